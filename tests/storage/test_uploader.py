"""The uploader alone: it copies, checks, keeps and skips checkpoints, also if the root is slow or fails."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import complete_steps, read_manifest, verify

from asyncckpt import Checkpointer
from asyncckpt.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StorageError,
)
from asyncckpt.extension import MANIFEST_NAME, storage_for
from asyncckpt.format.manifest import UPLOADED_NAME, Upload
from asyncckpt.storage import uploader as uploader_module
from asyncckpt.storage.history import prune
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.partial import PartialFolder
from asyncckpt.storage.storage import Storage
from asyncckpt.storage.uploader import Uploader, copy_checkpoint
from asyncckpt.storage.uploads import wait_for_uploads


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 to 4. Their files have several spans."""
    folder = tmp_path / "local"
    with Checkpointer(folder) as checkpointer:
        for step in range(1, 5):
            state = {"large": torch.full((5 << 20,), float(step)), "small": torch.ones(3), "step": step}
            checkpointer.save(step, state).result(60)
    return folder


def wanted(
    local: Path,
    root: Path,
    step: int,
    *,
    keep: bool = False,
    must: bool = False,
    keep_last: int | None = None,
    sets_aside: bool = False,
) -> str:
    """Mark a local checkpoint for upload in its manifest. Return its folder."""
    folder = local / f"step-{step:08d}"
    upload = Upload(str(root / folder.name), sets_aside, must, keep_last, keep, 600.0)
    manifest = replace(read_manifest(str(folder)), upload=upload)
    (folder / MANIFEST_NAME).write_bytes(manifest.encode())
    return str(folder)


class SlowStorage(LocalStorage):
    """Storage that blocks the begin of each attempt until ``allowed`` is set."""

    def __init__(self, allowed: threading.Event) -> None:
        super().__init__()
        self.begun = threading.Event()
        self._allowed = allowed

    def begin_checkpoint(
        self, final: str, attempt: str, nbytes: int, orphan_s: float | None = None, **options: int
    ) -> PartialFolder:
        self.begun.set()
        assert self._allowed.wait(60)
        return super().begin_checkpoint(final, attempt, nbytes, orphan_s)


def test_a_copy_is_the_checkpoint(local: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "_READ_BYTES", 1 << 20)  # spans of 8 MiB end in the middle of a read
    copy_checkpoint(wanted(local, root, 2, keep=True), storage_for)
    one, other = (read_manifest(str(folder / "step-00000002")) for folder in (local, root))
    assert (one.files, one.created, one.step) == (other.files, other.created, other.step) and other.keep
    assert one.attempt != other.attempt
    assert not verify(str(root / "step-00000002")).damages
    copy_checkpoint(wanted(local, root, 2), storage_for)  # an existing copy is no error
    assert [each.name for each in root.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0_0.index.json", ".metadata", "asyncckpt.json"])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.99])
def test_damage_is_not_copied(local: Path, root: Path, name: str, where: float) -> None:
    file = local / "step-00000001" / name
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError) as caught:
        copy_checkpoint(wanted(local, root, 1), storage_for)
    assert name in str(caught.value)
    if name == "__0_0.distcp":
        assert "large" in str(caught.value) or where > 0.9
        data[int(len(data) * where)] ^= 1
        file.write_bytes(data[:-5000])
        with pytest.raises(DamagedCheckpointError, match="shorter"):
            copy_checkpoint(wanted(local, root, 1), storage_for)
    assert not root.exists() or not list(root.iterdir())


@pytest.fixture
def uploader_of(local: Path) -> Iterator[Callable[..., Uploader]]:
    """A function that makes an uploader. The uploader is closed at the end."""
    with contextlib.ExitStack() as held:

        def make(storage: Callable[[str], Storage] = storage_for) -> Uploader:
            return held.enter_context(closing(Uploader(str(local), storage)))

        yield make


def upload(uploader: Uploader, *folders: str) -> None:
    """Begin the uploads of the checkpoints in ``folders``, as after a commit."""
    assert folders
    uploader.begin()


def outcome(uploader: Uploader) -> CheckpointError | None:
    """Wait for all uploads. Return the error, or None if all have succeeded."""
    try:
        wait_for_uploads(uploader.under_way, 60)
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("call", ["create", "names", "finalize"])
def test_what_fails_leaves_nothing_and_is_tried_again(
    local: Path, root: Path, uploader_of: Callable[..., Uploader], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no space left", path=str(root))

    monkeypatch.setattr(uploader_module, "_RETRY_S", 0.1)
    uploader = uploader_of()
    with monkeypatch.context() as patch:
        patch.setattr(PartialFolder, call, refuse)
        upload(uploader, wanted(local, root, 1))
        for _ in range(2):
            error = outcome(uploader)
            assert isinstance(error, StorageError) and error.step == 1
    while outcome(uploader) is not None:
        pass
    assert os.listdir(root) == ["step-00000001"] and not uploader.needs(1)


def test_what_waits_makes_way_and_stays_until_then(
    local: Path, root: Path, uploader_of: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    allowed = threading.Event()
    slow = SlowStorage(allowed)
    uploader = uploader_of(lambda path: slow if path.startswith(str(root)) else LocalStorage())
    upload(uploader, wanted(local, root, 1, keep_last=2))
    assert slow.begun.wait(60)
    upload(uploader, wanted(local, root, 2, must=True, keep_last=2), wanted(local, root, 3, keep_last=2))
    upload(uploader, wanted(local, root, 4, keep_last=2))
    prune(str(local), 1, uploader.needs)
    assert complete_steps(str(local)) == [1, 2, 3, 4]
    allowed.set()
    assert outcome(uploader) is None and complete_steps(str(root)) == [2, 4]
    assert "00000003 is not uploaded, as uploads take too long" in caplog.text
    prune(str(local), 1, uploader.needs)
    assert complete_steps(str(local)) == [4]


def test_a_step_that_is_saved_again_meanwhile(
    local: Path, root: Path, uploader_of: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    """The new checkpoint is uploaded, too, whether or not the upload of the old one succeeds."""
    allowed = threading.Event()
    slow = SlowStorage(allowed)
    uploader = uploader_of(lambda path: slow if path.startswith(str(root)) else LocalStorage())
    upload(uploader, wanted(local, root, 4))
    assert slow.begun.wait(60)
    with Checkpointer(local) as checkpointer:
        checkpointer.load({"small": torch.zeros(3)}, step=1)
        checkpointer.save(4, {"small": torch.full((3,), 8.0)}).result(60)
    upload(uploader, wanted(local, root, 4, sets_aside=True))
    allowed.set()
    while complete_steps(str(root)) != [4]:
        outcome(uploader)
    assert outcome(uploader) is None and not verify(str(root / "step-00000004")).damages
    assert read_manifest(str(root / "step-00000004")).created == read_manifest(str(local / "step-00000004")).created


def test_one_worker_at_a_time_uploads(local: Path, root: Path, uploader_of: Callable[..., Uploader]) -> None:
    """Another worker continues after the first worker, and removes no checkpoint that others have saved since."""
    allowed = threading.Event()
    slow = SlowStorage(allowed)
    one = uploader_of(lambda path: slow if path.startswith(str(root)) else LocalStorage())
    upload(one, wanted(local, root, 1, keep_last=1))
    assert slow.begun.wait(60)
    one.trainer_gone()
    other = uploader_of()
    upload(other, wanted(local, root, 2))
    assert len(other.under_way().to) == 2 and not root.exists()
    allowed.set()
    assert outcome(other) is None and complete_steps(str(root)) == [1, 2]


def test_the_next_worker_uploads_what_is_left(local: Path, root: Path, uploader_of: Callable[..., Uploader]) -> None:
    for step in (3, 4):
        wanted(local, root, step, must=True)
    (local / "step-00000004" / UPLOADED_NAME).write_text("another attempt")  # the marker of an older checkpoint
    uploader = uploader_of()
    assert outcome(uploader) is None and complete_steps(str(root)) == [3, 4]


def test_of_two_workers_that_end_one_uploads_the_last(
    local: Path, root: Path, uploader_of: Callable[..., Uploader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older worker has found no more work, but still holds the lock. It must upload the newer worker's step."""
    has_looked, may_go_on, find_next = threading.Event(), threading.Event(), Uploader._next

    def next_of(uploader: Uploader) -> object:
        found = find_next(uploader)
        if uploader is older and found is None:
            has_looked.set()
            assert may_go_on.wait(60)
        return found

    monkeypatch.setattr(Uploader, "_next", next_of)
    older = uploader_of()
    upload(older, wanted(local, root, 1))
    ending = threading.Thread(target=older.close)
    ending.start()
    assert has_looked.wait(60)
    newer = uploader_of()
    upload(newer, wanted(local, root, 2))
    newer.close()
    may_go_on.set()
    ending.join(60)
    assert complete_steps(str(root)) == [1, 2]


def test_a_damaged_checkpoint_of_a_worker_that_died_keeps_no_other(
    local: Path, root: Path, uploader_of: Callable[..., Uploader]
) -> None:
    wanted(local, root, 4)
    (local / "step-00000004" / MANIFEST_NAME).write_text("{")
    uploader = uploader_of()
    upload(uploader, wanted(local, root, 3))
    assert outcome(uploader) is None and complete_steps(str(root)) == [3]


def test_a_marker_that_cannot_be_written(
    local: Path, root: Path, uploader_of: Callable[..., Uploader], caplog: pytest.LogCaptureFixture
) -> None:
    """The local disk is full. This worker remembers that the upload is done, and the next worker finds out."""
    uploader = uploader_of()
    (marker := Path(wanted(local, root, 3, must=True)) / UPLOADED_NAME).mkdir()
    upload(uploader, wanted(local, root, 4, must=True))
    assert outcome(uploader) is None and complete_steps(str(root)) == [3, 4] and not uploader.needs(3)
    assert caplog.text.count("step 3 may be uploaded again") == 1
    uploader.close()
    marker.rmdir()
    assert outcome(uploader_of()) is None and marker.read_text() == read_manifest(str(marker.parent)).attempt


def test_a_marker_of_a_skipped_step_that_cannot_be_written_keeps_no_other(
    local: Path, root: Path, uploader_of: Callable[..., Uploader]
) -> None:
    uploader = uploader_of()
    (Path(wanted(local, root, 3)) / UPLOADED_NAME).mkdir()
    upload(uploader, wanted(local, root, 4))
    assert outcome(uploader) is None and complete_steps(str(root)) == [4]
