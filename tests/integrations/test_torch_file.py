"""Background saves in the format of ``torch.save``. Stock ``torch.load`` reads the files."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import random
import shutil
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.segments import mapped_segments
from support.states import same

from asyncckpt.config import Config
from asyncckpt.engine import shared as engines
from asyncckpt.errors import (
    OutOfMemoryError,
    StorageError,
    UnsavableStateError,
)
from asyncckpt.extension import Engine
from asyncckpt.integrations import dcp
from asyncckpt.integrations.torch_file import torch_save
from asyncckpt.link.client import WorkerClient
from asyncckpt.shm.segment import Segment


class Thing:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.name = "thing"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def check(obj: Any, path: Path, **how: Any) -> Any:
    """Save ``obj``, compare the file and each way to load it with torch.save's, and return the loaded value."""
    stock = path.with_name("stock.pt")
    torch.save(obj, stock)
    assert torch_save(obj, path).result(60) == str(path)
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(stock) as theirs:
        assert ours.testzip() is None
        contents = [{name.split("/", 1)[1]: file.read(name) for name in file.namelist()} for file in (ours, theirs)]
    for content in contents:
        for about_itself in (".data/serialization_id", ".format_version", ".storage_alignment"):
            content.pop(about_itself, None)  # older torch writes fewer records
    assert contents[0] == contents[1]  # the pickle and each storage are equal to the byte
    assert not list(path.parent.glob(".*"))
    for mapped in (False, True):
        expected = torch.load(stock, mmap=mapped, **how)
        loaded = torch.load(path, mmap=mapped, **how)
        assert how or same(loaded, expected)
    return loaded


def storages(value: Any) -> list[int]:
    """Return the storage address of each tensor."""
    return [tensor.untyped_storage().data_ptr() for tensor in value]


def test_a_dict_of_tensors(path: Path) -> None:
    raw = torch.randint(0, 255, (1000,), dtype=torch.uint8)
    dtypes = [torch.bfloat16, torch.complex64, torch.float64, torch.int16, torch.float8_e4m3fn, torch.uint16]
    check(
        {
            "all": {str(dtype): raw.clone().view(dtype) for dtype in dtypes},
            "bool": torch.tensor([True, False]),
            "none of it": torch.empty(0),
            "nor": torch.empty(3, 0, 2),
            "scalar": torch.tensor(3.0),
            "large": torch.randn(1 << 20),
            "list": [torch.ones(2), (3, "text", None), {"deep": torch.zeros(1)}],
            "parameter": torch.nn.Parameter(torch.randn(5)),
        },
        path,
    )


def test_the_state_of_a_training(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 20)).sum().backward()
    optimizer.step()
    loaded = check({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)
    assert type(loaded["model"]) is OrderedDict
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def test_views_share_their_storage(path: Path) -> None:
    base = torch.randn(40, 30)
    other = torch.randn(3)
    loaded = check([base, base.t(), base[3:5, ::2], base.reshape(-1)[7:], other, other], path)
    assert len(set(storages(loaded[:4]))) == 1 and len(set(storages(loaded))) == 2
    assert [(each.stride(), each.storage_offset()) for each in loaded[1:4]] == [((1, 30), 0), ((30, 2), 90), ((1,), 7)]
    loaded[0][3, 0] = 77.0
    assert loaded[2][0, 0] == 77.0
    with zipfile.ZipFile(path) as file:
        assert len([name for name in file.namelist() if "/data/" in name]) == 2


def test_what_else_a_tensor_has(path: Path) -> None:
    needed = torch.ones(2, requires_grad=True)
    conjugated, other = (torch.randn(4, dtype=torch.complex64).conj() for _ in range(2))
    obj = [torch.nn.Parameter(torch.ones(3)), needed, needed.detach(), conjugated, other.imag.resolve_conj()]
    loaded = check(obj, path)
    assert type(loaded[0]) is torch.nn.Parameter and [each.requires_grad for each in loaded[:3]] == [True, True, False]
    assert loaded[3].is_conj() and loaded[4].is_neg()


def test_tensors_without_plain_bytes(path: Path) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    quantised = torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.qint8)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    loaded = check([dense.to_sparse(), dense.to_sparse_csr(), quantised], path)
    assert loaded[0].is_sparse and loaded[2].is_quantized
    check([torch.empty(3, device="meta"), jagged], path, weights_only=False)
    storage = torch.randn(4).untyped_storage()
    assert bytes(check(storage, path, weights_only=False)) == bytes(storage)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)  # type: ignore[no-untyped-call]
    assert bytes(check(typed, path, weights_only=False)._untyped_storage) == bytes(storage)


def test_objects_of_any_class(path: Path) -> None:
    tensor = torch.arange(5.0)
    obj = {"thing": Thing(tensor), "tensor": tensor, "array": np.arange(3), "set": {1}, "module": torch.nn.Linear(2, 2)}
    loaded = check(obj, path, weights_only=False)
    assert loaded["thing"].name == "thing" and torch.equal(loaded["thing"].tensor, tensor)
    assert len(set(storages([loaded["thing"].tensor, loaded["tensor"]]))) == 1
    assert loaded["array"].tolist() == [0, 1, 2]
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)


@pytest.mark.parametrize("obj", [None, 3, "text", [], {}, torch.empty(0), torch.ones(3)], ids=repr)
def test_little_of_anything(obj: Any, path: Path) -> None:
    check(obj, path)


def test_map_location_and_protocol(path: Path) -> None:
    torch_save({"a": torch.ones(3)}, path).result(60)
    assert torch.load(path, map_location="meta")["a"].device.type == "meta"
    assert torch.load(path, map_location=lambda storage, location: storage)["a"].tolist() == [1, 1, 1]
    torch_save({"a": torch.ones(3)}, path, pickle_protocol=4).result(60)
    assert torch.load(path, weights_only=False)["a"].tolist() == [1, 1, 1]
    with zipfile.ZipFile(path) as file:
        assert file.read("archive/data.pkl")[:2] == b"\x80\x04"


@pytest.mark.parametrize("alignment", [64, 4096])
def test_records_are_where_torch_would_calculate_them(
    alignment: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch calculates nothing")
    state = {str(number): torch.randn(random.Random(number).randrange(3000)) for number in range(200)}
    state["empty"] = torch.empty(0)
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch.load compares the calculated offsets with the file
    with config.patch({"save.storage_alignment": alignment, "load.calculate_storage_offsets": True}):
        torch_save(state, path).result(60)
        assert same(torch.load(path, mmap=True), state)
    with zipfile.ZipFile(path) as file:
        assert all(data_at(path, entry.header_offset) % alignment == 0 for entry in file.infolist())


def data_at(path: Path, header_at: int) -> int:
    with path.open("rb") as file:
        file.seek(header_at + 26)
        lengths = file.read(4)
    return header_at + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


@pytest.mark.skipif(shutil.which("unzip") is None, reason="no unzip")
def test_unzip_finds_no_fault(path: Path) -> None:
    torch_save({"a": torch.randn(1000), "b": torch.empty(0)}, path).result(60)
    done = subprocess.run(["unzip", "-t", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_from_a_device(path: Path) -> None:
    base = torch.randn(1 << 20, device="cuda:0")
    obj = {"base": base, "view": base[::2], "small": torch.ones(3, device="cuda:0"), "cpu": torch.ones(3)}
    assert same(check(obj, path, map_location="cpu"), {name: tensor.cpu() for name, tensor in obj.items()})
    loaded = torch.load(path)
    assert [str(each.device) for each in loaded.values()] == ["cuda:0", "cuda:0", "cuda:0", "cpu"]
    assert len(set(storages(loaded.values()))) == 3
    save = torch_save({"base": base, "view": base[::2], "cpu": torch.ones(3)}, path)
    expected = base.cpu()
    base.zero_()
    assert torch.equal(torch.load(save.result(60), map_location="cpu")["base"], expected)


def test_tensors_may_change_after_the_call(path: Path) -> None:
    state: dict[str, Any] = {"large": torch.ones(1 << 18), "small": torch.ones(3), "list": [1]}
    save = torch_save(state, path)
    state["large"].zero_(), state["small"].zero_(), state["list"].append(2)
    save.result(60)
    assert same(torch.load(path), {"large": torch.ones(1 << 18), "small": torch.ones(3), "list": [1]})


def test_memory_is_used_again(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.randn(1000), "b": torch.randn(100_000), "history": []}
    saves = []
    segments: set[int] = set()
    expected = []
    for number in range(6):  # several files in turn; the pickle grows
        state["a"].add_(1)
        state["history"].append(number)
        saves.append(torch_save(state, tmp_path / f"{number}.pt"))
        expected.append({"a": state["a"].clone(), "b": state["b"].clone(), "history": list(range(number + 1))})
        segments.update(mapped_segments())
    assert len(segments) == 1
    for number, save in enumerate(saves):
        assert same(torch.load(save.result(60)), expected[number])
    state["history"] = list(range(10_000))  # a larger pickle needs a new segment, which replaces the first
    torch_save(state, tmp_path / "0.pt").result(60)
    assert same(torch.load(tmp_path / "0.pt"), state)
    assert len(mapped_segments()) == 1 and not segments & set(mapped_segments())
    state["b"] = torch.randn(7)
    torch_save(state, tmp_path / "0.pt").result(60)
    assert same(torch.load(tmp_path / "0.pt"), state)
    assert len(mapped_segments()) == 2


def test_memory_that_is_short_goes_to_whoever_saves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(alone=True) as engine:
        real = WorkerClient.allocate

        def allocate(client: WorkerClient, nbytes: int, timeout: float, end: int) -> tuple[int, Segment]:
            if any(known.buffer is not None for known in engine._buffers.known):
                raise OutOfMemoryError("no memory for two plans (as the test wants)")
            return real(client, nbytes, timeout, end)

        monkeypatch.setattr(WorkerClient, "allocate", allocate)
        for size in (10, 20, 10, 30):
            engine.save_file(path, torch.ones(size)).result(60)
            assert torch.load(path).shape == (size,)


def test_one_file_again_and_again(path: Path) -> None:
    saves = [torch_save(torch.full((1000,), float(number)), path) for number in range(8)]
    assert [save.result(60) for save in saves] == [str(path)] * 8
    assert torch.load(path)[0] == 7 and [each.name for each in path.parent.iterdir()] == ["model.pt"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    with Engine(alone=True) as engine, pytest.raises(StorageError, match="a pipe"):
        engine.save_file(pipe, "it")


def test_a_configuration_that_comes_too_late_is_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch_save("it", path, config=Config(nice=3)).result(60)
    assert not caplog.text
    for _ in range(2):
        torch_save("it", path, config=Config(nice=5, io_threads=3)).result(60)
    assert caplog.text.count("are ignored: io_threads, nice") == 1


def test_an_engine_of_ones_own(path: Path) -> None:
    with Engine(Config(overlap=True, slots=1), alone=True) as engine:
        first, state = torch.ones(1 << 18), {"a": torch.ones(100)}
        save = engine.save_file(path, first)
        save.wait_staged(60)
        first.zero_()
        engine.save(path.with_name("checkpoint"), state)
        engine.save_file(str(path.with_name("other.pt")), state)
        engine.wait(60)
        assert torch.equal(torch.load(path), torch.ones(1 << 18))
        assert same(torch.load(path.with_name("other.pt")), state)


def test_where_it_is_torch_save_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        Pickler, dumps, load, Unpickler = pickle.Pickler, pickle.dumps, pickle.load, pickle.Unpickler
        __name__ = "other"

    state = {"a": torch.ones(3)}
    buffer = io.BytesIO()
    save = torch_save(state, buffer)
    assert save.done() and save.staged() and save.failure is None
    buffer.seek(0)
    assert same(torch.load(buffer), state)
    with path.open("wb") as file:
        assert torch_save(state, file).result() == str(path)
    assert same(torch.load(path), state)
    for how in ({"_use_new_zipfile_serialization": False}, {"pickle_module": Other}):
        assert torch_save(state, path, **how).done()
        assert same(torch.load(path), state)
    assert torch_save(state, "/dev/null").done()
    with torch.serialization.skip_data():
        assert torch_save(state, path).done()
    assert torch.load(path)["a"].shape == (3,)
    assert not engines.shared._engines


def test_what_torch_save_refuses(path: Path) -> None:
    raw = torch.zeros(4)
    for obj in (lambda: None, [raw, raw.view(torch.int32)]):
        with pytest.raises((pickle.PicklingError, AttributeError, RuntimeError)):
            torch.save(obj, path)
        path.unlink(missing_ok=True)
        with pytest.raises(UnsavableStateError):
            torch_save(obj, path)
    with pytest.raises(StorageError, match="No such file"):
        torch_save(raw, path.parent / "missing" / "model.pt")
    with pytest.raises(StorageError, match="directory"):
        torch_save(raw, path.parent)
    torch_save(raw, path).result(60)  # later saves work
    assert [each.name for each in path.parent.iterdir()] == ["model.pt"]


def test_a_link_and_the_mode_of_a_file_stay(path: Path) -> None:
    path.touch()
    path.chmod(0o600)
    link = path.with_name("latest.pt")
    link.symlink_to(path.name)
    torch_save(torch.ones(3), link).result(60)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert torch.load(path).tolist() == [1, 1, 1]


def test_files_are_for_those_whom_the_umask_allows(tmp_path: Path) -> None:
    """The umask at the call applies, not the umask at the worker's start."""
    before = os.umask(0o022)
    try:
        torch_save({"w": torch.ones(3)}, tmp_path / "open.pt").result(60)
        os.umask(0o077)
        torch_save({"w": torch.ones(3)}, tmp_path / "closed.pt").result(60)
        dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "closed", no_dist=True).result(60)
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("open.pt", "closed.pt", "closed")}
    assert modes == {"open.pt": 0o644, "closed.pt": 0o600, "closed": 0o700}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "closed").iterdir()} == {0o600}


def test_in_a_fork_it_has_a_worker_of_its_own(tmp_path: Path) -> None:
    torch_save({"w": torch.ones(10)}, tmp_path / "mine").result(60)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            torch_save({"w": torch.zeros(10)}, tmp_path / "its").result(60)
            engines.shared.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not torch.load(tmp_path / "its")["w"].any()
    torch_save({"w": torch.ones(10)}, tmp_path / "mine").result(60)


def test_a_file_that_cannot_be_looked_at_is_not_written_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file system fails ``stat`` on the file, the save replaces the file in one step, or keeps it."""
    torch_save({"w": torch.zeros(4)}, path).result(60)
    real = os.stat

    def refuse(name: Any, *args: Any, **named: Any) -> os.stat_result:
        if name == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(name, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", None)
        patched.setattr(os, "stat", refuse)
        with contextlib.suppress(StorageError):
            torch_save({"w": torch.ones(4)}, path).result(60)
    assert torch.load(path)["w"].tolist() in ([0.0] * 4, [1.0] * 4)
