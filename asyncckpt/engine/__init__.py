"""The engine: states go in, checkpoints or single files come out."""

from asyncckpt.engine.engine import Engine

__all__ = ["Engine"]
