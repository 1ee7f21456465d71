"""The plan of a single file as ``torch.save`` writes it: an object's storages and pickle, and where they stand.

A tensor pickles as a reference to its storage, which is stored once, whole, however many tensors are views of it. So
objects whose storages have the same sizes share a plan, as long as the pickle, behind the storages, fits the bytes that
are reserved for it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.format.archive import header, lay_out, tail_room
from asyncckpt.format.index import Index, Item
from asyncckpt.format.segment_layout import Region, TorchFileLayout
from asyncckpt.planning.layout import DataLayout, Place, TensorSpec
from asyncckpt.planning.objects import bytes_to_reserve
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.shm.segment import round_up
from asyncckpt.threads import without_gc

# Most of what a pickle consists of: some twenty for each tensor, and of each the pickler asks whether it is a storage.
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
# Of these a tensor on the host pickles in one way, whatever is in it.
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
# Newer releases have no names.
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda tensor: False)
# What torch.save aligns storages to, where it has no setting for that (as torch 2.6).
_ALIGNMENT = 64


class TorchFileContents:
    """An object taken apart: ``pickle``, its bytes, and ``tensors``, its own storages as flat tensors of bytes."""

    @without_gc
    def __init__(self, obj: object, protocol: int) -> None:
        """Pickle ``obj`` as ``torch.save`` does. Raises ``UnsavableStateError``."""
        buffer = io.BytesIO()
        pickler = StoragePickler(buffer, protocol)
        try:
            pickler.dump(obj)
            with torch.no_grad():  # once: to enter it takes longer than what is done there
                self.tensors = [flat_bytes(storage) for storage in pickler.storages.values()]
        except unless_interrupt(Exception) as error:  # whatever the object's own code raises
            raise UnsavableStateError(
                f"the object, a {type(obj).__qualname__}, cannot be saved: {type(error).__name__}: {error}"
            ) from error
        self.pickle = buffer.getvalue()
        self.alignment = storage_alignment()
        self.sizes = [tensor.numel() for tensor in self.tensors]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for objects that fit the same plan, if their pickles do."""
        return (self.alignment, *self.sizes)


class StoragePickler(pickle.Pickler):
    """Puts aside the storages, in the order in which they are met, and leaves a reference to each."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: dict[object, torch.UntypedStorage] = {}
        self.keys: dict[object, str] = {}
        """The names of the records, by what they hold: by the addresses of storages, and by what a subclass adds."""
        self._dtypes: dict[int, torch.dtype] = {}
        self._rebuild = _rebuild_function()

    def reducer_override(self, obj: object) -> Any:
        """What ``__reduce_ex__`` of a plain tensor says, without all that torch asks it before."""
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
        # torch.load would see it as one or the other; torch.save refuses it too.
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError("tensors of different dtypes are views of the same data")
        # Kept from here on, so that none has the place in memory of another that is gone.
        self.storages.setdefault(storage._cdata, storage)
        key = self.keys.setdefault(storage._cdata, str(len(self.keys)))
        faked = getattr(obj, "_fake_device", None)
        return "storage", kind, key, location_tag(storage) if faked is None else str(faked), numel


def _rebuild_function() -> Callable[..., torch.Tensor] | None:
    """What rebuilds a plain tensor, if that pickles as in all releases of torch so far; None: it is asked itself."""
    rebuild, args, *more = torch.empty(1, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]
    is_known = args[1:] == (0, (1,), (1,), False, OrderedDict()) and not more
    return rebuild if is_known and torch.Tensor not in copyreg.dispatch_table else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has nothing that torch would pickle beside its place in a storage of the host, or warn of."""
    return (
        tensor.is_cpu
        and tensor.dtype in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.__dict__ or tensor.is_nested or tensor.is_neg() or _has_names(tensor))
    )


@dataclass
class TorchFilePlan:
    """How objects with storages of the same sizes are laid out; what ``CheckpointPlan`` is for a state dict."""

    number: int
    layout: DataLayout
    objects: _StoredPickle
    alignment: int
    sizes: Sequence[int]
    names: frozenset[str] = frozenset()  # where more has to be reserved for the pickle, a new plan replaces this one

    @classmethod
    def of(cls, contents: TorchFileContents, number: int) -> TorchFilePlan:
        """The plan for ``contents``, and for others with the same ``key``."""
        alignment, sizes = contents.alignment, contents.sizes
        objects = _StoredPickle(bytes_to_reserve(len(contents.pickle)))
        return cls(number, _lay_out(alignment, objects.reserved, sizes), objects, alignment, sizes)

    def capture(self, contents: TorchFileContents) -> Sequence[torch.Tensor]:
        """The tensors of ``contents`` in the order of the layout; its pickle is taken into ``objects``.

        Raises ``StructureChanged`` if the storages have other sizes, or the pickle is longer than what is reserved.
        """
        if contents.key != (self.alignment, *self.sizes):
            raise StructureChanged("there are storages of other sizes")
        if len(contents.pickle) > self.objects.reserved:
            raise StructureChanged(f"the pickle does not fit its {self.objects.reserved} bytes")
        self.objects.pickle = contents.pickle
        return contents.tensors

    def constants(self) -> dict[str, bytes | memoryview]:
        """What the worker has to know of the layout, by the name of its region in the segment."""
        return {"sizes": memoryview(array("Q", [self.alignment, self.objects.reserved, *self.sizes])).cast("B")}

    def segment_layout(self, slots: tuple[int, ...], regions: Mapping[str, Region]) -> TorchFileLayout:
        """What the worker is told of a segment with images at ``slots``, offsets in bytes."""
        return TorchFileLayout(self.layout.nbytes, slots, **regions)

    def index_head(self, file: str) -> bytes:
        """The head of the index of this file, where it has the name ``file`` in a set. Its items are its records."""
        names = [*(f"data/{number}" for number in range(len(self.sizes))), "data.pkl"]
        places = [*self.layout.tensors, *self.layout.objects]
        rows = zip(names, places, strict=True)
        return Index.head(file, [Item(f"{file}/{name}", "record", "", [], [], *place) for name, place in rows])


@dataclass
class _StoredPickle:
    """The one object of a file: its pickle, with ``reserved`` bytes in the image. No slot keeps what it had before."""

    reserved: int
    pickle: bytes = b""

    def forget_slots(self) -> None:
        """The slots are in other memory now."""

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """As ``StoredObjects.write``. The pickle is let go of."""
        image[places[0].payload_at : places[0].payload_at + len(self.pickle)] = self.pickle
        self.pickle = b""


def _lay_out(alignment: int, reserved: int, sizes: Sequence[int]) -> DataLayout:
    """The layout of an archive: storages are its tensors, the pickle is its object; the worker adds the rest behind."""
    records = lay_out(alignment, reserved, *sizes)
    places = [Place(record.at, record.end - record.at, record.payload_at, record.nbytes) for record in records]
    return DataLayout(
        specs=[TensorSpec(torch.uint8, (nbytes,)) for nbytes in sizes],
        tensors=places[:-1],
        objects=places[-1:],
        nbytes=round_up(records[-1].end + tail_room(alignment, len(sizes))),
        constants=[(record.at, header(record)) for record in records],
    )


def flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes, on its device: ``storage.cpu()`` would copy them in the same way, but now."""
    if storage.device.type == "meta":
        raise ValueError("a storage on the meta device has no bytes")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_alignment() -> int:
    """What ``torch.save`` aligns storages to, in bytes."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return _ALIGNMENT
    return getattr(config.save, "storage_alignment", _ALIGNMENT)
