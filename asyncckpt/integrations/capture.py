"""Capture the files that transformers, accelerate and peft write while they save, as one set of files.

The frameworks save as usual, but to a scratch folder instead of the checkpoint's folder. Calls of ``torch.save``,
safetensors and DCP with a path in the scratch folder write nothing. Their arguments are kept for the engine. All other
files are read from the scratch folder at the end, so no file of the frameworks is lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils import _pytree as pytree

from asyncckpt.config import Config
from asyncckpt.errors import StorageError, UnsavableStateError
from asyncckpt.extension import (
    Claim,
    FileSet,
    Pointer,
    Rotation,
    Save,
    absolute_path,
    engines,
    ranks_of,
    replace_or_set_aside,
    wait_for_attempts,
)

logger = logging.getLogger(__name__)


class SeenTensors:
    """The tensors of captured save calls. This class detects changes before the engine copies the tensors.

    Only tensors in dicts and lists are recorded. Other objects are not searched.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._elements: list[tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []

    def add(self, name: str, value: object) -> None:
        """Record the tensors of ``value``, which will be saved as ``name``."""
        tensors = [_local(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        tensors = [each for each in tensors if each.layout == torch.strided and each.numel() and not each.is_meta]
        self._seen += [(name, tensor, _form(tensor)) for tensor in tensors]
        # ``_version`` does not count changes through ``.data``, so compare elements, too. Compare all tensors, because
        # merging adapters changes only some of them.
        self._elements.append((name, tensors, _first_elements(tensors)))

    def changed(self) -> list[str]:
        """Return the names of values that have changed, or may have changed, since ``add``."""
        names = [name for name, tensor, form in self._seen if _form(tensor) != form]
        names += [
            name
            for name, tensors, elements in self._elements
            if not all(map(torch.equal, _first_elements(tensors), elements))
        ]
        return list(dict.fromkeys(names))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # the shard of a DTensor
    return local


def _form(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor, and the number of its in-place changes."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _first_elements(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of each tensor's first element, concatenated by device, to read each device only once."""
    found: dict[tuple[torch.device, type], list[torch.Tensor]] = {}
    for tensor in tensors:
        first = tensor.detach()[(0,) * tensor.dim()]
        # Viewing a quantized tensor as bytes crashes the process. torch refuses to view a conjugate tensor as bytes.
        first = first.int_repr() if first.is_quantized else first.resolve_conj().resolve_neg()
        first = first.reshape(1).view(torch.uint8)
        found.setdefault((first.device, type(first)), []).append(first)
    return [torch.cat(each) if len(each) > 1 else each[0].clone() for each in found.values()]


# Modules that refer to safetensors' save_file, and its name there. A module that is not imported is left alone.
_SAFETENSORS = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)
_LARGE = 64 << 20  # bytes; a larger file that was not staged is logged

_turn = threading.RLock()  # a capture replaces functions of the whole process, so only one may run at a time


class Capture:
    """The captured files of one folder. Only calls from the thread that made this object are captured."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Begin with no files.

        Args:
            folder: The scratch folder, used instead of the checkpoint's folder.
            kind: The kind of the set, see ``FileSet``.
        """
        self.folder = folder
        self.files = FileSet(kind)
        self._seen = SeenTensors()
        self._thread = threading.get_ident()

    def name_of(self, place: object) -> str | None:
        """Return the name in the set for a file or folder at ``place``.

        Return None if the place is outside the scratch folder, or if another thread calls.
        """
        if threading.get_ident() != self._thread or not isinstance(place, (str, os.PathLike)):
            return None
        path = Path(os.path.abspath(os.fspath(place)))
        return path.relative_to(self.folder).as_posix() if self.folder in path.parents else None

    def torch_save(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``torch.save`` that captures. Calls for other places go to ``stock``."""

        @functools.wraps(stock)
        def save(
            obj: object, f: Any, pickle_module: Any = pickle, pickle_protocol: int = 2, *more: Any, **and_: Any
        ) -> None:
            name = self.name_of(f)
            if name is None or pickle_module is not pickle or more or and_:
                stock(obj, f, pickle_module, pickle_protocol, *more, **and_)
            else:
                self.files.contents.pop(name, None)  # a second save to the same path replaces the first
                self.files.add_torch_file(name, obj, pickle_protocol)
                self._seen.add(name, obj)

        return save

    def save_file(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``safetensors.torch.save_file`` that captures. Calls for other places go to ``stock``."""

        @functools.wraps(stock)
        def save(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None) -> None:
            if (name := self.name_of(filename)) is None:
                stock(tensors, filename, metadata)
            else:
                self.files.contents.pop(name, None)
                self.files.add_safetensors(name, dict(tensors), metadata)
                self._seen.add(name, dict(tensors))

        return save

    def dcp_save(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``torch.distributed.checkpoint.save`` that captures. Calls for other places go to ``stock``."""

        @functools.wraps(stock)
        def save(state_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
            writer = options.get("storage_writer")
            place = options.get("checkpoint_id") or getattr(writer, "path", None)
            # A subclass of the writer may write other bytes.
            name = self.name_of(place) if type(writer) in (FileSystemWriter, NoneType) else None
            if name is None or args or set(options) - {"storage_writer", "checkpoint_id", "planner"}:
                return stock(state_dict, *args, **options)
            self.files.add_dcp_folder(name, state_dict, options.get("planner"))
            self._seen.add(name, state_dict)
            return None

        return save

    def take_written(self) -> None:
        """Add the files that the frameworks have written to the scratch folder themselves.

        Raises ``UnsavableStateError`` if a tensor has changed since it was captured.
        """
        if changed := self._seen.changed():
            raise UnsavableStateError(
                f"an object to be saved as {', '.join(changed)} was changed before all of the checkpoint was made;"
                " save copies of tensors that you change or move meanwhile"
            )
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                name, data = file.relative_to(self.folder).as_posix(), file.read_bytes()
                self.files.add_bytes(name, data)
                if len(data) > _LARGE:
                    logger.warning(
                        "%s, of %d bytes, is not staged: the training waited while it was written", name, len(data)
                    )


@contextlib.contextmanager
def capturing(name: str, kind: str = "") -> Iterator[Capture]:
    """Capture the files that this thread saves to ``Capture.folder``. After the block ``Capture.files`` has all files.

    Args:
        name: The name of the folder. It is the only entry of its parent folder.
        kind: The kind of the set, see ``FileSet``.
    """
    with _turn, tempfile.TemporaryDirectory(prefix="asyncckpt-", ignore_cleanup_errors=True) as root:
        capture = Capture(Path(os.path.realpath(root), name), kind)
        capture.folder.mkdir()
        with contextlib.ExitStack() as replacements:
            for owner, attribute, new in (
                (torch, "save", capture.torch_save),
                (torch.distributed.checkpoint, "save", capture.dcp_save),
                *((sys.modules.get(module), attribute, capture.save_file) for module, attribute in _SAFETENSORS),
            ):
                if owner is not None:
                    replacements.enter_context(replaced(owner, attribute, new(getattr(owner, attribute))))
            yield capture
        capture.take_written()
        _warn_of_others(capture.folder)


def _warn_of_others(folder: Path) -> None:
    """Warn about files beside the scratch folder, because they are lost."""
    beside = [each for each in folder.parent.iterdir() if each != folder]
    if others := [each.name for each in beside if each.is_file() or any(each.rglob("*"))]:
        logger.warning("files beside the folder of the checkpoint are not saved: %s", ", ".join(others))


def wait_for_dead_trainer(root: str, config: Config | None) -> None:
    """Wait on all ranks until the worker of a dead trainer has written its staged checkpoints to ``root``.

    This function finds only workers on the first rank's host, and only if their locks are visible. After
    ``Config.timeout`` seconds it logs a warning that training may resume from an older checkpoint.
    """
    try:
        wait = partial(wait_for_attempts, absolute_path(root), Config.given(config).timeout, _locked(root))
        ranks_of().from_first(wait)
    except StorageError as error:
        logger.warning("the training may resume from a checkpoint that is not the newest: %s", error)


def lock_for_worker(root: str, config: Config | None) -> None:
    """Make the first rank's worker hold the lock that ``wait_for_dead_trainer`` looks for, once it starts."""
    engines.get(config=config).claim(Claim(_locked(root), None))


def _locked(root: str) -> str:
    """Return the lock's name: an address, so that the lock file is in the runtime folder, which nothing uploads."""
    return f"file://{absolute_path(root)}"


def begin_save(
    place: str,
    capture: Capture,
    step: int | None,
    config: Config | None,
    *,
    pointer: Pointer | None = None,
    rotation: Rotation | None = None,
) -> Save:
    """Save the captured files, with all ranks, and return when the caller may change its tensors.

    Args:
        place: The folder. When the new checkpoint is durable, it replaces an older checkpoint of ours. Any other
            contents, such as a checkpoint of transformers, are then renamed and never deleted, because they may be the
            only copy.
        capture: The captured files.
        step: The training step of the checkpoint.
        config: Config of the job's engine, if this is its first save.
        pointer, rotation: As for ``Engine.save``.

    Raises:
        CheckpointError: As ``Engine.save`` raises.
    """
    engine, place = engines.get(config=config), absolute_path(place)
    save = engine.save(
        place, capture.files, step=step, existing=replace_or_set_aside(place), pointer=pointer, rotation=rotation
    )
    save.synchronize_staging(engine.config.timeout)
    return save


@contextlib.contextmanager
def told_to_all(place: str, step: int | None, config: Config | None) -> Iterator[None]:
    """Fail the save on all ranks if the block, which prepares it, raises. Otherwise the other ranks would wait.

    Args: as for ``begin_save``.
    """
    try:
        yield
    except Exception as error:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            files = FileSet()
            files.fail(error)
            with contextlib.suppress(Exception):
                engines.get(config=config).save(absolute_path(place), files, step=step, existing="set aside")
        raise


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set attribute ``name`` of ``owner`` for the block, then restore it. The class may have the old value."""
    own = vars(owner)
    before = own.get(name, replaced)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own.get(name) is value:  # otherwise keep the newer replacement by other code
            if before is replaced:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
