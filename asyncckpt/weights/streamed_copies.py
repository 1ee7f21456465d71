"""Copies of tensors that come one by one, and may be gone, or have become others, when the next one is asked for.

What is on a device is copied there first, which takes a small part of the time that its link takes. From that copy it
goes to the host on a side stream, while the next tensor is made: where ranks gather each together and take turns in
copying (see ``shards.py``), a rank that is still copying must not keep the others waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.devices.kinds import DeviceEvent, DeviceKind, DeviceStream, kind_of
from asyncckpt.errors import UnsavableStateError
from asyncckpt.staging.host_copy import check_memory
from asyncckpt.weights.layout import copied_as
from asyncckpt.weights.plan import WeightPlan
from asyncckpt.weights.shards import Sharding, is_here, local

# The most memory of a device that copies take, but for a tensor that is larger.
_MOST_BYTES = 256 << 20


class StreamedCopies:
    """Copies that are under way within a ``with`` block; at its end all are done, also where something is raised."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, DeviceStream] = {}
        self._under_way: deque[tuple[DeviceKind, DeviceEvent, torch.Tensor]] = deque()

    def copy(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy ``tensor``, which may be changed when this returns, to the host's memory, converted if need be."""
        device = tensor.device
        kind = kind_of(device)
        staged = None if kind is None else self._staged(tensor, into.dtype)
        if kind is None or staged is None:
            into.copy_(on_device(tensor, into.dtype))
            return
        with kind.use(device):
            # Whoever changes the tensor then may do so on any stream.
            kind.record(kind.current_stream(device)).synchronize()
        if device not in self._streams:
            self._streams[device] = kind.new_stream(device)
        with kind.use(device, self._streams[device]):
            into.copy_(staged, non_blocking=True)
            self._under_way.append((kind, kind.record(self._streams[device]), staged))

    def __enter__(self) -> StreamedCopies:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(0)
        finally:  # an exception out of a signal handler may have cut that short, or come before a copy was noted
            for device, stream in self._streams.items():
                kind = kind_of(device)
                if kind is not None:
                    with kind.use(device):
                        kind.record(stream).synchronize()

    def _staged(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """A copy of ``tensor`` on its device, in ``dtype``; None where that has no room for it."""
        self._wait(_MOST_BYTES - tensor.numel() * dtype.itemsize)
        try:
            # A conjugate that is only a flag would be carried out on the host, on bytes that are still to come.
            plain = tensor.resolve_conj().resolve_neg()
            return plain.to(dtype, copy=True, memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            self._wait(0)
            return None

    def _wait(self, nbytes: int) -> None:
        """Wait until no more than so many bytes are under way, or nothing is."""
        left = sum(staged.nbytes for *_, staged in self._under_way)
        while self._under_way and left > nbytes:
            kind, event, staged = self._under_way[0]
            with kind.use(staged.device):
                event.synchronize()
            # Not before: the memory goes to whoever asks next, and is still read until then.
            self._under_way.popleft()
            left -= staged.nbytes


def on_device(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in ``dtype``, if it is on a device that has room: a copy that converts does that on the host."""
    try:
        return tensor if tensor.is_cpu else tensor.to(dtype)
    except torch.OutOfMemoryError:
        return tensor


Views = Callable[[torch.device | None], Sequence[torch.Tensor]]
"""The places of all tensors of a plan in a slot, for copies from a device (None: from nowhere)."""


class StreamCopy:
    """The first tensor that is not as planned, and all after it, are kept, until it is known what there is."""

    def __init__(
        self,
        sharding: Sharding,
        dtype: torch.dtype | None,
        copies: StreamedCopies,
        planned: tuple[WeightPlan, Views] | None,
    ) -> None:
        """Nothing has come yet.

        Args:
            sharding: The ranks that take part.
            dtype: What those of floating point are published as; None: what they are.
            copies: By which they are copied.
            planned: The plan, and where its tensors go; None: all are kept.
        """
        self._sharding, self._dtype, self._copies, self._planned = sharding, dtype, copies, planned
        self._copied: dict[str, int] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._seen: set[str] = set()
        self.left_to_others: list[str] = []
        """Of which another rank was planned to publish the same part."""

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """The next one. Raises ``UnsavableStateError`` where it cannot be published."""
        if not is_here(tensor):
            return
        form = self._sharding.form(name, tensor, self._dtype)
        if name in self._seen:
            raise UnsavableStateError(f"{name!r} comes twice")
        self._seen.add(name)
        if not self._sharding.takes(form, tensor):
            return
        if form.shape != form.whole:
            raise UnsavableStateError(f"{name!r} is a part of a tensor: publish such as a state dict, not one by one")
        plan, views = self._planned if self._planned is not None and not self._kept else (None, None)
        # What is no DTensor is shared anew along each stream: a plan of state dicts may have it elsewhere.
        if isinstance(tensor, DTensor) and plan is not None and form in plan.elsewhere:
            self.left_to_others.append(name)
            return
        as_copied = copied_as(form.dtype)
        part = local(name, tensor).view(copied_as(tensor.dtype))
        check_memory(part, name)
        number = None if plan is None else plan.find(form)
        if views is None or number is None:
            self._kept[name] = on_device(part, as_copied).to("cpu", as_copied, copy=True).view(form.dtype)
        else:
            self._copies.copy(part, views(tensor.device)[number])
            self._copied[name] = number

    @property
    def is_as_planned(self) -> bool:
        """Whether all that was planned has come, and nothing else."""
        return self._planned is not None and not self._kept and len(self._copied) == len(self._planned[0].entries)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that has come, when the copies are done."""
        if self._planned is None:
            return self._kept
        plan, views = self._planned
        there, dtypes = views(None), [entry.dtype for entry in plan.entries]
        return {name: there[at].clone().view(dtypes[at]) for name, at in self._copied.items()} | self._kept
