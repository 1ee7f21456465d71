"""Test failures of an export: one error that says where, and no output that looks complete."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import ranks
from support.checkpoints import step_folder
from support.shards import save_shards
from support.states import same
from torch.distributed.checkpoint.filesystem import FileSystemReader

from asyncckpt import Checkpointer, async_save, export
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, DamagedCheckpointError, StorageError
from asyncckpt.exporting import batches, copying, output
from asyncckpt.extension import storage_for
from asyncckpt.storage import partial as renames


@pytest.fixture
def state() -> dict[str, Any]:
    return {"model": {f"w{number}": torch.randn(100, 100 + number) for number in range(5)}}


@pytest.fixture
def saved(state: dict[str, Any], root: Path) -> Path:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state)
    return Path(step_folder(str(root), 1))


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def _nothing_but(folder: Path, *names: str) -> bool:
    return sorted(each.name for each in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize(
    "to, dtype", [("hf", None), ("hf", "bf16"), ("torch", None), ("dcp", None), ("torch_checkpointing", None)]
)
def test_a_damaged_byte_is_found(
    state: dict[str, Any], saved: Path, tmp_path: Path, to: Any, dtype: str | None
) -> None:
    file = saved / "__0_0.distcp"
    _flip(file, file.read_bytes().index(state["model"]["w3"].numpy().tobytes()) + 5)
    with pytest.raises(DamagedCheckpointError, match=r"are damaged: 'model\.w3'") as raised:
        export(saved, tmp_path / "out", to=to, dtype=dtype)
    assert raised.value.path == str(file)
    assert _nothing_but(tmp_path, "checkpoints")


@pytest.mark.parametrize("name", ["asyncckpt.json", "__0_0.index.json", ".metadata"])
def test_damage_of_what_describes_it_is_found(saved: Path, tmp_path: Path, name: str) -> None:
    _flip(saved / name, 100)
    with pytest.raises(DamagedCheckpointError):
        export(saved, tmp_path / "out")
    assert _nothing_but(tmp_path, "checkpoints")


def test_what_is_missing_is_found(state: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    """Truncated and missing files are found also without checksums."""
    save_shards(state, tmp_path / "stock", {"model.w3": ((), (9,))})
    for source in (tmp_path / "stock", saved):
        file = source / "__0_0.distcp"
        os.truncate(file, file.stat().st_size - 30_000)
        with pytest.raises(DamagedCheckpointError) as raised:
            export(source, tmp_path / "out")
        assert raised.value.path == str(file)
        assert source == saved or "model.w4" in str(raised.value)
        file.unlink()
        with pytest.raises(DamagedCheckpointError):
            export(source, tmp_path / "out")
    assert _nothing_but(tmp_path, "checkpoints", "stock")


def test_a_part_that_is_not_stored_is_found(state: dict[str, Any], tmp_path: Path) -> None:
    """Consolidation would leave zeros there."""
    cuts: Any = {"model.w3": ((), (9,))}
    save_shards(state, tmp_path / "stock", cuts)
    metadata = FileSystemReader(tmp_path / "stock").read_metadata()
    for key in [key for key in metadata.storage_data if key.fqn == "model.w3" and key.offset[1]]:
        del metadata.storage_data[key]
    (tmp_path / "stock/.metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"'model\.w3' has 10,300 elements, and 900 are stored"):
        export(tmp_path / "stock", tmp_path / "out")


@pytest.mark.parametrize("to", ["hf", "torch", "dcp", "torch_checkpointing"])
def test_a_full_disk(
    state: dict[str, Any], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    real, left = os.pwrite, [2]

    def full(fd: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(copying, "BATCH_BYTES", 16384)
    monkeypatch.setattr(batches, "BATCH_BYTES", 16384)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"free space there.*exporting 'model\.w"):
        export(saved, tmp_path / "out", to=to)
    assert _nothing_but(tmp_path, "checkpoints")
    monkeypatch.setattr(os, "pwrite", real)
    export(saved, tmp_path / "out", to=to)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([4096, 4096, 9, 9, 1, *[9] * 5]))
    with pytest.raises(StorageError, match=r"the export needs .* and the file system has 4,096 left"):
        export(saved, tmp_path / "other", to=to)


def _export_until_killed(path: str, out: str, to: Any) -> None:
    """Export in a separate process that is killed at its third write."""
    vars(batches)["BATCH_BYTES"] = vars(copying)["BATCH_BYTES"] = 16384
    real, left = os.pwrite, [3]

    def pwrite(*args: Any) -> int:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    os.pwrite = pwrite
    export(path, out, to=to)


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_a_kill_leaves_nothing_that_looks_complete(state: dict[str, Any], saved: Path, tmp_path: Path, to: Any) -> None:
    folder = tmp_path / "to"
    for name in ("out", "out.other"):
        assert ranks.alone(_export_until_killed, str(saved), str(folder / name), to) == (-signal.SIGKILL, None)
    left = {each.name.partition(".export")[0][: -len(".0123456789ab")]: each for each in folder.iterdir()}
    assert left.keys() == {".out", ".out.other"}
    assert all(each.name.endswith(".export") for each in left.values())
    export(saved, folder / "out", to=to)
    assert _nothing_but(folder, "out", left[".out.other"].name)
    found = load_file(folder / "out/model.safetensors") if to == "hf" else torch.load(folder / "out")["model"]
    assert same({f"w{n}": found[f"model.w{n}" if to == "hf" else f"w{n}"] for n in range(5)}, state["model"])


@pytest.mark.parametrize("is_file", [False, True])
def test_of_two_exports_to_one_place_the_first_that_ends_wins(tmp_path: Path, is_file: bool) -> None:
    out = str(tmp_path / "out")
    first, second = (output.output(out, 1, is_file=is_file) for _ in range(2))
    one = first.__enter__()
    one.create("its", large=False).close()
    with second as other:
        other.create("file", large=False).close()
        assert Path(one.path).exists()
    with pytest.raises(CheckpointExistsError):
        first.__exit__(None, None, None)
    assert _nothing_but(tmp_path, "out") and (is_file or _nothing_but(tmp_path / "out", "file"))


@pytest.mark.parametrize("to", ["hf", "torch"])
@pytest.mark.parametrize("lacks", ["nothing", "renameat2", "links"])
def test_what_comes_there_at_the_last_moment_is_not_replaced(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any, lacks: str
) -> None:
    real, looks = output.place_for, []

    def look(out: str, *, is_file: bool) -> str:
        place = real(out, is_file=is_file)
        looks.append(out)
        Path(place).write_text("another's")
        return place

    def refuse(*args: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if lacks != "nothing":
        monkeypatch.setattr(renames, "_libc", None)
    if lacks == "links":
        monkeypatch.setattr(os, "link", refuse)
    export(saved, tmp_path / "other", to=to)
    monkeypatch.setattr(output, "place_for", look)
    with pytest.raises(CheckpointExistsError) as raised:
        export(saved, tmp_path / "out", to=to)
    assert looks == [raised.value.path] == [str(tmp_path / "out")]
    assert (tmp_path / "out").read_text() == "another's"
    assert _nothing_but(tmp_path, "checkpoints", "out", "other")


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_what_is_not_durable_is_not_there(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if (tmp_path / "out").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="flushing a folder failed"):
        export(saved, tmp_path / "out", to=to)
    assert _nothing_but(tmp_path, "checkpoints")


def test_nothing_is_replaced(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/its").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for name, to in (("file", "hf"), ("folder", "dcp"), ("link", "hf"), ("file", "torch"), ("empty", "torch")):
        with pytest.raises(CheckpointExistsError, match="an export replaces nothing"):
            export(saved, tmp_path / name, to=to)  # type: ignore[arg-type]
    with pytest.raises(CheckpointExistsError):
        export(saved, saved)
    export(saved, tmp_path / "empty")
    export(saved, tmp_path / "new/folders/out")
    with pytest.raises(StorageError, match="goes to a file system"):
        export(saved, "s3://bucket/out")
    assert not list(tmp_path.glob(".*"))


def test_retention_leaves_it_alone(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    real = copying.write

    def write(*args: Any) -> int:
        answers.append(storage_for(str(saved)).remove_checkpoint(str(saved)))
        return real(*args)

    monkeypatch.setattr("asyncckpt.exporting.export.write", write)
    export(saved.parent, tmp_path / "out")
    assert answers == [False] and storage_for(str(saved)).remove_checkpoint(str(saved))
    with pytest.raises(CheckpointNotFoundError):
        export(saved.parent, tmp_path / "again")


def _most_memory(path: str, out: str) -> None:
    """Export in a separate process, and report the growth of its peak memory in bytes."""

    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    torch.ones(1000).to(torch.bfloat16)
    before = most()
    export(path, out)
    ranks.say(most() - before)


@pytest.mark.usefixtures("forkserver")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    largest = torch.zeros(4096, 4096)  # six of them, one a thread, would exceed the limit
    state = {f"w{number}": largest for number in range(7)}
    save_shards(state, tmp_path / "stock", {name: ((), (1000, 3000)) for name in state}, files=2)
    code, nbytes = ranks.alone(_most_memory, str(tmp_path / "stock"), str(tmp_path / "out"))
    assert code == 0 and nbytes <= 1.2 * largest.nbytes + (256 << 20)


def test_a_folder_with_checkpoints_of_other_names_says_which(tmp_path: Path) -> None:
    for name in ("0", "1"):
        async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "run" / name).result(60)
    for path in (tmp_path / "run", tmp_path / "none"):
        with pytest.raises(CheckpointNotFoundError) as raised:
            export(path, tmp_path / "out")
        named = [f"{tmp_path}/run/{name}" in str(raised.value) for name in ("0", "1")]
        assert named == [path.name == "run"] * 2
