"""Slabs: runs of small tensors on a device that are brought over by one copy.

A copy from a device to the host costs the host some 6 us whatever its size, in which a PCIe link moves 150 KB (at 25
GB/s) to 300 KB (at 50 GB/s), and NVLink to a Grace host a megabyte: smaller tensors keep the link waiting. On the
device itself ``torch._foreach_copy_`` copies 64 tensors and more with one launch, 0.1 us each, and some tenths of a
microsecond a tensor beside. Hence a slab: tensors that stand next to each other in the image are first coalesced in a
slab buffer, memory on the device that looks like that part of the image, and then copied out at once. By this reckoning
8,000 tensors of 50 kB are 50 ms of calls one by one; as 25 slabs they are some 4 ms of calls, hidden by the 8 ms of
their bytes.

The slab buffer needs the bytes between the tensors too, their headers. They are fetched out of the slot, where they
stand from the beginning: in the other direction of the link, and by one call more for a slab.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from asyncckpt.devices.kinds import DeviceEvent
from asyncckpt.planning.forms import plain_addresses
from asyncckpt.planning.structure import picker
from asyncckpt.staging.host_copy import SlotViews, check_addresses, checked_addresses

logger = logging.getLogger(__name__)

# Tensors of fewer bytes are coalesced; see above.
_SMALL_BYTES = 1 << 20
# What one slab covers at most: so much that its calls (some 50 us) are beneath its bytes (300 us), so little that two
# slab buffers are no matter on any device.
SLAB_BYTES = 16 << 20
# Fewer tensors cost less one by one.
_LEAST_TENSORS = 8

# Through torch._foreach_copy_, elements go by way of the type that torch computes in, float for the halves, and come
# out of that with another pattern of bits where they are not numbers; and it does not know every type. Those below are
# copied as what they are, all others as integers.
_COPIED_AS_THEY_ARE = frozenset(
    {
        *(torch.float64, torch.float32, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class SlabBuffer:
    """``SLAB_BYTES`` on a device, for one slab after the other; ``free``: when the last one has been copied out."""

    memory: torch.Tensor
    free: DeviceEvent | None = None


class Slab:
    """Tensors with consecutive numbers, and the part of the image from the first byte of the first to the last's last.

    Nobody else may write there meanwhile: all the bytes between are written too, as they are.
    """

    calls = 8

    def __init__(
        self, numbers: Sequence[int], views: SlotViews, buffer: SlabBuffer, converted: Sequence[bool] = ()
    ) -> None:
        """Describe the slab.

        Args:
            numbers: The numbers of the tensors.
            views: Where they go.
            buffer: By way of which they go there; other slabs may use it too.
            converted: As of ``DeviceCopy``.
        """
        first, last = views.places[numbers[0]], views.places[numbers[-1]]
        self.begin = first.payload_at
        self.buffer = buffer
        nbytes = last.payload_at + last.payload_bytes - self.begin
        self._image = views.raw(self.begin, nbytes)
        self._memory = buffer.memory[:nbytes]
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        for number in numbers:
            alike.setdefault((views.specs[number].dtype, bool(converted) and converted[number]), []).append(number)
        self._groups = [
            _SameDtype(each, views, self._memory, self.begin, as_bits=not is_converted)
            for (_, is_converted), each in alike.items()
        ]

    def coalesce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the slab buffer what the image is to be."""
        with torch.inference_mode():
            self._memory.copy_(self._image, non_blocking=True)
            for group in self._groups:
                group.copy(tensors)

    def copy_out(self) -> None:
        """Copy the slab buffer into the image."""
        with torch.inference_mode():
            self._image.copy_(self._memory, non_blocking=True)

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Both, one after the other."""
        self.coalesce(tensors)
        self.copy_out()


class _SameDtype:
    """The tensors of one dtype in a slab. Where they go is kept: to make a view costs more than to copy into it.

    ``as_bits``: they come in that dtype, and no bit of them may change.
    """

    def __init__(
        self, numbers: Sequence[int], views: SlotViews, memory: torch.Tensor, begin: int, *, as_bits: bool
    ) -> None:
        self._pick = picker(numbers)
        dtype = views.specs[numbers[0]].dtype
        self._integer = _INTEGERS[dtype.itemsize] if as_bits and dtype not in _COPIED_AS_THEY_ARE else None
        self._specs = [views.specs[number] for number in numbers]
        self._is_complex = dtype.is_complex
        self._were_at = array("Q")
        self._integers: list[torch.Tensor] = []  # of the tensors that were at these addresses; they own no memory
        self._into: list[torch.Tensor] = []
        for number in numbers:
            place = views.places[number]
            raw = memory[place.payload_at - begin :][: place.payload_bytes]
            self._into.append(raw.view(self._integer or dtype).view(views.specs[number].shape))

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked = self._pick(tensors)
        addresses = plain_addresses(picked, on_host=False, may_be_conjugate=self._is_complex)
        if addresses is None:
            self._copy_odd(picked)
            return
        check_addresses(addresses, picked, self._specs)
        if self._integer is not None:
            picked = self._as_integers(picked, self._integer, addresses)
        torch._foreach_copy_(self._into, picked)

    def _as_integers(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype, addresses: array[int]
    ) -> list[torch.Tensor]:
        """The bits of ``tensors``. To view one as integers takes 2 us under Python's lock: from the second time on that
        all are at the same addresses, the views are kept.
        """
        if addresses != self._were_at:
            self._were_at, self._integers = addresses, []
            return [each.view(dtype) for each in tensors]
        if not self._integers:
            self._integers = [_unowned(tensor, dtype) for tensor in tensors]
        return self._integers

    def _copy_odd(self, picked: Sequence[torch.Tensor]) -> None:
        """Those that were ``picked``, of which some have no elements in a row, or a lazy sign."""
        checked_addresses(picked, self._specs)
        regular = list(map(torch.Tensor.is_contiguous, picked))
        if self._integer is not None:  # a lazy sign has to be carried out on what it is a sign of
            picked = [each.resolve_conj().resolve_neg().view(self._integer) for each in picked]
        # One that is not regular would have the whole call copy one by one.
        if any(regular):
            torch._foreach_copy_(list(compress(self._into, regular)), list(compress(picked, regular)))
        for into, tensor, is_regular in zip(self._into, picked, regular, strict=True):
            if not is_regular:
                into.copy_(tensor)


def _unowned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of ``tensor``, good as long as that is there; it does not keep the memory."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def group_by_slab(numbers: Sequence[int], views: SlotViews) -> Iterator[tuple[bool, list[int]]]:
    """All of ``numbers``, in their order, in groups: with True those that make a slab.

    A slab has no number between that is not of ``numbers``: its bytes would be somebody else's to write. So are
    the objects at the end of a file. Nor has it a tensor of a megabyte or more, where a range of pinned memory may end,
    which no copy may cross.
    """
    group: list[int] = []
    for number in numbers:
        place = views.places[number]
        joins = (
            bool(group)
            and number == group[-1] + 1
            and views.file_of(number) == views.file_of(group[0])
            and place.payload_bytes < _SMALL_BYTES
            and views.places[group[0]].payload_bytes < _SMALL_BYTES
            and place.payload_at + place.payload_bytes - views.places[group[0]].payload_at <= SLAB_BYTES
        )
        if group and not joins:
            yield len(group) >= _LEAST_TENSORS, group
            group = []
        group.append(number)
    if group:
        yield len(group) >= _LEAST_TENSORS, group


def allocate_slab_buffers(device: torch.device) -> list[SlabBuffer]:
    """Two, so that one is filled while the other is copied out; none where the device has no memory left for them."""
    try:
        return [SlabBuffer(torch.empty(SLAB_BYTES, dtype=torch.uint8, device=device)) for _ in range(2)]
    except torch.OutOfMemoryError:
        logger.warning(
            "%s has no %d bytes left to coalesce small tensors in: they are copied one by one", device, 2 * SLAB_BYTES
        )
        return []
