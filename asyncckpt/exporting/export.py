"""Export a checkpoint to safetensors, to files of ``torch.save``, or to another checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch

from asyncckpt.errors import CheckpointNotFoundError, MismatchError
from asyncckpt.exporting.batches import FilePlan
from asyncckpt.exporting.checkpoint_source import open_checkpoint
from asyncckpt.exporting.copying import write
from asyncckpt.exporting.dcp_target import CheckpointTarget
from asyncckpt.exporting.output import output, place_for
from asyncckpt.exporting.rank_files_target import plan_rank_files
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
from asyncckpt.format.manifest import MANIFEST_NAME
from asyncckpt.loading.contents import source_at
from asyncckpt.loading.data_file import read_pool
from asyncckpt.loading.progress import Progress
from asyncckpt.loading.source import find_step, stock_kind
from asyncckpt.storage import absolute, named_steps, step_folder, storage_for
from asyncckpt.storage.history import newest_step
from asyncckpt.threads import without_gc

Target = Literal["hf", "torch", "dcp", "torch_checkpointing"]


@dataclass(frozen=True)
class Exported:
    """Result of an export: ``nbytes`` in ``files`` at ``path``, from the checkpoint ``source``.

    Safetensors leave out tied tensors and objects. ``tied`` has the names of these tensors, each with the exported name
    that has the same bytes. ``objects`` has the names of the objects. ``tops`` are the top-level keys that begin the
    names in safetensors.
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
    weights_only: bool = True,
    progress: bool = False,
) -> Exported:
    """Write a stored state in another form, tensor by tensor, with little memory.

    Checksums are compared if there are any. ``out`` appears once it is complete and durable. An existing file or folder
    is never replaced.

    Args:
        path: A checkpoint of asyncckpt, of stock DCP or of torch_checkpointing, or a root, to export its newest step.
        out: For "torch" a file, otherwise a folder. A "dcp" folder with the name of a step becomes that step of its
            root.
        to: "hf": safetensors with an index, as ``from_pretrained`` reads them, tensors only. "torch": one file that
            ``torch.load`` reads. "dcp": a checkpoint that ``Checkpointer.load`` and stock DCP read.
            "torch_checkpointing": a checkpoint that PyTorch's ``torch_checkpointing`` reads.
        dtype: The new type of floating point tensors, except types of one byte: "bf16", "fp16" or "fp32".
        only: The key of the part of the state dict to export, such as "model", or several keys joined by dots. The
            export removes these keys from the names.
        rename: New names, applied after ``only``: "PATTERN=REPLACEMENT" as for ``re.sub``, the path of a JSON file with
            new names by old names, a dict of them, or a function.
        max_shard_size: For "hf": maximum bytes of a file, such as "5GB", the default.
        weights_only: For "torch" and "torch_checkpointing": refuse values that could run code while they are unpickled.
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
    if to not in get_args(Target):
        raise ValueError(f"to={to!r}: it is one of {', '.join(get_args(Target))}")
    if to != "hf" and max_shard_size is not None:
        raise ValueError(f"max_shard_size is for to='hf', and not for {to!r}")
    most = parse_bytes("5GB" if max_shard_size is None else max_shard_size)
    new_name, new_dtype = renaming(rename), dtype_of(dtype)
    place = place_for(out, is_file=to == "torch")
    with Progress("exporting", shown=progress) as bar, contextlib.ExitStack() as held:
        source = _checkpoint_at(absolute(path))
        held.enter_context(storage_for(source).reading(source))  # so that retention does not remove it
        folder = SourceFiles(source, held)
        state = _open(folder, held)
        selection = select(state, only, new_name, new_dtype)
        planned = _plan(state, selection, to, most, weights_only=weights_only)
        return _write(planned, state, selection, folder, place, to, bar)


class _Planned(NamedTuple):
    """The files to write: large files, ``small`` files beside them, and the files of a ``checkpoint``.

    The files of a checkpoint are known only after the large file is written.
    """

    plans: Sequence[FilePlan]
    small: dict[str, bytes] = {}
    checkpoint: CheckpointTarget | None = None


@without_gc
def _open(folder: SourceFiles, held: contextlib.ExitStack) -> StoredState:
    """Open the stored state of a checkpoint, or of a folder of DCP in a set of files."""
    source = source_at(folder.folder, held)
    return open_stock(folder) if source is None else open_checkpoint(folder, source)


@without_gc
def _plan(state: StoredState, selection: Selection, to: Target, most: int, *, weights_only: bool) -> _Planned:
    """Lay out the selected values. ``most``: see ``plan_safetensors``."""
    if to == "hf":
        if not selection.tensors:
            raise MismatchError("the state to export has no tensors", path=state.path)
        return _Planned(*plan_safetensors(selection, most))
    check_nesting(selection.keys, state.path)
    pickles = state.pickles(selection.objects.values())
    if to == "dcp":
        checkpoint = CheckpointTarget(selection, pickles)
        return _Planned([checkpoint.plan], checkpoint=checkpoint)
    if to == "torch_checkpointing":
        return _Planned(*plan_rank_files(selection, pickles, state.path, weights_only=weights_only))
    return _Planned([plan_torch_file(selection, pickles, state.path, weights_only=weights_only)])


def _write(
    planned: _Planned,
    state: StoredState,
    selection: Selection,
    folder: SourceFiles,
    place: str,
    to: Target,
    bar: Progress,
) -> Exported:
    """Write the planned files to ``place``."""
    begun = time.perf_counter()
    plans, small, checkpoint = planned
    nbytes = sum(plan.nbytes for plan in plans)
    bar.expect(nbytes)
    written = 0
    with output(place, nbytes, is_file=to == "torch") as attempt:
        with read_pool(state.path) as readers:
            for plan in plans:
                with contextlib.closing(attempt.create(plan.name, large=True)) as file:
                    written += write(plan, state, file, readers, bar.update)
        if checkpoint is not None:
            name = f"{secrets.token_hex(6)}-0"
            small = checkpoint.small_files(place, name)
            small[MANIFEST_NAME] = checkpoint.manifest(place, name, small, time.perf_counter() - begun)
        for name, data in small.items():
            with contextlib.closing(attempt.create(name, large=False)) as file:
                file.write(memoryview(data), 0)
                file.sync()
        folder.check_unchanged()
    is_hf = to == "hf"
    return Exported(
        source=state.path,
        path=place,
        files=[*(plan.name or os.path.basename(place) for plan in plans), *small],
        tensors=len(selection.tensors) - (len(selection.tied) if is_hf else 0),
        nbytes=written + sum(map(len, small.values())),
        tied=selection.tied if is_hf else {},
        objects=list(selection.objects) if is_hf else (),
        tops=selection.tops if is_hf else (),
    )


def _checkpoint_at(path: str) -> str:
    """Return the checkpoint at ``path``; for a root, its newest step. Raises ``CheckpointNotFoundError``."""
    has_manifest = storage_for(path).exists(os.path.join(path, MANIFEST_NAME))
    if has_manifest or stock_kind(path) is not None or not named_steps(path):
        return path
    if (step := newest_step(path)) is None:
        raise CheckpointNotFoundError("there is no checkpoint here yet", path=path)
    find_step(step, path)  # if the newest step lacks its manifest, raise an error that names the complete steps
    return step_folder(path, step)
