"""Engine: saves states as checkpoints or as single files, through plans, shared memory and a worker.

The engine saves to paths. The checkpointer manages roots, and the steps to load. One process may have several engines,
each with a worker of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch.distributed
from torch.distributed.checkpoint.planner import SavePlanner

from asyncckpt.config import TRAINER, Config
from asyncckpt.devices.kinds import ready_events
from asyncckpt.engine.plan_selection import Captured, PlanSelection, SaveInput, check_file_set_place, save_input
from asyncckpt.engine.retention import Retention
from asyncckpt.engine.saves import Copier, SaveOperation, Saves, check_writable
from asyncckpt.errors import (
    CheckpointError,
    ClosedError,
    JobTakenError,
    StorageError,
    interrupts_as_they_are,
    is_interrupt,
    located,
)
from asyncckpt.format.write_request import Existing, Joint, Pointer, Rotation
from asyncckpt.link.api import Claim
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.root_lock import is_locked
from asyncckpt.link.takeover import Takeover
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.planning.file_set import FileSet
from asyncckpt.planning.plan import Plan
from asyncckpt.planning.structure import StateDict
from asyncckpt.planning.torch_file_plan import TorchFileContents
from asyncckpt.publication import Publication, Versions, VersionState
from asyncckpt.ranks.group import Group
from asyncckpt.ranks.rounds import Call
from asyncckpt.save_handle import Save, wait_for_actions
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.staging.buffer_pool import BufferPool
from asyncckpt.staging.slot_copy import wait_for_copies
from asyncckpt.storage import absolute, is_address, parties, place_to_put, storage_for
from asyncckpt.supervisor import Supervisor
from asyncckpt.threads import Turn

logger = logging.getLogger(__name__)


def known_by_all(group: Group, number: int, known: VersionState) -> list[VersionState]:
    """Return the state of versions of each rank. ``number``: the number of this question, the same on all ranks."""
    return group.ask_all("epoch", number, lambda: known, lambda all_know: [all_know] * len(all_know))


def show(image: tuple[StagingBuffer, int] | None, version: PublishedVersion, folder: str | None) -> str | None:
    """Let readers see an image as ``version``.

    Args:
        image: The buffer and the slot with the image; None: no slot has the image any more.
        version: The version under which to publish the image.
        folder: For a set of files: the DCP folder that readers see; None: the only one.

    Returns:
        The reason why readers do not see the image, or None if they see it.

    Raises:
        CheckpointError: The image is of a kind that cannot be published, or readers cannot find the worker.
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
    """Return the number of the folder of DCP that readers see.

    The worker changes the slot only to complete archives, which readers do not see.
    """
    folders = [*plan.folders()]
    if plan.is_state and folder is not None:
        raise CheckpointError(f"a state dict is published whole, and has no folder {folder!r}")
    if folder is None and len(folders) == 1:
        return 0
    if folder in folders:
        return folders.index(folder)
    if "" in plan.parts and not folders:
        raise CheckpointError("a file cannot be published, only state dicts; a WeightPublisher publishes tensors")
    wrong = "one has to be named" if folder is None else f"{folder!r} is none"
    raise CheckpointError(
        f"publish takes one DCP folder of a set of files; of the folders in this set, {folders}, {wrong}"
    )


class Engine(AbstractContextManager["Engine"]):
    """Save state dicts to paths, through one worker process. The first save starts the worker.

    The methods are not thread-safe: call them from one thread at a time. Close the engine at the end, or use it as a
    context manager.
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
            config: The configuration; None: read it from the environment (``Config.from_env``).
            process_group: The ranks, which make the same calls; None: all ranks of the job at the first save.
            alone: Save for this process alone, even if the job has more ranks.
            job: The key for finding the worker of a dead trainer; None: the worker exits with its trainer.
            claim: The folder to lock against saves of other jobs; None: no folder.
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
        """Return the worker, or None before it is started."""
        return self._supervisor.client

    @property
    def has_plans(self) -> bool:
        """Return whether a save was planned."""
        return self._plans.has_plans

    @property
    def failures(self) -> int:
        """Return the number of saves that have failed so far."""
        return self._saves.failures

    def prepare(
        self, state_dict: StateDict | FileSet, planner: SavePlanner | None = None, path: str | None = None
    ) -> None:
        """Do the work of a first save of ``state_dict`` by ``planner``, up to a copy of the tensors into memory.

        ``path``: a path of such a save, to check that it is writable; None: no check. Raises as ``save`` does.
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
        joint: Joint | None = None,
    ) -> Save:
        """Save a state dict as a checkpoint, or a set of files: the files of all ranks appear together, or no file.

        Args:
            path: The checkpoint's folder, the same on all ranks.
            state_dict: This rank's part. The caller may change its tensors after this call (with ``Config.overlap``:
                see there). In a set of files, this part may be empty.
            step: The training step of the checkpoint.
            existing: The rule if ``path`` exists. ``retention`` overrides it. A set of files cannot "join".
            pointer: The first rank's worker advances this text file when the checkpoint is durable.
            rotation: The same worker then removes these older checkpoints, if the pointer was advanced.
            retention: Rules for the other steps, instead of the three arguments above; None: no rules.
            planner: A planner of DCP's or of the caller's; None: DCP's default.
            separate: A prefix. Values with this prefix go to a file of their own, with the prefix in its name.
            joint: The parties that save with the ranks. Ranks give no token.

        Returns:
            The handle of the save. A later failure comes from the handle, on all ranks the same.

        Raises:
            CheckpointExistsError: ``path`` exists, and ``existing`` forbids the save.
            UnsavableStateError, StructureChangedError, OutOfMemoryError: The state cannot be staged.
            WorkerDiedError, JobTakenError, RankFailedError: There is no worker, or another rank failed.
            SaveTimeoutError: A wait took longer than ``Config.timeout`` seconds.
            ClosedError: The engine is closed.
            CheckpointError: An earlier save failed, and the failure was not reported yet. This save is staged, and its
                write goes on.

        After any error but the last, no rank saves anything. With ``Config.failure="warn"`` the handle has the errors,
        and only ``ClosedError`` is raised.
        """
        retention = retention or Retention(existing=existing, pointer=pointer, rotation=rotation)
        if isinstance(state_dict, FileSet):
            check_file_set_place(state_dict, os.fspath(path), retention.existing)

        def capture(save: SaveOperation) -> Captured:
            check = partial(self._saves.check_place, save, retention.existing)
            call = Call.of_save(step, save.path)
            given = save.group, save.number, state_dict, planner, separate
            return self._plans.for_all(save_input(*given, path=save.path, call=call, check=check))

        return self._carry_out(place_to_put(path, retention.existing), step, retention, capture, joint)

    def announce(self, root: str, *, goes_back: bool = False) -> None:
        """First rank: let the parties of ``root`` find this trainer, unless another trainer has the root.

        ``goes_back``: the training goes back, so parts that were saved before belong to nothing. Raises
        ``StorageError``.
        """
        group = self._usable()
        if goes_back:
            group.renew_joint()
        mine = parties.Announcement(group.joint_token(), tuple(sorted(self.config.parties)))
        may_announce = self.worker is not None or is_address(root) or not is_locked(root)
        if group.rank == 0 and may_announce and parties.session_of(root) != mine:
            parties.announce(root, mine)

    def save_file(
        self, path: str | os.PathLike[str], obj: object, *, pickle_protocol: int = 2, follow_link: bool = True
    ) -> Save:
        """Save an object as a file that ``torch.load`` reads. Return the handle of the save.

        Args:
            path: The file, in an existing folder. An existing file is replaced, in one step.
            obj, pickle_protocol: See ``torch.save``.
            follow_link: If ``path`` is a link, save to its target. With False the link is replaced.

        Raises:
            CheckpointError: As ``save`` does.
            ValueError: The engine saves for more than this process.
        """
        final = place_to_put(path, "replace") if follow_link else absolute(path)

        def capture(save: SaveOperation) -> Captured:
            if not save.group.alone:
                raise ValueError("a file is saved by one process: give it an Engine(alone=True)")
            storage_for(final).check_file_place(final)
            content = TorchFileContents(obj, pickle_protocol)
            return self._plans.for_all(SaveInput(save.group, save.number, content, path=final))

        return self._carry_out(final, None, Retention(existing="replace"), capture)

    def start(self, *, alone: bool = False) -> None:
        """Start the worker as the first save does. Unless ``alone``, meet the other ranks. Raises as ``save`` does."""
        with self._turn.take():
            if alone:
                self._supervisor.running(self._new_group().rank)
            else:
                self._usable().connect_worker(self._supervisor.running)

    def publish(self, save: Save, version: int, *, roll_back: bool = False, folder: str | None = None) -> Publication:
        """Let readers see the image of a save in its slot. With ``overlap`` this waits until the image is complete.

        Args:
            save, version: The save, and its version. Skipped if the image is gone, or readers hold all other slots.
            roll_back: Allow a version that is not newer than the last one.
            folder: For a set of files: the DCP folder that readers see; None: the only one.

        Raises:
            VersionError: The version is not newer than the last one.
            CheckpointError: There is no such folder. Also raises as ``save`` does.
        """
        with self._turn.take(), interrupts_as_they_are():
            group = self._usable()
            gather = partial(known_by_all, group, next(self._numbers))
            published = self._versions.admit(version, group.world_size, gather, roll_back=roll_back)
            save.wait_staged(self.config.timeout)
            why_not = show(self._buffers.image_of(save), published, folder)
            self._versions.log(published.version, why_not)
            if why_not is None or not group.alone:  # other ranks may have published it, and all must agree
                self._versions.note(published)
            if not (done := Publication(published.version, published.epoch, why_not is not None)).skipped:
                self.tell(done.event(group.rank, save.path, save.step))
            return done

    def any_says(self, mine: bool) -> bool:
        """Return True if any rank has reported ``mine=True``. Return False while the first rank's worker is down.

        The ranks must have met.
        """
        with self._turn.take():
            group = self._ranks()
            if group.rank == 0 and self.worker is not None and not self.worker.alive:
                with contextlib.suppress(CheckpointError):  # the next save raises the error
                    group.connect_worker(self._supervisor.running)
            return group.any_rank_says(next(self._questions), mine)

    def held(self) -> HeldImages | None:
        """Return the images that a dead trainer's worker holds for this rank, or None. A save of this rank drops them.

        Raises ``SaveTimeoutError`` if that worker does not answer.
        """
        with self._turn.take():
            try:
                self._inherit(self._supervisor.find_predecessor(self._usable().rank))
            except JobTakenError as error:
                logger.info("the load reads storage only, because the memory of a worker cannot be used: %s", error)
            if self._memory is not None and self._memory.is_closed():
                self._memory = None  # the memory was released for a state with another structure
            return self._memory

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended, and all actions of ``Save.when_durable`` (of any engine) are done.

        Waits at most ``timeout`` seconds. Raises as ``close`` does.
        """
        self._turn.take()
        self._saves.wait(timeout)
        wait_for_actions(self.config.timeout if timeout is None else timeout)
        self._saves.raise_failure()

    def close(self, *, linger: bool = False) -> None:
        """Wait for all saves, end the worker, and release the memory. Safe to call twice.

        Raises the first failure not reported yet. Raises ``SaveTimeoutError`` if the worker is still writing after
        ``config.timeout`` seconds; then the worker goes on alone. ``linger``: the worker stays and keeps its images, as
        if this process had died.
        """
        self._is_ending = True
        with self._turn.take():
            self._close(linger=linger)
        wait_for_actions(self.config.timeout)
        self._saves.raise_failure()

    def abort(self) -> None:
        """Fail the saves under way at once (``WorkerDiedError``), tell no other rank, and close, to begin anew."""
        self._is_ending = True
        with self._turn.take():
            self._saves.give_up(self.worker)
            try:
                self._close(linger=False)
                self._saves.raise_failure()
            except CheckpointError as error:
                if not error.is_logged:
                    logger.error("closing an engine that was given up failed: %s", str(error))

    def _close(self, *, linger: bool) -> None:
        if self._closed or self._supervisor.is_forked:
            return
        self._copier.close()
        if self.worker is not None:
            self.worker.settle(self.config.timeout)  # so that the worker learns of all copies
            self.worker.wait_told()
        failure = self._supervisor.leave(linger=linger)
        self._close_buffers()
        if self._group is not None:
            self._group.close()
        self._supervisor.close()
        self._closed, self._memory = True, None  # last, so that a call after an interrupt does the rest
        if failure is not None:
            raise failure

    def __exit__(self, *_: object) -> None:
        self.close()

    def _usable(self) -> Group:
        """Return the ranks. Raise if the engine is closed, or in a fork."""
        self._supervisor.check_usable()
        return self._ranks()

    def _ranks(self) -> Group:
        self._group = self._group or self._new_group()
        self._group.check_current()
        return self._group

    def _carry_out(
        self,
        path: str,
        step: int | None,
        retention: Retention,
        capture: Callable[[SaveOperation], Captured],
        joint: Joint | None = None,
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
                    if joint is not None and not joint.party and step is not None:
                        group.begin_joint(step)
                        self.announce(os.path.dirname(path))
                    captured = capture(save)
                    if joint is None:
                        save.attempt = group.attempt(save.number)
                    else:
                        # Now the ranks are connected.
                        save.joint = joint if joint.party else replace(joint, token=group.joint_token())
                        save.attempt = save.joint.attempt(step)
                    self._memory = None  # the save overwrites the held images
                    self._saves.add(save)
                    save.stage(captured, retention, self._copier)
            except BaseException as error:
                if not save.is_posted:
                    self._saves.failures += 1
                    save.end(CheckpointError("the save was interrupted") if is_interrupt(error) else error)
                    save.release()
                    group.report_failure(save.number, error, begun=False)
                    if joint is not None and group.rank == 0 and not is_interrupt(error):
                        self._tell_others(joint, save, error)
                # A save that goes on after an interrupt may still fail, and that failure is not reported yet.
                save.is_reported = not is_interrupt(error) or save.done.is_set()
                if not _is_only_logged(error, self.config):
                    raise
            finally:
                save.on_return()
            self._saves.raise_failure(after=save)
            return Save(save)

    def _tell_others(self, joint: Joint, save: SaveOperation, error: BaseException) -> None:
        """Tell the trainer or the parties that this process has failed a save before its worker knew of it."""
        its = joint if joint.party else replace(joint, token=save.group.joint_token())
        with contextlib.suppress(StorageError):
            root = os.path.dirname(save.path)
            parties.note_failure(root, joint.party or TRAINER, its.attempt(save.step), located(error))

    def _on_outcome(self, failure: CheckpointError | None, was_begun: bool) -> None:
        if failure is None:
            self._supervisor.record_commit()
        else:
            self._saves.on_failure(failure, is_raised=not was_begun)

    def _hand_over(self, _: WorkerClient, predecessor: Takeover | None, is_attached: bool) -> None:
        wait_for_copies(self.config.timeout)  # of an earlier engine of this process, into the same memory
        self._inherit(predecessor)
        if predecessor is None:
            self._buffers.on_worker_lost()
        else:
            self._buffers.inherit(predecessor, is_attached=is_attached)

    def _inherit(self, predecessor: Takeover | None) -> None:
        """Take over the memory and the versions of the previous trainer."""
        if predecessor is not None:
            self._memory = HeldImages(predecessor.segments, predecessor.images)
            self._versions.inherit(predecessor.published_versions())

    def _replace_worker(self) -> None:
        """Start a worker in place of a dead one, and allocate memory for the next save. Raises as ``save`` does.

        Does nothing while images are held for a load, because these must stay mapped.
        """
        with self._turn.take():
            may_start = self._group is not None and self._group.has_met and self._memory is None
            if may_start and not self._is_ending:
                client = self._usable().connect_worker(self._supervisor.running)
                if not self._is_ending:
                    self._buffers.renew(client)

    def _close_buffers(self) -> None:
        """Release the memory, because its worker has died or leaves."""
        self._copier.wait()  # a copy writes into this memory
        if self.worker is not None:
            self.worker.settle(self.config.timeout)
        self._buffers.close()


def _is_only_logged(error: BaseException, config: Config) -> bool:
    """Return True, and log ``error``, if ``Config.failure`` says that the failure of a save is not raised."""
    if config.failure != "warn" or not isinstance(error, CheckpointError) or isinstance(error, ClosedError):
        return False
    logger.warning("a save failed, and the training continues: %s", str(error))
    return True
