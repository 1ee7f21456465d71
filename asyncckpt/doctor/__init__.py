"""The diagnosis of a place, a host and a job before the first step of a training: ``asyncckpt doctor``."""
