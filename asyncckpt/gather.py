"""Small tensors of a device, brought over many at a time.

A copy from a device to the host costs the host some 6 us whatever its size (the call, the checks, the launch), in which
a PCIe link moves 150 KB (at 25 GB/s) to 300 KB (at 50 GB/s). So smaller tensors keep the link waiting. On the device
itself ``torch._foreach_copy_`` copies 64 tensors and more with one launch, 0.1 us each, and all that it costs beside is
some tenths of a microsecond a tensor. Hence a *run*: tensors that stand next to each other in the image are first
copied into a *mirror*, memory on the device that looks like that part of the image, and then brought over by one copy.
By this reckoning 8,000 tensors of 50 kB are 50 ms of calls one by one; as 25 runs they are some 4 ms of calls, hidden
by the 8 ms of their bytes.

The mirror has to have the bytes between the tensors too, the envelopes. They are fetched out of the slot itself, where
they stand from the beginning: that is the other direction of the link, and one call more for a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import compress

import torch

from asyncckpt.structure import picker
from asyncckpt.targets import Targets

logger = logging.getLogger(__name__)

# Tensors of fewer bytes are gathered; see above.
_SMALL_BYTES = 256 << 10
# What one run covers at most: so much that its calls (some 50 us) are beneath its bytes (300 us), so little that two
# mirrors are no matter on any device.
RUN_BYTES = 16 << 20
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


class Run:
    """Tensors with consecutive numbers, and the part of the image from the first byte of the first to the last's last.

    Nobody else may write there meanwhile: all the bytes between are written too, as they are.
    """

    def __init__(self, numbers: Sequence[int], targets: Targets, mirrors: Sequence[torch.Tensor], turn: int) -> None:
        """It uses the one of ``mirrors`` whose ``turn`` it is, of at least ``RUN_BYTES``."""
        first, last = targets.places[numbers[0]], targets.places[numbers[-1]]
        self.begin = first.payload_at
        self.mirror = turn % len(mirrors)
        nbytes = last.payload_at + last.payload_bytes - self.begin
        self._image = targets.raw(self.begin, nbytes)
        self._there = mirrors[self.mirror][:nbytes]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number in numbers:
            by_dtype.setdefault(targets.specs[number].dtype, []).append(number)
        self._groups = [_Group(each, targets, self._there, self.begin) for each in by_dtype.values()]

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the mirror what the image is to be."""
        with torch.inference_mode():
            self._there.copy_(self._image, non_blocking=True)
            for group in self._groups:
                group.copy(tensors)

    def bring(self) -> None:
        """Copy the mirror into the image."""
        with torch.inference_mode():
            self._image.copy_(self._there, non_blocking=True)

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Both, one after the other."""
        self.gather(tensors)
        self.bring()


class _Group:
    """The tensors of one dtype in a run. Where they go is kept: to make a view costs more than to copy into it."""

    def __init__(self, numbers: Sequence[int], targets: Targets, there: torch.Tensor, begin: int) -> None:
        self._pick = picker(numbers)
        dtype = targets.specs[numbers[0]].dtype
        self._integer = None if dtype in _COPIED_AS_THEY_ARE else _INTEGERS[dtype.itemsize]
        self._into: list[torch.Tensor] = []
        for number in numbers:
            place = targets.places[number]
            raw = there[place.payload_at - begin :][: place.payload_bytes]
            self._into.append(raw.view(self._integer or dtype).view(targets.specs[number].shape))

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        picked: tuple[torch.Tensor, ...] | list[torch.Tensor] = self._pick(tensors)
        if self._integer is not None:
            picked = [_as_integers(tensor, self._integer) for tensor in picked]
        regular = list(map(torch.Tensor.is_contiguous, picked))
        if all(regular):
            torch._foreach_copy_(self._into, picked)
            return
        # One that is not would have the whole call copy one by one.
        if any(regular):
            torch._foreach_copy_(list(compress(self._into, regular)), list(compress(picked, regular)))
        for into, tensor, is_regular in zip(self._into, picked, regular, strict=True):
            if not is_regular:
                into.copy_(tensor)


def _as_integers(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():  # a lazy sign has to be carried out on what it is a sign of
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(dtype)


def stretches(numbers: Sequence[int], targets: Targets) -> Iterator[tuple[bool, list[int]]]:
    """All of ``numbers``, in their order, as what is a run (with True) and what is not.

    A run has no number between that is not of ``numbers``: its bytes would be somebody else's to write. Nor has it a
    tensor of a megabyte or more, where a piece of pinned memory may end, which no copy may cross.
    """
    stretch: list[int] = []
    for number in numbers:
        place = targets.places[number]
        joins = (
            bool(stretch)
            and number == stretch[-1] + 1
            and place.payload_bytes < _SMALL_BYTES
            and targets.places[stretch[0]].payload_bytes < _SMALL_BYTES
            and place.payload_at + place.payload_bytes - targets.places[stretch[0]].payload_at <= RUN_BYTES
        )
        if stretch and not joins:
            yield len(stretch) >= _LEAST_TENSORS, stretch
            stretch = []
        stretch.append(number)
    if stretch:
        yield len(stretch) >= _LEAST_TENSORS, stretch


def allocate_mirrors(device: torch.device) -> list[torch.Tensor]:
    """Two, so that one is filled while the other is brought over; none where the device has no memory left for them."""
    try:
        return [torch.empty(RUN_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    except torch.OutOfMemoryError:
        logger.warning(
            "%s has no %d bytes left to gather small tensors in: they are copied one by one", device, 2 * RUN_BYTES
        )
        return []
