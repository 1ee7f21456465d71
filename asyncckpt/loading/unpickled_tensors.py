"""Unpickle a value of ``torch.save`` without its tensors, and without running code.

Each tensor becomes a note of its place. Each class and function that is not known to be harmless becomes a note of its
arguments. So a DTensor describes its shard, and no process group is needed.
"""

from __future__ import annotations

import codecs
import copyreg
import math
import pickle
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pickle import _Unpickler
from typing import IO, Any, ClassVar

import torch

from asyncckpt.errors import MismatchError
from asyncckpt.loading.unpickle import allowed_by_user


def _of_list(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that makes ``kind`` of a list or of bytes alone: a short range can be a large set."""

    def made(content: Any = ()) -> Any:
        if not isinstance(content, list | tuple | bytes):
            raise pickle.UnpicklingError(f"a collection is made of a {type(content).__name__}")
        return kind(content)

    return made


_BUILTINS: dict[str, Any] = {
    **{"set": _of_list(set), "frozenset": _of_list(frozenset), "bytearray": _of_list(bytearray)},
    **{"complex": complex, "slice": slice, "range": range},
}
_HARMLESS: dict[tuple[str, str], Any] = {
    **{(module, name): each for module in ("builtins", "__builtin__") for name, each in _BUILTINS.items()},
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("_codecs", "encode"): codecs.encode,
}
# The dtypes of torch's storage classes. The classes themselves would give the same dtypes, but with a warning.
_STORAGES = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Untyped": torch.uint8},
}
_Records = Callable[[str], tuple[int, int, int]]
ReadBytes = Callable[[int, int], bytes]
"""Return the bytes of a file from one place up to another."""
Division = tuple[int, int, int, int]
"""How a mesh dimension shards a DTensor: number of ranks, number of this rank, tensor dimension, split factor."""
# The modules of torch whose classes and functions become notes, whatever the user allows.
_OF_NOTES = re.compile(r"torch(\.(_|distributed|storage|nn\.parameter|nested).*)?")
_OPCODES: dict[int, Callable[[Any], None]] = _Unpickler.dispatch
_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


@dataclass(frozen=True)
class StoredPart:
    """A tensor, or a part of a sharded tensor. Its first element is number ``first`` of its storage.

    ``record`` is the place of the storage in the file: its first byte, and the number of bytes. ``read_bytes`` reads
    the file from one byte up to another. ``whole`` is the shape of the sharded tensor, in which the part begins at
    ``offsets``; None: a plain tensor.
    """

    record: tuple[int, int]
    dtype: torch.dtype
    read_bytes: ReadBytes | None
    first: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    whole: tuple[int, ...] | None = None
    offsets: tuple[int, ...] = ()
    mesh: tuple[int, ...] = ()
    """The ranks of the DTensor's mesh, if the file has them."""
    crc: int | None = None
    """The CRC of the storage, if the file has one."""
    needs_grad: bool | None = None
    """Whether a ``Parameter`` requires a gradient; None: a tensor of another class."""

    def within(self, whole: Sequence[int], divisions: Sequence[Division], mesh: Sequence[int]) -> StoredPart:
        """Return the local part of a DTensor with its place, as DTensor computes the place.

        Args:
            whole: The shape of the DTensor.
            divisions: See ``Division``.
            mesh: The ranks of the mesh.

        Raises:
            MismatchError: The order of the shards is not known.
            ValueError: The part has another shape.
        """
        offsets, lengths = [0] * len(whole), list(whole)
        parts = [1] * len(lengths)
        # Placements with a split factor divide what the later placements have divided, as FSDP does after TP.
        plain = [row for row in divisions if row[3] == 1]
        for size, at, dim, factor in (*plain, *(row for row in divisions[::-1] if row[3] != 1)):
            if factor not in (1, parts[dim]):
                raise MismatchError(f"a DTensor is sharded with the split factor {factor}, after {parts[dim]} parts")
            each = -(-lengths[dim] // size)
            begin = min(at * each, lengths[dim])
            offsets[dim] += begin
            lengths[dim] = min(each, lengths[dim] - begin)
            parts[dim] *= size
        if tuple(lengths) != self.shape:
            raise ValueError(f"a part of a DTensor has the shape {self.shape}, and not {tuple(lengths)}")
        return replace(self, whole=tuple(whole), offsets=tuple(offsets), mesh=tuple(mesh))

    def begin(self) -> int:
        """Return the place of the first element in bytes. Raises ``ValueError`` if an element is outside the record."""
        begin = end = 0
        if 0 not in self.shape:  # an empty tensor may begin anywhere
            begin = self.first * self.dtype.itemsize
            extent = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
            end = begin + extent * self.dtype.itemsize
        if min((*self.shape, *self.strides), default=0) < 0 or not 0 <= begin <= end <= self.record[1]:
            raise ValueError("the elements lie outside the storage")
        return self.record[0] + begin

    def read(self) -> torch.Tensor:
        """Return the tensor. Raises ``ValueError`` if its storage is damaged."""
        at, nbytes = self.record
        begin = self.begin() - at
        if self.read_bytes is None or 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        data = bytearray(self.read_bytes(at, at + nbytes))
        if len(data) != nbytes or (self.crc is not None and zlib.crc32(data) != self.crc):
            raise ValueError("a tensor was changed: its record has another CRC, or is cut off")
        stored = torch.frombuffer(data, dtype=torch.uint8, offset=begin)
        whole = len(stored) // self.dtype.itemsize * self.dtype.itemsize
        return stored[:whole].view(self.dtype).as_strided(self.shape, self.strides)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The elements of a tensor of integers."""
        return tuple(self.read().flatten().tolist())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor itself."""
        if self.whole is not None:
            raise RefusedNameError("torch.distributed.tensor", "DTensor")
        tensor = self.read()
        if tensor.nbytes < self.record[1]:  # a view: save its own elements alone
            tensor = tensor.clone()
        if self.needs_grad is not None:
            tensor = torch.nn.Parameter(tensor, self.needs_grad)
        return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class RefusedNameError(Exception):
    """A value has a class or function that could run code, or that the reader does not know: its module, its name."""


class _NoteType(type):
    """The type of notes. No pickle can have a note."""

    name: tuple[str, str]

    def refuse(cls) -> Any:
        """Raise ``RefusedNameError``: ``pickle`` would import the name of the class."""
        raise RefusedNameError(*cls.name)


copyreg.pickle(_NoteType, _NoteType.refuse)


class Note(metaclass=_NoteType):
    """An object that is not made: its class or function (module and name), and the arguments."""

    name: tuple[str, str] = "", ""
    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Any:
        """Return the note, or the tensor."""
        made = super().__new__(cls)
        made.args = args
        match cls.name:
            case "torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state":
                return replace(args[0], needs_grad=args[1]) if isinstance(args[0], StoredPart) else args[0]
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return _rebuilt(made, *args)
            case "torch._tensor", "_rebuild_from_type_v2":
                return _of_type(made, *args)
        return made

    def append(self, *_: Any) -> None:
        """Ignore an entry of a list or a dict of another class."""

    __setitem__ = append

    def __setstate__(self, state: Any) -> None:
        """Keep a state that is a dict, as of placements and meshes. Ignore any other state."""
        if isinstance(state, dict):
            vars(self).update(state)

    def __str__(self) -> str:
        return f"{'.'.join(self.name)} {[each for each in self.args if isinstance(each, dict) and each] or ''}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RefusedNameError(*self.name)


def _rebuilt(note: Note, part: Any, first: Any, shape: Any, strides: Any, *more: Any) -> StoredPart | Note:
    """Return the tensor; the note if the tensor is conjugated, quantized or the like."""
    if not isinstance(part, StoredPart) or any(isinstance(each, dict) and each for each in more):
        return note
    dtype = more[2] if len(more) > 2 and isinstance(more[2], torch.dtype) else part.dtype
    if any(type(number) is not int for number in (first, *shape, *strides)):
        raise pickle.UnpicklingError("the offset, shape or strides are no numbers")
    return replace(part, dtype=dtype, first=first, shape=tuple(shape), strides=tuple(strides))


def _of_type(note: Note, function: Any, kind: Any, args: Any, state: Any) -> StoredPart | Note:
    """Return a tensor of a plain type, or the local part of a DTensor; the note for another type."""
    its = ".".join(getattr(kind, "name", ()))
    if its in _PLAIN and isinstance(found := function(*args), StoredPart):
        return found
    slots = state[1] if isinstance(state, tuple) else state
    if its != "torch.distributed.tensor.DTensor" or not isinstance(local := slots["_local_tensor"], StoredPart):
        return note
    spec = vars(slots["_spec"])
    mesh, placements, (whole, *_) = vars(spec["mesh"]), spec["placements"], spec["tensor_meta"].args
    coordinate, layout = mesh["_coordinate_on_dim"], mesh["_layout"]
    if coordinate is None:  # this rank is not in the mesh
        return replace(local, shape=(0, *whole[1:]), whole=tuple(whole), offsets=(0,) * len(whole))
    if others := {each.name[1] for each in placements} - {"Replicate", "Shard", "_StridedShard"}:
        raise MismatchError(f"a DTensor is placed as {others.pop()}, and only shards and replicas can be read")
    axes = [axis.shape for axis in layout.axes] if hasattr(layout, "axes") else layout.shape  # torch 2.13, or before
    sizes = map(_product, axes if isinstance(axes, list | tuple) else (axes,))
    rows = zip(sizes, coordinate, placements, strict=True)
    sharded = [(size, at, its.dim, getattr(its, "split_factor", 1)) for size, at, its in rows if hasattr(its, "dim")]
    orders = [entry.args[1] for entry in spec.get("shard_order") or ()]  # not known before torch 2.10
    if all(factor == 1 for *_, factor in sharded) and any(sorted(order) != list(order) for order in orders):
        raise MismatchError(f"a DTensor is sharded by its mesh dimensions in the order {orders}: it cannot be read")
    ranks = next((mesh[name] for name in ("_rank_map", "mesh") if isinstance(mesh.get(name), StoredPart)), None)
    return local.within(whole, sharded, () if ranks is None else ranks.numbers)


def _product(numbers: Any) -> int:
    return math.prod(map(_product, numbers)) if isinstance(numbers, tuple) else int(numbers)


class TensorUnpickler(_Unpickler):
    """An unpickler that makes notes.

    The faster ``pickle.Unpickler`` would let a pickle change the classes and functions that the user allows.
    ``record`` returns the place and the CRC of the storage with a given key, in the file that ``read_bytes`` reads.
    """

    stack: list[Any]

    def __init__(
        self, file: IO[bytes], record: _Records = lambda key: (0, 0, 0), read_bytes: ReadBytes | None = None
    ) -> None:
        super().__init__(file)
        self._record, self._read_bytes = record, read_bytes
        self.trusts = False
        """Whether the pickle may name classes and functions that are not torch's."""
        self._named: dict[tuple[str, str], Any] = {}
        self._names: dict[int, str] = {}  # by identity

    def find_class(self, module: str, name: str) -> Any:
        found = self._named.setdefault((module, name), self._found(module, name))
        self._names[id(found)] = f"{module}.{name}"
        return found

    def _build(self) -> None:
        """Set the state of an object. Raise ``UnpicklingError`` if the object is a class or function by its name."""
        if (name := self._names.get(id(self.stack[-2]))) is not None and not self.trusts:
            raise pickle.UnpicklingError(f"the pickle changes {name}")
        _OPCODES[pickle.BUILD[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {**_OPCODES, pickle.BUILD[0]: _build}

    def _found(self, module: str, name: str) -> Any:
        """Return what the name stands for: a class or function that is allowed, or the class of a note."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (found := _HARMLESS.get((module, name))) is not None:
            return found
        if not _OF_NOTES.fullmatch(module):  # torch itself allows DTensor and its mesh, and here they are notes
            if (found := allowed_by_user(module, name)) is not None:
                return found
            if self.trusts and module.split(".")[0] != "torch":
                return super().find_class(module, name)
        return type(name, (Note,), {"name": (module, name)})

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, _, *view = pid
        if any(view):
            raise pickle.UnpicklingError(f"the pickle refers to {pid!r}")
        if (dtype := _STORAGES.get(kind.name[1].removesuffix("Storage"))) is None:
            return kind()
        *record, crc = self._record(key)
        return StoredPart((record[0], record[1]), dtype, self._read_bytes, crc=crc)
