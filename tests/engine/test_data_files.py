"""Test separate data files of one rank in an image. All readers see them as one checkpoint."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import step_folder, verify
from support.ranks import Job, alone, run
from support.states import same, small_state, stock_load, zeros_like
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.extension import Engine, load
from asyncckpt.loading.contents import contents

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(Config(linger=0), alone=True) as engine:
        yield engine


def _tied() -> dict[str, Any]:
    """Return small and large values for both files, with tensors that both files share."""
    state = small_state()
    state["tied"] = state["optimizer"]["state"][0]["exp_avg"]
    state["optimizer"]["again"] = state["model"]["weight"]
    state["optimizer"]["large"] = torch.randn(3, 200_000)
    return state


def _files(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value in contents(str(path)):
        for shard in value.shards:
            found.setdefault(shard.file, []).append(value.name)
    return found


def test_names_that_begin_so_have_a_file_of_their_own(engine: Engine, tmp_path: Path) -> None:
    for number in range(3):
        state = _tied()
        engine.save(tmp_path / str(number), state, separate="optimizer").result(60)
        path = tmp_path / str(number)
        assert not verify(str(path)).damages
        load(loaded := zeros_like(state), str(path), no_dist=True)
        stock_load(stock := zeros_like(state), path)
        assert same(loaded, state) and same(stock, state)
        files = _files(path)
        assert set(files["optimizer__0_1.distcp"]) == {"optimizer.large", "optimizer.lr", "optimizer.state.0.step"}
        # Tied tensors are stored once, in the main file.
        tied = {"tied", "optimizer.state.0.exp_avg", "optimizer.again"}
        assert set(files["__0_0.distcp"]) == {"model.weight", "model.bias", "step", *tied}
    assert len(engine._buffers.known) == 1  # only one plan


def test_a_state_may_be_saved_either_way(engine: Engine, tmp_path: Path) -> None:
    state = small_state()
    for number, separate in enumerate(["", "model", "optimizer", "", "nothing", "model"]):
        path = tmp_path / str(number)
        engine.save(path, state, separate=separate).result(60)
        names = {name for name in os.listdir(path) if name.endswith(".distcp")}
        assert names == {"__0_0.distcp", *([f"{separate}__0_1.distcp"] if separate else [])}
        load(loaded := zeros_like(state), str(path), no_dist=True)
        stock_load(stock := zeros_like(state), path)
        assert same(loaded, state) and same(stock, state)


def test_all_of_it_may_be_apart(engine: Engine, tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(5), "note": "of all kinds"}}
    engine.save(tmp_path / "one", state, separate="model").result(60)
    assert (tmp_path / "one/__0_0.distcp").stat().st_size == 0 and not verify(str(tmp_path / "one")).damages
    load(loaded := zeros_like(state), str(tmp_path / "one"), no_dist=True)
    stock_load(stock := zeros_like(state), tmp_path / "one")
    assert same(loaded, state) and same(stock, state)


def test_without_the_files_apart_the_rest_loads(engine: Engine, tmp_path: Path) -> None:
    """Separate files exist so that the rest can be loaded without them."""
    state = small_state()
    engine.save(path := tmp_path / "one", state, separate="optimizer").result(60)
    # Megatron-LM's remove_sharded_tensors requires that no other file's name begins with "optimizer".
    assert [file.name for file in path.glob("optimizer*")] == ["optimizer__0_1.distcp"]
    (path / "optimizer__0_1.distcp").unlink()
    load(loaded := {"model": zeros_like(state["model"])}, str(path), no_dist=True)
    assert same(loaded["model"], state["model"])
    with pytest.raises(DamagedCheckpointError, match="missing"):
        load(zeros_like(state), str(path), no_dist=True)
    assert [damage.path for damage in verify(str(path)).damages] == [str(path / "optimizer__0_1.distcp")]


@pytest.mark.device
def test_on_a_device_too(engine: Engine, tmp_path: Path, device_type: str) -> None:
    """In each file, the tensors of the device stand before those of the host."""

    def part(value: float) -> dict[str, Any]:
        tensors = [torch.full((3,), value + number) for number in range(20)]
        return {str(number): each.to(device_type) if number % 2 else each for number, each in enumerate(tensors)}

    state = {"model": part(0), "optimizer": part(100), "step": 7}
    engine.save(path := tmp_path / "one", state, separate="optimizer").result(60)
    files = _files(path)
    for name, top in (("__0_0.distcp", "model"), ("optimizer__0_1.distcp", "optimizer")):
        expected = [f"{top}.{number}" for number in [*range(1, 20, 2), *range(0, 20, 2)]]
        assert [each for each in files[name] if each != "step"] == expected
    load(loaded := zeros_like({"model": part(0), "optimizer": part(100), "step": 7}), str(path), no_dist=True)
    assert same(loaded["step"], 7)
    for top, first in (("model", 0), ("optimizer", 100)):
        assert [each.cpu()[0].item() for each in loaded[top].values()] == [first + number for number in range(20)]


@pytest.mark.parametrize("name", ["__0_0.distcp", "optimizer__0_1.distcp"])
def test_damage_is_found_in_each(engine: Engine, tmp_path: Path, name: str) -> None:
    engine.save(path := tmp_path / "one", small_state(), separate="optimizer").result(60)
    data = bytearray((path / name).read_bytes())
    data[100] ^= 1
    (path / name).write_bytes(data)
    (damage,) = verify(str(path)).damages
    assert damage.path == str(path / name) and ("'optimizer." in str(damage)) == ("optimizer" in name)


def _sharded(values: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    shard = torch.arange(40.0).view(4, 10) + values + 100 * rank
    return {
        "model": {"sharded": DTensor.from_local(shard, mesh, [Shard(0)]), "whole": torch.full((7,), values)},
        "optimizer": {"sharded": DTensor.from_local(shard + 1, mesh, [Shard(0)]), "lr": values},
    }


def _local(state: dict[str, Any]) -> Any:
    return [[getattr(value, "_local_tensor", value) for value in its.values()] for its in state.values()]


def _separate_optimizer(checkpointer: Checkpointer) -> None:
    checkpointer._engine.save = functools.partial(checkpointer._engine.save, separate="optimizer")  # type: ignore[method-assign]


def _save_on_two(root: str) -> None:
    checkpointer = Checkpointer(root, Config(linger=60, slots=2))
    _separate_optimizer(checkpointer)
    for step in (1, 2):
        checkpointer.save(step, _sharded(float(step))).result(60)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _load_on_two(root: str) -> list[str]:
    sources: list[str] = []
    with Checkpointer(root) as checkpointer:
        for memory, step in ((True, 2), (True, 1), (False, 2)):
            assert checkpointer.load(state := _sharded(0.0), step, memory=memory) == step
            assert checkpointer.loaded is not None
            assert same(_local(state), _local(_sharded(float(step))))
            sources.append(checkpointer.loaded.source)
    return sources


def test_ranks_that_died_are_resumed_from_memory(tmp_path: Path) -> None:
    ended = Job(2, _save_on_two, str(root := tmp_path / "root"), folder=tmp_path).wait()
    assert [end.killed for end in ended] == [True, True], ended
    assert run(2, _load_on_two, str(root), folder=tmp_path) == [["memory", "memory", "storage"]] * 2
    expected = {name for rank in (0, 1) for name in (f"__{rank}_0.distcp", f"optimizer__{rank}_1.distcp")}
    assert _files(Path(step_folder(str(root), 2))).keys() == expected


def _die_staged(root: str) -> None:
    checkpointer = Checkpointer(root, Config(linger=60))
    _separate_optimizer(checkpointer)
    torch.manual_seed(3)
    checkpointer.save(1, _tied())
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_that_died_is_resumed_from_memory(tmp_path: Path) -> None:
    alone(_die_staged, str(tmp_path))
    torch.manual_seed(3)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(loaded := zeros_like(_tied())) == 1
        torch.manual_seed(3)
        assert checkpointer.loaded is not None and checkpointer.loaded.source == "memory"
        assert same(loaded, _tied())


@pytest.mark.parametrize("less", [0, 4096, 8192, 61440])
def test_a_file_ends_with_its_data_where_the_last_piece_ends_with_the_image(root: Path, less: int) -> None:
    """A piece has 64 MiB, and an image ends at a multiple of 64 KiB, which may be behind the end of the file."""
    state = {"t": torch.zeros((64 << 20) - 4096 - less, dtype=torch.uint8)}
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
    assert not verify(step_folder(str(root), 1)).damages
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(state, memory=False) == 1
