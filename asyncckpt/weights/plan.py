"""The plan of weights: which tensors there are, and where in the image each goes. Made once for a structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncckpt.fingerprint import Fingerprint
from asyncckpt.structure import StructureChanged, picker
from asyncckpt.weights.image import Form, WeightImage
from asyncckpt.weights.sharing import Sharing, local


@dataclass(frozen=True)
class WeightPlan:
    """How weights of one structure are laid out."""

    image: WeightImage
    converted: Sequence[bool]
    """Which come in another dtype than they are published in, in the order of the image."""
    dtype: torch.dtype | None
    names: Sequence[str]
    placements: Sequence[Any]
    fingerprint: Fingerprint
    pick: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

    @classmethod
    def make(cls, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None, sharing: Sharing) -> WeightPlan:
        """For ``weights``, this rank's own, those of floating point as ``dtype``. Raises ``UnsavableStateError``."""
        forms = [sharing.form(name, tensor, dtype) for name, tensor in weights.items()]
        image = WeightImage.lay_out(forms)
        parts = list(map(local, weights.values()))
        return cls(
            image=image,
            converted=[parts[number].dtype != forms[number].dtype for number in image.order],
            dtype=dtype,
            names=list(weights),
            placements=list(map(_placement, weights.values())),
            fingerprint=Fingerprint(parts, []),
            pick=picker(image.order),
        )

    def capture(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> Sequence[torch.Tensor]:
        """The tensors of ``weights`` in the order of the image, not copied. Raises ``StructureChanged``."""
        if dtype != self.dtype or list(weights) != self.names:
            raise StructureChanged("other names, or another dtype to publish in")
        if list(map(_placement, weights.values())) != self.placements:
            raise StructureChanged("a tensor is placed differently")
        parts = list(map(local, weights.values()))
        self.fingerprint.check(parts)
        return self.pick(parts)

    def find(self, form: Form) -> int | None:
        """The number in the image of a tensor of that ``form``; None where it is not in the plan."""
        number = self.image.number_of.get(form.name)
        return number if number is not None and self.image.entries[number][: len(form)] == form else None


def _placement(tensor: torch.Tensor) -> Any:
    return tensor._spec if isinstance(tensor, DTensor) else None
