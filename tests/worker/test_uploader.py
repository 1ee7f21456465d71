"""The uploader by itself: what it copies, checks, holds and passes over; the root may be slow, or refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    SaveTimeoutError,
    StorageError,
    WorkerDiedError,
)
from asyncckpt.loading.source import read_manifest, verify
from asyncckpt.worker import uploader
from asyncckpt.worker.storage import complete_steps, storage_for
from asyncckpt.worker.storage.history import prune
from asyncckpt.worker.storage.local import LocalStorage
from asyncckpt.worker.storage.partial import PartialFolder
from asyncckpt.worker.uploader import Uploader, copy_checkpoint
from asyncckpt.worker.uploads import OpenUploads, Upload, UploadEnded


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 to 4, whose files have several spans."""
    folder = tmp_path / "local"
    with Checkpointer(folder) as checkpointer:
        for step in range(1, 5):
            state = {"large": torch.full((5 << 20,), float(step)), "small": torch.ones(3), "step": step}
            checkpointer.save(step, state).result(60)
    return folder


@pytest.fixture
def told() -> list[UploadEnded]:
    return []


def upload_of(local: Path, root: Path, step: int, *, keep: bool = False, keep_last: int | None = None) -> Upload:
    name = f"step-{step:08d}"
    return Upload(str(local / name), str(root / name), step, False, keep_last, keep, 600.0)


class SlowStorage(LocalStorage):
    """Storage where no attempt begins until that is allowed."""

    def __init__(self, allowed: threading.Event) -> None:
        super().__init__()
        self.begun = threading.Event()
        self._allowed = allowed

    def begin_checkpoint(self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None) -> PartialFolder:
        self.begun.set()
        assert self._allowed.wait(60)
        return super().begin_checkpoint(final, attempt, nbytes, orphan_s)


def test_a_copy_is_the_checkpoint(local: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "_READ_BYTES", 1 << 20)  # spans of 8 MiB end in the middle of what is read
    copy_checkpoint(upload_of(local, root, 2, keep=True), storage_for)
    one, other = (read_manifest(str(folder / "step-00000002")) for folder in (local, root))
    assert (one.files, one.created, one.step) == (other.files, other.created, other.step) and other.keep
    assert one.attempt != other.attempt
    assert not verify(str(root / "step-00000002")).damages
    copy_checkpoint(upload_of(local, root, 2), storage_for)  # it is there already: that is no error
    assert [each.name for each in root.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_0.index.json", ".metadata", "asyncckpt.json"])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.99])
def test_damage_is_not_copied(local: Path, root: Path, name: str, where: float) -> None:
    file = local / "step-00000001" / name
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError) as caught:
        copy_checkpoint(upload_of(local, root, 1), storage_for)
    assert name in str(caught.value)
    if name == "__0_0.distcp":
        assert "large" in str(caught.value) or where > 0.9
        data[int(len(data) * where)] ^= 1
        file.write_bytes(data[:-5000])
        with pytest.raises(DamagedCheckpointError, match="shorter"):
            copy_checkpoint(upload_of(local, root, 1), storage_for)
    assert not root.exists() or not list(root.iterdir())


@pytest.mark.parametrize("call", ["create", "names", "finalize"])
def test_nothing_is_left_of_one_that_fails(
    local: Path, root: Path, told: list[UploadEnded], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no space left", path=str(root))

    with closing(Uploader(storage_for, told.append)) as each, monkeypatch.context() as patch:
        patch.setattr(PartialFolder, call, refuse)
        each.add(upload_of(local, root, 1))
        each.close()
        assert isinstance(told[0].error, StorageError) and told[0].error.step == 1 and not list(root.iterdir())
        patch.undo()
        each.add(upload_of(local, root, 1))
    assert told[1] == UploadEnded(str(root / "step-00000001"), None) and complete_steps(str(root)) == [1]


def test_what_waits_makes_way_and_is_held_until_then(local: Path, root: Path, told: list[UploadEnded]) -> None:
    allowed = threading.Event()
    slow = SlowStorage(allowed)

    def choose(path: str) -> LocalStorage:
        return slow if path.startswith(str(root)) else LocalStorage()

    with closing(Uploader(choose, told.append)) as each:
        each.add(upload_of(local, root, 1, keep_last=2))
        assert slow.begun.wait(60)
        each.add(upload_of(local, root, 2, keep=True, keep_last=2))
        each.add(upload_of(local, root, 3, keep_last=2))
        each.add(upload_of(local, root, 4, keep_last=2))
        assert told == [UploadEnded(str(root / "step-00000003"), None)]
        prune(str(local), 1, lambda _: False)
        assert complete_steps(str(local)) == [1, 2, 4]  # 3 is nobody's any more
        allowed.set()
    assert [each.error for each in told] == [None] * 4 and complete_steps(str(root)) == [2, 4]
    prune(str(local), 1, lambda _: False)
    assert complete_steps(str(local)) == [4]
    each.add(upload_of(local, root, 3))
    assert isinstance(told[-1].error, CheckpointNotFoundError)


@pytest.fixture
def waits() -> Iterator[Callable[[OpenUploads], CheckpointError | None]]:
    def wait(uploads: OpenUploads) -> CheckpointError | None:
        try:
            uploads.wait(0.01)
        except CheckpointError as error:
            return error
        return None

    yield wait


def test_what_a_trainer_knows_of_them(waits: Callable[[OpenUploads], CheckpointError | None]) -> None:
    one, two, three = (upload_of(Path("/local"), Path("/root"), step) for step in (1, 2, 3))
    uploads = OpenUploads()
    uploads.add(7, (one,))
    assert isinstance(waits(uploads), SaveTimeoutError)
    uploads.on_end(one.to, None)
    assert waits(uploads) is None
    uploads.add_overdue(one)
    assert isinstance(waits(uploads), WorkerDiedError) and uploads.overdue() == (one,)
    uploads.add(8, (one, two))
    assert uploads.overdue() == ()
    uploads.on_failed_save(8, two.path)  # nothing of it was begun
    assert uploads.overdue() == (one,)
    uploads.add(9, (one, three))
    uploads.on_exit()
    assert set(uploads.overdue()) == {one, three}
    uploads.add(10, uploads.overdue())
    uploads.on_end(one.to, StorageError("refused"))
    uploads.on_end(three.to, CheckpointExistsError("taken"))
    assert isinstance(waits(uploads), CheckpointExistsError)  # that cannot be mended, and is told once
    assert isinstance(waits(uploads), StorageError) and uploads.overdue() == (one,)
    uploads.add(11, uploads.overdue())
    uploads.on_end(one.to, None)
    assert waits(uploads) is None
