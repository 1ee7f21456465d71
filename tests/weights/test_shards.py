"""Ranks publish sharded weights together, each rank its own parts."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run
from support.weights import reads, sharded, whole
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from asyncckpt.errors import (
    MismatchError,
    RankFailedError,
    UnsavableStateError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.weights import WeightPublisher, WeightSubscriber, shards
from asyncckpt.weights import subscriber as subscribers

pytestmark = pytest.mark.usefixtures("forkserver")


def _publish_together(address: str) -> list[bool]:
    """Publish on two ranks. The first rank reads each version while both ranks are alive."""
    seen = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for step in range(1, 5):
            publisher.publish(sharded(step), step)
            dist.barrier()
            if dist.get_rank() == 0:
                seen.append(reads(WeightSubscriber(address), step))
            dist.barrier()
    return seen


def test_ranks_publish_together_what_each_has(tmp_path: Path) -> None:
    assert run(2, _publish_together, "policy", folder=tmp_path)[0] == [True] * 4


def _stream_together(address: str) -> list[bool]:
    seen = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for step in range(1, 6):
            weights = sharded(step)
            if step == 4:
                weights["more"] = torch.ones(3)
            stream = ((name, full(tensor)) for name, tensor in weights.items())
            assert not publisher.publish(stream, step).skipped
            dist.barrier()
            if dist.get_rank() == 0 and step != 4:
                with WeightSubscriber(address) as subscriber, subscriber.acquire() as acquired:
                    assert acquired.nbytes == sum(tensor.nbytes for tensor in whole(step).values())
                seen.append(reads(WeightSubscriber(address), step))
            dist.barrier()
    return seen


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. All ranks have to call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_ranks_walk_along_a_stream_together(tmp_path: Path) -> None:
    assert run(2, _stream_together, "policy", folder=tmp_path)[0] == [True] * 4


def _publish_where_one_fails(address: str) -> list[str]:
    said = []
    odd = torch.eye(3).to_sparse()
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for version in range(1, 9):
            weights: dict[str, torch.Tensor] = sharded(version)
            if version in (3, 6) and dist.get_rank() == 0:
                weights = {"rows": weights["rows"], "odd": odd} | weights
            by_name = ((name, full(tensor)) for name, tensor in weights.items())
            try:
                publisher.publish(weights if version < 5 else by_name, version)
                said.append("published")
            except (UnsavableStateError, RankFailedError) as error:
                said.append(type(error).__name__)
        dist.barrier()
        if dist.get_rank() == 0:
            with WeightSubscriber(address) as subscriber:
                assert subscriber.versions() == [7, 8]
        dist.barrier()
    return said


def test_what_one_rank_cannot_publish_none_does(tmp_path: Path) -> None:
    first, second = run(2, _publish_where_one_fails, "policy", folder=tmp_path)
    well = ["published"] * 2
    assert first == [*well, "UnsavableStateError", *well, "UnsavableStateError", *well]
    assert second == [*well, "RankFailedError", *well, "RankFailedError", *well]


def _publish_what_the_first_has_not(address: str) -> None:
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for version in range(1, 5):
            weights = sharded(version)
            if version in (2, 3) and dist.get_rank() == 1:
                weights["stage"] = torch.full((3,), float(version))
            publisher.publish(weights, version)
            dist.barrier()
            if dist.get_rank() == 0:
                with WeightSubscriber(address) as subscriber, subscriber.acquire() as acquired:
                    staged = acquired["stage"].tolist() if "stage" in acquired else None
                    assert staged == ([float(version)] * 3 if version in (2, 3) else None)
            dist.barrier()


def test_a_tensor_that_only_another_rank_has_is_published(tmp_path: Path) -> None:
    run(2, _publish_what_the_first_has_not, "policy", folder=tmp_path)


def _publish_over_parts_of_the_job(address: str) -> list[str]:
    """Publish weights that are tensor parallel over two ranks and data parallel over the pairs.

    The last rank has only replicas.
    """
    said = []
    rank = dist.get_rank()
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
    middle = DeviceMesh("cpu", [1, 2])
    rows = torch.arange(70.0).reshape(10, 7)
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for version in range(1, 5):
            weights: dict[str, torch.Tensor] = {
                "pairs": distribute_tensor(rows + version, pairs, [Shard(0)], src_data_rank=None),
                "middle": distribute_tensor(rows * version, middle, [Shard(1)], src_data_rank=None),
                "short": distribute_tensor(torch.ones(1) * version, pairs, [Shard(0)], src_data_rank=None),
            }
            if version == 2 and rank in (1, 3):
                del weights["pairs"]  # the parts still have the size of the tensor, but are the same half twice
            if version == 3 and rank == 2:
                weights["pairs"] = (rows + version)[1:5]
            try:
                publisher.publish(weights, version)
                assert publisher._plan is not None
                said.append(f"published {sum(entry.nbytes for entry in publisher._plan.entries)}")
            except UnsavableStateError as error:
                said.append(str(error))
            dist.barrier()
            if rank == 0 and version in (1, 4):
                with WeightSubscriber(address) as subscriber, subscriber.acquire() as acquired:
                    assert torch.equal(acquired["pairs"], rows + version)
                    assert torch.equal(acquired["middle"], rows * version)
                    assert acquired["short"].tolist() == [version]
                    assert acquired.nbytes == 2 * 70 * 4 + 4
            dist.barrier()
    return said


def test_replicas_of_parts_are_published_once_and_gaps_never(tmp_path: Path) -> None:
    each = run(4, _publish_over_parts_of_the_job, "policy", folder=tmp_path)
    assert [said[0] for said in each] == [f"published {nbytes}" for nbytes in (140 + 4, 140 + 160, 120, 0)]
    for said in each:
        assert said[3] == said[0]
        assert said[1] == "of 'pairs', (10, 7), no rank has [5:10, 0:7]"
        assert "'pairs' is torch.float32, (4, 7), on rank 2, and on another torch.float32, (10, 7)" in said[2]


def _publish_at_random(address: str, cases: int) -> int:
    """Publish tensors of all dtypes and placements. Return the number of tensors that were read back unchanged."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    some = [DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2, 3], [1, 3], [2])]
    meshes = [both, both["tensor"], both["data"], *some]
    dtypes = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
    read = 0
    subscriber = WeightSubscriber(address)
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher, subscriber:
        for case in range(cases):
            pick = random.Random(case)
            wholes, weights = {}, {}
            for number in range(10):
                name, whole = f"{number}", _random_tensor(pick, pick.choice(dtypes))
                mesh = pick.choice(meshes)
                ways = [Replicate(), *map(Shard, range(whole.dim()))]
                placements = [pick.choice(ways) for _ in range(mesh.ndim)]
                wholes[name] = whole
                weights[name] = _distributed(whole, mesh, placements)
            publisher.publish(weights, case)
            dist.barrier()
            if dist.get_rank() == 0:
                with subscriber.acquire(case) as acquired:
                    assert acquired.keys() == wholes.keys()
                    for name, whole in wholes.items():
                        assert acquired[name].dtype == whole.dtype and acquired[name].shape == whole.shape
                        assert _bytes_of(acquired[name]) == _bytes_of(whole), (case, name, whole.dtype)
                        read += 1
            dist.barrier()
    return read


def _distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Distribute a tensor as integers, because torch cannot copy all dtypes."""
    parts = distribute_tensor(_as_integers(whole), mesh, placements, src_data_rank=None)
    local = parts.to_local().view(whole.dtype)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, tensor.dtype)
    )


def _random_tensor(pick: random.Random, dtype: torch.dtype) -> torch.Tensor:
    shape = [pick.randint(0 if pick.random() < 0.1 else 1, 7) for _ in range(pick.randint(0, 3))]
    numbers = torch.tensor([pick.randrange(2) for _ in range(math.prod(shape) * dtype.itemsize)], dtype=torch.uint8)
    return numbers.view(dtype).reshape(shape)


def _bytes_of(tensor: torch.Tensor) -> list[int]:
    return _as_integers(tensor).contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []


def test_every_dtype_and_placement_comes_as_it_is(tmp_path: Path) -> None:
    assert run(4, _publish_at_random, "policy", 40, folder=tmp_path)[0] > 300


def _overlap(address: str) -> str:
    rows = torch.arange(70.0).reshape(10, 7)
    mesh = init_device_mesh("cpu", (2,))
    mine = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None) if dist.get_rank() else rows
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        try:
            publisher.publish({"rows": mine}, 1)
        except UnsavableStateError as error:
            return str(error)
    return ""


def test_parts_that_lie_in_each_other_are_refused(tmp_path: Path) -> None:
    for said in run(2, _overlap, "policy", folder=tmp_path):
        assert said == "of 'rows', (10, 7), two ranks have [5:10, 0:7] as parts that are neither the same nor apart"


def _publish_after_one_was_ahead(address: str) -> list[str]:
    said = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(sharded(4), 4)
        if dist.get_rank() == 0:  # as if the first rank was one version ahead when all ranks died
            buffer, plan = publisher._buffers[-1], publisher._plan
            assert plan is not None
            slot = buffer.claim(plan, 3)
            assert slot is not None
            buffer.publish(slot, PublishedVersion(publisher._versions._epoch, 5, False, 2))
        publisher._close(linger=True)
    dist.barrier()
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for version, roll_back in ((5, False), (6, False), (6, True)):
            try:
                publisher.publish(sharded(version), version, roll_back=roll_back)
                said.append("published")
            except VersionError:
                said.append("not newer")
        dist.barrier()
    return said


def test_all_ranks_know_what_one_has_published(tmp_path: Path) -> None:
    for said in run(2, _publish_after_one_was_ahead, "policy", folder=tmp_path):
        assert said == ["not newer", "published", "published"]


def _publish_alone(address: str) -> list[str]:
    said = []
    weights = sharded(1)
    with WeightPublisher(f"{address}-{dist.get_rank()}") as publisher:
        try:
            publisher.publish(weights, 1)
        except UnsavableStateError as error:
            said.append(str(error))
        # A tensor that is whole on this rank can be published, even if it is a DTensor.
        publisher.publish({name: weights[name] for name in ("same", "plain")}, 1)
        with WeightSubscriber(f"{address}-{dist.get_rank()}") as subscriber, subscriber.acquire() as acquired:
            assert all(type(tensor) is torch.Tensor and not isinstance(tensor, DTensor) for tensor in acquired.values())
            assert torch.equal(acquired["same"], whole(1)["same"])
    return said


def test_one_rank_alone_publishes_no_parts(tmp_path: Path) -> None:
    for said in run(2, _publish_alone, "policy", folder=tmp_path):
        assert len(said) == 1 and "give it the process group" in said[0]


def _publish_but_one(address: str) -> str:
    """Publish on both ranks, and withdraw the second rank's publication. Return the reader's error."""
    said = ""
    subscribers._LEAST_ANSWER_S = 30.0  # the workers may need a moment
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(sharded(1), 1)
        buffer = publisher._buffers[-1]
        if dist.get_rank() == 1:
            buffer._owned.withdraw_all()
        dist.barrier()
        if dist.get_rank() == 0:
            try:
                WeightSubscriber(address).acquire(timeout=0.2)
            except WeightsTimeoutError as error:
                said = str(error)
        dist.barrier()
    return said


def test_a_version_that_is_not_of_all_ranks_is_none(tmp_path: Path) -> None:
    said = run(2, _publish_but_one, "policy", folder=tmp_path)[0]
    assert "2 ranks publish, and not all of them on this host" in said


def _publish_half(address: str) -> str:
    said = ""
    weights = sharded(1)
    if dist.get_rank() == 1:
        del weights["rows"]
    shards._check_whole = lambda *_: None
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(weights, 1)
        dist.barrier()
        if dist.get_rank() == 0:
            with WeightSubscriber(address) as subscriber, subscriber.acquire() as acquired:
                assert torch.equal(acquired["columns"], whole(1)["columns"])
                with pytest.raises(ValueError, match="in parts"), acquired.safetensors():
                    pass
                try:
                    acquired["rows"]
                except MismatchError as error:
                    said = str(error)
        dist.barrier()
    return said


def test_a_reader_is_told_of_a_missing_part(tmp_path: Path) -> None:
    assert "'rows', (10, 7), nobody has published [5:10, 0:7]" in run(2, _publish_half, "policy", folder=tmp_path)[0]


def _publish_two_versions(address: str) -> str:
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(sharded(1), 1)
        try:
            publisher.publish(sharded(2), 2 + dist.get_rank())
        except VersionError as error:
            publisher.publish(sharded(4), 4)
            return str(error)
    return ""


def test_ranks_publish_the_same_version(tmp_path: Path) -> None:
    for said in run(2, _publish_two_versions, "policy", folder=tmp_path):
        assert "not publish the same version, but 2, 3" in said
