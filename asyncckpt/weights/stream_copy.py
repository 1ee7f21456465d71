"""The copy of a stream of tensors into a slot, as long as they are as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.errors import UnsavableStateError
from asyncckpt.staging.host_copy import check_memory
from asyncckpt.weights.layout import copied_as
from asyncckpt.weights.plan import WeightPlan
from asyncckpt.weights.shards import Sharding, is_here, local
from asyncckpt.weights.streamed_copies import StreamedCopies, on_device

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
