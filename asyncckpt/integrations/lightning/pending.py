"""What waits until a checkpoint of Lightning's is durable: older ones are removed then, and links lead to it."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeGuard

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.extension import Save
from asyncckpt.integrations.lightning.files import is_linked_to, link, remove

logger = logging.getLogger(__name__)

_UNDER_WAY = "asyncckpt-lightning/under-way"


class Pending:
    """The saves of one process, and what waits for them.

    A removal, or a link, waits for the newest save that was begun before it, and is left undone where that fails. They
    are done in the order they were asked for, but for removals of what a link leads to: they follow when that link
    leads elsewhere. All else here is for the one thread that saves. A place is a path as ``files.local_place`` gives
    it.
    """

    def __init__(self, timeout: float) -> None:
        """Nothing is under way.

        Args:
            timeout: Seconds to wait for another rank, or for a file system.
        """
        self.newest: Save | None = None
        """The save that was begun last."""
        self._timeout = timeout
        # By their places.
        self._saves: dict[str, Save] = {}
        self._removals: dict[str, Future[None]] = {}
        self._links: dict[str, Future[None]] = {}
        self._linked: set[str] = set()  # what is to be removed when no link leads there any more
        self._going: set[str] = set()  # what is being removed
        self._lock = threading.Lock()  # guards these two
        self._failures: list[BaseException] = []

    def add(self, place: str, save: Save) -> None:
        """``save``, to ``place``, has been begun."""
        self._saves = {place: save for place, save in self._saves.items() if not save.done()}
        self._saves[place] = self.newest = save
        _tell_others(save.future)

    def make_way(self, place: str) -> None:
        """Something is about to be saved to ``place``: it is not removed any more, nor comes a link in its place.

        Raises ``SaveTimeoutError``.
        """
        self._cancel_removal(place)
        if _waits(link := self._links.get(place)):
            self._await(link)

    def remove(self, place: str) -> None:
        """Remove what is at ``place``, or is being saved to there. Raises ``SaveTimeoutError``."""
        self._cancel_removal(place)
        own = self._saves.get(place)
        self._removals[place] = self._when_durable(partial(self._remove, place, own), f"removing {place}")

    def link(self, place: str, target: str) -> None:
        """Make a symbolic link at ``place``. As long as it is not made, what is there stays.

        Raises ``SaveTimeoutError``.
        """
        self._cancel_removal(place)
        self._links[place] = self._when_durable(partial(self._link, place, target), f"linking {place} to {target}")

    def will_exist(self, place: str) -> bool | None:
        """Whether there is something when all that is under way has gone well; None: as it is now."""
        if _waits(self._removals.get(place)) or place in self._linked:
            return False
        save = self._saves.get(place)
        return True if (save is not None and not save.done()) or _waits(self._links.get(place)) else None

    def wait_for(self, place: str) -> None:
        """Wait until nothing is under way for ``place``, and, in a job of ranks, nothing at all.

        Raises what the save to there has failed with, or as ``wait_for_others``.
        """
        for each in (self._removals.get(place), self._links.get(place)):
            if _waits(each):
                self._await(each)
        for target in {place: None, os.path.realpath(place): None}:
            if (save := self._saves.pop(target, None)) is not None:
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
        """Wait until nothing is under way, and nothing waits for that. Raises ``SaveTimeoutError``."""
        concurrent.futures.wait([save.future for save in self._saves.values()])
        for each in (*self._removals.values(), *self._links.values()):
            self._await(each)

    def end(self) -> None:
        """No link is to be made any more. Raises the first error of a removal or a link, and forgets them."""
        with self._lock:
            linked, self._linked = self._linked, set()
        for place in sorted(linked):
            logger.warning("%s is not removed, because a link leads there", place)
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def _when_durable(self, action: Callable[[], None], what: str) -> Future[None]:
        for kind in (self._removals, self._links):
            for place in [place for place, each in kind.items() if each.done()]:
                del kind[place]
        is_idle = not self._removals and not self._links
        newest = self.newest or Save.finished("")
        done = newest.when_durable(action, what)
        done.add_done_callback(self._note_failure)
        _tell_others(done)
        if newest.done() and is_idle:
            self._await(done)
        return done

    def _remove(self, place: str, own: Save | None) -> None:
        if own is not None:
            concurrent.futures.wait([own.future])  # one of another engine may end later
        with self._lock:
            self._linked.add(place)
        self._remove_linked()

    def _remove_linked(self) -> None:
        with self._lock:
            free = {place for place in self._linked if not is_linked_to(place)}
            self._linked, self._going = self._linked - free, self._going | free
        failures: list[Exception] = []
        for place in free:
            try:
                remove(place)
            except Exception as error:
                failures.append(error)
        with self._lock:
            self._going -= free
        if failures:
            raise failures[0]

    def _link(self, place: str, target: str) -> None:
        link(place, target)
        self._remove_linked()

    def _cancel_removal(self, place: str) -> None:
        removal = self._removals.pop(place, None)
        if _waits(removal) and not removal.cancel():
            self._await(removal)
        with self._lock:
            self._linked.discard(place)
            is_going = place in self._going
        if is_going:
            for each in filter(_waits, (*self._removals.values(), *self._links.values())):
                self._await(each)

    def _await(self, done: Future[None]) -> None:
        if self.newest is not None:
            concurrent.futures.wait([self.newest.future])
        if not concurrent.futures.wait([done], self._timeout).done:
            raise SaveTimeoutError(f"what is to be removed, or linked to, is not after {self._timeout:g} s")

    def _note_failure(self, done: Future[None]) -> None:
        if not done.cancelled() and (failure := done.exception()) is not None:
            self._failures.append(failure)


def _waits(done: Future[None] | None) -> TypeGuard[Future[None]]:
    return done is not None and not done.done()


def _tell_others(outcome: Future[Any]) -> None:
    """Something is under way, for all ranks to see, until there is an ``outcome``."""
    if (store := _store()) is not None:
        store.add(_UNDER_WAY, 1)
        outcome.add_done_callback(lambda _: store.add(_UNDER_WAY, -1))


def _store() -> Store | None:
    """Where the ranks tell each other of what is under way; None: there are no others."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return _get_default_store()
