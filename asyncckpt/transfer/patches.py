"""Patches: the words of a span that differ from the same span of another image.

A word has 16 bits, the size of most weights. A patch has the number of changed words in each page of ``_PAGE`` words,
then the place of each changed word in its page, then the new words. A patch is smaller than half of its span.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncckpt.shm.memcpy import BLOCK, address_of, differing

# Words whose place fits into a byte.
_PAGE = 256
_WORD = np.dtype("<u2")


def patch_of(old: memoryview, new: memoryview) -> bytes:
    """Return a patch that changes ``old`` to ``new``. Both are writable and have the same size.

    Return b"" if more than a third of the words differ, or if the size is odd.
    """
    if len(new) % _WORD.itemsize:
        return b""
    words = np.frombuffer(new, _WORD)
    at = _differing(old, new, len(words) // 3)
    if at is None:
        return b""
    counts = np.bincount(at // _PAGE, minlength=-(-len(words) // _PAGE))
    places = (at % _PAGE).astype(np.uint8)
    return b"".join((counts.astype(_WORD).tobytes(), places.tobytes(), words[at].tobytes()))


def apply_patch(patch: bytes, span: memoryview) -> None:
    """Change the words of ``span``. A patch that does not fit is ignored, because the digest of the span is checked."""
    with contextlib.suppress(ValueError, IndexError):
        words = np.frombuffer(span, _WORD)
        pages = -(-len(words) // _PAGE)
        counts = np.frombuffer(patch, _WORD, pages)
        begin, changed = counts.nbytes, int(counts.sum())
        places = np.frombuffer(patch, np.uint8, changed, begin)
        values = np.frombuffer(patch, _WORD, changed, begin + changed)
        words[np.repeat(np.arange(0, pages * _PAGE, _PAGE), counts) + places] = values


def _differing(old: memoryview, new: memoryview, most: int) -> NDArray[Any] | None:
    """Return the numbers of the words that differ, in rising order; None if more than ``most`` differ."""
    words = len(new) // _WORD.itemsize
    if differing is None:
        at: NDArray[Any] = np.flatnonzero(np.frombuffer(old, _WORD) != np.frombuffer(new, _WORD))
        return at if len(at) <= most else None
    found = np.empty(most + BLOCK, np.uint32)
    count = differing(address_of(old), address_of(new), words, address_of(found.data), most)
    return found[:count] if count <= most else None
