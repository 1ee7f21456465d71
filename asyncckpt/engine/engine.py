"""The engine: states go in, checkpoints or single files come out. Between: plans, shared memory and the worker.

It knows paths, not roots and steps to be loaded: those are the checkpointer's. One process may have several engines,
each with a worker of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch.distributed
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.config import Config
from asyncckpt.devices.kinds import ready_events
from asyncckpt.engine.plan_selection import Captured, PlanSelection, check_file_set_place, save_input
from asyncckpt.engine.retention import Retention
from asyncckpt.engine.saves import Copier, SaveOperation, Saves, check_writable
from asyncckpt.errors import CheckpointError, ClosedError, JobTakenError, interrupts_as_they_are, is_interrupt
from asyncckpt.format.write_request import Existing, Pointer, Rotation
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.messages import Claim
from asyncckpt.link.takeover import Takeover
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.planning.file_set import FileSet
from asyncckpt.planning.file_set_plan import FileSetPlan
from asyncckpt.planning.plan import CheckpointPlan, StateDict
from asyncckpt.planning.torch_file_plan import TorchFileContents
from asyncckpt.publication import Publication, Versions, VersionState
from asyncckpt.ranks.group import Group
from asyncckpt.ranks.rounds import Call
from asyncckpt.save_handle import Save, wait_for_actions
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.staging.buffer import Plan, StagingBuffer
from asyncckpt.staging.buffer_pool import BufferPool
from asyncckpt.staging.slot_copy import wait_for_copies
from asyncckpt.storage import absolute, place_to_put, storage_for
from asyncckpt.supervisor import Supervisor
from asyncckpt.threads import Turn

logger = logging.getLogger(__name__)


def known_by_all(group: Group, number: int, known: VersionState) -> list[VersionState]:
    """Return the knowledge of versions of each rank. ``number``: the number of this question, the same on all ranks."""
    return group.ask_all("epoch", number, lambda: known, lambda all_know: [all_know] * len(all_know))


def show(image: tuple[StagingBuffer, int] | None, version: PublishedVersion, folder: str | None) -> str | None:
    """Let readers see an image as ``version``.

    Args:
        image: The slot that has it; None: none has any more.
        version: As what.
        folder: The folder of DCP's in a set of files that readers see; None: the only one.

    Returns:
        None if readers see the image, otherwise the reason.

    Raises:
        CheckpointError: It is nothing that can be published, or readers could not find it.
    """
    if image is None:
        return "its image is not in memory any more, or never was"
    buffer, slot = image
    version = version._replace(folder=_number_of(buffer.plan, folder))
    if not buffer.client.has_endpoint:
        raise CheckpointError(
            "readers cannot find the worker, which has no endpoint: the engine has no job, or see the log"
        )
    if buffer.publish(slot, version):
        return None
    return "readers have all slots but that; more of them would help (Config.slots)"


def _number_of(plan: Plan, folder: str | None) -> int:
    """The number of what readers are to see of the image: a whole state dict, or a folder in a set.

    The worker completes archives in the slot, and changes nothing else there.
    """
    match plan:
        case CheckpointPlan():
            if folder is not None:
                raise CheckpointError(f"a state dict is published whole, and has no folder {folder!r}")
            return 0
        case FileSetPlan():
            folders = [name for name, part in plan.parts.items() if isinstance(part, CheckpointPlan)]
            if folder is None and len(folders) == 1:
                return 0
            if folder in folders:
                return folders.index(folder)
            wrong = "it has to be named" if folder is None else f"{folder!r} is none"
            raise CheckpointError(
                "of a set of files one of the folders of DCP's can be published, and no other file; of those in this"
                f" set, {folders}, {wrong}"
            )
        case _:
            raise CheckpointError("a file cannot be published, only state dicts; a WeightPublisher publishes tensors")


class Engine(AbstractContextManager["Engine"]):
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
        claim: Claim | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            config: The configuration; None: the one of the environment (``Config.from_env``).
            process_group: The ranks, which make the same calls; None: all ranks of the job at the first save.
            alone: For this process, whatever the job.
            job: By this text a trainer in the place of a dead one finds its worker; None: it leaves with its trainer.
            claim: The folder that no other job is to save to meanwhile; None: there is none.
        """
        self.config, self.job = Config.given(config), job
        self._new_group = partial(Group, self.config, process_group, alone=alone)
        self._group: Group | None = None
        self._memory: HeldImages | None = None
        self._versions, self._buffers = Versions(), BufferPool(self.config)
        mine = self._close_buffers, self._hand_over, lambda linger: self.close(linger=linger), self._replace_worker
        self._supervisor = Supervisor(self.config, job, *mine, claim, ranks=lambda: self._group)
        self._copier, self._saves = Copier(overlaps=self.config.overlap), Saves(self.config)
        self._plans = PlanSelection(self.config, self._buffers, self._supervisor)
        self._turn, self._numbers, self._questions = Turn(), itertools.count(1), itertools.count(1)
        self._closed = self._is_ending = False
        self.tell, self.plan_as = self._supervisor.listeners.tell, self._plans.plan_as
        self.check_open, self.is_over = self._supervisor.check_open, self._supervisor.is_over
        self.claim = self._supervisor.claim
        self._supervisor.register()

    @property
    def worker(self) -> WorkerClient | None:
        """The worker, once there is one."""
        return self._supervisor.client

    @property
    def failures(self) -> int:
        """How many saves have failed so far."""
        return self._saves.failures

    def prepare(
        self, state_dict: StateDict | FileSet, planner: SavePlanner | None = None, path: str | None = None
    ) -> None:
        """Do the work of a first save of ``state_dict`` by ``planner``, up to a copy of the tensors into memory.

        ``path``: where such a save may go, which is looked at; None: nobody knows. Raises as ``save`` does.
        """

        def check() -> None:
            if path is not None:
                check_writable(path)

        with self._turn.take():
            group, number = self._usable(), next(self._numbers)
            try:
                with interrupts_as_they_are():
                    wanted = save_input(group, number, state_dict, planner, check=check)
                    buffer, tensors, *_ = self._plans.for_all(wanted, prepares=True)
            except BaseException as error:
                group.report_failure(number, error, begun=False)
                if not _is_only_logged(error, self.config):
                    raise
                return
            for slot in buffer.unused_slots():
                buffer.copy(slot, tensors, ready_events(tensors), self._copier.threads)

    def save(
        self,
        path: str | os.PathLike[str],
        state_dict: StateDict | FileSet,
        *,
        step: int | None = None,
        existing: Existing = "refuse",
        pointer: Pointer | None = None,
        rotation: Rotation | None = None,
        retention: Retention | None = None,
        planner: SavePlanner | None = None,
        separate: str = "",
    ) -> Save:
        """Save a state dict as a checkpoint, or a set of files: in the end the files of all ranks are there, or none.

        Args:
            path: The checkpoint's folder, the same on all ranks.
            state_dict: This rank's part. Its tensors may change when this returns (with ``Config.overlap``: see there).
                A rank may have no file of a set.
            step: The training step it is of.
            existing: The rule if something stands at ``path``, unless ``retention`` has one. A set cannot "join" it.
            pointer: The first rank's worker advances this text file when the checkpoint is durable.
            rotation: The same worker then removes these older checkpoints, if the pointer was advanced.
            retention: The rules for the steps beside it, in the place of the three above; None: no rules.
            planner: DCP's or the caller's own; None: DCP's default.
            separate: A prefix. Values with this prefix go to a file of their own, with the prefix in its name.

        Returns:
            The handle of the save. A later failure comes from the handle, on all ranks the same.

        Raises:
            CheckpointExistsError: ``existing`` forbids it.
            UnsavableStateError, StructureChangedError, OutOfMemoryError: It cannot be staged.
            WorkerDiedError, JobTakenError, RankFailedError: There is no worker, or another rank failed.
            SaveTimeoutError: A wait took longer than ``Config.timeout`` seconds.
            ClosedError: This is closed.
            CheckpointError: An earlier save failed, and nobody was told. This one is staged, and goes on.

        Except for the last, no rank saves anything then. With ``Config.failure="warn"`` all but ``ClosedError`` comes
        from the handle.
        """
        retention = retention or Retention(existing=existing, pointer=pointer, rotation=rotation)
        if isinstance(state_dict, FileSet):
            check_file_set_place(state_dict, os.fspath(path), retention.existing)

        def capture(save: SaveOperation) -> Captured:
            check = partial(self._saves.check_place, save, retention.existing)
            call = Call.of_save(step, save.path)
            given = save.group, save.number, state_dict, planner, separate
            return self._plans.for_all(save_input(*given, path=save.path, call=call, check=check))

        return self._carry_out(place_to_put(path, retention.existing), step, retention, capture)

    def save_file(
        self, path: str | os.PathLike[str], obj: object, *, pickle_protocol: int = 2, follow_link: bool = True
    ) -> Save:
        """Save an object as a file that ``torch.load`` reads. Returns, and raises, as ``save`` does; also
        ``ValueError`` where this is an engine for more than this process.

        Args:
            path: The file, in an existing folder. An existing file is replaced, in one step.
            obj, pickle_protocol: As ``torch.save`` has them.
            follow_link: Save to what a link at ``path`` leads to; else the link is replaced.
        """
        final = place_to_put(path, "replace") if follow_link else absolute(path)

        def capture(save: SaveOperation) -> Captured:
            if not save.group.alone:
                raise ValueError("a file is of one process: give it an Engine(alone=True)")
            storage_for(final).check_file_place(final)
            return self._plans.for_file(TorchFileContents(obj, pickle_protocol), save.group, save.number)

        return self._carry_out(final, None, Retention(existing="replace"), capture)

    def start(self, *, alone: bool = False) -> None:
        """Start the worker, as the first save does, and, unless ``alone``, meet the other ranks. Raises as ``save``."""
        with self._turn.take():
            if alone:
                self._supervisor.running(self._new_group().rank)
            else:
                self._usable().connect_worker(self._supervisor.running)

    def publish(self, save: Save, version: int, *, roll_back: bool = False, folder: str | None = None) -> Publication:
        """Let readers see the image of a save in its slot. With ``overlap`` this waits until the image is complete.

        Args:
            save, version: The save, and its version. Skipped if the image is gone, or readers have all other slots.
            roll_back: Allow a version that is not newer than the last one.
            folder: The folder of DCP's in a set of files that readers see; None: the only one.

        Raises:
            VersionError, CheckpointError: It is not newer; it is no such folder. Also raises as ``save`` does.
        """
        with self._turn.take(), interrupts_as_they_are():
            group = self._usable()
            gather = partial(known_by_all, group, next(self._numbers))
            published = self._versions.admit(version, group.world_size, gather, roll_back=roll_back)
            save.wait_staged(self.config.timeout)
            why_not = show(self._buffers.image_of(save), published, folder)
            self._versions.log(published.version, why_not)
            if why_not is None or not group.alone:  # other ranks may have published it, and all have to know the same
                self._versions.note(published)
            if not (done := Publication(published.version, published.epoch, why_not is not None)).skipped:
                self.tell(done.event(group.rank, save.path, save.step))
            return done

    def any_says(self, mine: bool) -> bool:
        """Whether any rank (``mine``: this one) has said yes by now, as the first rank sees it; no, while its worker is
        gone. The ranks must have met.
        """
        with self._turn.take():
            group = self._ranks()
            if group.rank == 0 and self.worker is not None and not self.worker.alive:
                with contextlib.suppress(CheckpointError):  # the next save says what is wrong
                    group.connect_worker(self._supervisor.running)
            return group.any_rank_says(next(self._questions), mine)

    def held(self) -> HeldImages | None:
        """Return the images that the worker of a dead trainer holds for this rank, until this rank saves; None: none.

        Raises ``SaveTimeoutError`` where that worker does not answer.
        """
        with self._turn.take():
            try:
                self._inherit(self._supervisor.find_predecessor(self._usable().rank))
            except JobTakenError as error:
                logger.info("nothing is loaded from memory: %s", error)
            if self._memory is not None and self._memory.is_closed():
                self._memory = None  # it was for another structure, and had to make room
            return self._memory

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended, and what follows those of any engine, for at most ``timeout`` seconds.

        Raises as ``close``.
        """
        self._turn.take()
        self._saves.wait(timeout)
        wait_for_actions(self.config.timeout if timeout is None else timeout)
        self._saves.raise_failure()

    def close(self, *, linger: bool = False) -> None:
        """Wait for all saves, end the worker, give the memory back. Safe to call twice.

        Raises the first failure nobody was told of, or ``SaveTimeoutError`` if the worker is still writing after
        ``config.timeout`` seconds: it goes on alone. ``linger``: it stays with what it holds, as if this had died.
        """
        self._is_ending = True
        with self._turn.take():
            self._close(linger=linger)
        wait_for_actions(self.config.timeout)
        self._saves.raise_failure()

    def abort(self) -> None:
        """Give up the saves under way at once (``WorkerDiedError``), tell no other rank, and close, to begin anew."""
        self._is_ending = True
        with self._turn.take():
            self._saves.give_up(self.worker)
            try:
                self._close(linger=False)
                self._saves.raise_failure()
            except CheckpointError as error:
                logger.error("given up: %s", str(error))

    def _close(self, *, linger: bool) -> None:
        if self._closed or self._supervisor.is_forked:
            return
        self._copier.close()
        if self.worker is not None:
            self.worker.settle(self.config.timeout)  # so that it is told of what was copied
            self.worker.wait_told()
        failure = self._supervisor.leave(linger=linger)
        self._close_buffers()
        if self._group is not None:
            self._group.close()
        self._supervisor.close()
        self._closed, self._memory = True, None  # not before: what an exception interrupts, the next call does
        if failure is not None:
            raise failure

    def __exit__(self, *_: object) -> None:
        self.close()

    def _usable(self) -> Group:
        """The ranks, while this is open, in the process that it was made in."""
        self._supervisor.check_usable()
        return self._ranks()

    def _ranks(self) -> Group:
        self._group = self._group or self._new_group()
        self._group.check_current()
        return self._group

    def _carry_out(
        self, path: str, step: int | None, retention: Retention, capture: Callable[[SaveOperation], Captured]
    ) -> Save:
        """Carry out a save until it is staged. ``capture`` returns the state and its memory."""
        try:
            lock = self._turn.take()
        except CheckpointError as error:
            if not _is_only_logged(error, self.config):
                raise
            return Save.finished(path, error, step=step)
        with lock:
            group = self._usable()
            save = SaveOperation(path, step, group, next(self._numbers), self.config, self._on_outcome, self.tell)
            try:
                with interrupts_as_they_are():
                    captured = capture(save)
                    self._memory = None  # what was held is being overwritten
                    self._saves.add(save)
                    save.stage(captured, retention, self._copier)
            except BaseException as error:
                if not save.is_posted:
                    self._saves.failures += 1
                    save.end(CheckpointError("it was interrupted") if is_interrupt(error) else error)
                    save.release()
                    group.report_failure(save.number, error, begun=False)
                # But an interrupt that came too late says nothing of how the save ends.
                save.is_reported = not is_interrupt(error) or save.done.is_set()
                if not _is_only_logged(error, self.config):
                    raise
            finally:
                save.on_return()
            self._saves.raise_failure(after=save)
            return Save(save)

    def _on_outcome(self, failure: CheckpointError | None, was_begun: bool) -> None:
        if failure is None:
            self._supervisor.record_commit()
        else:
            self._saves.on_failure(failure, is_raised=not was_begun)

    def _hand_over(self, _: WorkerClient, predecessor: Takeover | None, is_attached: bool) -> None:
        wait_for_copies(self.config.timeout)  # of an engine before this in the same process, into the same memory
        self._inherit(predecessor)
        if predecessor is None:
            self._buffers.on_worker_lost()
        else:
            self._buffers.inherit(predecessor, is_attached=is_attached)

    def _inherit(self, predecessor: Takeover | None) -> None:
        """Go on with the memory and the versions of the trainer before this one."""
        if predecessor is not None:
            self._memory = HeldImages(predecessor.segments, predecessor.images)
            self._versions.inherit(predecessor.published_versions())

    def _replace_worker(self) -> None:
        """Start another worker for one that has died, and take memory for the next save. Raises as ``save``.

        Images that are held for a load stay mapped here.
        """
        with self._turn.take():
            may_start = self._group is not None and self._group.has_met and self._memory is None
            if may_start and not self._is_ending:
                client = self._usable().connect_worker(self._supervisor.running)
                if not self._is_ending:
                    self._buffers.renew(client)

    def _close_buffers(self) -> None:
        """Let go of the memory, which has lost its worker."""
        self._copier.wait()  # it writes into the memory that goes now
        if self.worker is not None:
            self.worker.settle(self.config.timeout)
        self._buffers.close()


def _is_only_logged(error: BaseException, config: Config) -> bool:
    """Whether what a save fails with is not raised, as ``Config.failure`` says; then it is logged."""
    if config.failure != "warn" or not isinstance(error, CheckpointError) or isinstance(error, ClosedError):
        return False
    logger.warning("not saved, and training goes on: %s", str(error))
    return True
