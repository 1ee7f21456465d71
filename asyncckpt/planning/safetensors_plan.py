"""Plan a file in the format of safetensors: a header that lists the tensors, then their bytes.

The README of huggingface/safetensors describes the format: eight bytes with the length of the header, the header (JSON,
which may end in spaces), then the bytes of all tensors without a gap. ``save_file`` sorts tensors by type, the widest
type first, and then by name. The data begins at a multiple of eight bytes, so every tensor is aligned to its elements.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.format.index import Index, Item, spans
from asyncckpt.format.segment_layout import Region, SafetensorsData
from asyncckpt.planning.layout import DataLayout, Place, TensorSpec
from asyncckpt.planning.objects import StoredObjects
from asyncckpt.planning.part_plan import PartPlan
from asyncckpt.planning.structure import PLAIN, Fingerprint, StructureChanged, has_no_bytes
from asyncckpt.shm.segment import IMAGE_PAGE, round_up

SUFFIX = ".safetensors"


def index_name_of(name: str) -> str:
    """Return the name of the index for ``name``. If several files replace ``name``, the index lists their tensors."""
    return f"{name}.index.json"


def shard(name: str, forms: Mapping[str, Form], most: int) -> tuple[dict[str, Sequence[str]], dict[str, bytes]]:
    """Divide tensors among files.

    Args:
        name: The name of the file if one file is enough.
        forms: The dtype and the shape of each tensor.
        most: Maximum bytes of tensors in a file. A larger tensor gets a file of its own.

    Returns:
        The tensor names of each file, by file name. The content of the index, by its name; empty if one file is enough.
    """
    shards = _shards({each: _nbytes(form) for each, form in forms.items()}, most)
    if len(shards) == 1:
        return {name: shards[0]}, {}
    stem = name.removesuffix(SUFFIX)
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(1, len(shards) + 1)]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in forms.values()),
            "total_size": sum(map(_nbytes, forms.values())),
        },
        "weight_map": {each: file.rpartition("/")[2] for file, its in zip(names, shards, strict=True) for each in its},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return dict(zip(names, shards, strict=True)), {index_name_of(name): text.encode()}


def _nbytes(form: Form) -> int:
    dtype, shape = form
    return math.prod(shape) * dtype.itemsize


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide tensors, in their order, as huggingface_hub does: a tensor larger than ``most`` has a file of its own."""
    shards: list[list[str]] = []
    current: list[str] = []
    nbytes = 0
    for name, size in sizes.items():
        if size > most:
            shards.append([name])
            continue
        if nbytes + size > most:
            shards.append(current)
            current, nbytes = [], 0
        current.append(name)
        nbytes += size
    return [*shards, current] if current or not shards else shards


PREFIX_BYTES = 8
_ALIGNMENT = 8
METADATA = "__metadata__"

# The types of the format and of torch, in the order of a file. A release of torch may lack some of them.
_TYPES = (
    *(("U64", "uint64"), ("I64", "int64"), ("F64", "float64"), ("C64", "complex64")),
    *(("F32", "float32"), ("U32", "uint32"), ("I32", "int32")),
    *(("BF16", "bfloat16"), ("F16", "float16"), ("U16", "uint16"), ("I16", "int16")),
    *(("F8_E5M2FNUZ", "float8_e5m2fnuz"), ("F8_E4M3FNUZ", "float8_e4m3fnuz"), ("F8_E8M0", "float8_e8m0fnu")),
    *(("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("I8", "int8"), ("U8", "uint8"), ("BOOL", "bool")),
)
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, own) for name, own in _TYPES if hasattr(torch, own)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}

Form = tuple[torch.dtype, tuple[int, ...]]


def in_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return the names of tensors with these dtypes, in the order of ``save_file``."""
    return sorted(dtypes, key=lambda name: (_ORDER.get(dtypes[name], 0), str(name).encode()))


def lay_out(
    forms: Mapping[str, Form], metadata: Mapping[str, str] | None = None, alignment: int = _ALIGNMENT
) -> tuple[bytes, dict[str, int]]:
    """Place tensors one after the other.

    Args:
        forms: The dtype and the shape of each tensor, by name. Wider types come before narrower ones.
        metadata: Text for the header.
        alignment: The data begins at a multiple of this number of bytes.

    Returns:
        The header; and the offset of each tensor, in bytes from the start of the file.

    Raises:
        UnsavableStateError: The format has no such dtype or name.
    """
    fields: dict[str, object] = {} if metadata is None else {METADATA: dict(metadata)}
    begins: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in forms.items():
        if dtype not in _NAMES:
            raise UnsavableStateError(f"{name!r}: safetensors has no {dtype}; save it as another")
        if name == METADATA or not isinstance(name, str):
            raise UnsavableStateError(f"{name!r} cannot be the name of a tensor in a safetensors file")
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begins[name], end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    length = round_up(PREFIX_BYTES + len(text), alignment) - PREFIX_BYTES
    header = length.to_bytes(PREFIX_BYTES, "little") + text.ljust(length)
    return header, {name: len(header) + begin for name, begin in begins.items()}


@dataclass(frozen=True)
class SafetensorsFile:
    """A file with ``tensors`` and ``metadata``, as ``safetensors.torch.save_file`` writes it."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None


@dataclass
class SafetensorsPlan(PartPlan):
    """The layout of tensors of one structure, in the ``order`` of the file, which has ``length`` bytes."""

    layout: DataLayout
    length: int
    order: Sequence[str]
    metadata: Mapping[str, str] | None
    fingerprint: Fingerprint
    objects: StoredObjects = field(default_factory=lambda: StoredObjects([], []))

    @classmethod
    def of(cls, content: SafetensorsFile) -> SafetensorsPlan:
        """Return the plan for a file. Raises ``UnsavableStateError`` if ``save_file`` would refuse its tensors."""
        tensors, metadata = content.tensors, content.metadata
        _check(tensors)
        check_metadata(metadata)
        names = in_order({name: tensor.dtype for name, tensor in tensors.items()})
        header, begins = lay_out({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}, metadata)
        specs = [TensorSpec(tensors[name].dtype, tuple(tensors[name].shape), name=name) for name in begins]
        sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
        places = [Place(begin, size, begin, size) for begin, size in zip(begins.values(), sizes, strict=True)]
        length = len(header) + sum(sizes)
        return cls(
            layout=DataLayout(specs, places, [], round_up(length, IMAGE_PAGE), [(0, header)]),
            length=length,
            order=list(begins),
            metadata=None if metadata is None else dict(metadata),
            fingerprint=Fingerprint([tensors[name] for name in begins], []),
        )

    def capture(self, content: SafetensorsFile, *, is_raw: bool = False) -> Sequence[torch.Tensor]:
        tensors = content.tensors
        if content.metadata != self.metadata or tensors.keys() != self._known:
            raise StructureChanged("other names, or another header")
        taken = [tensors[name] for name in self.order]
        if not PLAIN.issuperset(map(type, taken)):
            raise StructureChanged("what was a tensor is something else")
        self.fingerprint.check(taken)
        return taken

    @cached_property
    def _known(self) -> Set[str]:
        return set(self.order)

    def constants(self, name: str) -> dict[str, bytes | memoryview]:
        items = [
            Item(f"{name}/{spec.name}", "tensor", str(spec.dtype).removeprefix("torch."), *_row(spec, place))
            for spec, place in zip(self.layout.specs, self.layout.tensors, strict=True)
        ]
        bounds: array[int] = spans((item.at for item in items), self.length)
        return {"index_head": Index.head(name, items), "spans": memoryview(bounds).cast("B")}

    def files(self, name: str, begin: int, regions: Mapping[str, Region]) -> Sequence[SafetensorsData]:
        return [SafetensorsData(begin, self.layout.nbytes, path=name, length=self.length, **regions)]


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise ``UnsavableStateError`` if ``metadata`` is not text, so that the header cannot hold it."""
    if metadata is not None and not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise UnsavableStateError(f"the metadata of a safetensors file is text, and not {dict(metadata)!r}")


def _row(spec: TensorSpec, place: Place) -> tuple[list[int], list[int], int, int, int, int]:
    return [*spec.shape], [0] * len(spec.shape), *place


def _check(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``UnsavableStateError`` if ``save_file`` would refuse a tensor.

    A tensor is refused if it has no plain bytes, is not contiguous, or shares memory with another tensor.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsavableStateError(f"{name!r} is a {type(tensor).__name__}, and safetensors stores tensors alone")
        if type(tensor) not in PLAIN or has_no_bytes(tensor):
            raise UnsavableStateError(f"{name!r} is a {type(tensor).__name__} that has no plain bytes to save")
        if not tensor.is_contiguous():
            raise UnsavableStateError(f"{name!r} is not contiguous; save_file asks for {name}.contiguous()")
    check_apart(tensors)


def check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``UnsavableStateError`` if two tensors share memory. Tensors without plain bytes are ignored."""
    areas: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        if type(tensor) in PLAIN and not has_no_bytes(tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            areas[tensor.untyped_storage()._cdata].append((begin, begin + (last + 1) * tensor.itemsize, name))
    for its in areas.values():
        for (_, end, one), (begin, _, other) in pairwise(sorted(its)):
            if begin < end:
                raise UnsavableStateError(f"{one!r} and {other!r} share memory, which safetensors cannot say: save one")
