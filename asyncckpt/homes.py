"""The plans an engine keeps, and the memory of each: found again for a state that is as planned, made for a new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.config import Config
from asyncckpt.errors import OutOfMemoryError
from asyncckpt.file_plan import FilePlan
from asyncckpt.handle import Save
from asyncckpt.home import Home, Spare
from asyncckpt.plan import Plan
from asyncckpt.structure import StructureChanged
from asyncckpt.worker.client import WorkerClient
from asyncckpt.worker.visit import Visit

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 2
# Structures whose memory is kept, so that a model, an optimizer and an average can take turns.
_MAX_PLANS = 4


@dataclass
class Known:
    """A plan, and its memory while there is a worker that holds it.

    ``key``: of planners that plan alike, or of files that are laid out alike.
    """

    key: Any
    plan: Plan | FilePlan
    home: Home | None = None


class Homes:
    """What an engine has planned, and where it is staged.

    ``known``: the most recently used first. ``spares``: memory whose worker is gone, for the next one to adopt.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.known: list[Known] = []
        self.spares: list[Spare] = []

    def find(
        self, key: Any, capture: Callable[[Any], Sequence[torch.Tensor]], client: WorkerClient
    ) -> tuple[Home, Sequence[torch.Tensor]] | None:
        """The home of the plan under ``key`` that can ``capture`` what is to be saved, and what it captured."""
        for known in self.known:
            if known.key != key:
                continue
            try:
                tensors = capture(known.plan)
            except StructureChanged as error:
                logger.debug("not the structure of plan %d: %s", known.plan.number, error)
                continue
            self.known.remove(known)
            self.known.insert(0, known)
            if known.home is None:  # its worker died, and took the memory along
                known.home = self._settle(known.plan, client)
            return known.home, tensors
        return None

    def make(self, key: Any, plan: Plan | FilePlan, client: WorkerClient) -> Home:
        """Memory for a new plan, which takes the place of one for the same names, or of the oldest of many."""
        outdated = [entry for entry in self.known if entry.key == key and entry.plan.names == plan.names]
        for entry in outdated or self.known[_MAX_PLANS - 1 :]:
            if entry.home is not None:
                doing = "writing the save before the structure changed"
                client.wait_for(entry.home.idle, self._config.timeout, doing)
                entry.home.close()
            self.known.remove(entry)
        return self._settle(plan, client)

    def keep(self, key: Any, plan: Plan | FilePlan, home: Home) -> None:
        """From now on, find it."""
        self.known.insert(0, Known(key, plan, home))

    def image_of(self, save: Save) -> tuple[Home, int] | None:
        """Where what was staged for ``save`` still is, whole: the home and the slot."""
        for home in (known.home for known in self.known if known.home is not None):
            for slot, pending in enumerate(home.pending):
                # By the path too: saves of another engine have the same numbers.
                if pending is None or (pending.order.save_id, pending.order.path) != (save._number, str(save.path)):
                    continue
                if pending.whole:
                    return home, slot
        return None

    def inherit(self, visit: Visit) -> None:
        """Where no memory is left to be adopted: that which the worker of an earlier trainer holds."""
        if self.spares:
            return
        for number, segment in visit.segments.items():
            images = tuple(each for each in visit.images if each.order.segment == number)
            self.spares.append(Spare(segment, images[0].layout, images))

    def hand_over(self, client: WorkerClient) -> None:
        """Have ``client`` adopt what is spare. Raises ``WorkerDiedError``, ``SaveTimeoutError``."""
        for spare in self.spares:
            spare.number = client.adopt(spare.segment, spare.held, self._config.timeout)

    def leave(self) -> None:
        """Let go of the memory of all plans, which has lost its worker."""
        for known in self.known:
            if known.home is not None:
                self.spares.append(known.home.leave())
                known.home = None

    def close(self) -> None:
        """Give back what is spare."""
        while self.spares:
            self.spares.pop().segment.close()

    def _settle(self, plan: Plan | FilePlan, client: WorkerClient) -> Home:
        """Memory for ``plan``; where there is too little, for one slot, or in the place of what was not used lately."""
        slots = self._config.slots or DEFAULT_SLOTS
        while True:
            try:
                return Home(plan, client, slots, self._config.timeout, self.spares)
            except OutOfMemoryError as error:
                if self._config.slots is None and slots > 1:
                    logger.warning("one slot instead of two, so saves will wait for each other: %s", error)
                    slots = 1
                elif not self._give_back_oldest(client):
                    raise

    def _give_back_oldest(self, client: WorkerClient) -> bool:
        """Give back the memory of the plan that was not used for longest; False if none has any."""
        housed = [known for known in self.known if known.home is not None]
        if not housed or housed[-1].home is None:
            return False
        client.wait_for(housed[-1].home.idle, self._config.timeout, "writing what is in memory that is needed")
        housed[-1].home.close()
        housed[-1].home = None
        return True
