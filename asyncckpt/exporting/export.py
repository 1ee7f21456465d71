"""Export a checkpoint to safetensors, to a file of ``torch.save``, or to another checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from asyncckpt.errors import CheckpointNotFoundError, MismatchError, StorageError, UnsavableStateError
from asyncckpt.exporting.batches import FilePlan
from asyncckpt.exporting.checkpoint_source import open_checkpoint
from asyncckpt.exporting.copying import write
from asyncckpt.exporting.dcp_target import CheckpointTarget
from asyncckpt.exporting.output import output, place_for
from asyncckpt.exporting.safetensors_target import plan_safetensors
from asyncckpt.exporting.selection import (
    Rename,
    Selection,
    check_nesting,
    dtype_of,
    parse_bytes,
    renaming,
    select,
)
from asyncckpt.exporting.source_files import SourceFiles
from asyncckpt.exporting.stock_source import open_stock
from asyncckpt.exporting.stored import StoredState
from asyncckpt.exporting.torch_file_target import plan_torch_file
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME
from asyncckpt.loading.contents import SetsOfFiles
from asyncckpt.loading.data_file import read_pool
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import StorageSource, find_step, is_stock
from asyncckpt.storage import absolute, named_steps, step_folder, storage_for
from asyncckpt.storage.file_system import translated
from asyncckpt.storage.history import newest_step
from asyncckpt.storage.storage import OpenAttempt
from asyncckpt.threads import without_gc

_COPY_BYTES = 1 << 20

Target = Literal["hf", "torch", "dcp"]


@dataclass(frozen=True)
class Exported:
    """Result of an export: ``nbytes`` in ``files`` at ``path``, from the checkpoint ``source``.

    ``tied`` were left out of safetensors, each with the name that has its bytes. ``objects`` were left out, too.
    ``tops`` are the top-level keys that begin the names in safetensors.
    """

    source: str
    path: str
    files: Sequence[str]
    tensors: int
    nbytes: int
    tied: dict[str, str] = field(default_factory=dict)
    objects: Sequence[str] = ()
    tops: Sequence[str] = ()

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        facts = {"source": self.source, "path": self.path, "files": self.files, "tensors": self.tensors}
        return facts | {"bytes": self.nbytes, "tied": self.tied, "left_out": self.objects}


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Target = "hf",
    dtype: str | torch.dtype | None = None,
    only: str | None = None,
    rename: Rename | None = None,
    max_shard_size: str | int | None = None,
    extra: Sequence[str | os.PathLike[str]] = (),
    weights_only: bool = True,
    progress: bool = False,
) -> Exported:
    """Write a stored state in another form, tensor by tensor, with little memory.

    Checksums are compared if there are any. ``out`` appears once it is complete and durable. An existing file or folder
    is never replaced.

    Args:
        path: A checkpoint of asyncckpt or of stock DCP, or a root, for its newest step.
        out: For "hf" and "dcp" a folder (with the name of a step: that step of a root), for "torch" a file.
        to: "hf": safetensors with an index, as ``from_pretrained`` reads them, tensors only. "torch": one file that
            ``torch.load`` reads. "dcp": a checkpoint that ``Checkpointer.load`` and stock DCP read.
        dtype: The new type of floating point tensors, except types of one byte: "bf16", "fp16" or "fp32".
        only: The key of the part of the state dict to export, such as "model", or several keys joined by dots. It is
            removed from the names.
        rename: New names, applied after ``only``: "PATTERN=REPLACEMENT" as for ``re.sub``, the path of a JSON file with
            new names by old names, a dict of them, or a function.
        max_shard_size: For "hf": maximum bytes of a file, such as "5GB", the default.
        extra: For "hf": files to copy into the folder.
        weights_only: For "torch": refuse values that could run code while they are unpickled.
        progress: Show a bar on the terminal.

    Raises:
        ValueError: An argument is invalid.
        CheckpointExistsError: ``out`` exists.
        CheckpointNotFoundError, DamagedCheckpointError: There is no checkpoint, or it is damaged.
        MismatchError: There is nothing to export.
        UnsavableStateError: Names collide, or a value cannot be stored in that form.
        UntrustedValueError: A value could run code.
        StorageError: Storage refuses, or is full.
    """
    job = _Job(absolute(path), to, max_shard_size, extra, weights_only)
    new_name, new_dtype = renaming(rename), dtype_of(dtype)
    place = place_for(out, is_file=to == "torch")
    with Progress("exporting", shown=progress) as bar, contextlib.ExitStack() as held:
        state = job.open(held)
        planned = job.plan(state, select(state, only, new_name, new_dtype))
        return job.write(planned, place, bar)


class _Planned(NamedTuple):
    """The files to write: large files, ``small`` files beside them, and the files of a ``checkpoint``.

    The files of a checkpoint are known only after the large file is written.
    """

    state: StoredState
    selection: Selection
    plans: Sequence[FilePlan]
    small: dict[str, bytes]
    checkpoint: CheckpointTarget | None


class _Job:
    """An export, with its arguments."""

    def __init__(
        self,
        path: str,
        to: Target,
        max_shard_size: str | int | None,
        extra: Sequence[str | os.PathLike[str]],
        weights_only: bool,
    ) -> None:
        """Check the arguments, see ``export``. Raises ``ValueError``, ``StorageError``."""
        if to not in ("hf", "torch", "dcp"):
            raise ValueError(f"to={to!r}: it is 'hf', 'torch' or 'dcp'")
        if to != "hf" and (extra or max_shard_size is not None):
            raise ValueError(f"max_shard_size and extra are for to='hf', and not for {to!r}")
        self._path, self._to, self._weights_only = path, to, weights_only
        self._most = parse_bytes("5GB" if max_shard_size is None else max_shard_size)
        self._extra = {os.path.basename(os.path.abspath(each)): absolute(each) for each in extra}
        for each in self._extra.values():
            with translated("looking at a file", each):
                if not os.path.isfile(each):
                    raise StorageError("this is to be copied, and is no file", path=each)
        if len(self._extra) != len(extra):
            raise ValueError("extra: two files have the same name")
        self._source: SourceFiles | None = None
        self._attempt = f"{secrets.token_hex(6)}-0"

    @without_gc
    def open(self, held: contextlib.ExitStack) -> StoredState:
        """Open the stored state, and protect it against removal."""
        path = _checkpoint_at(self._path)
        held.enter_context(storage_for(path).reading(path))  # so that retention does not remove it
        self._source = folder = SourceFiles(path, held)
        if not is_stock(path):
            return open_checkpoint(folder, StorageSource(path))
        found = SetsOfFiles(held).with_file(os.path.join(path, METADATA_NAME))
        if found is None:
            return open_stock(folder)
        return open_checkpoint(folder, found[0], found[1].removesuffix(METADATA_NAME))

    @without_gc
    def plan(self, state: StoredState, selection: Selection) -> _Planned:
        """Lay out the selected values."""
        if self._to == "hf":
            if not selection.tensors:
                raise MismatchError("there are no tensors in it", path=state.path)
            plans, small = plan_safetensors(selection, self._most)
            if taken := self._extra.keys() & {*small, *(plan.name for plan in plans)}:
                raise UnsavableStateError(f"{min(taken)!r} is written by the export: leave it out of what is copied")
            return _Planned(state, selection, plans, small, None)
        check_nesting(selection.keys, state.path)
        pickles = state.pickles(selection.objects.values())
        if self._to == "dcp":
            checkpoint = CheckpointTarget(selection, pickles)
            return _Planned(state, selection, [checkpoint.plan], {}, checkpoint)
        plan = plan_torch_file(selection, pickles, state.path, weights_only=self._weights_only)
        return _Planned(state, selection, [plan], {}, None)

    def write(self, planned: _Planned, place: str, bar: Progress) -> Exported:
        """Write the planned files to ``place``."""
        begun = time.perf_counter()
        state, selection, plans, small, checkpoint = planned
        beside, nbytes = sum(map(os.path.getsize, self._extra.values())), sum(plan.nbytes for plan in plans)
        bar.expect(nbytes)
        with output(place, nbytes + beside, is_file=self._to == "torch") as attempt:
            written = self._write_large(plans, state, attempt, bar)
            if checkpoint is not None:
                small = checkpoint.small_files(place, self._attempt)
                small[MANIFEST_NAME] = checkpoint.manifest(place, self._attempt, small, time.perf_counter() - begun)
            for name, data in small.items():
                _write_small(attempt, name, data)
            for name, source in self._extra.items():
                _copy(attempt, name, source)
            if self._source is not None:
                self._source.check_unchanged()
        is_hf = self._to == "hf"
        names = [plan.name or os.path.basename(place) for plan in plans]
        return Exported(
            source=state.path,
            path=place,
            files=[*names, *small, *self._extra],
            tensors=len(selection.tensors) - (len(selection.tied) if is_hf else 0),
            nbytes=written + beside + sum(map(len, small.values())),
            tied=selection.tied if is_hf else {},
            objects=list(selection.objects) if is_hf else (),
            tops=selection.tops if is_hf else (),
        )

    def _write_large(self, plans: Sequence[FilePlan], state: StoredState, attempt: OpenAttempt, bar: Progress) -> int:
        written = 0
        with read_pool(state.path) as readers:
            for plan in plans:
                with contextlib.closing(attempt.create(plan.name, large=True)) as file:
                    written += write(plan, state, file, readers, bar.update)
        return written


def _checkpoint_at(path: str) -> str:
    """Return the checkpoint at ``path``; for a root, its newest step. Raises ``CheckpointNotFoundError``."""
    if storage_for(path).exists(os.path.join(path, MANIFEST_NAME)) or is_stock(path) or not named_steps(path):
        return path
    if (step := newest_step(path)) is None:
        raise CheckpointNotFoundError("there is no checkpoint here yet", path=path)
    find_step(step, 0.0, path)  # otherwise this raises an error with the existing steps
    return step_folder(path, step)


def _write_small(attempt: OpenAttempt, name: str, data: bytes) -> None:
    with contextlib.closing(attempt.create(name, large=False)) as file:
        file.write(memoryview(data), 0)
        file.sync()


def _copy(attempt: OpenAttempt, name: str, source: str) -> None:
    """Copy a file into the output folder."""
    with contextlib.closing(attempt.create(name, large=False)) as file, translated("copying a file", source):
        with open(source, "rb") as its:
            at = 0
            while data := its.read(_COPY_BYTES):
                file.write(memoryview(data), at)
                at += len(data)
        file.sync()
