"""What the staging buffer needs of a plan, whatever it is a plan of: a checkpoint or a single file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from asyncckpt.planning.layout import DataLayout, Place
from asyncckpt.worker.messages import CheckpointLayout, Region, TorchFileLayout


class SlotObjects(Protocol):
    """The values of a state that are not tensors, as bytes in the slots."""

    def forget_slots(self) -> None:
        """From now on the slots are in other memory, which has nothing of the objects."""

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Bring the objects in a slot up to what the plan last captured.

        Args:
            slot: The number of the slot.
            image: Its memory.
            places: Where in it each object stands, in bytes.
        """


class BufferPlan(Protocol):
    """How the states of one structure are laid out."""

    @property
    def number(self) -> int:
        """The same on all ranks, and for no other plan."""

    @property
    def layout(self) -> DataLayout:
        """The layout of one image."""

    @property
    def objects(self) -> SlotObjects: ...

    @property
    def names(self) -> frozenset[str]:
        """The names of the values. A new plan takes the place of one that has the same."""

    @property
    def capture(self) -> Callable[..., Sequence[torch.Tensor]]:
        """Takes what is to be saved, and returns its tensors in the order of the layout; its objects are taken into
        ``objects``. The tensors are the caller's own: nothing is copied. Raises ``StructureChanged`` if this plan is
        not for it, ``UnsavableStateError`` if a value cannot be saved.
        """

    def constants(self) -> Mapping[str, bytes | memoryview]:
        """Bytes that are the same in every save, by the name of their region in the segment."""

    def segment_layout(
        self, slots: tuple[int, ...], regions: Mapping[str, Region]
    ) -> CheckpointLayout | TorchFileLayout:
        """What the worker is told of a segment with images at ``slots`` (offsets in bytes) and constants in
        ``regions``.
        """
