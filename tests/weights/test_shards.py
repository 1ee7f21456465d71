"""Ranks publish together, each the part it has of sharded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run
from support.weights import reads, sharded, whole
from torch.distributed.tensor import DTensor

from asyncckpt.errors import (
    MismatchError,
    RankFailedError,
    UnsavableStateError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights import subscriber as subscribers

pytestmark = pytest.mark.usefixtures("forkserver")


def _publish_together(address: str) -> list[bool]:
    """The first rank reads, while both are there."""
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
    """All of it, for which the ranks meet."""
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
                assert subscriber.versions() == [5, 7, 8]
        dist.barrier()
    return said


def test_what_one_rank_cannot_publish_none_does(tmp_path: Path) -> None:
    first, second = run(2, _publish_where_one_fails, "policy", folder=tmp_path)
    well = ["published"] * 2
    assert first == [*well, "UnsavableStateError", *well, "UnsavableStateError", *well]
    assert second == [*well, "RankFailedError", *well, "RankFailedError", *well]


def _publish_what_the_first_has_not(address: str) -> list[str]:
    said = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for version in range(1, 5):
            weights = sharded(version)
            if version in (2, 3) and dist.get_rank() == 1:
                weights["stage"] = torch.ones(3)
            try:
                publisher.publish(weights, version)
                said.append("published")
            except (UnsavableStateError, RankFailedError) as error:
                said.append(str(error))
        dist.barrier()
    return said


def test_a_tensor_that_only_another_rank_has_is_not_lost_silently(tmp_path: Path) -> None:
    for said in run(2, _publish_what_the_first_has_not, "policy", folder=tmp_path):
        assert said[0] == said[3] == "published"
        assert all("'stage' is no DTensor" in text for text in said[1:3])


def _publish_after_one_was_ahead(address: str) -> list[str]:
    said = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(sharded(4), 4)
        if dist.get_rank() == 0:  # the first rank was one version ahead when all died
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
        # What is whole here can be published, be it a DTensor or not.
        publisher.publish({name: weights[name] for name in ("same", "plain")}, 1)
        with WeightSubscriber(f"{address}-{dist.get_rank()}") as subscriber, subscriber.acquire() as acquired:
            assert all(type(tensor) is torch.Tensor and not isinstance(tensor, DTensor) for tensor in acquired.values())
            assert torch.equal(acquired["same"], whole(1)["same"])
    return said


def test_one_rank_alone_publishes_no_parts(tmp_path: Path) -> None:
    for said in run(2, _publish_alone, "policy", folder=tmp_path):
        assert len(said) == 1 and "give it the process group" in said[0]


def _publish_but_one(address: str) -> str:
    """The second rank's publication is missing."""
    said = ""
    subscribers._LEAST_ANSWER_S = 30.0  # the workers may need a moment
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(sharded(1), 1)
        buffer = publisher._buffers[-1]
        if dist.get_rank() == 1:
            buffer._published.withdraw_all()
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


def test_a_missing_part_is_told(tmp_path: Path) -> None:
    assert "'rows', (10, 7), not every part" in run(2, _publish_half, "policy", folder=tmp_path)[0]


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
