"""A DCP folder in a file set is read where it is staged, like a checkpoint of a state dict."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import verify
from support.ranks import Job, alone, fsdp2_on_cpu, say
from support.segments import mapped_segments
from support.states import same, stock_load, zeros_like
from support.weights import sharded
from support.workers import wait_for
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncckpt import Checkpointer, Config, FileSet
from asyncckpt.errors import CheckpointError, VersionError
from asyncckpt.extension import Engine
from asyncckpt.weights import WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")

LARGE = 300_000  # elements: a torch file below 1 MiB is not staged


def model(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300, 70), float(step)), "b": torch.arange(5, dtype=torch.bfloat16) + step}


def files(step: int, *more: str) -> FileSet:
    """Return a file set with all kinds of files: the model in the folder "actor", and ``more`` folders."""
    its = FileSet()
    its.add_torch_file("optimizer.pt", {"moment": torch.full((LARGE,), -1.0)})
    its.add_safetensors("other.safetensors", {"w": torch.full((9,), -2.0)})
    its.add_bytes("state.json", b"{}")
    its.add_torch_file("small.pt", {"step": step})
    for name in ("actor", *more):
        state = model(step) if name == "actor" else {"w": torch.full((300,), 1000.0 + step)}
        its.add_dcp_folder(name, {"model": state, "step": step})
    return its


def mapped_at(inode: int) -> Iterator[range]:
    """Yield the address ranges of this process's mappings of a segment."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.split()[4] == str(inode):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            yield range(begin, end)


def read(root: str, version: int, prefix: str = "model.") -> dict[str, torch.Tensor]:
    subscriber = WeightSubscriber.of_checkpoints(root, prefix=prefix)
    with subscriber, subscriber.acquire(version=version) as weights:
        return {name: tensor.clone() for name, tensor in weights.items()}


def _read_and_say(root: str, version: int) -> None:
    say(read(root, version))


def test_the_folder_is_read_where_it_is_staged(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            save = checkpointer.save(step, files(step))
            publication = checkpointer.publish(save)
            assert (publication.version, publication.skipped, publication.nbytes) == (step, False, 0)
            _, seen = alone(_read_and_say, str(root), step)
            assert same(seen, model(step))
            with WeightSubscriber.of_checkpoints(root) as subscriber, subscriber.acquire() as weights:
                assert set(weights) == {"model.w", "model.b"}  # no tensors of other files
            path = save.result(60)
        assert not verify(path).damages
        state: dict[str, Any] = {"model": zeros_like(model(2)), "step": 0}
        stock_load(state, f"{path}/actor")
        assert same(state, {"model": model(2), "step": 2})


def test_no_byte_is_copied_for_it(root: Path) -> None:
    """The trainer takes no more memory, and the reader's tensors lie in the trainer's segment."""
    with Checkpointer(root) as checkpointer, WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
        checkpointer.prepare(files(0))
        (inode,) = before = mapped_segments()
        checkpointer.publish(checkpointer.save(1, files(1)))
        assert mapped_segments() == before
        with subscriber.acquire() as weights:
            address, memory = weights["w"].data_ptr(), list(mapped_at(inode))
            # Three mappings: the trainer's, the reader's for the publications, and the lease's.
            assert any(address in each for each in memory) and len(memory) == 3


def test_of_several_folders_one_is_named(root: Path) -> None:
    with Checkpointer(root, Config(slots=3)) as checkpointer:
        save = checkpointer.save(1, files(1, "critic"))
        checkpointer.publish(save, folder="actor")
        other = checkpointer.save(2, files(2, "critic"))
        checkpointer.publish(other, folder="critic")
        # Each version has its own folder.
        assert same(read(str(root), 1), model(1))
        assert same(read(str(root), 2), {"w": torch.full((300,), 1002.0)})
        # The folder that a slot publishes may change while nobody reads the slot.
        checkpointer.publish(other, 3, folder="actor")
        assert same(read(str(root), 3), model(2))


@pytest.mark.parametrize("folder", [None, "", "model", "other.safetensors", "optimizer.pt", "state.json", "small.pt"])
def test_what_is_no_folder_of_dcps_is_refused(root: Path, folder: str | None) -> None:
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, files(1, "critic"))
        words = "has to be named" if folder is None else f"{folder!r} is none"
        with pytest.raises(
            CheckpointError, match=rf"publish takes one DCP folder of a set.* \['actor', 'critic'\], .*{words}"
        ):
            checkpointer.publish(save, folder=folder)
        with WeightSubscriber.of_checkpoints(root) as subscriber:
            assert subscriber.versions() == []
        assert not checkpointer.publish(save, folder="actor").skipped  # only the name was wrong
        save.result(60)


def test_other_saves_have_no_folders(root: Path, tmp_path: Path) -> None:
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, model(1))
        with pytest.raises(CheckpointError, match="published whole, and has no folder 'actor'"):
            checkpointer.publish(save, folder="actor")
        nothing = FileSet()
        nothing.add_safetensors("w.safetensors", model(1))
        save = checkpointer.save(2, nothing)
        with pytest.raises(CheckpointError, match=r"in this set, \[\], one has to be named"):
            checkpointer.publish(save)
    with Engine(alone=True, job="files") as engine:
        save = engine.save_file(tmp_path / "file.pt", {"w": torch.ones(LARGE)})
        with pytest.raises(CheckpointError, match="a file cannot be published"):
            engine.publish(save, 1)
    with Engine(alone=True) as engine:  # without a job name, readers cannot find its worker
        save = engine.save(tmp_path / "set", files(1))
        with pytest.raises(CheckpointError, match="no endpoint"):
            engine.publish(save, 1)


def test_saves_go_on_beside_a_reader_who_never_ends(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        with WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
            checkpointer.publish(checkpointer.save(1, files(1)))
            held = subscriber.acquire()
            for step in range(2, 6):
                assert checkpointer.publish(checkpointer.save(step, files(step))).skipped
                assert same(dict(held.items()), model(1)) and subscriber.versions() == [1]
            held.release()
            assert not checkpointer.publish(checkpointer.save(6, files(6))).skipped
            with subscriber.acquire(6) as weights:
                assert same(dict(weights.items()), model(6))
        checkpointer.wait()
        assert not any(verify(str(root / f"step-{step:08d}")).damages for step in range(1, 7))


def test_with_overlap_a_version_is_whole(root: Path) -> None:
    with Checkpointer(root, Config(overlap=True)) as checkpointer:
        for step in range(1, 4):
            checkpointer.publish(checkpointer.save(step, files(step)))
            assert same(read(str(root), step), model(step))


def _publish_and_die(root: str) -> None:
    checkpointer = Checkpointer(root)
    for step in (1, 2):
        save = checkpointer.save(step, files(step))
        checkpointer.publish(save)
    save.result(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_that_takes_over_leaves_alone_what_is_read(root: Path) -> None:
    assert alone(_publish_and_die, str(root))[0] == -signal.SIGKILL
    with WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
        held = subscriber.acquire()  # from the lingering worker
        assert held.version == 2
        with Checkpointer(root) as checkpointer:
            for step in range(3, 6):
                save = checkpointer.save(step, files(step))
                with pytest.raises(VersionError, match="not newer than 2"):
                    checkpointer.publish(save, 1)
                assert checkpointer.publish(save).skipped
                assert same(dict(held.items()), model(2)) and subscriber.versions() == [2]
            held.release()
            assert not checkpointer.publish(checkpointer.save(6, files(6))).skipped
            with subscriber.acquire(6) as weights:
                assert same(dict(weights.items()), model(6))


def _publish_apart(root: str) -> None:
    with Checkpointer(root) as checkpointer:
        for step, theirs in ((1, "critic"), (2, "actor")):
            its = FileSet()
            for name in ("actor", "critic"):
                its.add_dcp_folder(name, {"model": sharded(step)})
            save = checkpointer.save(step, its)
            checkpointer.publish(save, folder=theirs if dist.get_rank() else "actor")
            dist.barrier()
            if dist.get_rank() == 0:
                with WeightSubscriber.of_checkpoints(root) as subscriber:
                    say(subscriber.versions())
            dist.barrier()


def test_a_version_is_of_the_same_folder_on_all_ranks(tmp_path: Path, root: Path) -> None:
    job = Job(2, _publish_apart, str(root), folder=tmp_path)
    assert [job.hear(0), job.hear(0)] == [[], [2]]
    assert [end.error for end in job.wait()] == [None, None]


def _train(root: str, gate: str) -> None:
    """Train with FSDP2. Save and publish each step as one file set, as verl's FSDP engine does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 31), nn.ReLU(), nn.Linear(31, 40))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with Checkpointer(root) as checkpointer:
        for step in range(1, 5):
            net(torch.randn(4, 40)).square().sum().backward()
            optimizer.step()
            its_model, its_optimizer = get_state_dict(net, optimizer)
            whole = {name: value.full_tensor() for name, value in its_model.items() if isinstance(value, DTensor)}
            its = FileSet()
            its.add_dcp_folder("", {"model": its_model, "optimizer": its_optimizer})
            its.add_bytes(f"rank-{dist.get_rank()}", b"mine")
            save = checkpointer.save(step, its)
            say((checkpointer.publish(save).skipped, whole))
            optimizer.zero_grad()
            wait_for(Path(f"{gate}-{step}").exists)
            save.result(60)


@fsdp2_on_cpu
def test_two_ranks_of_fsdp2(tmp_path: Path, root: Path) -> None:
    job = Job(2, _train, str(root), str(tmp_path / "gate"), folder=tmp_path)
    seen: list[dict[str, torch.Tensor]] = []
    with WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
        held = None
        for step in range(1, 5):
            (skipped, whole), other = job.hear(0), job.hear(1)
            assert other[0] == skipped == (step in (2, 3)) and same(other[1], whole)
            seen.append(whole)
            if not skipped:
                held = subscriber.acquire(step)
            assert held is not None
            assert same(dict(held.items()), seen[held.version - 1])  # the leased version is not overwritten
            assert held.version == (4 if step == 4 else 1)
            if step == 3:
                held.release()
            Path(tmp_path / f"gate-{step}").touch()
        held = None
    assert [end.error for end in job.wait()] == [None, None]
    for step, whole in enumerate(seen, 1):
        path = root / f"step-{step:08d}"
        assert not verify(str(path)).damages and (path / "rank-1").read_bytes() == b"mine"
        state = {"model": zeros_like(whole)}
        stock_load(state, path)
        assert same(state["model"], whole)
