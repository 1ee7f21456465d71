"""Save Lightning's checkpoints by a plugin, and delay removals and links until a checkpoint is durable.

The plugin saves single-file checkpoints, and the checkpoint folders of ``strategies.py``. ``ask_the_plugin`` makes
``ModelCheckpoint`` ask the plugin for files and links.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotDoneError
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.distributed_c10d import Store, _get_default_store

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.extension import Engine, FileSet, Save, engines, replace_or_set_aside, storage_for

logger = logging.getLogger(__name__)

AnyPath = str | Path
"""A path, in Lightning's types."""

_UNDER_WAY = "asyncckpt-lightning/under-way"


def local_place(path: AnyPath) -> str | None:
    """Return the canonical path of a local file; None for a remote file. A link in the last part is not resolved."""
    system, place = url_to_fs(str(path))
    return place_of(place) if isinstance(system, LocalFileSystem) else None


def place_of(path: AnyPath) -> str:
    """Return the canonical path of a local ``path``, as ``local_place`` does."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def is_needed_at_once(path: AnyPath) -> bool:
    """Return whether Lightning needs this checkpoint when the call returns, so that it has to be saved synchronously.

    There are two such checkpoints. Slurm's signal handler saves one before it requeues the job. Launched processes save
    the other at their end, for the process that launched them. Both saves may interrupt another save.
    """
    return re.fullmatch(r"hpc_ckpt_\d+\.ckpt|\.temp\.ckpt", os.path.basename(path)) is not None


def remove(place: str) -> None:
    """Remove a file or a folder. A folder is renamed first, so that a half-removed folder is no checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.islink(place) or not os.path.isdir(place):
            os.unlink(place)
        elif not storage_for(place).remove_checkpoint(place):
            logger.warning("%s is not removed: another process reads it", place)


def link(place: str, target: str) -> None:
    """Make a symbolic link to ``target`` that replaces ``place`` in one step, unless ``place`` is a folder."""
    if os.path.isdir(place) and not os.path.islink(place):
        remove(place)
    folder, name = os.path.split(place)
    new = Path(folder, f".{name}.link")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(place)


def is_linked_to(place: str) -> bool:
    """Return whether a symbolic link in the same folder points to ``place``."""
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.dirname(place)) as entries:
        return any(each.is_symlink() and os.path.realpath(each.path) == place for each in entries)
    return False


class Pending:
    """The saves of one process, and the removals and links that wait for them.

    A removal or a link waits for the newest save begun before it, and is not done if that save fails. Removals and
    links are done in the order of the calls, with one exception: a removal of a link's target waits until the link
    points elsewhere. Only the saving thread may call the methods. A place is a path from ``local_place``.
    """

    def __init__(self, timeout: float) -> None:
        """Start without pending work.

        Args:
            timeout: Seconds to wait for another rank, or for a file system.
        """
        self.newest: Save | None = None
        """The newest save."""
        self._timeout = timeout
        # Keys are places.
        self._saves: dict[str, Save] = {}
        self._removals: dict[str, Future[None]] = {}
        self._links: dict[str, Future[None]] = {}
        self._linked: set[str] = set()  # places to remove when no link points to them any more
        self._going: set[str] = set()  # places being removed
        self._lock = threading.Lock()  # guards the two sets
        self._failures: list[BaseException] = []

    def add(self, place: str, save: Save) -> None:
        """Record that a ``save`` to ``place`` has begun."""
        self._saves = {place: save for place, save in self._saves.items() if not save.done()}
        self._saves[place] = self.newest = save
        _tell_others(save.future)

    def make_way(self, place: str) -> None:
        """Prepare for a save to ``place``: cancel a pending removal, and wait for a pending link there.

        Raises ``SaveTimeoutError``.
        """
        self._cancel_removal(place)
        if _waits(link := self._links.get(place)):
            self._await(link)

    def remove(self, place: str) -> None:
        """Remove ``place`` after the newest save, even if that is a save to ``place``. Raises ``SaveTimeoutError``."""
        self._cancel_removal(place)
        own = self._saves.get(place)
        self._removals[place] = self._when_durable(partial(self._remove, place, own), f"removing {place}")

    def link(self, place: str, target: str) -> None:
        """Make a symbolic link at ``place`` after the newest save. Until then the present file at ``place`` stays.

        Raises ``SaveTimeoutError``.
        """
        self._cancel_removal(place)
        self._links[place] = self._when_durable(partial(self._link, place, target), f"linking {place} to {target}")

    def will_exist(self, place: str) -> bool | None:
        """Return whether ``place`` will exist if all pending work succeeds; None if no pending work changes it."""
        if _waits(self._removals.get(place)) or place in self._linked:
            return False
        save = self._saves.get(place)
        return True if (save is not None and not save.done()) or _waits(self._links.get(place)) else None

    def wait_for(self, place: str) -> None:
        """Wait until no work is pending for ``place``. In a distributed job, wait for all pending work of all ranks.

        Raises the error of the save to ``place``, or as ``wait_for_others``.
        """
        for each in (self._removals.get(place), self._links.get(place)):
            if _waits(each):
                self._await(each)
        for target in {place: None, os.path.realpath(place): None}:
            if (save := self._saves.pop(target, None)) is not None:
                save.result()
        self.wait_for_others()

    def wait_for_others(self) -> None:
        """Wait until no work is pending on any rank, because most ranks save nothing and know of no pending work.

        Raises:
            SaveTimeoutError: A rank has not finished in time.
        """
        if (store := _store()) is None:
            return
        deadline = time.monotonic() + self._timeout
        while store.add(_UNDER_WAY, 0) > 0:
            if time.monotonic() > deadline:
                raise SaveTimeoutError(f"another rank has not finished its saves after {self._timeout:g} s")
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait until all saves, removals and links are done. Raises ``SaveTimeoutError``."""
        for save in list(self._saves.values()):
            save.future.exception()
        for each in (*self._removals.values(), *self._links.values()):
            self._await(each)

    def end(self) -> None:
        """Give up removals of linked places. Raise the first error of a removal or a link, and forget all errors."""
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
            own.future.exception()  # wait: this save may be of another engine, and end after the newest save
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
            self.newest.future.exception()
        try:
            done.exception(self._timeout)
        except CancelledError:
            pass
        except NotDoneError:
            raise SaveTimeoutError(f"removals and links are not done after {self._timeout:g} s") from None

    def _note_failure(self, done: Future[None]) -> None:
        if not done.cancelled() and (failure := done.exception()) is not None:
            self._failures.append(failure)


def _waits(done: Future[None] | None) -> TypeGuard[Future[None]]:
    return done is not None and not done.done()


def _tell_others(outcome: Future[Any]) -> None:
    """Count a pending action in the store of all ranks until its ``outcome`` is done."""
    if (store := _store()) is not None:
        store.add(_UNDER_WAY, 1)
        outcome.add_done_callback(lambda _: store.add(_UNDER_WAY, -1))


def _store() -> Store | None:
    """Return the store in which the ranks count pending work; None if there are no other ranks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return _get_default_store()


class AsyncckptIO(TorchCheckpointIO):
    """Saves as Lightning's own ``TorchCheckpointIO`` does, but in the background, and only to local files.

    Lightning itself saves, and the training waits, if the path is remote (``s3://``) or the checkpoint is needed at
    once (see ``is_needed_at_once``). Each process saves for itself.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Start no worker yet. The first save starts the worker.

        Args:
            config: Config of the engine for this process alone, if this is its first save; None: from the environment.
        """
        self._config = config
        self._timeout = Config.given(config).timeout
        self.pending = Pending(self._timeout)
        """The saves, removals and links under way."""
        self._engines: list[Engine] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._config,)  # a spawned process has saved nothing yet

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> None:
        """Save a checkpoint, and return when the tensors are copied.

        Args:
            checkpoint: Anything that ``torch.save`` takes.
            path: The file. A missing folder is created. A link at this path is replaced when the file is durable; the
                link's target stays.
            storage_options: Not supported, as by ``TorchCheckpointIO``.

        Raises:
            TypeError: There are ``storage_options``.
            CheckpointError: As ``Engine.save_file`` raises; or an earlier save has failed, unreported so far.
        """
        place = local_place(path)
        if place is None or storage_options is not None or is_needed_at_once(place):
            super().save_checkpoint(checkpoint, path, storage_options)
            if place is None:
                _warn_of_remote()
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        self.pending.make_way(place)
        engine = engines.get(alone=True, config=self._config)
        self._begun(place, engine.save_file(place, checkpoint, follow_link=False), engine)

    def save_files(self, place: str, files: FileSet) -> None:
        """Save a checkpoint of several files, together with the other ranks, and return when the tensors are copied.

        Args:
            place: Path of the folder, from ``place_of``; the same on all ranks. When the new checkpoint is durable, it
                replaces a link or a checkpoint of ours. Any other contents are renamed.
            files: This rank's part.

        Raises:
            CheckpointError: As ``Engine.save`` raises; or an earlier save has failed, unreported so far.
        """
        self.pending.make_way(place)
        engine = engines.get(config=self._config)
        save = engine.save(place, files, existing=replace_or_set_aside(place))
        self._begun(place, save, engine)

    def load_checkpoint(
        self, path: AnyPath, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Wait for the work pending for ``path``, then load as ``TorchCheckpointIO`` does.

        Args:
            path, map_location, weights_only: As for ``TorchCheckpointIO``.

        Raises:
            CheckpointError: The last save to ``path`` has just failed.
            FileNotFoundError: There is no checkpoint.
        """
        if (place := local_place(path)) is not None:
            self.pending.wait_for(place)
        loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return loaded

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Remove a checkpoint when the newest begun save is durable. If that save fails, the checkpoint stays.

        Args:
            path: Path of a file or a folder.
        """
        place = local_place(path)
        if place is None:
            self.pending.wait()  # the newer checkpoint may be local
            super().remove_checkpoint(path)
        elif self.pending.will_exist(place) or os.path.lexists(place):
            self.pending.remove(place)

    def teardown(self) -> None:
        """Wait until all saves, removals and links of all ranks are done.

        While another error is being handled, log errors instead of raising them, and do not wait for other ranks.

        Raises:
            CheckpointError: A save has failed, unreported so far.
            OSError: A removal or a link has failed.
        """
        is_failing = sys.exc_info()[1] is not None
        try:
            self.pending.wait()
            for engine in self._engines:
                engine.wait()
            self.pending.end()
            if not is_failing:  # other ranks may be dead
                self.pending.wait_for_others()
        except (CheckpointError, OSError) as error:
            if not is_failing:
                raise
            if not (isinstance(error, CheckpointError) and error.is_logged):
                logger.error("waiting for the saves of a failed training failed: %s", error)

    def _begun(self, place: str, save: Save, engine: Engine) -> None:
        self.pending.add(place, save)
        if engine not in self._engines:
            self._engines.append(engine)
        # Wait even with Config.overlap, because nothing else waits before the next optimizer step.
        save.wait_staged(self._timeout)


@functools.cache
def _warn_of_remote() -> None:
    logger.warning("Lightning itself saves to paths that are no local files, and the training waits")


def ask_the_plugin() -> None:
    """Replace two methods of ``ModelCheckpoint``. With a plugin other than ``AsyncckptIO`` they behave as before."""
    file_exists, link_checkpoint = ModelCheckpoint.file_exists, ModelCheckpoint._link_checkpoint

    @functools.wraps(file_exists)
    def ask_file_exists(self: ModelCheckpoint, filepath: AnyPath, trainer: Any) -> bool:
        """Count a checkpoint under way as existing, so that no other checkpoint gets the same name."""
        io, place = trainer.strategy.checkpoint_io, local_place(filepath)
        known = None
        if isinstance(io, AsyncckptIO) and place is not None and trainer.is_global_zero:
            known = io.pending.will_exist(place)
        if known is None:
            return bool(file_exists(self, filepath, trainer))
        return bool(trainer.strategy.reduce_boolean_decision(known, all=False))  # other ranks call this in file_exists

    @functools.wraps(link_checkpoint)
    def ask_link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        """Keep the old link until the newer checkpoint exists."""
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, AsyncckptIO):
            link_checkpoint(trainer, filepath, linkpath)
            return
        target, place = place_of(filepath), place_of(linkpath)
        if trainer.is_global_zero and target != place:
            io.pending.link(place, os.path.relpath(target, os.path.dirname(place)))
        trainer.strategy.barrier()

    ModelCheckpoint.file_exists = ask_file_exists  # type: ignore[method-assign]
    ModelCheckpoint._link_checkpoint = staticmethod(ask_link_checkpoint)  # type: ignore[method-assign]
