"""Loads that many ranks make together."""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import QUICK, run
from support.states import equal, replicas
from support.workers import wait_for
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import asyncckpt
from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError
from asyncckpt.extension import StorageSource
from asyncckpt.loading import bar
from asyncckpt.loading import load as reader
from asyncckpt.ranks import ranks

pytestmark = pytest.mark.usefixtures("forkserver")


def _loads_nothing(root: str) -> str:
    with Checkpointer(root, QUICK) as checkpointer, pytest.raises(asyncckpt.CheckpointError) as caught:
        checkpointer.load(replicas())
    return type(caught.value).__name__


def test_nothing_to_load_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    assert run(2, _loads_nothing, str(tmp_path / "root"), folder=tmp_path) == ["CheckpointNotFoundError"] * 2


def _save_one(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas(1)).result(60)


def _load_replicas(root: str, by_dcp_on: int | None) -> tuple[bool, bool]:
    """Return whether all values are right, and whether DCP was used. The rank ``by_dcp_on`` needs DCP."""
    if dist.get_rank() == by_dcp_on:
        vars(reader)["draft"] = lambda *_: None
    asked = []
    load_by_dcp = vars(reader)["load_by_dcp"]

    def ask(*args: Any, **options: Any) -> None:
        asked.append(True)
        load_by_dcp(*args, **options)

    vars(reader)["load_by_dcp"] = ask
    into = replicas(99)
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.load(into)
    return equal(into, replicas(1)), bool(asked)


def _load_in_vain(root: str, misfit_on: int | None) -> str:
    """Return the error of a load. The rank ``misfit_on`` asks for another shape."""
    into = replicas(99)
    if dist.get_rank() == misfit_on:
        into["model"]["w0"] = torch.zeros(3)
    with Checkpointer(root, QUICK) as checkpointer:
        try:
            checkpointer.load(into)
        except CheckpointError as error:
            return f"{type(error).__name__} {error.message}"
    return ""


def test_replicas_are_loaded_without_dcp_where_all_ranks_can(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    assert len(list((tmp_path / "root/step-00000001").glob("*.distcp"))) == 2
    assert run(2, _load_replicas, root, None, folder=tmp_path) == [(True, False)] * 2
    assert run(3, _load_replicas, root, 1, folder=tmp_path) == [(True, True)] * 3
    wrong = run(2, _load_in_vain, root, 1, folder=tmp_path)
    assert wrong[0] == wrong[1] and "MismatchError" in wrong[0] and "'model.w0'" in wrong[0]
    path = tmp_path / "root/step-00000001"
    index = list(StorageSource(str(path)).indexes())[1]
    data = bytearray((path / index.data).read_bytes())
    data[index.items[0].payload_at] ^= 1
    (path / index.data).write_bytes(data)
    bad = run(2, _load_in_vain, root, None, folder=tmp_path)
    assert bad[0] == bad[1] and "DamagedCheckpointError" in bad[0] and index.items[0].name in bad[0]


def _load_with_a_bar(root: str) -> tuple[bool, str]:
    """Return whether all values are right, and the text that the terminal got."""
    into = replicas(99)
    terminal = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, Checkpointer(root, QUICK) as checkpointer:
        patch.setattr(reader, "_LONG_S", 1e-9)
        patch.setattr(bar.Bar, "__init__", partialmethod(bar.Bar.__init__, mininterval=0))
        patch.setattr(terminal, "isatty", lambda: True)
        patch.setattr(sys, "stderr", terminal)
        checkpointer.load(into)
    return equal(into, replicas(1)), terminal.getvalue()


def test_the_first_rank_alone_shows_how_far_a_load_is(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    (first, shown), (other, silence) = run(2, _load_with_a_bar, root, folder=tmp_path)
    assert first and other and "loading" in shown and not silence


def _loads_on_a_device(root: str, part: bool) -> list[tuple[bool, int]]:
    """Return for each load whether all values are right, and the number of torch's groups after it."""
    group = dist.new_group([1, 2], backend="cuda:gloo") if part else None
    found = []
    for by_dcp_on in (None, 1, 1) if dist.get_rank() > 0 or not part else ():
        with pytest.MonkeyPatch.context() as patch, Checkpointer(root, QUICK, group) as checkpointer:
            if dist.get_rank() == by_dcp_on:
                patch.setattr(reader, "draft", lambda *_: None)
            into = replicas(99)
            checkpointer.load(into)
        found.append((equal(into, replicas(1)), len(dist.distributed_c10d._world.pg_names)))
    return found


def _on_a_device_alone(root: str, meeting: str, part: bool) -> tuple[list[tuple[bool, int]], int]:
    """Load in a job with process groups that send only device tensors, on a host without a device.

    Return the results of the loads, and how many groups stay in memory after their destruction.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that is still connecting would wait for ever
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    # These groups have no barrier, and a rank that destroys its group too soon breaks the connecting of others.
    Path(f"{meeting}-{rank}").touch()
    wait_for(lambda: all(Path(f"{meeting}-{each}").exists() for each in range(size)))
    found = _loads_on_a_device(root, part)
    known = [weakref.ref(each) for each in dist.distributed_c10d._world.pg_names]
    dist.destroy_process_group()
    gc.collect()
    return found, sum(each() is not None for each in known)


@pytest.mark.parametrize("part", [False, True], ids=["all ranks", "some ranks"])
def test_what_a_load_asks_goes_by_way_of_the_host(tmp_path: Path, part: bool) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    ranks = run(3, _on_a_device_alone, root, str(tmp_path / "device"), part, folder=tmp_path)
    assert [found for found, _ in ranks[part:]] == [[(True, 2 + part)] * 3] * (3 - part)
    assert not any(left for _, left in ranks)


def _on_the_host(root: str) -> list[int]:
    into = replicas(99)
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.load(into)
    return [len(dist.distributed_c10d._world.pg_names), len(ranks._cpu_groups)]


def test_where_the_host_is_sent_already_no_group_is_made(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    assert run(2, _on_the_host, root, folder=tmp_path) == [[1, 0]] * 2


def _load_into_meta(root: str, stock: str) -> list[list[float]]:
    """Load our own checkpoint, by step and by path, and stock DCP's, into tensors on the meta device."""
    mesh = init_device_mesh("cpu", (2,))
    found: list[list[float]] = []

    def state(device: str) -> dict[str, Any]:
        part = torch.arange(4.0) + 4 * dist.get_rank() if device == "cpu" else torch.empty(4, device=device)
        sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        return {"model": {"w": sharded}, "step": 1}

    with Checkpointer(root, config=QUICK) as checkpointer:
        path = checkpointer.save(1, state("cpu")).result()
        state_dict_saver.save(state("cpu"), checkpoint_id=stock)
        checkpointer.load(first := state("meta"))
    asyncckpt.load(second := state("meta"), checkpoint_id=path)
    asyncckpt.load(third := state("meta"), checkpoint_id=stock)
    for its in (first, second, third):
        found.append(its["model"]["w"].to_local().tolist())
    return found


def test_dtensors_on_the_meta_device_are_made(tmp_path: Path) -> None:
    """A load by all ranks creates the DTensors, as DCP's load does."""
    found = run(2, _load_into_meta, str(tmp_path / "root"), str(tmp_path / "stock"), folder=tmp_path)
    assert found == [[[0.0, 1.0, 2.0, 3.0]] * 3, [[4.0, 5.0, 6.0, 7.0]] * 3]


def _load_late_name(root: str, late: int) -> bool:
    """Load step 1, and return whether all values are right.

    The host of rank ``late`` sees the folder a second later.
    """
    path = Path(root, "step-00000001")
    if dist.get_rank() == late:
        at_host = Path(root, "late")
        threading.Timer(1, at_host.symlink_to, [path]).start()
        path = at_host
    asyncckpt.load(state := replicas(), checkpoint_id=path)
    return equal(state, replicas(1))


@pytest.mark.parametrize("late", [0, 1])
def test_a_name_that_other_hosts_see_late_is_waited_for(tmp_path: Path, late: int) -> None:
    root = str(tmp_path / "root")
    run(2, _save_one, root, folder=tmp_path)
    assert all(run(2, _load_late_name, root, late, folder=tmp_path))
