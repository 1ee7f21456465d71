"""Hidden names beside a checkpoint: what is being written, replaced or removed there."""

from __future__ import annotations

import os
import re

PARTIAL_SUFFIX = ".partial"
"""An attempt that is being written."""
TRASH_SUFFIX = ".asyncckpt-trash"
"""What is being removed."""
OLD_SUFFIX = ".asyncckpt-old"
"""A checkpoint that makes way for another of the same name."""

CHECKPOINT_ATTEMPT = re.compile(r"\.(.+)\.[0-9a-f]+-\d+(?:\.partial|\.asyncckpt-old)")
FILE_ATTEMPT = re.compile(r"\..+\.[0-9a-f]{12}-\d+\.partial")


def attempt_path(final: str, attempt: str) -> str:
    """Where ``final`` is written until the ``attempt`` is finalized."""
    parent, name = os.path.split(final)
    return os.path.join(parent, f".{name}.{attempt}{PARTIAL_SUFFIX}")


def with_suffix(partial: str, suffix: str) -> str:
    """The path of an attempt with another suffix."""
    return partial.removesuffix(PARTIAL_SUFFIX) + suffix
