"""nvrx's file system classes: the contents of checkpoint folders, and the files left after a failure."""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.checkpoints import verify
from support.nvrx_saves import is_there, plan
from support.ranks import alone, run, say
from support.segments import mapped_segments
from support.states import small_state, stock_load
from support.workers import Faulty
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt.integrations import nvrx
from asyncckpt.integrations.nvrx import filesystem

pytestmark = pytest.mark.usefixtures("forkserver")


def test_a_save_joins_what_is_in_its_folder(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_text("of the caller")
    finalized: list[int] = []
    for number in range(3):
        state = small_state()
        done = functools.partial(finalized.append, number)
        assert queue.schedule_async_request(plan(state, tmp_path, done)) == number
        assert queue.get_num_unfinalized_calls() == 1 and finalized == list(range(number))
        assert queue.maybe_finalize_async_calls(blocking=True) == [number]
        assert is_there(state, tmp_path) and not verify(str(tmp_path)).damages
    assert finalized == [0, 1, 2] and (tmp_path / "common.pt").read_text() == "of the caller"
    assert [path.name for path in tmp_path.parent.iterdir() if path.name.endswith(".partial")] == []


def test_the_newest_metadata_is_read(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    """A reader returns the new metadata even if an earlier reader has read the old. Upstream caches the old."""
    for names in ("a", "ab", "c"):
        queue.schedule_async_request(plan({name: torch.ones(3) for name in names}, tmp_path))
        queue.maybe_finalize_async_calls(blocking=True)
        reader = nvrx.CachedMetadataFileSystemReader(tmp_path)
        assert set(reader.read_metadata().state_dict_metadata) == set(names)
        assert reader.read_metadata() is nvrx.CachedMetadataFileSystemReader(tmp_path).read_metadata()
    nvrx.CachedMetadataFileSystemReader.clear_metadata_cache()
    assert not nvrx.CachedMetadataFileSystemReader._cache


def test_it_does_not_overwrite_unless_it_may(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    (tmp_path / "common.pt").touch()
    for works in (True, False):
        writer = nvrx.FileSystemWriterAsync(tmp_path, overwrite=False)
        planned = nvrx.save_state_dict_async_plan({"w": torch.full((3,), float(works))}, writer)
        if works:
            nvrx.save_state_dict_async_finalize(*planned)
        else:
            with pytest.raises(CheckpointException, match="a checkpoint never replaces another by accident"):
                nvrx.save_state_dict_async_finalize(*planned)
    assert is_there({"w": torch.ones(3)}, tmp_path)


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    for option in ({"separation_hint": "a/b"}, {"open_file": os.open}):
        with pytest.raises(ValueError, match=next(iter(option))):
            nvrx.FileSystemWriterAsync(tmp_path, **option)
    for path in ("msc://profile/checkpoints", Path("msc://profile/checkpoints")):
        with pytest.raises(ValueError, match="use_msc"):
            nvrx.FileSystemWriterAsync(path, use_msc=True)
    assert nvrx.FileSystemWriterAsync(tmp_path, use_msc=True).path == tmp_path
    with pytest.raises(ValueError, match="io_priority"):
        nvrx.AsyncCallsQueue(io_priority=4)


def test_a_hint_separates(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    """File names match those of nvrx's own writer with two threads."""
    for folder, hint in (("apart", "optimizer"), ("whole", None), ("again", "optimizer")):
        writer = nvrx.FileSystemWriterAsync(tmp_path / folder, separation_hint=hint, thread_count=2)
        nvrx.save_state_dict_async_finalize(*nvrx.save_state_dict_async_plan(state := small_state(), writer))
        names = {name for name in os.listdir(tmp_path / folder) if name.endswith(".distcp")}
        assert names == {"__0_0.distcp", *(["optimizer__0_1.distcp"] if hint else [])}
        assert is_there(state, tmp_path / folder)


def test_spans_have_the_names_of_nvrx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    # The tracer provider can be set only once in a process.
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", tracers)
    filesystem._spans.cache_clear()
    queue = nvrx.AsyncCallsQueue(otel_bootstrap={"enabled": True, "service_name": "training"})
    writer = nvrx.FileSystemWriterAsync(tmp_path / "it")
    nvrx.save_state_dict_async_plan(small_state(), writer)
    function, _, arguments = writer.get_save_function_and_args()
    queue.schedule_async_request(nvrx.AsyncRequest(function, arguments, []))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    filesystem.engines.close()
    says = {span.name: (span.attributes or {}).get("is_goodput_span") for span in exporter.get_finished_spans()}
    assert says["nvrx.checkpoint.save.request"] is True and says["nvrx.checkpoint.save.write"] is False
    filesystem.configure(None)


def test_the_newest_keywords(tmp_path: Path) -> None:
    queue, prepared = nvrx.AsyncCallsQueue(otel_bootstrap={}), tmp_path / "elsewhere/prepared.metadata"

    def save(folder: Path, values: float, reuse: Any = None, create: str | None = None) -> Any:
        writer = nvrx.FileSystemWriterAsync(folder, open_file=open)
        state = {"w": torch.full((5,), values)}
        planned = nvrx.save_state_dict_async_plan(state, writer, reuse_metadata_obj=reuse)
        function, _, arguments = writer.get_save_function_and_args()
        said = []
        finalize = functools.partial(nvrx.save_state_dict_async_finalize, *planned, reuse, create)
        queue.schedule_async_request(nvrx.AsyncRequest(function, arguments, [lambda: said.append(finalize())]))
        queue.maybe_finalize_async_calls(blocking=True)
        assert is_there(state, folder)
        return said[0]

    metadata = save(tmp_path / "first", 1.0, create=str(prepared))
    assert metadata.storage_data and prepared.read_bytes() == (tmp_path / "first/.metadata").read_bytes()
    assert save(tmp_path / "second", 2.0, reuse=metadata) is None
    with pytest.raises(ValueError, match="not both"):
        save(tmp_path / "third", 3.0, reuse=metadata, create=str(prepared))
    queue.close(abort=True)


def _some_have_nothing(root: str) -> None:
    rank = dist.get_rank()
    queue = nvrx.AsyncCallsQueue(cpu_shm_mode=True)
    for number in range(4):
        queue.schedule_async_request(
            plan({"w": torch.full((5,), float(number))} if rank == 1 else {}, f"{root}/{number}")
        )
        while number % 2 and queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
    # Collectives of the ranks and of the queue do not interfere.
    dist.barrier()
    queue.close()
    for number in range(4):
        into = {"w": torch.zeros(5)}
        stock_load(into, f"{root}/{number}")
        assert into["w"][0] == number


def test_w2_and_w4_a_rank_with_nothing_to_write(tmp_path: Path) -> None:
    run(2, _some_have_nothing, str(tmp_path), folder=tmp_path)


def _moved(root: str) -> None:
    """Swap the ranks of two tensors. Names, shapes and dtypes in the job stay the same."""
    whole = torch.arange(8.0).reshape(4, 2)
    queue = nvrx.AsyncCallsQueue()
    for number in range(4):
        mine = dist.get_rank() if number < 2 else 1 - dist.get_rank()
        local = whole[2 * mine : 2 * mine + 2] + number
        queue.schedule_async_request(plan({f"part{mine}": local.clone()}, f"{root}/{number}"))
    queue.close()
    for number in range(4):
        into = {"part0": torch.zeros(2, 2), "part1": torch.zeros(2, 2)}
        stock_load(into, f"{root}/{number}")
        assert torch.equal(torch.cat([into["part0"], into["part1"]]), whole + number)


def _other_offsets(root: str) -> None:
    queue = nvrx.AsyncCallsQueue()
    mesh = init_device_mesh("cpu", (2,))
    turned = DeviceMesh("cpu", [1, 0])
    for number, each in enumerate([mesh, mesh, turned, turned, mesh]):
        (mine,) = each.get_coordinate() or [0]
        local = torch.arange(4.0) + 4 * mine + number
        state = {"w": DTensor.from_local(local, each, [Shard(0)])}
        queue.schedule_async_request(plan(state, f"{root}/{number}"))
    queue.close()
    for number in range(5):
        into = {"w": torch.zeros(8)}
        stock_load(into, f"{root}/{number}")
        assert torch.equal(into["w"], torch.arange(8.0) + number), number


def test_w5_other_offsets_are_another_structure(tmp_path: Path) -> None:
    run(2, _moved, str(tmp_path / "moved"), folder=tmp_path)
    run(2, _other_offsets, str(tmp_path / "offsets"), folder=tmp_path)


def test_w8_memory_is_taken_once(queue: nvrx.AsyncCallsQueue, tmp_path: Path) -> None:
    state = {f"w{number}": torch.zeros(1 << 16) for number in range(8)}
    sizes = []
    for number in range(3):
        queue.schedule_async_request(plan(state, tmp_path / str(number)))
        queue.maybe_finalize_async_calls(blocking=True)
        sizes.append(mapped_segments())
    assert sizes[0] == sizes[1] == sizes[2] and len(sizes[0]) == 1
    assert sum(sizes[0].values()) < 2.5 * sum(tensor.nbytes for tensor in state.values())  # two images and little else


def _many_tensors(root: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    state = {f"w{number}": torch.full((10,), float(number)) for number in range(2000)}
    queue = nvrx.AsyncCallsQueue(cpu_shm_mode=True)
    queue.schedule_async_request(plan(state, root))
    queue.close()
    say(is_there(state, root))


def test_w9_many_tensors_need_few_descriptors(tmp_path: Path) -> None:
    assert alone(_many_tensors, str(tmp_path / "it")) == (0, True)


def test_w16_what_failed_is_nowhere(queue: nvrx.AsyncCallsQueue, tmp_path: Path, faulty_worker: Faulty) -> None:
    faulty_worker("sync:eio")
    (tmp_path / "it").mkdir()
    (tmp_path / "it/common.pt").touch()
    queue.schedule_async_request(plan(small_state(), tmp_path / "it"))
    with pytest.raises(CheckpointException):
        queue.maybe_finalize_async_calls(blocking=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["it", "common.pt"]
