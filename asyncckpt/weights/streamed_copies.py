"""Copies of tensors that come one by one. The caller may free or overwrite a tensor when it makes the next tensor.

A tensor on a device is first copied on the device, which is much faster than the link to the host. A side stream then
copies this copy to the host, while the caller makes the next tensor. Ranks that gather each tensor together take turns
in copying (see ``shards.py``), so a rank that is still copying must not delay the other ranks.
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

# Maximum bytes of device memory for copies, unless a single tensor is larger.
_MOST_BYTES = 256 << 20


class StreamedCopies:
    """Copies that run within a ``with`` block. The block waits for all copies at its end, even after an error."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, DeviceStream] = {}
        self._under_way: deque[tuple[DeviceKind, DeviceEvent, torch.Tensor]] = deque()

    def copy(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy ``tensor`` to host memory, with conversion. The caller may change ``tensor`` when this returns."""
        device = tensor.device
        kind = kind_of(device)
        staged = None if kind is None else self._staged(tensor, into.dtype)
        if kind is None or staged is None:
            into.copy_(on_device(tensor, into.dtype))
            return
        with kind.use(device):
            # The caller may change the tensor on any stream from now on.
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
        finally:  # a signal handler may raise during the wait, or before a copy is noted
            for device, stream in self._streams.items():
                kind = kind_of(device)
                if kind is not None:
                    with kind.use(device):
                        kind.record(stream).synchronize()

    def _staged(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a copy of ``tensor`` on its device, in ``dtype``; None if the device has no memory for the copy."""
        self._wait(_MOST_BYTES - tensor.numel() * dtype.itemsize)
        try:
            # Resolve lazy conjugates now. Otherwise the host would resolve them before the bytes have arrived.
            plain = tensor.resolve_conj().resolve_neg()
            return plain.to(dtype, copy=True, memory_format=torch.contiguous_format)
        except torch.OutOfMemoryError:
            self._wait(0)
            return None

    def _wait(self, nbytes: int) -> None:
        """Wait until at most ``nbytes`` bytes are under way; if ``nbytes`` is negative, until nothing is."""
        left = sum(staged.nbytes for *_, staged in self._under_way)
        while self._under_way and left > nbytes:
            kind, event, staged = self._under_way[0]
            with kind.use(staged.device):
                event.synchronize()
            # Release the memory only now. Otherwise the allocator would reuse it while the copy still reads it.
            self._under_way.popleft()
            left -= staged.nbytes


def on_device(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor`` in ``dtype``. Convert on the device if there is memory, because host conversion is slow."""
    try:
        return tensor if tensor.is_cpu else tensor.to(dtype)
    except torch.OutOfMemoryError:
        return tensor


Views = Callable[[torch.device | None], Sequence[torch.Tensor]]
"""Returns views of all tensors of a plan in a slot. The argument is the device to copy from, or None."""


class StreamCopy:
    """Copies one stream. From the first tensor that is not as planned, all tensors are kept for replanning."""

    def __init__(
        self,
        sharding: Sharding,
        dtype: torch.dtype | None,
        copies: StreamedCopies,
        planned: tuple[WeightPlan, Views] | None,
    ) -> None:
        """Copy nothing yet.

        Args:
            sharding: The ranks that publish together.
            dtype: The dtype to publish floating-point tensors in; None: the dtype of each tensor.
            copies: Performs the copies.
            planned: The plan, and the views of its tensors; None: keep all tensors.
        """
        self._sharding, self._dtype, self._copies, self._planned = sharding, dtype, copies, planned
        self._copied: dict[str, int] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._seen: set[str] = set()
        self.left_to_others: list[str] = []
        """Names of tensors that another rank publishes according to the plan."""

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Copy or keep the next tensor. Raises ``UnsavableStateError`` if the tensor cannot be published."""
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
        # Plain tensors are assigned to ranks again in each stream. A plan made from a state dict may assign them
        # differently.
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
        """Whether the stream had exactly the planned tensors."""
        return self._planned is not None and not self._kept and len(self._copied) == len(self._planned[0].entries)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the stream. Call after the copies are done."""
        if self._planned is None:
            return self._kept
        plan, views = self._planned
        there, dtypes = views(None), [entry.dtype for entry in plan.entries]
        return {name: there[at].clone().view(dtypes[at]) for name, at in self._copied.items()} | self._kept
