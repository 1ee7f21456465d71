"""The engine: saves states as checkpoints or as single files."""

from asyncckpt.engine.engine import Engine

__all__ = ["Engine"]
