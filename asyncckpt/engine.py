"""The engine: states go in, checkpoints come out. Between them the plans, the shared memory and the worker.

It knows paths, not roots and steps to be loaded: those are the checkpointer's. One process may have several engines,
each with a worker of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    ClosedError,
    OutOfMemoryError,
    SaveDroppedError,
    SaveTimeoutError,
    UnsavableStateError,
)
from asyncckpt.handle import Save
from asyncckpt.home import Home
from asyncckpt.plan import Plan, StateDict, make_plan, stateful_to_dict
from asyncckpt.shm.slots import State
from asyncckpt.staging import Ready, copy_pool, ready_events
from asyncckpt.structure import StructureChanged
from asyncckpt.worker.client import Pending, WorkerClient
from asyncckpt.worker.messages import Committed, Order
from asyncckpt.worker.storage import exists_error, replaceable

logger = logging.getLogger(__name__)

_DEFAULT_SLOTS = 2
# Structures whose memory is kept, so that a model, an optimizer and an average can take turns.
_MAX_HOMES = 4
_RANK = 0


class Engine:
    """Saves state dicts to paths, through one worker process that is started by the first save.

    The methods are for one thread at a time. ``close`` it, or use it as a context manager.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._client: WorkerClient | None = None
        self._homes: list[tuple[Any, Home]] = []  # most recently used first
        self._under_way: dict[int, Save] = {}
        self._failed: list[Save] = []
        self._ids = itertools.count(1)
        self._pool = copy_pool()
        self._stager: ThreadPoolExecutor | None = None
        self._copies: list[Future[CheckpointError | None]] = []
        self._closed = False
        self._lock = threading.RLock()

    def prepare(self, state_dict: StateDict, planner: SavePlanner | None = None) -> None:
        """Do all that a first save would have to: start the worker, plan, take the memory and touch it.

        Values are not saved, but the tensors are copied once, to warm up. Raises as ``save`` does.
        """
        with self._lock:
            self._check_usable()
            home, tensors, _ = self._plan(state_dict, planner)
            ready = ready_events(tensors)
            for slot, _ in enumerate(home.pending):
                if home.slots.state(slot) is State.FREE:
                    home.copy(slot, tensors, ready, self._pool)

    def save(
        self,
        path: str | os.PathLike[str],
        state_dict: StateDict,
        *,
        step: int | None = None,
        overwrite: bool = False,
        keep_last: int | None = None,
        planner: SavePlanner | None = None,
    ) -> Save:
        """Save ``state_dict`` as the checkpoint ``path``.

        Returns when its tensors are staged, from where on the caller may change them (with ``overlap``: earlier, see
        ``Config``). Raises ``CheckpointExistsError`` if something is at ``path`` (with ``overwrite``: something other
        than a checkpoint), ``UnsavableStateError``, ``OutOfMemoryError``, ``WorkerDiedError``, ``SaveTimeoutError``,
        ``ClosedError``; then nothing was saved. What goes wrong later comes from the handle.
        """
        final = os.path.abspath(os.fspath(path))
        with self._lock:
            self._check_usable()
            save = Save(final, step)
            self._check_place(final, overwrite, step)
            home, tensors, planned = self._plan(state_dict, planner)
            slot = self._take_slot(home, save)
            if slot is None:
                return save
            waited = time.perf_counter()
            save._timings["plan_s"] = planned - save._begun
            save._timings["slot_s"] = waited - planned
            order = Order(
                save_id=next(self._ids),
                segment=home.number,
                slot=slot,
                path=final,
                attempt=uuid.uuid4().hex[:12],
                step=step,
                rank=_RANK,
                overwrite=overwrite,
                keep_last=keep_last,
            )
            self._stage(save, order, home, tensors)
            save._timings["stall_s"] = time.perf_counter() - save._begun
            return save

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended. Raises the first failure nobody was told of, or ``SaveTimeoutError``."""
        saves = list(self._under_way.values())
        if wait([save.future for save in saves], timeout).not_done:
            raise SaveTimeoutError(f"saves are still under way after {timeout:g} s")
        self._raise_failure()

    def close(self) -> None:
        """Wait for all saves, end the worker, give the memory back. Then raise the first failure nobody was told of.

        Raises ``SaveTimeoutError`` if the worker is still writing after ``config.timeout`` seconds: it goes on alone.
        Safe to call twice.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._stager is not None:
                self._stager.shutdown()
            try:
                if self._client is not None:
                    self._client.close(self.config.timeout)
            finally:
                self._drop_homes()
                self._pool.shutdown()
        self._raise_failure()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            if self._client is not None:
                self._client.abandon()
                warnings.warn("an asyncckpt engine was not closed", ResourceWarning, stacklevel=2, source=self)
            self._closed = True

    # What a save goes through.

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this checkpointer is closed; make a new one")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            world_size = torch.distributed.get_world_size()
            if world_size > 1:
                raise UnsavableStateError(
                    f"this version saves the state of one process, and the job has {world_size};"
                    " use torch.distributed.checkpoint until a version that saves all ranks together"
                )

    def _check_place(self, final: str, overwrite: bool, step: int | None) -> None:
        if any(os.fspath(save.path) == final for save in list(self._under_way.values())):
            raise CheckpointExistsError("this checkpoint is being saved already", path=final, step=step)
        if not (replaceable(final) if overwrite else not os.path.lexists(final) or _is_empty_folder(final)):
            raise exists_error(final, overwrite, step=step)

    def _plan(self, state_dict: StateDict, planner: SavePlanner | None) -> tuple[Home, Sequence[torch.Tensor], float]:
        """The home for ``state_dict``, made if there is none, with the state captured; and when that was done."""
        state = stateful_to_dict(state_dict)
        client = self._running_client()
        key = _planner_key(planner)
        for number, (its_key, home) in enumerate(self._homes):
            if its_key == key:
                try:
                    tensors = home.plan.capture(state, planner)
                except StructureChanged as error:
                    logger.debug("not the structure of plan %d: %s", number, error)
                    continue
                self._homes.insert(0, self._homes.pop(number))
                return home, tensors, time.perf_counter()
        plan = make_plan(state, self.config.slots or _DEFAULT_SLOTS, planner, _RANK)
        home = self._settle(plan, key, client)
        self._homes.insert(0, (key, home))
        return home, plan.capture(state, planner), time.perf_counter()

    def _settle(self, plan: Plan, key: Any, client: WorkerClient) -> Home:
        """Allocate for ``plan``, first giving back what it replaces: the same names in another form."""
        outdated = [entry for entry in self._homes if entry[0] == key and entry[1].plan.names == plan.names]
        for entry in outdated or self._homes[_MAX_HOMES - 1 :]:
            client.wait_for(entry[1].idle, self.config.timeout, "writing the save before the structure changed")
            self._homes.remove(entry)
            entry[1].close()
        try:
            return Home(plan, client, self.config.slots or _DEFAULT_SLOTS, self.config.timeout)
        except OutOfMemoryError as error:
            if self.config.slots is not None:
                raise
            logger.warning("one slot instead of two, so saves will wait for each other: %s", error)
            return Home(plan, client, 1, self.config.timeout)

    def _take_slot(self, home: Home, save: Save) -> int | None:
        """A free slot, as ``when_busy`` says. None: the save was dropped."""
        slot = home.free_slot()
        if slot is not None:
            return slot
        policy, client = self.config.when_busy, home.client
        if policy == "skip":
            save._resolve(
                SaveDroppedError("skipped: all slots were being written", path=save.path, rank=_RANK, step=save.step)
            )
            save._reported = True
            return None
        if policy == "latest":
            for pending in sorted(filter(None, home.pending), key=lambda pending: -pending.order.save_id):
                reason = SaveDroppedError(
                    f"replaced by the newer save of step {save.step} before it was written",
                    path=pending.order.path,
                    rank=_RANK,
                    step=pending.order.step,
                )
                if not pending.slot_free and client.cancel(pending, reason, self.config.timeout):
                    return pending.order.slot
        client.wait_for(lambda: home.free_slot() is not None, self.config.timeout, "waiting for a free slot")
        return home.free_slot()

    def _stage(self, save: Save, order: Order, home: Home, tensors: Sequence[torch.Tensor]) -> None:
        ready = ready_events(tensors)
        home.slots.take(order.slot, order.save_id)
        # Of the worker whose memory this is: should it have died since, this says so.
        pending = home.client.begin(order)
        home.pending[order.slot] = pending
        self._under_way[order.save_id] = save
        pending.future.add_done_callback(lambda outcome: self._ended(save, order.save_id, outcome))
        home.write_objects(order.slot)
        if self.config.overlap:
            if self._stager is None:
                self._stager = ThreadPoolExecutor(1, thread_name_prefix="asyncckpt-stager")
            self._copies = [copy for copy in self._copies if not copy.done()]
            self._copies.append(self._stager.submit(self._copy, save, pending, home, tensors, ready))
        else:
            error = self._copy(save, pending, home, tensors, ready)
            if error is not None:
                raise error

    def _copy(
        self, save: Save, pending: Pending, home: Home, tensors: Sequence[torch.Tensor], ready: Ready
    ) -> CheckpointError | None:
        """Copy, and hand the slot over. What goes wrong is returned, and is the outcome of the save."""
        begun = time.perf_counter()
        try:
            home.copy(pending.order.slot, tensors, ready, self._pool, busy=self.config.overlap)
            save._timings["copy_s"] = time.perf_counter() - begun
            home.slots.set(pending.order.slot, State.STAGED)
            home.client.staged(pending, dict(save._timings))
            save._staged.set()
        except BaseException as error:
            failure = error if isinstance(error, CheckpointError) else _staging_error(error, pending.order)
            if home.client.alive:
                home.client.cancel(pending, failure, self.config.timeout)
            if not isinstance(error, Exception):
                raise
            save._reported = not self.config.overlap  # else it is raised at once
            return failure
        return None

    def _ended(self, save: Save, save_id: int, outcome: Future[Committed]) -> None:
        """On whatever thread learned of it. First the books, then the handle, on which somebody may be waiting."""
        self._under_way.pop(save_id, None)
        failure = outcome.exception()
        if failure is not None and not isinstance(failure, SaveDroppedError):
            logger.error("saving failed: %s", str(failure))  # not itself: it holds on to the memory it saw
            self._failed = [save for save in self._failed if not save._reported] + [save]
        save._end(outcome)

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, []
        errors = [error for save in failed if (error := save._unreported_failure()) is not None]
        if errors:
            raise errors[0]

    def _running_client(self) -> WorkerClient:
        if self._client is not None and not self._client.alive:
            self._drop_homes()
            self._client.close(self.config.timeout)
            self._client = None
        if self._client is None:
            self._client = WorkerClient(self.config.worker_options())
        return self._client

    def _drop_homes(self) -> None:
        for copy in self._copies:
            copy.result()  # it writes into the memory that goes now
        homes, self._homes = self._homes, []
        for _, home in homes:
            home.close()


def _planner_key(planner: SavePlanner | None) -> Any:
    """Equal for planners that plan alike."""
    if planner is None or type(planner) is DefaultSavePlanner:
        planner = planner or DefaultSavePlanner()
        return planner.flatten_state_dict, planner.flatten_sharded_tensors
    return type(planner)


def _is_empty_folder(path: str) -> bool:
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    with os.scandir(path) as entries:
        return next(entries, None) is None


def _staging_error(error: BaseException, order: Order) -> CheckpointError:
    failure = CheckpointError(
        f"staging failed: {type(error).__name__}: {error}", path=order.path, rank=order.rank, step=order.step
    )
    failure.__cause__ = error
    return failure
