"""The plan of weights: which tensors there are, and where in a slot each goes. Made once for a structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.planning.structure import Fingerprint, StructureChanged, picker
from asyncckpt.weights.layout import SafetensorsLayout, TensorForm
from asyncckpt.weights.shards import Sharding, local


@dataclass(frozen=True)
class WeightPlan:
    """How weights of one structure are laid out."""

    layout: SafetensorsLayout
    converted: Sequence[bool]
    """Which come in another dtype than they are published in, in the order of the layout."""
    dtype: torch.dtype | None
    names: Sequence[str]
    placements: Sequence[Any]
    fingerprint: Fingerprint
    pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

    @classmethod
    def make(cls, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None, sharding: Sharding) -> WeightPlan:
        """Plan weights of this structure.

        Args:
            weights: This rank's own, by name.
            dtype: What those of floating point are published as; None: what they are.
            sharding: The ranks that publish together.

        Raises:
            UnsavableStateError: Something cannot be published.
        """
        forms = [sharding.form(name, tensor, dtype) for name, tensor in weights.items()]
        layout = SafetensorsLayout.lay_out(forms)
        parts = list(map(local, weights.values()))
        return cls(
            layout=layout,
            converted=[parts[number].dtype != forms[number].dtype for number in layout.order],
            dtype=dtype,
            names=list(weights),
            placements=list(map(_placement, weights.values())),
            fingerprint=Fingerprint(parts, []),
            pick=picker(layout.order),
        )

    def capture(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Sequence[torch.Tensor]:
        """The tensors of ``weights`` in the order of the layout, not copied. Raises ``StructureChanged``."""
        if dtype != self.dtype or list(weights) != self.names:
            raise StructureChanged("other names, or another dtype to publish in")
        if list(map(_placement, weights.values())) != self.placements:
            raise StructureChanged("a tensor is placed differently")
        parts = list(map(local, weights.values()))
        self.fingerprint.check(parts)
        return self.pick(parts)

    def find(self, form: TensorForm) -> int | None:
        """The number in the layout of a tensor of that ``form``; None where it is not in the plan."""
        number = self.layout.number_of.get(form.name)
        return number if number is not None and self.layout.entries[number][: len(form)] == form else None


def _placement(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements, tensor.shape) if isinstance(tensor, DTensor) else None
