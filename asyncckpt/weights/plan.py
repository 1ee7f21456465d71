"""The plan of weights: the tensors, and their places in a slot. A plan is made once for each structure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.planning.layout import DataLayout, Place, TensorSpec
from asyncckpt.planning.structure import PLAIN, Fingerprint, StructureChanged, picker
from asyncckpt.weights.layout import TensorEntry, copied_as, lay_out
from asyncckpt.weights.shards import Sharding, local


@dataclass(frozen=True)
class WeightPlan:
    """The layout of weights of one structure: a ``header``, then the ``entries`` in the order of their places."""

    dtype: torch.dtype | None
    header: bytes
    entries: Sequence[TensorEntry]
    converted: Sequence[bool]
    """For each entry, whether it is converted from another dtype."""
    elsewhere: Collection[TensorEntry]
    """The parts that another rank publishes, although this rank also has them."""
    names: Sequence[str]
    placements: Sequence[Any]
    fingerprint: Fingerprint
    pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

    @classmethod
    def make(cls, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None, sharding: Sharding) -> WeightPlan:
        """Plan weights of this structure, on all ranks together.

        Raises ``UnsavableStateError`` if a tensor cannot be published.

        Args:
            weights: The tensors of this rank, by name.
            dtype: The dtype to publish floating-point tensors in; None: the dtype of each tensor.
            sharding: The ranks that publish together.
        """
        forms = [sharding.form(name, tensor, dtype) for name, tensor in weights.items()]
        own = set(sharding.own(forms))
        order = [number for number, form in enumerate(forms) if form in own]
        order.sort(key=lambda number: -forms[number].dtype.itemsize)
        header, entries = lay_out([forms[number] for number in order])
        parts = list(map(local, weights, weights.values()))
        return cls(
            dtype=dtype,
            header=header,
            entries=entries,
            converted=[parts[number].dtype != forms[number].dtype for number in order],
            elsewhere=set(forms) - own,
            names=list(weights),
            placements=list(map(_placement, weights.values())),
            fingerprint=Fingerprint(parts, []),
            pick=picker(order),
        )

    @cached_property
    def places(self) -> DataLayout:
        """The entries in the form that copying needs."""
        specs = [TensorSpec(copied_as(entry.dtype), entry.shape, name=entry.name) for entry in self.entries]
        places = [Place(entry.begin, entry.nbytes, entry.begin, entry.nbytes) for entry in self.entries]
        return DataLayout(specs, places, [], len(self.header) + sum(entry.nbytes for entry in self.entries))

    def capture(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Sequence[torch.Tensor]:
        """Return the tensors of ``weights`` in the order of the entries, viewed with the dtypes of ``places``.

        Raises ``StructureChanged``, and ``UnsavableStateError`` if a part has no plain bytes.
        """
        if dtype != self.dtype or list(weights) != self.names:
            raise StructureChanged("other names, or another dtype to publish in")
        if not all(issubclass(kind, DTensor) for kind in set(map(type, weights.values())) - PLAIN):
            raise StructureChanged("a tensor is of a kind of its own")
        if list(map(_placement, weights.values())) != self.placements:
            raise StructureChanged("a tensor is placed differently")
        parts = list(map(local, weights, weights.values()))
        self.fingerprint.check(parts)
        picked = self.pick(parts)
        return [part.view(copied_as(part.dtype)) for part in picked] if self._has_unknown else picked

    @cached_property
    def _has_unknown(self) -> bool:
        return not all(entry.is_known for entry in self.entries)

    def find(self, form: TensorEntry) -> int | None:
        """Return the number of the entry that equals ``form`` except for its place; None if there is none."""
        return self._numbers.get(form)

    @cached_property
    def _numbers(self) -> Mapping[TensorEntry, int]:
        return {entry._replace(begin=0): number for number, entry in enumerate(self.entries)}


def _placement(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else None
