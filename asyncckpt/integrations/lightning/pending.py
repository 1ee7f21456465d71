"""Saves under way, and what waits for them: checkpoints to be removed, links to be made."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.integrations.lightning.files import link, remove
from asyncckpt.save_handle import Save

logger = logging.getLogger(__name__)

_UNDER_WAY = "asyncckpt-lightning/under-way"


class Pending:
    """The saves of one process, and what waits for them.

    A removal, or a link, waits for the newest save that was begun before it, and is left undone where that fails. They
    are done in the order they were asked for, on the thread that makes calls at the ends of saves; all else here is for
    the one thread that saves. A place is a path as ``files.local_place`` gives it.
    """

    def __init__(self, timeout: float) -> None:
        """Nothing is under way.

        Args:
            timeout: Seconds to wait for another rank.
        """
        self.newest: Save | None = None
        """The save that was begun last."""
        self._timeout = timeout
        # By their places.
        self._saves: dict[str, Save] = {}
        self._removals: dict[str, Future[None]] = {}
        self._links: dict[str, Future[None]] = {}
        self._failures: list[Exception] = []

    def add(self, place: str, save: Save) -> None:
        """``save``, to ``place``, has been begun."""
        self._saves = {place: save for place, save in self._saves.items() if not save.done()}
        self._saves[place] = self.newest = save
        if (store := _store()) is not None:
            store.add(_UNDER_WAY, 1)
            save.future.add_done_callback(lambda _: store.add(_UNDER_WAY, -1))

    def make_way(self, place: str) -> None:
        """Something is about to be saved to ``place``: it is not removed any more, nor comes a link in its place."""
        self._cancel_removal(place)
        concurrent.futures.wait(filter(None, [self._links.get(place)]))

    def remove(self, place: str) -> None:
        """Remove what is at ``place``, or is being saved to there."""
        self._cancel_removal(place)
        own = self._saves.get(place)

        def act() -> None:
            if own is not None:
                own.future.exception()  # one of another engine may end later
            remove(place)

        self._removals[place] = self._when_durable(f"{place} is not removed", act)

    def link(self, place: str, target: str) -> None:
        """Make a symbolic link at ``place``. As long as it is not made, what is there stays."""
        self._cancel_removal(place)
        undone = f"{place} is not linked to {target}"
        self._links[place] = self._when_durable(undone, lambda: link(place, target))

    def will_exist(self, place: str) -> bool | None:
        """Whether there is something when all that is under way has gone well; None: as it is now."""
        if _waits(self._removals.get(place)):
            return False
        save = self._saves.get(place)
        return True if (save is not None and not save.done()) or _waits(self._links.get(place)) else None

    def wait_for(self, place: str) -> None:
        """Wait until nothing is under way for ``place``, and, in a job of ranks, nothing at all.

        Raises what the save to there has failed with, or as ``wait_for_others``.
        """
        concurrent.futures.wait(filter(None, [self._removals.get(place), self._links.get(place)]))
        if (save := self._saves.pop(os.path.realpath(place), None)) is not None:
            save.result()
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Wait until nothing is under way on any rank: most save nothing, and know of nothing.

        Raises:
            SaveTimeoutError: That takes too long.
        """
        if (store := _store()) is None:
            return
        deadline = time.monotonic() + self._timeout
        while store.add(_UNDER_WAY, 0) > 0:
            if time.monotonic() > deadline:
                raise SaveTimeoutError(f"another rank has not finished its saves after {self._timeout:g} s")
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait until nothing waits."""
        concurrent.futures.wait(list(self._waiting()))
        if self.newest is not None:
            self.newest.future.exception()

    def raise_failure(self) -> None:
        """Raise the first error of a removal or a link, and forget them."""
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def _cancel_removal(self, place: str) -> None:
        removal = self._removals.pop(place, None)
        if removal is not None and not removal.cancel():
            concurrent.futures.wait([removal])

    def _when_durable(self, undone: str, act: Callable[[], None]) -> Future[None]:
        """Have ``act`` called; ``undone`` says what it means where it is not."""
        waiting: Future[None] = Future()
        newest, store = self.newest, _store()

        def act_now(_: object = None) -> None:
            if waiting.set_running_or_notify_cancel():
                try:
                    if newest is not None and newest.failure is not None:
                        logger.warning("%s, because %s is not saved", undone, newest.path)
                    else:
                        act()
                except Exception as error:
                    logger.error("%s: %s", undone, error)
                    self._failures.append(error)
                waiting.set_result(None)
            if store is not None:
                store.add(_UNDER_WAY, -1)

        if store is not None:
            store.add(_UNDER_WAY, 1)
        is_idle = not any(map(_waits, self._waiting()))
        for kind in (self._removals, self._links):
            for other in [other for other, its in kind.items() if its.done()]:
                del kind[other]
        if newest is None or (newest.done() and is_idle):
            act_now()
        else:
            newest.future.add_done_callback(act_now)
        return waiting

    def _waiting(self) -> Iterator[Future[None]]:
        yield from self._removals.values()
        yield from self._links.values()


def _waits(action: Future[None] | None) -> bool:
    return action is not None and not action.done()


def _store() -> Store | None:
    """Where the ranks tell each other of what is under way; None: there are no others."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return _get_default_store()
