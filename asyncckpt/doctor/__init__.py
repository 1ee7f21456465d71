"""What a training will meet at its place, found out before its first step: ``asyncckpt doctor``."""
