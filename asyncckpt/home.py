"""A plan and the shared memory for it: one segment, with the constant files and the slots."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncckpt.plan import Plan
from asyncckpt.shm.segment import PAGE, round_up
from asyncckpt.shm.slots import HEADER_BYTES, SlotTable
from asyncckpt.staging import PinnedMemory, Ready, SlotStager
from asyncckpt.worker.client import Pending, WorkerClient
from asyncckpt.worker.messages import Layout, Region


class Home:
    """Where the states of one structure are staged.

    The segment: the header page, the constant files (``.metadata``, index, spans), then one image a slot, each from a
    page on. ``pending`` has, for each slot, the save that last took it. ``client`` is the worker whose memory it is.
    """

    def __init__(self, plan: Plan, client: WorkerClient, slots: int, timeout: float) -> None:
        """Have ``client`` allocate the segment, and write all that is constant into it.

        Raises ``OutOfMemoryError``, ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        self.plan = plan
        self.client = client
        self.pending: list[Pending | None] = [None] * slots
        self._pinned: PinnedMemory | None = None
        plan.objects.forget_slots()
        constants: dict[str, bytes | memoryview] = {
            "metadata": plan.metadata,
            "index_head": plan.index_head,
            "spans": memoryview(plan.bounds).cast("B"),
        }
        regions = {}
        end = HEADER_BYTES
        for name, data in constants.items():
            regions[name] = Region(end, len(data))
            end = round_up(end + len(data))
        offsets = tuple(end + number * plan.image.nbytes for number in range(slots))
        self._offsets = offsets
        self.number, self.segment = client.allocate(end + slots * plan.image.nbytes, timeout)
        self.segment.touch()
        self.slots = SlotTable(self.segment.view)
        for name, data in constants.items():
            region = regions[name]
            self.segment.view[region.offset : region.offset + region.nbytes] = data
        for place, data in plan.image.constants():
            for offset in offsets:
                self.segment.view[offset + place : offset + place + len(data)] = data
        self._stagers = [SlotStager(plan.image, self.segment, offset) for offset in offsets]
        client.describe(self.number, Layout(plan.data_name, plan.image.nbytes, offsets, **regions))

    def limit(self, slots: int) -> None:
        """Use no more than ``slots`` slots: another rank has no more."""
        del self.pending[slots:]

    def free_slot(self) -> int | None:
        """A slot that holds nothing any more, if there is one; that least recently used, so that they take turns."""
        free = [
            (0 if save is None else save.order.save_id, slot)
            for slot, save in enumerate(self.pending)
            if save is None or save.slot_free
        ]
        return min(free)[1] if free else None

    def idle(self) -> bool:
        """Whether no slot holds a save under way."""
        return all(save is None or save.slot_free for save in self.pending)

    def copy(
        self,
        slot: int,
        tensors: Sequence[torch.Tensor],
        ready: Ready,
        pool: ThreadPoolExecutor,
        *,
        busy: bool = False,
    ) -> None:
        """Copy ``tensors`` into ``slot``, see ``SlotStager.copy``. The first from CUDA has the memory pinned."""
        if ready and self._pinned is None:
            places = [place.payload_at for place in self.plan.image.tensors if place.payload_at % PAGE == 0]
            cuts = [offset + place for offset in self._offsets for place in (0, *places)]
            self._pinned = PinnedMemory(self.segment, cuts)
        self._stagers[slot].copy(tensors, ready, pool, busy=busy)

    def write_objects(self, slot: int) -> None:
        """Bring the objects in ``slot`` up to what the plan last captured."""
        begin = self._offsets[slot]
        image = self.segment.view[begin : begin + self.plan.image.nbytes]
        self.plan.objects.write(slot, image, self.plan.image.objects)

    def close(self) -> None:
        """Give the memory back; nothing in it may be under way, or the worker is gone."""
        if self.client.alive:
            self.client.release(self.number)
        if self._pinned is not None:
            self._pinned.close()
        for stager in self._stagers:
            stager.close()
        self.slots.close()
        self.segment.close()
