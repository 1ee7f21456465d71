"""What is unpickled when a checkpoint is loaded, and how little may come of it.

DCP's format has pickles: its ``.metadata``, and each value that is not a tensor. With ``weights_only`` the first may
name only what DCP itself writes there, the second only what ``torch.load(weights_only=True)`` takes; both also what
``torch.serialization.add_safe_globals`` was given. So the bytes of a checkpoint cannot run code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from asyncckpt.errors import UntrustedValueError

_METADATA_MODULES = frozenset({"torch.distributed.checkpoint.metadata"})
_METADATA_GLOBALS = frozenset(
    {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
    }
)


def load_metadata(data: bytes, path: str, *, weights_only: bool) -> Metadata:
    """Unpickle DCP's ``.metadata`` of the checkpoint ``path``. Raises ``UntrustedValueError``."""
    try:
        metadata: Metadata = (_MetadataUnpickler(io.BytesIO(data)) if weights_only else _unpickler(data)).load()
    except pickle.UnpicklingError as error:
        raise UntrustedValueError(_text(".metadata", error), path=path) from error
    return metadata


def load_object(file: io.BytesIO, name: str, path: str, *, weights_only: bool) -> Any:
    """Unpickle the value ``name`` of the checkpoint ``path``. Raises ``UntrustedValueError``."""
    try:
        return torch.load(file, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise UntrustedValueError(_text(repr(name), error), path=path) from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module in _METADATA_MODULES or (module, name) in _METADATA_GLOBALS
        if known and "." not in name:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.memory_format)):
            return found
        for safe in torch.serialization.get_safe_globals():
            if getattr(safe, "__module__", None) == module and getattr(safe, "__qualname__", None) == name:
                return safe
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickler(data: bytes) -> pickle.Unpickler:
    return pickle.Unpickler(io.BytesIO(data))


def _text(what: str, error: Exception) -> str:
    reason = str(error).strip().splitlines() or ["it is of another class"]
    why = next((line.strip() for line in reason if "GLOBAL" in line or "names" in line), reason[0])
    return (
        f"{what} is not loaded, because what it is made of could run code: {why}; if you trust who wrote the"
        " checkpoint, load it with weights_only=False, or allow that class with torch.serialization.add_safe_globals"
    )
