"""Unpickle values and metadata of a checkpoint so that its bytes cannot run code.

With ``weights_only``, DCP's ``.metadata`` may name only classes that DCP itself writes there. A value may name only
classes that ``torch.load(weights_only=True)`` allows. Both may also name classes that the user has allowed with
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

from asyncckpt.errors import CheckpointError, DamagedCheckpointError, UntrustedValueError, unless_interrupt

_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
# Megatron-LM and nvidia-resiliency-ext store the plans of the ranks beside the metadata.
_PLAN_MODULE = "torch.distributed.checkpoint.planner"
_PLAN_CLASSES = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
# The module of these classes until torch 2.3.
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_OLD_CLASSES = ("TensorProperties", "MEM_FORMAT_ENCODING")
_METADATA_GLOBALS = frozenset(
    {
        *((_MODULE, name) for name in _CLASSES),
        *((_PLAN_MODULE, name) for name in _PLAN_CLASSES),
        *((_OLD_MODULE, name) for name in _OLD_CLASSES),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)


class _MemberOfEnum:
    """Replace ``getattr`` in the pickles of enum members that Python 3.11.0 to 3.11.3 writes.

    An instance has no attributes, so a pickle cannot change it.
    """

    __slots__ = ()

    def __call__(self, kind: Any, name: Any) -> Any:
        """Return the member ``name`` of the enum ``kind``. Raise ``_NotAllowed`` for any other use of ``getattr``."""
        if not (isinstance(kind, enum.EnumMeta) and type(name) is str and name in kind.__members__):
            raise _NotAllowed("it calls builtins.getattr, and not for the member of an enum")
        return kind.__members__[name]


_member_of_enum = _MemberOfEnum()

# Harmless types that torch does not allow by default: types of plain Python values, and ``io.BytesIO``.
_HARMLESS: list[Any] = [bytes, bytearray, complex, frozenset, range, slice, io.BytesIO]
_HARMLESS.append((_member_of_enum, "builtins.getattr"))


class _Harmless:
    """Additional safe globals for ``torch.load(weights_only=True)``, for as long as any thread unpickles.

    torch has one set of safe globals for all threads. Removing a global removes it for all threads, even if another
    thread has also added it. So this class counts its users.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._added = contextlib.ExitStack()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let torch allow the globals until the context ends, on any thread."""
        with self._lock:
            if self._users == 0:
                known = torch.serialization.get_safe_globals()
                ours = [each for each in _HARMLESS if each not in known]
                self._added.enter_context(torch.serialization.safe_globals(ours))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._added.close()


harmless = _Harmless()


def load_metadata(data: bytes, path: str, *, weights_only: bool) -> Metadata:
    """Unpickle DCP's ``.metadata``.

    Args:
        data: The bytes of the file.
        path: The folder of the checkpoint, for errors.
        weights_only: Whether to refuse a pickle that could run code.

    Raises:
        UntrustedValueError: The pickle names something that could run code, or changes classes.
        DamagedCheckpointError: The bytes are no pickle, or no pickle of DCP's metadata.
    """
    unpickler = (_MetadataUnpickler if weights_only else pickle.Unpickler)(io.BytesIO(data))
    classes = [getattr(dcp_metadata, name) for name in _CLASSES if hasattr(dcp_metadata, name)]
    classes += [getattr(dcp_planner, name) for name in _PLAN_CLASSES if hasattr(dcp_planner, name)]
    classes += [getattr(sharded_metadata, name) for name in _OLD_CLASSES if hasattr(sharded_metadata, name)]
    before = [dict(vars(each)) for each in classes]
    try:
        try:
            found = unpickler.load()
        finally:  # a pickle can change classes and then end in garbage
            if weights_only:
                _restore(classes, before)
    except _NotAllowed as error:
        raise untrusted(".metadata", error, path) from error
    except unless_interrupt(Exception) as error:  # invalid pickles fail in many ways
        raise DamagedCheckpointError(f".metadata is no pickle: {type(error).__name__}: {error}", path=path) from error
    if not isinstance(found, Metadata):
        raise DamagedCheckpointError(f".metadata holds a {type(found).__name__}, and not DCP's metadata", path=path)
    return found


def load_object(file: io.BytesIO, name: str, path: str, *, weights_only: bool, device: str | None = None) -> Any:
    """Unpickle one value.

    Args:
        file: The bytes of the value, and any bytes behind them.
        name: The name of the value in the state dict, for errors.
        path: The folder of the checkpoint, for errors.
        weights_only: Whether to refuse a pickle that could run code.
        device: The device for tensors within the value; None: the device that they were saved from.

    Raises:
        UntrustedValueError: The pickle names something that could run code.
        CheckpointError: The value fails to unpickle: a class that it names is missing, or its own code raises.
    """
    begin = file.tell()
    try:
        with harmless.allowed():
            return torch.load(file, map_location=device, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        file.seek(begin)
        try:
            return _without_names(file)
        except unless_interrupt(Exception):  # no value without names; torch's error says what it is
            raise untrusted(repr(name), error, path) from error
    except unless_interrupt(Exception) as error:  # the value's own code runs
        raise CheckpointError(f"{name!r} fails to unpickle: {type(error).__name__}: {error}", path=path) from error


def _without_names(file: io.BytesIO) -> Any:
    """Unpickle a value that names no class and no function, and so cannot run code.

    torch's unpickler knows only some opcodes, and none for an integer of more than 2,040 bits.
    """
    magic, protocol, _, value, storages = (NamelessUnpickler(file).load() for _ in range(5))
    if (magic, protocol, storages) != (MAGIC_NUMBER, PROTOCOL_VERSION, []):
        raise _NotAllowed("it is not in the older form of torch.save, or has tensors")
    return value


def _restore(classes: list[type], before: list[dict[str, Any]]) -> None:
    """Undo changes of ``classes`` since ``before``, and raise ``_NotAllowed`` if there are any.

    A pickle can set attributes of the classes that it names.
    """
    changed = False
    for each, attributes in zip(classes, before, strict=True):
        for name, value in dict(vars(each)).items():
            if name not in attributes:
                delattr(each, name)
            elif attributes[name] is not value:
                setattr(each, name, attributes[name])
            else:
                continue
            changed = True
    if changed:
        raise _NotAllowed("it changes the classes of what it holds")


class _NotAllowed(pickle.UnpicklingError):
    pass


class NamelessUnpickler(pickle.Unpickler):
    """An unpickler that raises ``UntrustedValueError`` if the pickle names a class or a function."""

    def find_class(self, module: str, name: str) -> Any:
        raise UntrustedValueError(f"the pickle could run code: it names {module}.{name}")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of_enum
        if (module, name) in _METADATA_GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), (torch.dtype, torch.memory_format)):
            return found
        if (allowed := allowed_by_user(module, name)) is not None:
            return allowed
        raise _NotAllowed(f"it names {module}.{name}")


def allowed_by_user(module: str, name: str) -> Any:
    """Return the class or function that the user has allowed under this name; None: there is none."""
    for each in torch.serialization.get_safe_globals():
        safe, full = each if isinstance(each, tuple) else (each, None)
        if full == f"{module}.{name}":
            return safe
        if getattr(safe, "__module__", None) == module and getattr(safe, "__qualname__", None) == name:
            return safe
    return None


def untrusted(what: str, error: Exception, path: str) -> UntrustedValueError:
    lines = str(error).strip().splitlines() or ["it is of another class"]
    why = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
    return UntrustedValueError(
        f"{what} is not loaded, because what it is made of could run code ({why}); if you trust who wrote the"
        " checkpoint, load it with weights_only=False, or allow that class with torch.serialization.add_safe_globals",
        path=path,
    )
