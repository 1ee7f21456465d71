"""The header of a stored tensor: with its bytes behind, what ``torch.load`` reads.

The form is that which ``torch.save`` writes with ``_use_new_zipfile_serialization=False``: pickles of two numbers to
know it by, of the machine (nobody looks at that), of the tensor, of the names of its storages; then each storage, its
number of elements before its bytes. torch reads it in all releases, with ``weights_only`` too. A zip would have some
600 bytes more, and most of them behind the tensor.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import pickletools
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from asyncckpt.errors import UnsavableStateError

_NAME = "0"  # of the one storage
_COUNT = struct.Struct("<q")


@functools.lru_cache(maxsize=65536)
def tensor_header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What stands before the bytes of a contiguous CPU tensor, whatever its values.

    Raises ``UnsavableStateError`` on a machine with another order of bytes than this form has.
    """
    if sys.byteorder != "little":
        raise UnsavableStateError("tensors are stored with the lowest byte first, and this machine has it last")
    elements = math.prod(shape)
    about = 0, shape, torch.empty(shape, device="meta").stride(), False, None  # no gradient, no hooks
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    if name is None:  # a storage of bytes, as only some dtypes have a kind of their own
        elements *= dtype.itemsize
        storage = _Storage(torch.ByteStorage, elements)
        tensor = _Call(torch._utils._rebuild_tensor_v3, (storage, *about, dtype))
    else:
        tensor = _Call(torch._utils._rebuild_tensor_v2, (_Storage(getattr(torch, name), elements), *about))
    pickles = map(_pickled, (MAGIC_NUMBER, PROTOCOL_VERSION, None, tensor, [_NAME]))
    return b"".join(pickles) + _COUNT.pack(elements)


class _Storage(NamedTuple):
    """Stands for a storage, of a class of torch's."""

    kind: type
    elements: int


class _Call(NamedTuple):
    """Stands for what ``function`` returns."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, _NAME, "cpu", value.elements, None  # no view of another
        return None


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(value)
    # Without the protocol, which is told anyhow, and what would be remembered: torch reads a pickle byte by byte.
    return pickletools.optimize(buffer.getvalue())[2:]
