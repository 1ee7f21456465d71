"""A part of a plan: how one file, or one folder of DCP, lies in the image of a save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from asyncckpt.format.segment_layout import LargeFile, Region
from asyncckpt.planning.layout import DataLayout, Place


class PlannedObjects(Protocol):
    """The pickled values of a part, which the trainer writes into each slot."""

    def own_pickles(self) -> Iterable[tuple[str, bytes]]:
        """Return the names and bytes of the values that pickle by code of their own."""

    def forget_slots(self) -> None:
        """Note that the slots are in other memory now, which holds no objects."""

    def write(self, slot: int, image: memoryview, places: Sequence[Place]) -> None:
        """Write the captured values to their ``places`` in the ``image`` of a slot."""


class PartPlan(ABC):
    """The plan of one file or folder. All methods get the content of the same kind as the planned content.

    Attributes:
        layout: The places of the items, in bytes from the start of the part.
        objects: The pickled values.
    """

    layout: DataLayout
    objects: PlannedObjects

    @property
    def devices(self) -> object | None:
        """See ``Forms.devices``; None: unknown."""
        return None

    @abstractmethod
    def capture(self, content: Any, *, is_raw: bool = False) -> Sequence[torch.Tensor]:
        """Return the caller's own tensors, in the order of the layout, and take the other values into ``objects``.

        Args:
            content: The content to save.
            is_raw: Whether ``Stateful`` values were not asked for their states yet.

        Raises:
            StructureChanged: The plan does not fit the content, or a value may be ``Stateful``, with ``is_raw``.
            UnsavableStateError: A value cannot be saved.
        """

    @abstractmethod
    def constants(self, name: str) -> dict[str, bytes | memoryview]:
        """Return the bytes that are the same in every save, by the name of their region.

        ``name``: the name of the file or folder in its checkpoint.
        """

    @abstractmethod
    def files(self, name: str, begin: int, regions: Mapping[str, Region]) -> Sequence[LargeFile]:
        """Return the large files.

        Args:
            name: As in ``constants``.
            begin: The start of the part in the image, in bytes.
            regions: The regions of the ``constants``.
        """

    def replicas(self, content: Any, number: int) -> Iterable[tuple[str, object]]:
        """Return the values that ranks compare in save ``number``, with their names."""
        return ()

    def note_end(self, *, is_committed: bool) -> None:
        """Note that a save has ended."""
        return
