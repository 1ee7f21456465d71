"""The functions of torch.distributed.checkpoint, on our engine."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import same, small_state, stock_load, zeros_like
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import asyncckpt
from asyncckpt.engine import shared as engines
from asyncckpt.errors import CheckpointExistsError
from asyncckpt.extension import MANIFEST_NAME, Engine
from asyncckpt.integrations import dcp, nvrx
from asyncckpt.staging import host_copy


def stock_save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns if there is only one process
        state_dict_saver.save(state, checkpoint_id=path)


def test_the_calls_of_dcp(tmp_path: Path) -> None:
    state = small_state()
    path = tmp_path / "checkpoint"
    path.mkdir()  # users often create the folder first
    assert asyncckpt.async_save(state, checkpoint_id=path).result(60) == str(path)
    for number in range(3):
        state["step"] = number
        metadata = asyncckpt.save(state, checkpoint_id=path)  # replaces the checkpoint
    assert "model.weight" in metadata.state_dict_metadata
    asyncckpt.load(into := zeros_like(state), checkpoint_id=path)
    assert same(into, state)
    (path / "notes.txt").touch()
    state["step"] = 7
    asyncckpt.save(state, checkpoint_id=path)  # keeps the files of others in the folder, as DCP does
    asyncckpt.load(into := zeros_like(state), checkpoint_id=path)
    assert same(into, state) and (path / "notes.txt").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointExistsError, match="no folder"):
        asyncckpt.save(state, checkpoint_id=tmp_path / "file")
    with pytest.raises(ValueError, match="checkpoint_id"):
        asyncckpt.save(state)
    assert not list(tmp_path.glob(".*"))


def test_it_loads_what_stock_dcp_wrote(tmp_path: Path) -> None:
    state = small_state()
    stock_save(state, tmp_path / "stock")
    asyncckpt.load(into := zeros_like(state), checkpoint_id=tmp_path / "stock")
    assert same(into, state)


def test_a_planner_of_the_users_own(tmp_path: Path) -> None:
    class Halving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            object = super().transform_object(write_item, object)
            return object.half() if isinstance(object, torch.Tensor) and object.dim() else object

    state = {"a": torch.full((5, 3), 1.5), "n": 1, "s": torch.tensor(2.0)}
    for number in range(3):
        state["n"] = number
        asyncckpt.save(state, checkpoint_id=tmp_path / str(number), planner=Halving())
        into: dict[str, Any] = {"a": torch.zeros(5, 3), "n": None, "s": torch.zeros(())}
        asyncckpt.load(into, checkpoint_id=tmp_path / str(number))
        assert same(into, state)
    assert [len(engine._buffers.known) for engine in engines.shared._engines.values()] == [1]


def test_dcps_writer_and_reader_say_which_folder(tmp_path: Path) -> None:
    state = small_state()
    writer = FileSystemWriter(tmp_path / "first", thread_count=2)
    asyncckpt.save(state, writer)  # the writer as the second argument, as in DCP's earlier signature
    metadata = asyncckpt.save(state, storage_writer=writer, checkpoint_id=tmp_path / "second")
    asyncckpt.async_save(state, storage_writer=FileSystemWriter(tmp_path / "third")).result(60)
    for name in ("first", "second", "third"):
        assert (tmp_path / name / MANIFEST_NAME).exists()
        asyncckpt.load(into := zeros_like(state), FileSystemReader(tmp_path / name))
        assert same(into, state)
    assert writer.path == tmp_path / "second"
    reader = FileSystemReader(tmp_path / "gone")
    asyncckpt.load(into := zeros_like(state), storage_reader=reader, checkpoint_id=tmp_path / "first")
    assert same(into, state)

    assert metadata.storage_meta is not None and metadata.storage_meta.checkpoint_id == tmp_path / "second"
    stored = FileSystemReader(tmp_path / "second").read_metadata().storage_meta
    assert stored is not None and str(stored.checkpoint_id) == str(tmp_path / "second")
    assert stored.save_id and stored.save_id == writer.save_id == metadata.storage_meta.save_id
    stock_save(state, tmp_path / "stock")
    stock: Any = FileSystemReader(tmp_path / "stock").read_metadata()
    assert getattr(metadata, "version", None) == getattr(stock, "version", None)  # torch 2.6 has none
    assert metadata.planner_data == stock.planner_data
    for each in stock.state_dict_metadata.values():
        if hasattr(each, "properties"):
            each.properties.strides = None  # left out, as torch before 2.14 cannot read it
    assert metadata.state_dict_metadata == stock.state_dict_metadata


def test_dcps_writer_says_whether_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it/notes.txt").touch()
    writer = FileSystemWriter(tmp_path / "it", overwrite=False)
    asyncckpt.save({"a": torch.ones(2)}, storage_writer=writer)  # the folder holds no checkpoint yet
    for save in (asyncckpt.save, asyncckpt.async_save):
        with pytest.raises(CheckpointException, match="already exists and self.overwrite=False"):
            save({"a": torch.zeros(2)}, storage_writer=writer)
    asyncckpt.load(into := {"a": torch.zeros(2)}, checkpoint_id=tmp_path / "it")
    assert into["a"].all()


def test_nor_is_what_is_being_saved_overwritten(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "it", overwrite=False)
    first = asyncckpt.async_save({"a": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="overwrite=False"):
        asyncckpt.async_save({"a": torch.zeros(2)}, storage_writer=writer)
    first.result(60)
    asyncckpt.load(into := {"a": torch.zeros(2)}, checkpoint_id=tmp_path / "it")
    assert into["a"].all()


class _FaultyWriter(FileSystemWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        raise ValueError("the metadata cannot be written")


def test_a_link_leads_to_what_is_overwritten(tmp_path: Path) -> None:
    """The save writes through the link, as DCP does. The target stays complete, and the link stays."""
    (tmp_path / "last").symlink_to("step-1")
    for number in (1, 2, 3):
        state = {"w": torch.full((5,), float(number))}
        if number < 3:
            asyncckpt.async_save(state, checkpoint_id=tmp_path / "last").result(60)
        else:
            with Engine(alone=True) as engine:
                engine.save(tmp_path / "last", state, existing="replace").result(60)
        stock = {"w": torch.zeros(5)}
        stock_load(stock, tmp_path / "step-1")
        assert stock["w"][0] == number and (tmp_path / "last").is_symlink()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["last", "step-1"]


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected an existing checkpoint"
)
def test_what_is_not_dcps_own_goes_to_dcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Writer(FileSystemWriter):
        pass

    class Reader(FileSystemReader):
        pass

    state = small_state()
    for _ in range(2):
        asyncckpt.save(state, Writer(tmp_path / "it"))
        asyncckpt.async_save(state, storage_writer=Writer(tmp_path / "it")).result(60)
        asyncckpt.load(into := zeros_like(state), Reader(tmp_path / "it"))
        assert same(into, state)
    assert not (tmp_path / "it" / MANIFEST_NAME).exists()
    asked = [record.message for record in caplog.records if record.name == "asyncckpt.integrations.dcp"]
    assert [("Writer" in each, "Reader" in each) for each in asked] == [(True, False), (False, True)]

    with pytest.raises(CheckpointException, match="cannot be written") as raised:
        asyncckpt.save(state, storage_writer=_FaultyWriter(tmp_path / "faulty"))
    assert type(raised.value.failures[0][0]) is ValueError
    with pytest.raises(RuntimeError, match="Cannot detect"):
        asyncckpt.save(state, checkpoint_id="abc://bucket/it")  # must not create a folder named "abc:"
    with pytest.raises(RuntimeError, match="Cannot detect"):
        asyncckpt.load(state, checkpoint_id="abc://bucket/it")


def test_bytes_that_are_read_like_a_file(tmp_path: Path) -> None:
    state: dict[str, Any] = {"losses": io.BytesIO(b"abc"), "plain": torch.ones(2)}
    state["losses"].seek(1)
    asyncckpt.save(state, checkpoint_id=tmp_path / "ours")
    stock_save(state, tmp_path / "stock")
    for name, planner in (("ours", None), ("ours", DefaultLoadPlanner()), ("stock", None)):
        into: dict[str, Any] = {"losses": io.BytesIO(), "plain": torch.zeros(2)}
        asyncckpt.load(into, checkpoint_id=tmp_path / name, planner=planner)
        assert into["losses"].getvalue() == b"abc" and into["losses"].read() == b"bc"


def test_a_second_save_to_the_same_place_need_not_wait(tmp_path: Path) -> None:
    for number in range(3):
        first = asyncckpt.async_save({"a": torch.full((1 << 20,), 0.0)}, checkpoint_id=tmp_path / "it")
        second = asyncckpt.async_save({"a": torch.full((1 << 20,), number + 1.0)}, checkpoint_id=tmp_path / "it")
        assert first.result(60) == second.result(60) == str(tmp_path / "it")
        asyncckpt.load(into := {"a": torch.zeros(1 << 20)}, checkpoint_id=tmp_path / "it")
        assert torch.equal(into["a"], torch.full((1 << 20,), number + 1.0))


@pytest.mark.skipif(not hasattr(state_dict_saver, "AsyncSaveResponse"), reason="torch has no such stagers yet")
def test_a_stager_that_stages_behind_the_caller_is_answered_as_by_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_async_staging=True, use_shared_memory=False, use_non_blocking_copy=False
        )
    )
    state = {"a": torch.ones(2)}
    answer: Any = asyncckpt.async_save(state, checkpoint_id=tmp_path / "it", async_stager=stager)
    answer.staging_completion.result(60)
    state["a"].zero_()
    answer.upload_completion.result(60)
    stager.close()
    asyncckpt.load(state, checkpoint_id=tmp_path / "it")
    assert state["a"].all()


def _by_dcp(state: dict[str, Any], path: Path) -> Any:
    return dcp.async_save(state, checkpoint_id=str(path)).result


def _by_nvrx(state: dict[str, Any], path: Path) -> Any:
    writer = nvrx.FileSystemWriterAsync(str(path))
    nvrx.save_state_dict_async_plan(state, writer)
    return writer.retrieve_write_results


def _by_torch_save(state: dict[str, Any], path: Path) -> Any:
    path.mkdir()
    return nvrx.TorchAsyncCheckpoint().async_save(state, path / "file").result


@pytest.mark.parametrize("save", [_by_dcp, _by_nvrx, _by_torch_save])
def test_who_gets_no_handle_of_ours_may_change_tensors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[dict[str, Any], Path], Any]
) -> None:
    """Callers without one of our handles may change tensors at once, even if the environment asks for overlap."""
    monkeypatch.setenv("ASYNC_CKPT_OVERLAP", "yes")
    copy, may_go_on, path = host_copy._ByteCopy.copy, threading.Event(), tmp_path / "one"

    def waits(unit: Any, tensors: Any) -> None:
        assert may_go_on.wait(60)
        copy(unit, tensors)

    monkeypatch.setattr(host_copy._ByteCopy, "copy", waits)
    state = {"w": torch.ones(1000)}
    timer = threading.Timer(0.3, may_go_on.set)
    timer.start()
    wait = save(state, path)
    state["w"].fill_(2.0)
    wait()
    timer.join()
    saved = {"w": torch.zeros(1000)}
    if save is _by_torch_save:
        saved = torch.load(path / "file")
    else:
        stock_load(saved, path)
    assert saved["w"].eq(1.0).all()
