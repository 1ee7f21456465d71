"""What ranks tell each other, as bytes."""

from __future__ import annotations

import pickle
import zlib
from typing import Any


def pack(value: object) -> bytes:
    """``value`` as it goes over the store, where it is sealed."""
    return zlib.compress(pickle.dumps(value), 1)


def unpack(data: bytes) -> Any:
    """The value that ``pack`` made these bytes of."""
    return pickle.loads(zlib.decompress(data))
