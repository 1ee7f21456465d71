"""Plan a single file in the format of ``torch.save``: the places of an object's storages and of its pickle.

A tensor pickles as a reference to its storage. Each storage is stored once, whole, even if many tensors are views of
the storage. So objects with storages of the same sizes share a plan, if the pickle, behind the storages, fits into its
reserved bytes.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.format.archive import header, lay_out, tail_room
from asyncckpt.format.index import Index, Item
from asyncckpt.format.segment_layout import ArchiveData, Region
from asyncckpt.planning.layout import DataLayout, Place, TensorSpec
from asyncckpt.planning.objects import bytes_to_reserve
from asyncckpt.planning.part_plan import PartPlan
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.shm.segment import IMAGE_PAGE, round_up
from asyncckpt.threads import without_gc

# The types of most objects in a pickle. The pickler calls ``persistent_id`` for each object, some twenty per tensor.
_NO_STORAGES = {
    str,
    int,
    float,
    bool,
    type(None),
    tuple,
    list,
    dict,
    OrderedDict,
    torch.Tensor,
    torch.nn.Parameter,
    type,
}
# A tensor on the host with one of these dtypes always pickles in the same way, whatever its values.
_PLAIN = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}
# Newer releases of torch have no named tensors.
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda tensor: False)
# The alignment of storages in torch.save, in bytes, if torch has no setting for it (torch 2.6).
_ALIGNMENT = 64


class TorchFileContents:
    """The parts of an object: the bytes of its ``pickle``, and ``tensors``, its own storages as flat byte tensors."""

    @without_gc
    def __init__(self, obj: object, protocol: int) -> None:
        """Pickle ``obj`` as ``torch.save`` does. Raises ``UnsavableStateError``."""
        buffer = io.BytesIO()
        pickler = StoragePickler(buffer, protocol)
        try:
            pickler.dump(obj)
            with torch.no_grad():  # entered once, because entering takes longer than the work inside
                self.tensors = [flat_bytes(storage) for storage in pickler.storages.values()]
        except unless_interrupt(Exception) as error:  # whatever the object's own code raises
            raise UnsavableStateError(
                f"the object, a {type(obj).__qualname__}, cannot be saved: {type(error).__name__}: {error}"
            ) from error
        self.pickle = buffer.getvalue()
        self.alignment = storage_alignment()
        self.sizes = [tensor.numel() for tensor in self.tensors]


class StoragePickler(pickle.Pickler):
    """Collects the storages, in the order of the pickle, and writes a reference in the place of each."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: dict[object, torch.UntypedStorage] = {}
        self.keys: dict[object, str] = {}
        """The name of each record, by the address of its storage object. A subclass may add keys of another kind."""
        self._dtypes: dict[int, torch.dtype] = {}
        self._rebuild = _rebuild_function()

    def reducer_override(self, obj: object) -> Any:
        """Return the result of ``__reduce_ex__`` for a plain tensor, without the checks that torch makes first."""
        if type(obj) is not torch.Tensor or self._rebuild is None or not _is_plain(obj):
            return NotImplemented
        storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=obj.untyped_storage(), dtype=obj.dtype, _internal=True
        )
        hooks: OrderedDict[int, object] = OrderedDict()
        return self._rebuild, (storage, obj.storage_offset(), tuple(obj.size()), obj.stride(), False, hooks)

    def persistent_id(self, obj: object) -> Any:
        if type(obj) in _NO_STORAGES:
            return None
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()  # type: ignore[no-untyped-call]
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call]
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, numel = obj, torch.uint8, obj.nbytes()
            kind = normalize_storage_type(type(obj))  # type: ignore[no-untyped-call]
        else:
            return None
        address = storage.data_ptr() if storage.device.type != "meta" else 0
        # torch.load would give both tensors one dtype. torch.save refuses such tensors too.
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError("tensors of different dtypes are views of the same data")
        # Hold a reference: otherwise a later storage could get the address of a storage that is gone.
        self.storages.setdefault(storage._cdata, storage)
        key = self.keys.setdefault(storage._cdata, str(len(self.keys)))
        faked = getattr(obj, "_fake_device", None)
        return "storage", kind, key, location_tag(storage) if faked is None else str(faked), numel


def _rebuild_function() -> Callable[..., torch.Tensor] | None:
    """Return the function that rebuilds a plain tensor from its pickle.

    Return None if this torch pickles a plain tensor in a way unknown here. Then call the tensor's ``__reduce_ex__``.
    """
    rebuild, args, *more = torch.empty(1, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]
    is_known = args[1:] == (0, (1,), (1,), False, OrderedDict()) and not more
    return rebuild if is_known and torch.Tensor not in copyreg.dispatch_table else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if torch would pickle only the tensor's place in a storage on the host, without a warning."""
    return (
        tensor.is_cpu
        and tensor.dtype in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.__dict__ or tensor.is_nested or tensor.is_neg() or _has_names(tensor))
    )


@dataclass
class TorchFilePlan(PartPlan):
    """The layout of objects with storages of the same ``sizes``, if their pickles fit into the reserved bytes."""

    layout: DataLayout
    objects: _StoredPickle
    alignment: int
    sizes: Sequence[int]

    @classmethod
    def of(cls, content: TorchFileContents) -> TorchFilePlan:
        """Return the plan for an object, and for other objects with storages of the same sizes."""
        alignment, sizes = content.alignment, content.sizes
        objects = _StoredPickle(bytes_to_reserve(len(content.pickle)))
        return cls(_lay_out(alignment, objects.reserved, sizes), objects, alignment, sizes)

    def capture(self, content: TorchFileContents, *, is_raw: bool = False) -> Sequence[torch.Tensor]:
        if content.alignment != self.alignment or content.sizes != self.sizes:
            raise StructureChanged("there are storages of other sizes")
        if len(content.pickle) > self.objects.reserved:
            raise StructureChanged(f"the pickle does not fit its {self.objects.reserved} bytes")
        self.objects.pickle = content.pickle
        return content.tensors

    def constants(self, name: str) -> dict[str, bytes | memoryview]:
        """Return the head of the index, with the records as items, and the sizes (see ``ArchiveData``)."""
        records = [*(f"data/{number}" for number in range(len(self.sizes))), "data.pkl"]
        rows = zip(records, [*self.layout.tensors, *self.layout.objects], strict=True)
        items = [Item(f"{name}/{record}", "record", "", [], [], *place) for record, place in rows]
        sizes = array("Q", [self.alignment, self.objects.reserved, *self.sizes])
        return {"index_head": Index.head(name, items), "sizes": memoryview(sizes).cast("B")}

    def files(self, name: str, begin: int, regions: Mapping[str, Region]) -> Sequence[ArchiveData]:
        return [ArchiveData(begin, self.layout.nbytes, path=name, **regions)]


@dataclass
class _StoredPickle:
    """The only object of a file: the pickle, with ``reserved`` bytes in the image. Each save writes the pickle anew."""

    reserved: int
    pickle: bytes = b""

    def own_pickles(self) -> Iterable[tuple[str, bytes]]:
        """Return nothing: ``torch.load`` reads the file, and its caller decides what to trust."""
        return ()

    def forget_slots(self) -> None:
        """Do nothing, because every save writes the pickle anew."""

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Write the pickle, see ``StoredObjects.write``, and release it."""
        image[places[0].payload_at : places[0].payload_at + len(self.pickle)] = self.pickle
        self.pickle = b""


def _lay_out(alignment: int, reserved: int, sizes: Sequence[int]) -> DataLayout:
    """Return the layout of an archive. The storages are its tensors, the pickle is its object.

    The worker adds the rest of the archive behind the pickle.
    """
    records = lay_out(alignment, reserved, *sizes)
    places = [Place(record.at, record.end - record.at, record.payload_at, record.nbytes) for record in records]
    return DataLayout(
        specs=[TensorSpec(torch.uint8, (nbytes,)) for nbytes in sizes],
        tensors=places[:-1],
        objects=places[-1:],
        nbytes=round_up(records[-1].end + tail_room(alignment, len(sizes)), IMAGE_PAGE),
        constants=[(record.at, header(record)) for record in records],
    )


def flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage`` as a tensor on the same device, without a copy."""
    if storage.device.type == "meta":
        raise ValueError("a storage on the meta device has no bytes")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_alignment() -> int:
    """Return the alignment of storages in ``torch.save``, in bytes."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return _ALIGNMENT
    return getattr(config.save, "storage_alignment", _ALIGNMENT)
