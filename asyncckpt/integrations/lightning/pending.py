"""Saves under way, and what waits for them: checkpoints to be removed, links to be made."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.integrations.lightning.files import is_linked_to, link, remove
from asyncckpt.save_handle import Save

logger = logging.getLogger(__name__)

_UNDER_WAY = "asyncckpt-lightning/under-way"


class _Action:
    """A removal, or a link to be made: it waits for the newest save that was begun before it."""

    def __init__(self, newest: Save | None, undone: str, act: Callable[[], None]) -> None:
        self._newest, self._undone, self._act = newest, undone, act
        self.done: Future[None] = Future()

    def is_held(self) -> bool:
        """Whether it has to wait for longer than for that save."""
        return False

    def run(self, failures: list[Exception], *, is_last: bool = False) -> bool:
        """Do it, or leave it undone; that save has ended. Returns whether it is over.

        Args:
            failures: What it fails with is added to them.
            is_last: It is left undone if it is still held.
        """
        is_saved = self._newest is None or self._newest.failure is None
        is_held = is_saved and self.is_held()
        if is_held and not is_last:
            return False
        if not self.done.set_running_or_notify_cancel():
            return True
        try:
            if is_held:
                logger.warning("%s, because a link leads there", self._undone)
            elif self._newest is not None and not is_saved:
                logger.warning("%s, because %s is not saved", self._undone, self._newest.path)
            else:
                self._act()
        except Exception as error:
            logger.error("%s: %s", self._undone, error)
            failures.append(error)
        self.done.set_result(None)
        return True


class _Removal(_Action):
    """Of what is at ``place``: not while a link leads there, which a newer checkpoint is about to get."""

    def __init__(self, newest: Save | None, own: Save | None, place: str) -> None:
        super().__init__(newest, f"{place} is not removed", lambda: remove(place))
        self._own, self._place = own, place

    def is_held(self) -> bool:
        if self._own is not None:
            self._own.future.exception()  # one of another engine may end later
        return is_linked_to(self._place)


class Pending:
    """The saves of one process, and what waits for them.

    A removal, or a link, waits for the newest save that was begun before it, and is left undone where that fails. They
    are done in the order they were asked for, on the thread that makes calls at the ends of saves, but for removals of
    what a link leads to: they follow when that link leads elsewhere. All else here is for the one thread that saves. A
    place is a path as ``files.local_place`` gives it.
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
        self._removals: dict[str, _Action] = {}
        self._links: dict[str, _Action] = {}
        self._held: list[_Action] = []
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
        if (link := self._links.get(place)) is not None:
            concurrent.futures.wait([link.done])

    def remove(self, place: str) -> None:
        """Remove what is at ``place``, or is being saved to there."""
        self._cancel_removal(place)
        self._when_durable(self._removals, place, _Removal(self.newest, self._saves.get(place), place))

    def link(self, place: str, target: str) -> None:
        """Make a symbolic link at ``place``. As long as it is not made, what is there stays."""
        self._cancel_removal(place)

        def act() -> None:
            link(place, target)
            self._run_held()

        self._when_durable(self._links, place, _Action(self.newest, f"{place} is not linked to {target}", act))

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
        if _waits(self._removals.get(place)) or _waits(self._links.get(place)):
            self._wait_for_saves()
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
        """Wait until nothing is under way, and nothing waits for that."""
        self._wait_for_saves()
        self._run_held(is_last=True)

    def raise_failure(self) -> None:
        """Raise the first error of a removal or a link, and forget them."""
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def _cancel_removal(self, place: str) -> None:
        removal = self._removals.pop(place, None)
        if removal is not None and not removal.done.cancel():
            concurrent.futures.wait([removal.done])

    def _when_durable(self, kind: dict[str, _Action], place: str, action: _Action) -> None:
        is_idle = not any(_waits(each) for each in (*self._removals.values(), *self._links.values()))
        for other in [other for other, each in kind.items() if each.done.done()]:
            del kind[other]
        kind[place] = action
        if self.newest is None or (self.newest.done() and is_idle):
            self._run(action)
            return
        store = _store()
        if store is not None:
            store.add(_UNDER_WAY, 1)

        def run(_: object) -> None:
            self._run(action)
            if store is not None:
                store.add(_UNDER_WAY, -1)

        self.newest.future.add_done_callback(run)

    def _run(self, action: _Action, *, is_last: bool = False) -> None:
        if not action.run(self._failures, is_last=is_last):
            self._held.append(action)

    def _run_held(self, *, is_last: bool = False) -> None:
        held, self._held = self._held, []
        for action in held:
            self._run(action, is_last=is_last)

    def _wait_for_saves(self) -> None:
        """Wait until all saves have ended, and all that waits for them has been done or is held."""
        ended = []
        for save in (*self._saves.values(), self.newest):
            if save is not None:
                end: Future[None] = Future()
                save.future.add_done_callback(lambda _, end=end: end.set_result(None))  # type: ignore[misc]
                ended.append(end)
        concurrent.futures.wait(ended)


def _waits(action: _Action | None) -> bool:
    return action is not None and not action.done.done()


def _store() -> Store | None:
    """Where the ranks tell each other of what is under way; None: there are no others."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return _get_default_store()
