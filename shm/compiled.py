"""What was compiled, where this was installed beside a compiler. All that uses it has another way."""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any


def compiled(beside: str, name: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> Any:
    """A library of functions; None where it is not there.

    Args:
        beside: A file in the same folder.
        name: Of its source, without the ending.
        kind: Whether a call lets go of Python's lock (``CDLL``), or keeps it (``PyDLL``).
    """
    stem = os.path.join(os.path.dirname(beside), name)
    path = next(filter(os.path.exists, map(stem.__add__, EXTENSION_SUFFIXES)), None)
    return None if path is None else kind(path)
