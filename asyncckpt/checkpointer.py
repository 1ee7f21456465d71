"""Checkpointer: the calls of a training loop to save and load. Its folder has one checkpoint a step."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from asyncckpt.budgets import TELL_S
from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.engine.loads import Loaded, Loads
from asyncckpt.engine.plan_selection import check_file_set_place
from asyncckpt.engine.retention import retention_of
from asyncckpt.engine.saves import RecentSaves, synchronize_staging
from asyncckpt.errors import CheckpointError, ClosedError
from asyncckpt.events import Event
from asyncckpt.format.write_request import Joint
from asyncckpt.interval import Advice, parse_duration
from asyncckpt.link.api import Claim, SessionApi
from asyncckpt.loading.tiers import Tiers
from asyncckpt.planning.file_set import FileSet
from asyncckpt.planning.structure import StateDict
from asyncckpt.publication import Publication, job_of_checkpoints
from asyncckpt.ranks.ranks import ranks_of
from asyncckpt.save_handle import Save
from asyncckpt.storage import absolute, is_address, step_folder, whole_number
from asyncckpt.storage.history import StoredStep, history
from asyncckpt.storage.uploads import wait_for_uploads

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from asyncckpt.doctor.diagnosis import Diagnosis

logger = logging.getLogger(__name__)

# The time of a last save before a deadline, in those of the saves before it.
_MARGIN = 1.5


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Save and load the checkpoints ``root/step-00000100``. With ``Config.local_root`` they go through a local folder.

    Make one checkpointer at the start of a run and close it at the end, or use it as a context manager. Its methods are
    not thread-safe: call them from one thread at a time. A state dict is the same as for
    ``torch.distributed.checkpoint``: nested dicts and lists of tensors and of values that pickle. Values with
    ``state_dict()`` and ``load_state_dict()``, at any depth, are saved and loaded by these methods.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: Config | None = None,
        process_group: ProcessGroup | None = None,
        *,
        begin_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
        on_event: Callable[[Event], object] | str | Sequence[Callable[[Event], object] | str] = (),
    ) -> None:
        """Make a checkpointer. In a job of many ranks every rank makes one.

        All ranks make the same calls in the same order.

        Args:
            root: The folder, made if it is missing. It is the same on all ranks, on a file system they share. An
                address on an object store works too: ``s3://bucket/run``, ``gs://`` and ``az://``.
            config: The configuration; None: read it from the environment (``Config.from_env``).
            process_group: The ranks that save together; None: the whole job.
            begin_from: Other places that ``load`` and ``latest`` look at: the root of another run or region, or one
                checkpoint of it (``other/step-00000500``). The newest checkpoint of all places is loaded. Saves go to
                ``root`` alone. A checkpoint begins a branch, because the checkpoints of ``root`` become newer than it.
            on_event: Listeners for events of saves and loads, in addition to ``Config.on_event``, and of the same form.

        Raises:
            CheckpointExistsError: The folder is itself a checkpoint, or holds only checkpoints of other kinds.
            StorageError: The folder cannot be made, or the address is of an unknown kind.
            ValueError: An environment variable has an invalid value, or ``config`` has parties and a local folder.
        """
        config = Config.given(config)
        config = replace(config, on_event=(*config.listeners, *Config(on_event=on_event).listeners))
        if config.parties and (config.local_root is not None or config.when_busy != "wait"):
            raise ValueError(
                "Config.parties needs a root that all parties see, without local_root, and when_busy='wait'"
            )
        self.root = absolute(root)
        others = [begin_from] if isinstance(begin_from, str | os.PathLike) else begin_from
        self._tiers = Tiers(self.root, config.local_root, [os.fspath(each) for each in others])
        job, claim = job_of_checkpoints(self.root, config.job_id), Claim(self.root, config.job_id, self._tiers.local)
        self._engine = Engine(config, process_group, job=job, claim=claim)
        self._process_group, self._loads = process_group, Loads(self._engine, self._tiers, process_group)
        self._hooks: list[Any] = []
        self._recent = RecentSaves()
        self._staging: list[Save] = []  # saves that may still read tensors
        self._is_signalled = self._is_terminating = self._has_saved = False
        self._ends_at = self._asked_at = math.inf
        self._step_s = 0.0  # the longest time between two calls of ``terminating``
        self._began = 0.0  # first rank: the begin of a run that has loaded nothing
        self._handlers: dict[int, Any] = {}  # by signal: the handler before ``watch_signals``
        self.loaded: Loaded | None = None
        """The result of the last ``load``: its step, and its source. It is None before a load."""

    @property
    def config(self) -> Config:
        """Return the configuration, with all listeners."""
        return self._engine.config

    def check(self, nbytes: int | None = None) -> Diagnosis:
        """Examine the root, this host and the job before the first step, as ``asyncckpt doctor`` does.

        All ranks make this call, and get the same diagnosis. It takes a few seconds. Nothing stays in the root.

        Args:
            nbytes: The bytes of this rank's part of a checkpoint; None: space and memory are told, and not judged.

        Returns:
            The findings. ``level`` is "fails" if a save would fail, and ``str`` has a line for each finding.

        Raises:
            RankFailedError: Another rank does not make the call.
        """
        from asyncckpt.doctor.diagnosis import diagnose  # most trainings never call this

        return diagnose(self._tiers.roots, self.config, ranks_of(self._process_group), nbytes)

    def prepare(self, state_dict: StateDict | FileSet) -> None:
        """Do the work of the first save of ``state_dict`` now: start the worker, plan, allocate and touch memory.

        Call this before the first training step. Raises as ``save`` does.
        """
        if self.config.parties:
            self._engine.announce(self.root)
        self._engine.prepare(state_dict, path=step_folder(self._tiers.roots[0], 0))

    def save(
        self,
        step: SupportsIndex,
        state_dict: StateDict | FileSet,
        *,
        upload: bool | None = None,
        cut: str | None = None,
    ) -> Save:
        """Save ``state_dict`` as the checkpoint of ``step``.

        A ``FileSet`` is saved too. ``load`` reads the state dict at the top of a set, and no other file.

        Returns when the tensors are copied. The checkpoint holds their values of this moment, and the caller may change
        them. (With ``Config.overlap`` the copy goes on: see ``guard``.) The worker writes in the background. The handle
        reports the outcome. If no handle was asked for a failure, ``wait`` or ``close`` raises the failure.

        If a load has gone back to an older step, a later step that exists is renamed when that step is saved again.

        ``upload``: with ``Config.local_root``, whether the step is also uploaded; the same on all ranks. With None: as
        ``Config.upload_every`` says, and yes for a job after SIGTERM (``terminating``).

        ``cut``: with ``Config.parties``, a text that all parts of the step must share, such as the global step with the
        number of the last prompt.

        Raises ``CheckpointExistsError`` if the step is saved already, ``UnsavableStateError``, ``OutOfMemoryError``,
        ``WorkerDiedError``, ``JobTakenError``, ``SaveTimeoutError``, ``ClosedError``. Then nothing was saved, and the
        next save may succeed. Also raises the failure of an earlier save if that failure was not reported yet; then
        this save is staged, and its write goes on. (With ``Config.failure="warn"`` only ``ClosedError`` is raised, and
        the handle has the failure.)
        """
        step = whole_number(step, "step")
        origin = self._loads.origin
        if not self._has_saved and origin is None and ranks_of(self._process_group).rank == 0:
            self._began = _begin(self._tiers.roots)
        self._has_saved = True
        if self._tiers.local is not None and isinstance(state_dict, FileSet):
            check_file_set_place(state_dict, self.root, "refuse")
        asked = True if upload is None and self._is_terminating else upload
        retention = retention_of(self.config, origin, self._tiers.roots, step, began=self._began, upload=asked)
        path = step_folder(self._tiers.roots[0], step)
        parties = self._engine.config.parties
        joint = Joint(tuple(sorted(parties)), cut=cut) if parties else None
        save = self._engine.save(path, state_dict, step=step, retention=retention, joint=joint)
        self._staging = [*filter(_is_copying, self._staging), save]
        self._recent.add(save)
        return save

    def publish(
        self, save: Save, version: int | None = None, *, roll_back: bool = False, folder: str | None = None
    ) -> Publication:
        """Publish the staged tensors of a save to readers on this host. No copy is made.

        All ranks call this after ``save`` and before the next save. Readers find the version by
        ``WeightSubscriber.of_checkpoints(root)``, and see all tensors of the state. The slot is not reused while they
        read. One slot always stays free for saves: with the usual two slots one version is readable, with three slots
        two.

        Args:
            save: The handle of the save to publish.
            version: The number of the version; None: the step of the save. Versions grow.
            roll_back: Allow a version that does not grow, for a training that has gone back.
            folder: For a set of files: the DCP folder that readers see; None: the only one.

        Returns:
            The outcome. Nothing is published (``skipped``) if readers hold the slot that would have to be freed.

        Raises:
            VersionError: The version is not newer than the last one.
            CheckpointError: There is no such folder, or more than one. Also raises as ``save`` does.
        """
        if not isinstance(save, Save):
            raise TypeError(f"publish takes the handle that save has returned, not a {type(save).__name__}")
        number = save.step if version is None else version
        if number is None:
            raise ValueError("a save without a step needs a version")
        return self._engine.publish(save, number, roll_back=roll_back, folder=folder)

    def load(
        self,
        state_dict: dict[str, Any],
        step: SupportsIndex | None = None,
        *,
        verify: bool = True,
        weights_only: bool = True,
        fallback: bool = False,
        memory: bool = True,
        strict: bool = True,
    ) -> int:
        """Load a checkpoint into ``state_dict``, in place.

        All ranks load the same checkpoint; each rank reads the parts it needs.

        The checkpoint may have been saved by any number of ranks, in any placement. After a crash it comes from
        memory if the workers of all ranks still hold it, written or not. Otherwise it comes from storage, once no save
        in this root is under way (the wait takes at most ``Config.timeout`` seconds). The newest checkpoint of the
        local folder and of the root counts; if one copy is damaged, the other copy is loaded. ``loaded`` tells the
        source.

        Args:
            state_dict: The state to fill. Tensors are filled in place, other values are replaced, ``Stateful`` values
                get ``load_state_dict``.
            step: The step to load; None: the newest.
            verify: Check every byte against its checksum while copying. After an error the state may be partly loaded,
                and may contain bad bytes.
            weights_only: Load nothing that could run code. ``torch.serialization.add_safe_globals`` allows classes.
            fallback: If a checkpoint cannot be read, log an error and try the next older one. A damaged checkpoint is
                renamed to ``step-00000100.damaged-1``, and its step can be saved again. A checkpoint of another version
                of asyncckpt is not damaged: its ``FormatError`` is raised.
            memory: Whether the checkpoint may come from memory.
            strict: Raise if the checkpoint lacks a value of the state dict. With False the value is left unchanged.
                ``loaded.missing`` and ``loaded.unexpected`` have the names, as for ``load_state_dict`` of a module.

        Returns:
            The step that was loaded.

        Raises:
            CheckpointNotFoundError, DamagedCheckpointError, StorageError: There is no checkpoint, or it cannot be read.
            FormatError: Another version of asyncckpt has written the checkpoint.
            JobTakenError: The root belongs to another ``Config.job_id``.
            RankFailedError: The ranks do not load the same step, or one of them is gone.
            MismatchError, UntrustedValueError: The state does not fit the checkpoint, or a value could run code.
        """
        self._engine.check_open()
        options: dict[str, Any] = {"verify": verify, "weights_only": weights_only, "strict": strict}
        self.loaded = self._loads.load(state_dict, step, memory=memory, fallback=fallback, **options)
        if self.config.parties:
            self._engine.announce(self.root, goes_back=True)
        return self.loaded.step

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        return self._tiers.steps()

    def latest(self) -> int | None:
        """Return the step that ``load`` would load, or None.

        The step is the newest in storage, or in the memory of a dead trainer's worker.

        All ranks have to call this, and get the same answer. Waits as ``load`` does.
        """
        return self._loads.latest()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves. Raises the first unreported failure; ``SaveTimeoutError`` after ``timeout`` s."""
        self._engine.wait(timeout)

    def wait_uploads(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended and every step to upload is in the root. All ranks have to call this.

        A step that waits for its upload while a newer step is committed is left out, unless its upload is mandatory.
        An upload error is logged and fails no save. This method raises the error, on all ranks. The upload is retried
        after some time, and with the next save, unless its place is taken or the local copy is damaged. Raises
        ``SaveTimeoutError`` after ``timeout`` seconds (None: ``Config.timeout``).
        """
        limit = self.config.timeout if timeout is None else timeout
        ranks = ranks_of(self._process_group)
        ranks.on_all(partial(self._engine.wait, limit))
        if self._tiers.local is not None:
            ranks.from_first(partial(self._wait_uploads, limit))

    def _wait_uploads(self, timeout: float) -> None:
        if self._engine.worker is None:
            self._engine.start(alone=True)
        if (worker := self._engine.worker) is not None:
            ask = partial(worker.call, timeout, SessionApi.uploads)
            wait_for_uploads(ask, timeout)

    @property
    def failures(self) -> int:
        """Return the number of saves that have failed so far."""
        return self._engine.failures

    def suggested_interval(self, mtbf: float | str, *, restart: float | str | None = None) -> Advice:
        """Suggest how often to save, from the cost of the last saves of this process to this rank alone.

        ``mtbf``: mean time between failures, in seconds, or as "4h". ``restart``: duration of a restart, in the same
        form; None: restarts are left out.

        Raises ``NothingMeasuredError`` if no save has been committed yet, ``ValueError`` if a duration is invalid.
        """
        times = [parse_duration(each) if isinstance(each, str) else each for each in (mtbf, restart)]
        return self._recent.advice(times[0] or 0.0, times[1])

    def watch_signals(self, *signals: int) -> None:
        """Handle ``signals`` (none: SIGTERM) from now on: they make ``terminating`` true, and do not end this process.

        Call this on the main thread. Launchers send a signal some time before SIGKILL: torchrun SIGTERM 30 seconds
        before, Slurm what ``--signal`` says. All ranks have to call this. ``close`` restores the handlers before.
        """
        self._engine.start()
        for each in signals or (signal.SIGTERM,):
            if each not in self._handlers:
                self._handlers[each] = _past_closed(each, signal.signal(each, self._note_signal))

    def deadline(self, seconds: float) -> None:
        """Announce that this process ends in ``seconds``. ``terminating`` then becomes true in time for a last save.

        Any thread, and a signal handler, may call. The earliest deadline counts. One rank is enough.
        """
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)

    def terminating(self) -> bool:
        """Return whether it is time for a last save: save, and end.

        That is so if some rank has received a watched signal, or if its ``deadline`` leaves no time for another step
        and a save. A save counts with one and a half times the longest recent one, behind those under way, and a
        second. A step counts with the longest time between two calls of this. Until a save was measured, it counts with
        ``Config.commit_timeout``. An upload from a local folder is not counted.

        All ranks call this after the same steps, at a point where the state is complete. The answer is the same on all
        ranks. The cost is a message to the first rank's worker, a fraction of a millisecond.
        """
        now = time.monotonic()
        self._step_s = max(self._step_s, now - self._asked_at)
        self._asked_at = now
        last_s = _MARGIN * self._recent.expected_s(self.config.commit_timeout) + TELL_S
        is_over = self._ends_at < now + self._step_s + last_s
        self._is_terminating = self._engine.any_says(self._is_signalled or is_over)
        return self._is_terminating

    def _note_signal(self, *_: object) -> None:
        self._is_signalled = True

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer`` wait, before each step, until all saves have copied their tensors.

        This is for ``Config.overlap``.

        On devices the step waits on the current stream; the host does not wait, and goes on queueing. Replays of a
        graph do not wait: call ``synchronize_staging`` before each replay. (A step that is captured into a graph warns,
        or raises.)
        """
        self._hooks.append(optimizer.register_step_pre_hook(self.synchronize_staging))

    def synchronize_staging(self, *_: object) -> None:
        """Make work that is queued from here on wait until all saves have copied their tensors."""
        synchronize_staging(self._staging, self.config.timeout)

    def close(self) -> None:
        """Wait for all saves, end the worker and free the memory. Safe to call twice.

        Raises the first failure not reported yet. Raises ``SaveTimeoutError`` if the worker is still writing after
        ``Config.timeout`` seconds; then the worker goes on alone.
        """
        self._close(linger=False)

    def _close(self, *, linger: bool) -> None:
        handlers, self._handlers = self._handlers, {}
        for each, before in handlers.items():
            # Otherwise the handler was replaced, or the handler before it is not one of Python's.
            if signal.getsignal(each) == self._note_signal and before is not None:
                signal.signal(each, before)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._staging = [], []
        try:
            self._engine.close(linger=linger)
        finally:
            self._recent.settle()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            # A training that ends by an error is likely to be restarted, perhaps in the same process by
            # nvidia-resiliency-ext.
            self._close(linger=not issubclass(kind, (KeyboardInterrupt, SystemExit)))
        except CheckpointError as trouble:
            if not trouble.is_logged:  # and not raised, because the other error matters more
                logger.error("closing the checkpointer of a failed training failed: %s", str(trouble))


def _past_closed(number: int, handler: Any) -> Any:
    """Return ``handler``, or the handler before it if ``handler`` belongs to a checkpointer that is closed.

    A checkpointer is closed without a call of ``close`` if another one has taken over from it.
    """
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, Checkpointer) and number in owner._handlers:
        try:
            owner._engine.check_open()
        except ClosedError:
            return owner._handlers[number]
    return handler


def _is_copying(save: Save) -> bool:
    return not save.staged()


def _begin(roots: Sequence[str]) -> float:
    """Begin a training that has loaded nothing, and warn if there are checkpoints: its user may have forgotten to load.

    Returns a moment, in seconds since the epoch, that is later than the creation time of every checkpoint there.
    """
    known = [root for root in roots if not is_address(root)]  # a save does not wait for an object store
    found: list[StoredStep] = []
    with contextlib.suppress(CheckpointError):  # the save raises a better error
        found = history(*known)
    if found:
        logger.warning(
            "this training has loaded no checkpoint, and the folder has some, the newest of step %d in %s:"
            " Config.keep_last removes none of those; call load first to resume, or save to another folder",
            found[-1].step,
            known[-1],
        )
    created = [each.created for each in found if each.created is not None]
    return max(time.time(), math.nextafter(max(created, default=0.0), math.inf))
