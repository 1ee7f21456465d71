"""Checkpoints in storage: list them, tell their kind, and read their files with checksums.

This module works without torch, and unpickles nothing.
"""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, Protocol
from weakref import WeakValueDictionary

from asyncckpt.budgets import POLL_S
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MismatchError,
    StorageError,
)
from asyncckpt.format.index import Index
from asyncckpt.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, checksum, is_index
from asyncckpt.link.root_lock import LOCK_NAME, is_finishing
from asyncckpt.loading.data_file import CheckedFile, CheckedFiles, ChecksummedFile, StoredFile, distrusted, read_pool
from asyncckpt.storage import absolute, complete_steps, split_place, step_folder, step_of, storage_for
from asyncckpt.storage.history import history, stored_step
from asyncckpt.storage.storage import InputFile

logger = logging.getLogger(__name__)

_SOME = 4  # maximum number of checkpoints that an error names


# Maximum number of saves that a dead trainer can have staged for its worker: some slots for each structure.
_MOST_STAGED = 8
# The metadata of torch_checkpointing, and its files of ranks.
RANKS_METADATA_NAME = "metadata.pkl"
_RANK_FILE = re.compile(r".+_\d+\.pt")
# The weights of Hugging Face: an index that names several files, or one file.
HF_INDEX_NAME, HF_NAME = "model.safetensors.index.json", "model.safetensors"
# Files that mark a checkpoint: of this library, of stock DCP, of Hugging Face's Trainer.
_MARKS = (MANIFEST_NAME, METADATA_NAME, "trainer_state.json")


def check_root(root: str) -> None:
    """Raise ``CheckpointExistsError`` if ``root`` is itself a checkpoint, or holds only checkpoints of other kinds.

    A training would find nothing to load there. The training would begin at step 0, inside a checkpoint, or beside
    checkpoints that the user meant to load.
    """
    storage = storage_for(root)
    if _is_checkpoint(root):
        raise CheckpointExistsError(
            "this is a checkpoint, and a Checkpointer takes the folder that holds the checkpoints: give it"
            f" {os.path.dirname(root)}; asyncckpt.load reads one checkpoint by its own path",
            path=root,
        )
    names = storage.names_in(root)
    if LOCK_NAME in names or any(step_of(name) is not None for name in names):
        return
    other = next((name for name in sorted(names) if name[0] != "." and _is_checkpoint(os.path.join(root, name))), None)
    if other is not None:
        raise CheckpointExistsError(
            f"there are checkpoints here that no Checkpointer has saved, such as {other}, and it would load none of"
            " them: choose another folder; asyncckpt.load reads one that DCP has saved by its own path",
            path=root,
        )


def _is_checkpoint(folder: str) -> bool:
    storage = storage_for(folder)
    return any(storage.exists(os.path.join(folder, mark)) for mark in _MARKS)


def wait_for_attempts(root: str, timeout: float, locked: str | None = None) -> None:
    """Wait until no worker writes under ``root``.

    A dead trainer's worker may be about to finalize a checkpoint, or to begin one. A wait is logged. The worker of a
    live trainer may write for ever, so the wait ends after as many attempts as a dead trainer can have staged. Raises
    ``StorageError`` after ``timeout`` seconds.

    ``locked``: the folder that a saver to ``root`` locks; None: ``root``.
    """
    storage, deadline = storage_for(root), time.monotonic() + timeout
    known: set[str] = set()
    is_told = False
    while (attempts := storage.attempts_under_way(root)) or is_finishing(locked or root):
        if len(known) < _MOST_STAGED:
            known.update(attempts)
        elif attempts and known.isdisjoint(attempts):
            return
        if not is_told:
            logger.warning("the load waits until a worker has written the staged saves under %s", root)
            is_told = True
        if time.monotonic() >= deadline:
            raise StorageError(
                f"a worker is still writing here after {timeout:g} s; wait for it, or name the step to load",
                path=attempts[0] if attempts else root,
            )
        time.sleep(POLL_S)


def find_step(step: int | None, *places: str, root: str | None = None) -> list[tuple[int, str]]:
    """Return the step and the root of each copy of ``step``, the nearest first. None: find the newest step.

    Args:
        step: The step.
        places: The places to look at, the nearest first, see ``split_place``.
        root: The root of the run, for errors; None: the only place.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint. Raises as ``check_root``, too.
        StorageError: Storage cannot be read.
    """
    root = root or places[-1]
    if step is None:
        found = history(*places)
        if not found:
            check_root(root)
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=root)
        return [(found[-1].step, each) for each in found[-1].roots]
    roots = [its for its, only in map(split_place, places) if only in (None, step)]
    there = [its for its in roots if storage_for(its).exists(os.path.join(step_folder(its, step), MANIFEST_NAME))]
    if not there:
        known = ", ".join(map(str, complete_steps(*places)[-5:])) or "none"
        raise CheckpointNotFoundError(
            f"there is no such checkpoint; the newest are: {known}", path=step_folder(root, step), step=step
        )
    known_as = stored_step(step, *there) if there[1:] else None
    return [(step, its) for its in (there if known_as is None else known_as.roots)]


def is_stock(path: str) -> bool:
    """Return whether stock DCP wrote the checkpoint ``path``: it has DCP's metadata, and no manifest of this library.

    A folder with an index of this library is not of stock DCP, even without a manifest. In this case the manifest was
    lost, or another checkpoint is just replacing this checkpoint, file by file. DCP would load these bytes unchecked.
    """
    storage = storage_for(path)
    if storage.exists(os.path.join(path, MANIFEST_NAME)) or not storage.exists(os.path.join(path, METADATA_NAME)):
        return False
    return not any(map(is_index, storage.names_in(path)))


def has_rank_files(names: Iterable[str], read: Callable[[str], bytes]) -> bool:
    """Return whether these files are a checkpoint of torch_checkpointing with metadata.

    Without metadata, the files of ranks could be files of steps or epochs just as well. Files of safetensors count if
    the metadata names one of them. ``read`` returns the bytes of a file.
    """
    own = set(names)
    if RANKS_METADATA_NAME not in own:
        return False
    if any(map(_RANK_FILE.fullmatch, own)):
        return True
    tensors = [name.encode() for name in own if name.endswith(".safetensors")]
    metadata = read(RANKS_METADATA_NAME) if tensors else b""
    return any(name in metadata for name in tensors)


def stock_kind(path: str) -> Literal["dcp", "torch_checkpointing", "huggingface"] | None:
    """Return which other library wrote the checkpoint ``path``; None: this library did, or there is no checkpoint.

    A folder with steps, or with Hugging Face's weights and checkpoints, is a root.
    """
    if is_stock(path):
        return "dcp"
    storage = storage_for(path)
    if storage.exists(os.path.join(path, MANIFEST_NAME)):
        return None
    names = storage.names_in(path)
    if any(step_of(name) is not None for name in names):
        return None
    if has_rank_files(names, lambda name: storage.read(os.path.join(path, name))):
        return "torch_checkpointing"
    is_ours = any(map(is_index, names)) or METADATA_NAME in names
    is_other = is_ours or {HF_INDEX_NAME, HF_NAME}.isdisjoint(names) or checkpoints_in(path)
    return None if is_other else "huggingface"


def read_manifest(path: str) -> Manifest:
    """Return the manifest of the checkpoint ``path``. Its step must match the name of the folder.

    Raises ``CheckpointNotFoundError`` if there is no checkpoint, ``DamagedCheckpointError``, ``StorageError``.
    """
    storage, name = storage_for(path), os.path.join(path, MANIFEST_NAME)
    if storage.exists(name):
        manifest, step = Manifest.parse(storage.read(name), name), step_of(path)
        if step is None or manifest.step in (None, step):
            return manifest
        raise DamagedCheckpointError(
            f"this is the checkpoint of step {manifest.step}, under the name of step {step}: it was renamed,"
            " or copied here; rename it back, or remove it",
            path=path,
            step=step,
        )
    if is_stock(path):
        raise DamagedCheckpointError(
            f"there is no {MANIFEST_NAME} beside {METADATA_NAME}: it was removed, or another program wrote this"
            " (then torch.distributed.checkpoint loads it, and nothing can verify it)",
            path=path,
        )
    if storage.exists(os.path.join(path, METADATA_NAME)):
        raise DamagedCheckpointError(
            f"asyncckpt wrote this, and its manifest is missing: {MANIFEST_NAME} was removed, or another checkpoint is"
            " just taking the place of this one",
            path=path,
        )
    others = checkpoints_in(path)
    known = f"; in this folder are {', '.join(others[-_SOME:])}: name one" if others else ""
    raise CheckpointNotFoundError(f"there is no checkpoint here{known}", path=path)


def checkpoints_in(path: str) -> list[str]:
    """Return all checkpoints of this library directly in the folder ``path``, with any names, sorted by name."""
    storage = storage_for(path)
    # Folders without a manifest are attempts.
    if (stamps := storage.stamps_in(path, MANIFEST_NAME)) is not None:
        names = [name for name, stamp in stamps.items() if stamp is not None]
    else:
        names = [name for name in storage.names_in(path) if storage.exists(os.path.join(path, name, MANIFEST_NAME))]
    return [os.path.join(path, name) for name in sorted(names) if not name.startswith(".")]


def stands_there(path: str, attempt: str) -> Literal["still", "another", "none"]:
    """Return whether the checkpoint at ``path`` is still of the ``attempt``.

    Otherwise, wrong bytes do not show damage: a reader may have read parts of two checkpoints, or a part of one.
    """
    try:
        return "still" if read_manifest(path).attempt == attempt else "another"
    except CheckpointNotFoundError:
        return "none"
    except CheckpointError:
        return "still"


class Source(Protocol):
    """The files of one checkpoint, in storage or in memory."""

    @property
    def attempt(self) -> str:
        """Return the attempt that wrote the checkpoint."""

    def metadata(self) -> bytes:
        """Return DCP's ``.metadata``, after comparing its checksum."""

    def data_files(self) -> list[str]:
        """Return the names of the data files."""

    def open(self, name: str) -> ChecksummedFile:
        """Open the data file ``name``. The caller has to close it."""


class Candidate(ABC):
    """A checkpoint that a load tries: ``with candidate.tried(), candidate.opened() as source``.

    All ranks try the same checkpoint together.

    Attributes:
        step: The step.
        path: The folder of the checkpoint in storage.
        tier: Where the checkpoint is: the memory of workers, the folder in ``Config.local_root``, or the root.
        is_loaded: Whether the last trial raised no error.
        failure: Otherwise its error.
    """

    step: int
    path: str
    tier: Literal["memory", "local", "storage"]
    is_loaded = False
    failure: CheckpointError | None = None
    _expected: tuple[type[CheckpointError], ...] = (CheckpointNotFoundError, DamagedCheckpointError, StorageError)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Note whether the body loads the checkpoint. An error that shows the checkpoint to be unreadable ends here."""
        self.is_loaded, self.failure = False, None
        try:
            yield
            self.is_loaded = True
        except self._expected as error:
            self.failure = error
            # Their variables hold the states of the load. From Python 3.13 on the frames and the error form a cycle.
            traceback.clear_frames(error.__traceback__)

    def raise_failure(self) -> NoReturn:
        """Raise the error of the last trial, and keep no reference to it: its traceback has the states of the load."""
        failure, self.failure = self.failure, None
        if failure is None:
            raise CheckpointError("this checkpoint was not tried: please report this", path=self.path)
        try:
            raise failure
        finally:
            del failure

    @abstractmethod
    def opened(self) -> AbstractContextManager[Source | None]:
        """Open the checkpoint on all ranks. Raises an error of any rank on all ranks."""

    def nbytes_from(self) -> dict[str, int]:
        """Return the bytes read from each kind of memory, if there are several."""
        return {}


class StorageSource:
    """The checkpoint ``path`` in storage. All methods raise ``DamagedCheckpointError`` and ``StorageError``."""

    def __init__(self, path: str) -> None:
        """Read the ``manifest``. Also raises ``CheckpointNotFoundError``."""
        self.path = path
        self._metadata = b""
        # Each index is parsed once, and kept while a file uses it.
        self._indexes: WeakValueDictionary[str, Index] = WeakValueDictionary()
        self.manifest = read_manifest(path)
        self.attempt = self.manifest.attempt
        self._storage = storage_for(path)

    def metadata(self) -> bytes:
        """Return DCP's ``.metadata``. Also raises ``MismatchError`` if this is a set of files without ``.metadata``."""
        if METADATA_NAME not in self.manifest.files:
            some = ", ".join(list(self.manifest.files)[:4])
            raise MismatchError(f"this is no state dict, but a set of files: load these, as {some}", path=self.path)
        self._metadata = self._metadata or self.read(METADATA_NAME)
        return self._metadata

    def data_files(self) -> list[str]:
        """Return the names of the data files that ``.metadata`` may describe."""
        files = self.manifest.files.items()
        return [name for name, its in files if "index" in its and "/" not in name and name.endswith(".distcp")]

    def open(self, name: str, opened: Callable[[str], InputFile] | None = None) -> ChecksummedFile:
        """Open the data file ``name``. ``opened``: the function that opens a path; None: the function of storage."""
        if "index" not in self._facts(name):
            raise DamagedCheckpointError("this is no data file with an index", path=os.path.join(self.path, name))
        index, path = self.index(name), self._checked(name)
        return StoredFile((opened or self._storage.open)(path), index)

    def index(self, data: str) -> Index:
        """Return the index of the data file ``data``, after checking it."""
        facts = self._facts(data)
        path = os.path.join(self.path, name := facts["index"])
        if (index := self._indexes.get(name)) is None:
            index = self._indexes[name] = Index.parse(self.read(name), path)
        if (index.data, index.nbytes) != (data, facts["bytes"]):
            raise DamagedCheckpointError(
                f"this is the index of {index.data!r} with {index.nbytes:,} bytes, which is not the file beside it",
                path=path,
            )
        return index

    def indexes(self) -> Iterator[Index]:
        """Yield the indexes of all data files."""
        return map(self.index, self.manifest.data_files())

    def read(self, name: str) -> bytes:
        """Return all bytes of the small file ``name``, after comparing their checksum."""
        data = self._storage.read(path := self._checked(name))
        if f"{checksum(data):016x}" != self._facts(name).get("xxh3"):
            raise DamagedCheckpointError("the file is damaged: its checksum does not match", path=path)
        return data

    def _facts(self, name: str) -> Mapping[str, Any]:
        facts = self.manifest.files.get(name)
        if facts is None:
            raise DamagedCheckpointError(f"the manifest knows no {name}", path=self.path)
        return facts

    def _checked(self, name: str) -> str:
        """Return the path of the file ``name``, after comparing its size with the manifest."""
        written = self._facts(name)["bytes"]
        size = self._storage.size(path := os.path.join(self.path, name))
        if size is None:
            raise DamagedCheckpointError("a file of this checkpoint is missing", path=path)
        if size != written:
            more = distrusted(self.path, name)
            raise DamagedCheckpointError(
                f"the file is damaged: it has {size:,} bytes and was written with {written:,}{more}", path=path
            )
        return path

    def shared(self, name: str) -> CheckedFile | None:
        """Return the identity of file ``name``, with the checksum of its index; None: the file has no other name."""
        its = self._storage.identity(os.path.join(self.path, name))
        if its is None or its.links < 2:
            return None
        return CheckedFile(its.device, its.inode, self._facts(self._facts(name)["index"])["xxh3"])


class FolderSource(StorageSource):
    """A folder of DCP in a set of files, as a checkpoint of its own."""

    def __init__(self, path: str, folder: str) -> None:
        """Read the manifest of the set at ``path``. Raises as ``StorageSource`` does."""
        super().__init__(path)
        self._within = f"{folder}/"

    def metadata(self) -> bytes:
        return self.read(self._within + METADATA_NAME)

    def data_files(self) -> list[str]:
        names = (
            name.removeprefix(self._within) for name in self.manifest.data_files() if name.startswith(self._within)
        )
        return [name for name in names if "/" not in name and name.endswith(".distcp")]

    def open(self, name: str, opened: Callable[[str], InputFile] | None = None) -> ChecksummedFile:
        return super().open(self._within + name, opened)

    def index(self, data: str) -> Index:
        found = super().index(data)
        return replace(found, items=[item._replace(name=item.name.removeprefix(self._within)) for item in found.items])


@dataclass
class Report:
    """Result of ``verify``: ``nbytes`` checked, and an error for each damage, with its file.

    ``shared``: the part of ``nbytes`` in files that were checked before as files of another checkpoint (hard links),
    and were not read again.
    """

    path: str
    nbytes: int = 0
    damages: list[DamagedCheckpointError] = field(default_factory=list)
    shared: int = 0


def verify(
    path: str, progress: Callable[[int], object] = lambda nbytes: None, checked: CheckedFiles | None = None
) -> Report:
    """Check every byte of the checkpoint ``path``. Report all damages, each with file and tensor.

    Args:
        path: The checkpoint.
        progress: Called with the number of bytes checked since the last call.
        checked: Results for files that were checked with other checkpoints, if any. This function adds its results.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or it was removed during the check.
        StorageError: The checkpoint cannot be read.
    """
    path = absolute(path)
    report = Report(path)
    with storage_for(path).reading(path):
        try:
            source = StorageSource(path)
        except DamagedCheckpointError as error:
            report.damages.append(error)
            return report
        verify_files(source, source.manifest.files, report, progress, checked)
        found = stands_there(path, source.attempt) if report.damages else "still"
    if found == "none":
        raise CheckpointNotFoundError("the checkpoint was removed while it was checked", path=path)
    return verify(path, progress, checked) if found == "another" else report


def verify_files(
    source: StorageSource,
    names: Iterable[str],
    report: Report,
    progress: Callable[[int], object],
    checked: CheckedFiles | None = None,
) -> None:
    """Check every byte of the files ``names`` of a checkpoint, and add the result to ``report``.

    ``progress``, ``checked``: see ``verify``. Raises ``StorageError``.
    """
    checked = {} if checked is None else checked
    for name in names:
        facts = source.manifest.files[name]
        try:
            if "index" in facts:
                _verify_large(source, name, report, progress, checked)
            else:
                source.read(name)
                progress(facts["bytes"])
        except DamagedCheckpointError as error:
            if error.args not in [known.args for known in report.damages]:  # a damaged index is found twice
                report.damages.append(error)
        report.nbytes += facts["bytes"]


def _verify_large(
    source: StorageSource, name: str, report: Report, progress: Callable[[int], object], checked: CheckedFiles
) -> None:
    its = source.shared(name)
    if its is not None and its in checked:
        found = checked[its]
        nbytes = source.manifest.files[name]["bytes"]
        report.shared += nbytes
        progress(nbytes)
    else:
        found = _damages(source.path, source.open(name), progress)
        if its is not None:
            checked[its] = found
    more = distrusted(source.path, name) if found else ""
    path = os.path.join(source.path, name)
    report.damages += [DamagedCheckpointError(damage + more, path=path) for damage in found]


def _damages(path: str, file: ChecksummedFile, progress: Callable[[int], object]) -> list[str]:
    found = []
    with closing(file), read_pool(path) as pool:
        for run in file.read([(0, file.index.nbytes)], pool):
            found += [damage.message for damage in run.damages]
            progress(run.nbytes)
    return found
