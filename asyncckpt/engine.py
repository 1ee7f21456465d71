"""The engine: states go in, checkpoints or single files come out. Between: plans, shared memory and the worker.

It knows paths, not roots and steps to be loaded: those are the checkpointer's. One process may have several engines,
each with a worker of its own.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.busy import take_slot
from asyncckpt.config import Config
from asyncckpt.device_copy import Ready, ready_events
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    ClosedError,
    JobTakenError,
    SaveDroppedError,
    SaveTimeoutError,
    StructureChangedError,
    UnsavableStateError,
    WorkerDiedError,
)
from asyncckpt.file_plan import Contents, FilePlan
from asyncckpt.group import Group
from asyncckpt.handle import Save
from asyncckpt.home import Home
from asyncckpt.homes import DEFAULT_SLOTS, Homes
from asyncckpt.host_copy import copy_pool
from asyncckpt.memory import Memory
from asyncckpt.plan import StateDict, flat_names, make_plan
from asyncckpt.shm.slots import State
from asyncckpt.structure import StructureChanged, stateful_to_dict
from asyncckpt.versions import Publication, Said, Versions
from asyncckpt.worker.client import Pending, WorkerClient, deserted
from asyncckpt.worker.door import door_name
from asyncckpt.worker.messages import Committed, Existing, Order
from asyncckpt.worker.storage import exists_error, fits, remove, translated, withdraw
from asyncckpt.worker.succession import start_worker
from asyncckpt.worker.visit import Visit

logger = logging.getLogger(__name__)

# How long the end of a worker may take to be noticed.
_NOTICE_S = 2.0


class Engine:
    """Saves state dicts to paths, through one worker process that is started by the first save.

    The methods are for one thread at a time. ``close`` it, or use it as a context manager.
    """

    def __init__(
        self,
        config: Config | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        *,
        alone: bool = False,
        job: str | None = None,
    ) -> None:
        """For the ranks of ``process_group`` (None: of the whole job, if ``torch.distributed`` is initialised by the
        first save), which all have to make the same calls; with ``alone`` for this process whatever the job.

        ``job``: a text by which the worker finds its way from a trainer that dies to the one in its place; None: it
        leaves when its trainer does.
        """
        self.config = config or Config()
        self._job = job
        self._visit: Visit | None = None
        self._has_visited = False
        self._memory: Memory | None = None
        self._versions = Versions()
        self._process_group = process_group
        self._alone = alone
        self._group: Group | None = None
        self._client: WorkerClient | None = None
        self._homes = Homes(self.config)
        self._under_way: dict[int, Save] = {}
        self._failed: list[Save] = []
        self.failures = 0
        self._deaths = 0  # of workers, since a save was committed
        self._restart_at = 0.0
        self._ids = itertools.count(1)
        self._questions = itertools.count(1)
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
            group, number = self._ranks(), next(self._ids)
            try:
                state = stateful_to_dict(state_dict)
                client, found = self._agree(group, number, state, planner, lambda: None)
                home, tensors = found or self._plan_anew(group, number, state, planner, client)
            except BaseException as error:
                group.fail(number, error, begun=False)
                raise
            ready = ready_events(tensors)
            for slot in home.unused_slots():
                home.copy(slot, tensors, ready, self._pool)

    def save(
        self,
        path: str | os.PathLike[str],
        state_dict: StateDict,
        *,
        step: int | None = None,
        existing: Existing = "refuse",
        keep_last: int | None = None,
        keep: Callable[[], bool] | None = None,
        planner: SavePlanner | None = None,
    ) -> Save:
        """Save ``state_dict``, this rank's part, as the checkpoint ``path``, the same on all ranks.

        Returns when its tensors are staged, from where on the caller may change them (with ``overlap``: earlier, see
        ``Config``). Once it is committed, all but the ``keep_last`` newest steps beside it are removed, except those
        of which ``keep``, asked on the first rank, has said yes.

        ``existing`` says what becomes of what is at ``path``.

        Raises ``CheckpointExistsError`` if that forbids it, ``UnsavableStateError``, ``StructureChangedError``,
        ``OutOfMemoryError``, ``WorkerDiedError``, ``JobTakenError``, ``RankFailedError``, ``SaveTimeoutError``,
        ``ClosedError``, or what an earlier save failed with, if nobody was told; then nothing was saved, and no other
        rank's save succeeds. What goes wrong later comes from the handle, on all ranks the same. (With
        ``Config.failure="warn"`` all but ``ClosedError`` comes from there.)
        """
        retention = _Retention(existing, keep_last, keep)

        def carry_out(group: Group, number: int, save: Save) -> None:
            self._save(group, number, save, state_dict, planner, retention)

        return self._undertake(os.path.abspath(os.fspath(path)), step, carry_out)

    def save_file(self, path: str | os.PathLike[str], obj: object, *, pickle_protocol: int = 2) -> Save:
        """Save ``obj`` as the file ``path``, which ``torch.load`` reads, replacing a file that is there, in one step.

        Of this process alone: raises ``ValueError`` in an engine for more. The folder must be there. Returns, and
        raises, as ``save`` does.
        """

        def carry_out(group: Group, number: int, save: Save) -> None:
            if not group.alone:
                raise ValueError("a file is of one process: give it an Engine(alone=True)")
            self._save_file(group, number, save, obj, pickle_protocol)

        # Through a link to what it leads to, as whoever opens the file for writing does.
        return self._undertake(os.path.realpath(os.fspath(path)), None, carry_out)

    def start(self) -> None:
        """Start the worker and meet the other ranks, as the first save does. Raises as ``save`` does."""
        with self._lock:
            self._check_usable()
            self._running_client(self._ranks())

    def warm_up(self) -> None:
        """Start the worker of this rank alone, which the first save then need not. Raises as ``save`` does.

        ``torch.distributed`` may be initialised later: the ranks do not meet here.
        """
        with self._lock:
            self._check_usable()
            if self._client is None:
                self._client = self._start_worker(Group(self.config, self._process_group, alone=self._alone))

    def publish(self, save: Save, version: int, *, roll_back: bool = False) -> Publication:
        """Let readers see, as ``version``, what was staged for ``save``, where it is.

        Its slot is not staged in again while somebody reads it, and as long as there is another. With ``overlap`` this
        waits until all is staged. Skipped where the image is not there any more, or never was; or where no other slot
        would be left for saves, as readers have them all.

        Raises ``VersionError``, see ``Versions.admit``; ``SaveTimeoutError``, ``RankFailedError``, ``ClosedError``.
        """
        with self._lock:
            self._check_usable()
            group, number = self._ranks(), next(self._ids)

            def gather(said: Said) -> list[Said]:
                return group.consult("epoch", number, lambda: said, lambda all_say: [all_say] * len(all_say))

            published = self._versions.admit(version, group.world_size, gather, roll_back=roll_back)
            save.wait_staged(self.config.timeout)
            image = self._homes.image_of(save)
            why = "its image is not in memory any more, or never was"
            if image is not None:
                home, slot = image
                if not home.client.has_door:
                    raise CheckpointError("readers cannot find the worker, which has no door: see the log")
                if home.publish(slot, published):
                    self._versions.note(published)
                    return Publication(published.version, published.epoch, skipped=False)
                why = "readers have all slots but that; more of them would help (Config.slots)"
            logger.warning("version %d is not published: %s", version, why)
            if not group.alone:
                self._versions.note(published)  # other ranks may have published it, and all have to know the same
            return Publication(published.version, published.epoch, skipped=True)

    def any_says(self, mine: bool) -> bool:
        """Whether any rank has said yes by now (``mine``: this one does), as the first rank sees it.

        The ranks must have met. No, while the first rank's worker is gone, which brings them together.
        """
        with self._lock:
            group = self._ranks()
            if group.rank == 0 and self._client is not None and not self._client.alive:
                with contextlib.suppress(CheckpointError):  # the next save says what is wrong
                    self._running_client(group)
            return group.any_says(next(self._questions), mine)

    def held(self) -> Memory | None:
        """What the worker of this rank's trainer before this one still holds; None when that is nothing, or when this
        one has begun to save. Raises ``SaveTimeoutError`` where that worker does not answer.
        """
        with self._lock:
            self._check_usable()
            try:
                self._knock(self._ranks())
            except JobTakenError as error:
                logger.info("nothing is loaded from memory: %s", error)
            if self._memory is not None and self._memory.is_closed():
                self._memory = None  # it was for another structure, and had to make room
            return self._memory

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended. Raises the first failure nobody was told of, or ``SaveTimeoutError``."""
        saves = list(self._under_way.values())
        if wait([save.future for save in saves], timeout).not_done:
            raise SaveTimeoutError(f"saves are still under way after {timeout:g} s")
        self._raise_failure()

    def close(self, *, linger: bool = False) -> None:
        """Wait for all saves, end the worker, give the memory back. Then raise the first failure nobody was told of.

        Raises ``SaveTimeoutError`` if the worker is still writing after ``config.timeout`` seconds: it goes on alone.
        ``linger``: the worker stays for a while with what it holds, as if this process had died. Safe to call twice.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._stager is not None:
                self._stager.shutdown()
            try:
                if self._client is not None and linger:
                    self._client.desert(self.config.timeout)
                elif self._client is not None:
                    self._client.close(self.config.timeout)
            finally:
                self._leave_homes()
                self._homes.close()
                self._memory = None
                if self._visit is not None:
                    self._visit.close()
                    self._visit = None
                self._pool.shutdown()
                if self._group is not None:
                    self._group.close()
        self._raise_failure()

    def abort(self) -> None:
        """Give up the saves under way, at once and without a word to the other ranks, and close: for a job whose ranks
        are torn down, to begin anew in the same processes. Handles of such saves say ``WorkerDiedError``.
        """
        with self._lock:
            given_up = list(self._under_way.items())
            group, self._group = self._group, None  # nobody is told
            if self._client is not None:
                self._client.kill()
            for number, save in given_up:
                save._reported = True
                if group is not None and group.rank == 0:
                    # Its worker, which would have published, is dead. Only so may anybody remove what is of all ranks.
                    with contextlib.suppress(OSError):
                        if (trash := withdraw(os.fspath(save.path), group.attempt(number))) is not None:
                            remove(trash)
            if group is not None:
                group.close()
            try:
                self.close()
            except CheckpointError as error:
                logger.error("given up: %s", str(error))

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
        if self._client is not None:
            self._client.check_owner()

    def _ranks(self) -> Group:
        if self._group is not None and self._group.is_outdated():
            raise CheckpointError(
                "torch.distributed was initialised after the first save, which was of one process; close this engine"
                " or checkpointer, and make a new one"
            )
        if self._group is None:
            self._group = Group(self.config, self._process_group, alone=self._alone)
        return self._group

    def _undertake(self, final: str, step: int | None, carry_out: Callable[[Group, int, Save], None]) -> Save:
        """A save at ``final``, until it is staged, which is what ``carry_out`` does. Raises as ``save`` does."""
        with self._lock:
            self._check_usable()
            group, number = self._ranks(), next(self._ids)
            save = Save(final, step, number)
            try:
                self._raise_failure()
                carry_out(group, number, save)
            except BaseException as error:
                group.fail(number, error, begun=save._begun_in_worker)
                if not save._begun_in_worker:
                    self.failures += 1  # else it is counted when it ends
                if not self._is_passed_over(error):
                    raise
                logger.warning("not saved, and training goes on: %s", str(error))
                save._reported = True
                save._resolve(error)
            save._timings["stall_s"] = time.perf_counter() - save._begun
            return save

    def _save(
        self,
        group: Group,
        number: int,
        save: Save,
        state_dict: StateDict,
        planner: SavePlanner | None,
        retention: _Retention,
    ) -> None:
        final, step = os.fspath(save.path), save.step

        def check_place() -> None:
            if group.rank == 0:
                self._check_place(final, retention.existing, step)

        state = stateful_to_dict(state_dict)
        client, found = self._agree(group, number, state, planner, check_place)
        home, tensors = found or self._plan_anew(group, number, state, planner, client)
        self._send_off(group, number, save, home, tensors, retention)

    def _save_file(self, group: Group, number: int, save: Save, obj: object, pickle_protocol: int) -> None:
        final = os.fspath(save.path)
        with translated("saving a file", final):
            if os.path.isdir(final):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            os.stat(os.path.dirname(final))
        contents = Contents(obj, pickle_protocol)
        client = self._running_client(group)
        found = self._homes.find(contents.key, lambda plan: plan.capture(contents), client)
        if found is None:
            plan = FilePlan.of(contents, number)
            home = self._homes.make(contents.key, plan, client)
            self._homes.keep(contents.key, plan, home)
            found = home, plan.capture(contents)
        self._send_off(group, number, save, *found, _Retention("replace"), pickle_bytes=len(contents.pickle))

    def _send_off(
        self,
        group: Group,
        number: int,
        save: Save,
        home: Home,
        tensors: Sequence[torch.Tensor],
        retention: _Retention,
        pickle_bytes: int = 0,
    ) -> None:
        """Take a slot, stage what was captured, and have the worker make of it what ``save`` is to be."""
        planned = time.perf_counter()
        slot = take_slot(self.config, group, number, home, save)
        if slot is None:
            return
        save._timings["plan_s"] = planned - save._begun
        save._timings["slot_s"] = time.perf_counter() - planned
        order = Order(
            save_id=number,
            segment=home.number,
            slot=slot,
            path=os.fspath(save.path),
            attempt=group.attempt(number),
            step=save.step,
            rank=group.rank,
            world_size=group.world_size,
            existing=retention.existing,
            keep_last=retention.keep_last,
            keep=group.rank == 0 and retention.keep is not None and retention.keep(),
            timeout=self.config.commit_timeout,
            pickle_bytes=pickle_bytes,
            umask=_umask(),
        )
        self._stage(save, order, home, tensors)

    def _check_place(self, final: str, existing: Existing, step: int | None) -> None:
        if any(os.fspath(save.path) == final for save in list(self._under_way.values())):
            raise CheckpointExistsError("this checkpoint is being saved already", path=final, step=step)
        if not fits(final, existing):
            raise exists_error(final, existing, step=step)

    def _agree(
        self, group: Group, number: int, state: StateDict, planner: SavePlanner | None, check: Callable[[], None]
    ) -> tuple[WorkerClient, tuple[Home, Sequence[torch.Tensor]] | None]:
        """The worker, and what ``_look_up`` says; on the first rank, asked again if its worker died meanwhile.

        It may have died long before, and only now be missed: then nothing is lost but the time to start another, for
        which the other ranks wait.
        """
        client = self._running_client(group)
        try:
            return client, self._look_up(group, number, state, planner, client, check)
        except WorkerDiedError as error:
            if group.alone or group.rank > 0 or error.rank != 0:
                raise
            logger.warning("asking again: %s", str(error))
        client.wait_for_end(_NOTICE_S)
        client = self._running_client(group)
        return client, self._look_up(group, number, state, planner, client, check)

    def _look_up(
        self,
        group: Group,
        number: int,
        state: StateDict,
        planner: SavePlanner | None,
        client: WorkerClient,
        check: Callable[[], None],
    ) -> tuple[Home, Sequence[torch.Tensor]] | None:
        """The home for ``state``, captured, if all ranks have one for the same plan. None: all have to plan.

        What ``check`` raises on any rank is raised on all. With constant structure no rank is asked.
        """
        found: tuple[Home, Sequence[torch.Tensor]] | None = None

        def find() -> tuple[Home, Sequence[torch.Tensor]] | None:
            return self._homes.find(_planner_key(planner), lambda plan: plan.capture(state, planner), client)

        if group.alone or (self.config.assume_constant_structure and self._homes.known):
            check()
            found = find()
            if found is None and not group.alone:
                self._check_new(state, planner)
            return found

        def local() -> int:
            nonlocal found
            check()
            found = find()
            return found[0].plan.number if found is not None else 0

        def decide(plans: list[int]) -> list[bool]:
            return [plans[0] > 0 and plans.count(plans[0]) == len(plans)] * len(plans)

        return found if group.consult("agree", number, local, decide) else None

    def _check_new(self, state: StateDict, planner: SavePlanner | None) -> None:
        """Constant structure is promised and ``state`` has none of those planned: refuse it, if it is one changed."""
        names = flat_names(state, planner)
        if any(names & known.plan.names for known in self._homes.known):
            raise StructureChangedError(
                "the state has the names of one that was saved before, in another structure (a name, dtype, shape or"
                " placement differs), and assume_constant_structure was promised; call prepare with it on all ranks"
                " first, or do not promise that"
            )

    def _plan_anew(
        self, group: Group, number: int, state: StateDict, planner: SavePlanner | None, client: WorkerClient
    ) -> tuple[Home, Sequence[torch.Tensor]]:
        """Plan ``state`` with all ranks, in the place of a plan for the same names in another form."""
        key = _planner_key(planner)
        plan = make_plan(state, self.config.slots or DEFAULT_SLOTS, planner, group, number)
        homes: list[Home] = []

        def settle() -> int:
            homes.append(self._homes.make(key, plan, client))
            return len(homes[0].pending)

        try:
            least = group.consult("memory", number, settle, lambda slots: [min(slots)] * len(slots))
            homes[0].limit(least)
            tensors = plan.capture(state, planner)
        except StructureChanged as error:
            raise UnsavableStateError(f"the state dict changes while it is looked at: {error}") from error
        except BaseException:
            for home in homes:
                home.close()
            raise
        self._homes.keep(key, plan, homes[0])
        return homes[0], tensors

    def _stage(self, save: Save, order: Order, home: Home, tensors: Sequence[torch.Tensor]) -> None:
        ready = ready_events(tensors)
        # In this order: from when the order is begun, the worker may read of the slot what it is told has arrived.
        home.slots.take(order.slot, order.save_id)
        self._memory = None  # what was held is being overwritten
        home.write_objects(order.slot)
        # Of the worker whose memory this is: should it have died since, this says so.
        pending = home.client.begin(order)
        try:
            save._begun_in_worker = True
            home.begin(order.slot, pending)
            self._under_way[order.save_id] = save
            pending.future.add_done_callback(lambda outcome: self._ended(save, pending, outcome))
            if self.config.overlap:
                if self._stager is None:
                    self._stager = ThreadPoolExecutor(1, thread_name_prefix="asyncckpt-stager")
                self._copies = [copy for copy in self._copies if not copy.done()]
                self._copies.append(self._stager.submit(self._copy, save, pending, home, tensors, ready))
                return
        except BaseException as error:  # an interrupt: nobody else would ever call it off
            self._call_off(pending, home, error)
            raise
        failure = self._copy(save, pending, home, tensors, ready)
        if failure is not None:
            raise failure

    def _copy(
        self, save: Save, pending: Pending, home: Home, tensors: Sequence[torch.Tensor], ready: Ready
    ) -> CheckpointError | None:
        """Copy, and hand the slot over. What goes wrong is returned, and is the outcome of the save."""
        begun = time.perf_counter()
        try:
            home.copy(pending.order.slot, tensors, ready, self._pool, save._copies_queued)
            save._timings["copy_s"] = time.perf_counter() - begun
            home.slots.set(pending.order.slot, State.STAGED)
            home.client.copied(pending)
            home.client.staged(pending, dict(save._timings))
            save._staged.set()
        except BaseException as error:
            failure = self._call_off(pending, home, error)
            if not isinstance(error, Exception):
                raise
            if not self.config.overlap:
                save._reported = True  # it is raised at once
            return failure
        return None

    def _call_off(self, pending: Pending, home: Home, error: BaseException) -> CheckpointError:
        """Staging has come to nothing. Returns what the save fails with."""
        failure = error if isinstance(error, CheckpointError) else _staging_error(error, pending.order)
        home.client.copied(pending)
        if home.client.alive:
            home.client.cancel(pending, failure, self.config.timeout)
        return failure

    def _ended(self, save: Save, pending: Pending, outcome: Future[Committed]) -> None:
        """On whatever thread learned of it. First the books, then the handle, on which somebody may be waiting."""
        self._under_way.pop(pending.order.save_id, None)
        failure = outcome.exception()
        try:
            failure = self._verdict(pending, failure)
            if failure is not None and not isinstance(failure, SaveDroppedError):
                logger.error("saving failed: %s", str(failure))  # not itself: it holds on to the memory it saw
                self._failed = [save for save in self._failed if not save._reported] + [save]
                self.failures += 1
            if failure is None:
                self._deaths = 0
        finally:
            save._end(failure, outcome.result() if outcome.exception() is None else None)

    def _verdict(self, pending: Pending, failure: BaseException | None) -> BaseException | None:
        """How a save has ended on all ranks, of which this rank's worker says ``failure``, or, dead, says nothing."""
        group, order = self._group, pending.order
        if failure is None or not pending.unheard or group is None:
            return failure
        if order.rank > 0:
            group.fail(order.save_id, failure, begun=True)
        try:
            if group.is_committed(order, pending.inode):
                return None  # its part was done, and it could not say so any more
        except SaveTimeoutError as error:
            return error
        if order.rank == 0 and isinstance(failure, WorkerDiedError):
            group.fail(order.save_id, failure, begun=True)
        return failure

    def _is_passed_over(self, error: BaseException) -> bool:
        passed = isinstance(error, CheckpointError) and not isinstance(error, ClosedError)
        return self.config.failure == "warn" and passed

    def _raise_failure(self) -> None:
        """Raise the first failure nobody was told of, unless a warning in the log is enough."""
        failed, self._failed = self._failed, []
        if self.config.failure == "warn":
            return
        errors = [error for save in failed if (error := save._unreported_failure()) is not None]
        if errors:
            raise errors[0]

    def _running_client(self, group: Group) -> WorkerClient:
        if self._client is not None and not self._client.alive:
            self._leave_homes()
            self._client.close(self.config.timeout)
            self._client = None
            self._bury()
        if self._client is None:
            try:
                self._client = self._start_worker(group)
            except CheckpointError as error:
                group.miss(error)
                raise
        group.meet(self._client)
        return self._client

    def _start_worker(self, group: Group) -> WorkerClient:
        limit = self.config.worker_restarts
        if self._deaths > limit:
            raise WorkerDiedError(
                f"the worker has died {self._deaths} times in a row, and no other is started (see"
                f" Config.worker_restarts); look at what is in the log, then make a new checkpointer",
                rank=group.rank,
            )
        if (left := self._restart_at - time.monotonic()) > 0:
            raise WorkerDiedError(
                f"the worker has died {self._deaths} times in a row, and another is started in {left:.1f} s",
                rank=group.rank,
            )
        self._knock(group)
        if self._visit is not None:
            self._homes.inherit(self._visit)
        options = self.config.worker_options()
        if self._job is not None:
            options = replace(options, door=door_name(self._job, group.rank))
        try:
            client = start_worker(options, self._visit, self._homes.hand_over, self.config.timeout)
        except WorkerDiedError:
            self._bury()
            raise
        self._visit = None
        return client

    def _bury(self) -> None:
        """A worker has died. The next may be started at once, but not one after the other."""
        self._deaths += 1
        if self._deaths > 1:
            self._restart_at = time.monotonic() + self.config.restart_pause * 2 ** (self._deaths - 2)

    def _knock(self, group: Group) -> None:
        """See, once, whether the worker of a trainer before this one is there. Raises ``JobTakenError``."""
        if self._job is not None and not self._has_visited and self._client is None:
            self._visit = Visit.pay(door_name(self._job, group.rank), self.config.timeout, deserted())
            self._has_visited = True
            if self._visit is not None:
                self._memory = Memory(self._job, self._visit.segments, self._visit.images)
                self._versions.inherit(self._visit.last_published())

    def _leave_homes(self) -> None:
        """Let go of the memory, which has lost its worker."""
        for copy in self._copies:
            copy.result()  # it writes into the memory that goes now
        self._homes.leave()


@dataclass(frozen=True)
class _Retention:
    """What is to become of what stands at the place of a save, and beside it."""

    existing: Existing
    keep_last: int | None = None
    keep: Callable[[], bool] | None = None


def _planner_key(planner: SavePlanner | None) -> Any:
    """Equal for planners that plan alike."""
    if planner is None or type(planner) is DefaultSavePlanner:
        planner = planner or DefaultSavePlanner()
        return planner.flatten_state_dict, planner.flatten_sharded_tensors, planner.dedup_save_to_lowest_rank
    return type(planner)


def _umask() -> int:
    """This process's, which can be changed by whoever asks for it in any other way."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))
    except (OSError, StopIteration):  # a kernel before 4.7
        return 0o022


def _staging_error(error: BaseException, order: Order) -> CheckpointError:
    failure = CheckpointError(
        f"staging failed: {type(error).__name__}: {error}", path=order.path, rank=order.rank, step=order.step
    )
    failure.__cause__ = error
    return failure
