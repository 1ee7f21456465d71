"""What a training loop calls to save and load: a folder with one checkpoint a step."""

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

from asyncckpt.config import Config
from asyncckpt.devices.captures import check_guarded_capture
from asyncckpt.engine.engine import Engine
from asyncckpt.engine.loads import Loaded, Loads
from asyncckpt.engine.plan_selection import check_file_set_place
from asyncckpt.engine.retention import retention_of
from asyncckpt.engine.saves import RecentSaves
from asyncckpt.errors import CheckpointError, ClosedError
from asyncckpt.events import Event
from asyncckpt.interval import Advice, parse_duration
from asyncckpt.link.messages import Claim
from asyncckpt.loading.load import load
from asyncckpt.loading.tiers import Tiers
from asyncckpt.planning.file_set import FileSet
from asyncckpt.planning.plan import StateDict
from asyncckpt.publication import Publication, job_of_checkpoints, whole_number
from asyncckpt.ranks.collectives import from_first, is_first, on_all
from asyncckpt.save_handle import Save
from asyncckpt.storage import absolute, is_address, step_folder
from asyncckpt.storage.history import StoredStep, history
from asyncckpt.storage.uploads import AskUploads, UploadsUnderWay, wait_for_uploads

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Saves and loads the checkpoints ``root/step-00000100``, with ``Config.local_root`` by way of a local folder.

    Make one at the start of a run and close it at the end, or use it as a context manager. The methods are for one
    thread at a time. A state dict is what ``torch.distributed.checkpoint`` takes: nested dicts and lists with tensors,
    and whatever pickles; values with ``state_dict()`` and ``load_state_dict()``, however deep, are asked for theirs.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: Config | None = None,
        process_group: ProcessGroup | None = None,
        *,
        on_event: Callable[[Event], object] | str | Sequence[Callable[[Event], object] | str] = (),
    ) -> None:
        """In a job of many ranks every rank makes one, and all make the same calls in the same order.

        Args:
            root: The folder, made if it is missing; the same on all ranks, on a file system they share. Or an address
                on an object store, ``s3://bucket/run``, also ``gs://`` and ``az://``.
            config: What there is to choose; None: what the environment says (``Config.from_env``).
            process_group: The ranks that save together; None: the whole job.
            on_event: Who is told what becomes of saves and loads, as ``Config.on_event``, and beside those.

        Raises:
            CheckpointExistsError: The folder is itself a checkpoint, or holds only checkpoints of other kinds.
            StorageError: The folder cannot be made, or this is an address of another kind.
            ValueError: A variable of the environment makes no sense.
        """
        config = Config.given(config)
        config = replace(config, on_event=(*config.listeners, *Config(on_event=on_event).listeners))
        self.root = absolute(root)
        self._tiers = Tiers(self.root, config.local_root)
        job, claim = job_of_checkpoints(self.root, config.job_id), Claim(self.root, config.job_id, self._tiers.local)
        self._engine = Engine(config, process_group, job=job, claim=claim)
        self._process_group, self._loads = process_group, Loads(self._engine, self._tiers, process_group)
        self._hooks: list[Any] = []
        self._recent = RecentSaves()
        self._staging: list[Save] = []  # those whose tensors may still be read
        self._terminated = self._is_terminating = self._has_saved = False
        self._began = 0.0  # first rank: when a run began that has loaded nothing
        self._had_sigterm: Any = None
        self.loaded: Loaded | None = None
        """What the last ``load`` has loaded, and from where."""

    @property
    def config(self) -> Config:
        """As it was given."""
        return self._engine.config

    def prepare(self, state_dict: StateDict | FileSet) -> None:
        """Do now what the first save of ``state_dict`` would have to: start the worker, plan, take and touch the
        memory. Best called before the first training step. Raises as ``save`` does.
        """
        self._engine.prepare(state_dict, path=step_folder(self._tiers.roots[0], 0))

    def save(self, step: SupportsIndex, state_dict: StateDict | FileSet, *, upload: bool | None = None) -> Save:
        """Save ``state_dict`` as the checkpoint of ``step``, or a set of files, which ``load`` does not read.

        Returns when its tensors are copied: the checkpoint will hold their values of this moment, and the caller may go
        on and change them. (With ``Config.overlap``: see ``guard``.) Writing goes on in the worker; the handle tells
        how it went, and so do ``wait`` and ``close``, for failures that no handle was asked about.

        After a load that went back, a later step that was there takes another name when it is saved again.

        ``upload``: with ``Config.local_root``, whether it is also uploaded, the same on all ranks; None: as
        ``Config.upload_every`` says, and yes for a job that was asked to end (``terminating``).

        Raises ``CheckpointExistsError`` if that step is saved already, ``UnsavableStateError``, ``OutOfMemoryError``,
        ``WorkerDiedError``, ``JobTakenError``, ``SaveTimeoutError``, ``ClosedError``; then nothing was saved, and the
        next save may work. Raises the failure of an earlier save that nobody was told of, after this one is staged:
        writing it goes on. (With ``Config.failure="warn"`` none but ``ClosedError``: the handle has it.)
        """
        step = whole_number(step, "step")
        origin = self._loads.origin
        if not self._has_saved and origin is None and is_first(self._process_group):
            self._began = _begin(self._tiers.roots)
        self._has_saved = True
        if self._tiers.local is not None and isinstance(state_dict, FileSet):
            check_file_set_place(state_dict, self.root, "refuse")
        asked = True if upload is None and self._is_terminating else upload
        retention = retention_of(self.config, origin, self._tiers.roots, step, began=self._began, upload=asked)
        path = step_folder(self._tiers.roots[0], step)
        save = self._engine.save(path, state_dict, step=step, retention=retention)
        self._staging = [*filter(_is_copying, self._staging), save]
        self._recent.add(save)
        return save

    def publish(
        self, save: Save, version: int | None = None, *, roll_back: bool = False, folder: str | None = None
    ) -> Publication:
        """Let readers on this host have what was staged for a save. No copy is made.

        All ranks call this after ``save`` and before the next one. Readers find it by
        ``WeightSubscriber.of_checkpoints(root)``, and see all tensors of the state; while they read, that slot is left
        alone. One slot always stays for saves: with the usual two one version is readable, with three two.

        Args:
            save: What to publish.
            version: As what; None: as its step. Versions grow.
            roll_back: Allow a version that does not, for a training that has gone back.
            folder: Of a set of files: the folder of DCP's that readers see; None: the only one.

        Returns:
            What became of it: nothing is published where a reader holds on to what would have to go.

        Raises:
            VersionError: The version is not newer than the last one.
            CheckpointError: There is no such folder, or not only one. Also raises as ``save`` does.
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
        """Load a checkpoint into ``state_dict``, in place. All ranks load the same one, each what its part needs.

        Any number of ranks may have saved it, in any placement. In the place of a trainer that died it comes from
        memory, if the workers of all ranks still have it there, written or not; else from storage, when no save in this
        root is under way any more (this waits ``Config.timeout`` seconds). Of what is in the local folder and in the
        root the newest counts; where one copy is damaged, the other is loaded. ``loaded`` tells where it came from.

        Args:
            state_dict: What to fill: tensors where they are, other values are replaced, ``Stateful`` ones told.
            step: Which one; None: the newest.
            verify: Check every byte as it is copied. After an error part of the state may be loaded, bad bytes with it.
            weights_only: Load nothing that could run code; ``torch.serialization.add_safe_globals`` allows classes.
            fallback: Try the next older one when one cannot be read, and log an error; a damaged one is renamed to
                ``step-00000100.damaged-1``, and its step can be saved again. A checkpoint of another version of
                asyncckpt is not damaged: its ``FormatError`` is raised.
            memory: Whether it may come from memory.
            strict: Raise if the checkpoint lacks a value of the state dict. Without, the value stays as it is, and
                ``loaded.missing`` and ``loaded.unexpected`` have the names, as of ``load_state_dict``.

        Returns:
            Its step.

        Raises:
            CheckpointNotFoundError, DamagedCheckpointError, StorageError: There is none, or it cannot be read.
            FormatError: Another version of asyncckpt has written it.
            JobTakenError: The root is of another ``Config.job_id``.
            RankFailedError: The ranks do not load the same step.
            MismatchError, UntrustedValueError: The state does not fit it, or a value could run code.
        """
        self._engine.check_open()
        ranks, shows = self._process_group, self.config.progress
        options: dict[str, Any] = {"verify": verify, "weights_only": weights_only, "strict": strict, "progress": shows}
        fill = partial(load, state_dict, process_group=ranks, **options)
        self.loaded = self._loads.load(fill, step, memory=memory, fallback=fallback)
        return self.loaded.step

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending."""
        return self._tiers.steps()

    def latest(self) -> int | None:
        """The step that ``load`` would load: the newest in storage, or in the memory of a trainer that died, or None.
        The same on all ranks, which all have to ask. Waits as ``load`` does.
        """
        return self._loads.latest()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves. Raises the first failure nobody was told of, ``SaveTimeoutError`` after ``timeout`` s."""
        self._engine.wait(timeout)

    def wait_uploads(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended, and all that is uploaded is in the root. All ranks have to call this.

        What goes wrong with an upload is logged, and fails no save: this raises it, on all ranks. It is tried again
        after some time, and with the next save, unless its place is taken, or the local copy damaged. Raises
        ``SaveTimeoutError`` after ``timeout`` seconds (None: ``Config.timeout``).
        """
        limit = self.config.timeout if timeout is None else timeout
        on_all(partial(self._engine.wait, limit), self._process_group)
        if self._tiers.local is not None:
            from_first(partial(self._wait_uploads, limit), self._process_group)

    def _wait_uploads(self, timeout: float) -> None:
        if self._engine.worker is None:
            self._engine.start(alone=True)
        if (worker := self._engine.worker) is not None:
            ask = partial(worker.ask, AskUploads(), UploadsUnderWay, timeout, "asking for uploads")
            wait_for_uploads(ask, timeout)

    @property
    def failures(self) -> int:
        """How many saves have failed so far."""
        return self._engine.failures

    def suggested_interval(self, mtbf: float | str, *, restart: float | str | None = None) -> Advice:
        """How often to save, from what the last saves of this process have cost this rank, and no other.

        ``mtbf``: mean time between failures, in seconds, or as "4h". ``restart``: what a restart takes; None: left out.

        Raises ``NothingMeasuredError`` where no save has been committed yet, ``ValueError`` for no such times.
        """
        times = [parse_duration(each) if isinstance(each, str) else each for each in (mtbf, restart)]
        return self._recent.advice(times[0] or 0.0, times[1])

    def watch_sigterm(self) -> None:
        """From now on SIGTERM does not end this process, but makes ``terminating`` true; for the main thread.

        Launchers send it some time before SIGKILL (torchrun: 30 s), enough for a last save. All ranks have to call
        this. ``close`` gives the signal back to whom it was.
        """
        self._engine.start()
        if self._had_sigterm is None:
            self._had_sigterm = _past_closed(signal.signal(signal.SIGTERM, self._note_sigterm))

    def terminating(self) -> bool:
        """Whether some rank was sent SIGTERM since ``watch_sigterm``: save, and end.

        To be called by all ranks after the same steps, between which the state is whole; the answer is the same on all.
        It costs the ranks of a job a message to the first rank's worker, a fraction of a millisecond.
        """
        self._is_terminating = self._engine.any_says(self._terminated)
        return self._is_terminating

    def _note_sigterm(self, *_: object) -> None:
        self._terminated = True

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """For ``Config.overlap``: have ``optimizer`` wait, before each step, until all saves have their copies.

        On devices it is the step that waits, on the current stream, and not the host, which goes on queueing. Replays
        of a graph do not: call ``synchronize_staging`` before each (capturing a step warns, or raises).
        """
        self._hooks.append(optimizer.register_step_pre_hook(self.synchronize_staging))

    def synchronize_staging(self, *_: object) -> None:
        """What ``guard`` has an optimizer do: what is queued from here on waits until all saves have their copies."""
        copying = list(filter(_is_copying, self._staging))
        check_guarded_capture(copies_are_under_way=bool(copying))
        for save in copying:  # not the newest alone: that may have been skipped, or refused
            save.synchronize_staging(self.config.timeout)

    def close(self) -> None:
        """Wait for all saves, end the worker, give the memory back; safe to call twice.

        Raises the first failure nobody was told of, or ``SaveTimeoutError`` if the worker is still writing after
        ``Config.timeout`` seconds; then it goes on alone.
        """
        self._close(linger=False)

    def _close(self, *, linger: bool) -> None:
        had, self._had_sigterm = self._had_sigterm, None
        if had is not None and signal.getsignal(signal.SIGTERM) == self._note_sigterm:  # else another has it by now
            signal.signal(signal.SIGTERM, had)
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
            # A training that ends by an error is likely to be started again; also by what nvrx restarts it with.
            self._close(linger=not issubclass(kind, (KeyboardInterrupt, SystemExit)))
        except CheckpointError as trouble:
            logger.error("while the training ends by an error: %s", str(trouble))  # that one matters more


def _past_closed(handler: Any) -> Any:
    """``handler``; or, if that is of a checkpointer that another has taken over from, the one from before it."""
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, Checkpointer) and owner._had_sigterm is not None:
        try:
            owner._engine.check_open()
        except ClosedError:
            return owner._had_sigterm
    return handler


def _is_copying(save: Save) -> bool:
    return not save.staged()


def _begin(roots: Sequence[str]) -> float:
    """Begin a training that has loaded nothing, and warn if there are checkpoints: its user may have forgotten to load.

    Returns a moment, in seconds since the epoch, that is later than the time of creation of each checkpoint there.
    """
    known = [root for root in roots if not is_address(root)]  # no save waits for a store
    found: list[StoredStep] = []
    with contextlib.suppress(CheckpointError):  # the save says it better
        found = history(*known)
    if found:
        logger.warning(
            "there are checkpoints here, the newest of step %d in %s, and this has loaded none: it is a training of"
            " its own, whose checkpoints count as newer than those, and Config.keep_last removes none of those;"
            " call load first to go on, or save to another folder",
            found[-1].step,
            known[-1],
        )
    created = [each.created for each in found if each.created is not None]
    return max(time.time(), math.nextafter(max(created, default=0.0), math.inf))
