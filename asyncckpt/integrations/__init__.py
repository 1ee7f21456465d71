"""Make the save calls of existing frameworks asynchronous. An integration imports ``asyncckpt.extension``."""
