"""Save calls that people already have, made asynchronous. An integration imports ``asyncckpt.extension``."""
