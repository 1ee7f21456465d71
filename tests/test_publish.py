"""What is staged for a checkpoint is what readers get, where it is; and readers never stand in a save's way."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Faulty, same, small_state, zeros_like
from ranks import alone, run, say, serve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from asyncckpt.address import job_of_checkpoints
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import (
    ClosedError,
    MismatchError,
    RankFailedError,
    StorageError,
    UnsavableStateError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.shm.slots import Published
from asyncckpt.verify import verify
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.reading import Publications
from asyncckpt.worker.door import door_name


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield from serve()


def numbered(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 700), float(step)), "b": torch.full((3,), float(step))}, "step": step}


def number_in(weights: Any) -> int:
    (found,) = {float(value) for tensor in weights.values() for value in tensor.flatten().tolist()}
    return int(found)


def test_the_tensors_of_a_save_are_read_where_it_is_staged(root: Path) -> None:
    state = small_state()
    with Checkpointer(root) as checkpointer, WeightSubscriber.of_checkpoints(root) as subscriber:
        save = checkpointer.save(4, state)
        publication = checkpointer.publish(save)
        assert (publication.version, publication.skipped) == (4, False)
        assert set(publication.timings.values()) == {0.0}
        with subscriber.acquire() as weights:
            expected = {
                "model.weight": state["model"]["weight"],
                "model.bias": state["model"]["bias"],
                "optimizer.state.0.exp_avg": state["optimizer"]["state"][0]["exp_avg"],
                "optimizer.state.0.step": state["optimizer"]["state"][0]["step"],
            }
            assert set(weights) == set(expected) and all(same(weights[name], expected[name]) for name in expected)
            assert weights.version == 4
            with pytest.raises(ValueError, match="only a WeightPublisher's"), weights.safetensors():
                pass
        with WeightSubscriber.of_checkpoints(root, prefix="model.") as other, other.acquire() as weights:
            assert sorted(weights) == ["bias", "weight"]
        save.result(60)
        assert not verify(str(root / "step-00000004")).damages
        into = zeros_like(state)
        checkpointer.load(into)
        assert same(into, state)


def test_saves_go_on_beside_a_reader_who_never_ends(root: Path) -> None:
    with Checkpointer(root, Config(keep_last=2)) as checkpointer:
        with WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
            checkpointer.publish(checkpointer.save(1, numbered(1)))
            held = subscriber.acquire()
            for step in range(2, 12):
                publication = checkpointer.publish(checkpointer.save(step, numbered(step)))
                assert publication.skipped  # the other slot is for saves
                assert number_in(held) == 1 and subscriber.versions() == [1]
            held.release()
            assert not checkpointer.publish(checkpointer.save(12, numbered(12))).skipped
            with subscriber.acquire(12) as weights:
                assert number_in(weights) == 12
        checkpointer.wait()
        for step in checkpointer.steps()[-2:]:  # an older one may just be being removed
            into = zeros_like(numbered(0))
            checkpointer.load(into, step)
            assert same(into["model"], numbered(step)["model"])


def test_more_slots_keep_more_versions(root: Path) -> None:
    subscriber = WeightSubscriber.of_checkpoints(root, prefix="model.")
    with subscriber, Checkpointer(root, Config(slots=4)) as checkpointer:
        for step in range(1, 8):
            checkpointer.publish(checkpointer.save(step, numbered(step)))
            checkpointer.wait()
            assert subscriber.versions() == list(range(max(1, step - 2), step + 1))
        with subscriber.acquire(version=5) as weights:
            assert number_in(weights) == 5


def test_with_one_slot_nothing_is_published(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(root, Config(slots=1)) as checkpointer:
        assert checkpointer.publish(checkpointer.save(1, numbered(1))).skipped
    assert "readers have all slots but that" in caplog.text


def test_what_is_not_there_any_more_is_skipped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(root, Config(slots=2)) as checkpointer:
        first = checkpointer.save(1, numbered(1))
        checkpointer.save(2, numbered(2))
        checkpointer.save(3, numbered(3))
        assert checkpointer.publish(first).skipped
        assert "not in memory any more" in caplog.text


def test_only_a_save_of_its_own_is_published(root: Path) -> None:
    with Checkpointer(root / "one") as one, Checkpointer(root / "other") as other:
        save = one.save(1, numbered(1))
        other.save(2, numbered(2))
        assert other.publish(save).skipped and not one.publish(save).skipped


def test_what_is_prepared_again_is_not_written_over(root: Path) -> None:
    subscriber = WeightSubscriber.of_checkpoints(root, prefix="model.")
    with subscriber, Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, numbered(1))
        checkpointer.publish(save)
        save.result(60)
        with subscriber.acquire() as weights:
            checkpointer.prepare(numbered(99))
            assert number_in(weights) == 1


def test_a_fork_publishes_nothing(root: Path) -> None:
    with Checkpointer(root) as checkpointer, WeightPublisher("policy", slots=2) as publisher:
        save = checkpointer.save(1, numbered(1))
        for version in range(4):
            publisher.publish(numbered(version), version)
        weights = numbered(9)  # torch computes nothing in a fork

        def save_again() -> object:
            return checkpointer.publish(save)

        def publish_more() -> object:
            return publisher.publish(weights, 9)

        if (child := os.fork()) == 0:
            told = 0
            for publish in (save_again, publish_more):
                try:
                    publish()
                except ClosedError:
                    told += 1
                except BaseException:
                    pass
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert not checkpointer.publish(save).skipped and not publisher.publish(numbered(4), 4).skipped


def test_a_save_that_storage_refuses_can_be_published(root: Path, faulty_worker: Faulty) -> None:
    faulty_worker("write:enospc")
    with Checkpointer(root) as checkpointer, WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
        save = checkpointer.save(1, numbered(1))
        with pytest.raises(StorageError):
            save.result(60)
        assert not checkpointer.publish(save).skipped
        with subscriber.acquire() as weights:
            assert number_in(weights) == 1


def test_with_overlap_a_version_is_whole(root: Path) -> None:
    subscriber = WeightSubscriber.of_checkpoints(root, prefix="model.")
    with subscriber, Checkpointer(root, Config(overlap=True)) as checkpointer:
        for step in range(1, 6):
            checkpointer.publish(checkpointer.save(step, numbered(step)))
            with subscriber.acquire(step) as weights:
                assert number_in(weights) == step


def test_versions_of_saves_grow_too(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.publish(checkpointer.save(5, numbered(5)))
        save = checkpointer.save(3, numbered(3))
        with pytest.raises(VersionError):
            checkpointer.publish(save)
        assert not checkpointer.publish(save, 3, roll_back=True).skipped


def _train_and_die(root: str, last: int) -> None:
    checkpointer = Checkpointer(root)
    for step in range(1, last + 1):
        save = checkpointer.save(step, numbered(step))
        checkpointer.publish(save)
        save.result(60)
    say(last)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_trainer_that_takes_over_leaves_alone_what_is_read(root: Path) -> None:
    assert alone(_train_and_die, str(root), 3) == (-signal.SIGKILL, 3)
    with WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
        held = subscriber.acquire()
        assert number_in(held) == 3
        with Checkpointer(root) as checkpointer:
            into = numbered(0)
            assert checkpointer.load(into) == 3 and checkpointer.loaded is not None
            assert checkpointer.loaded.source == "memory"
            for step in range(4, 10):
                save = checkpointer.save(step, numbered(step))
                assert checkpointer.publish(save).skipped and number_in(held) == 3
            with pytest.raises(VersionError, match="not newer than 3"):
                checkpointer.publish(save, 2)
            held.release()
            assert not checkpointer.publish(checkpointer.save(10, numbered(10))).skipped
            with subscriber.acquire(10) as weights:
                assert number_in(weights) == 10


# Of many ranks.


def whole(step: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(70.0).reshape(10, 7) + step,
        "columns": torch.arange(60.0).reshape(6, 10) * step,
        "uneven": torch.arange(5.0) - step,
        "same": torch.full((4,), float(step)),
        "plain": torch.tensor([float(step)]),
    }


def sharded(step: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: dict[str, list[Placement]] = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "uneven": [Shard(0)],
        "same": [Replicate()],
    }
    weights = whole(step)
    for name, placement in placements.items():
        weights[name] = distribute_tensor(weights[name], mesh, placement)
    return weights


def _publish_together(address: str) -> list[bool]:
    """The first rank reads, while both are there."""
    seen = []
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        for step in range(1, 5):
            publisher.publish(sharded(step), step)
            dist.barrier()
            if dist.get_rank() == 0:
                seen.append(_reads(WeightSubscriber(address), step))
            dist.barrier()
    return seen


def _reads(subscriber: WeightSubscriber, step: int) -> bool:
    with subscriber, subscriber.acquire() as weights:
        right = all(torch.equal(weights[name], tensor) for name, tensor in whole(step).items())
        return right and len(weights) == len(whole(step)) and weights.version == step


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
                seen.append(_reads(WeightSubscriber(address), step))
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
            shelf, client, plan = publisher._shelves[-1], publisher._client, publisher._plan
            assert client is not None and plan is not None
            slot = shelf.claim(plan, client, 3, 60)
            assert slot is not None
            shelf.publish(slot, Published(publisher._versions._epoch, 5, False, 2))
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


def _publish_saves(root: str) -> list[bool]:
    seen = []
    with Checkpointer(root) as checkpointer:
        for step in range(1, 5):
            save = checkpointer.save(step, sharded(step))
            assert not checkpointer.publish(save).skipped
            save.result(60)
            dist.barrier()
            if dist.get_rank() == 0:
                seen.append(_reads(WeightSubscriber.of_checkpoints(root), step))
            dist.barrier()
    return seen


def test_saves_of_many_ranks_are_published(tmp_path: Path, root: Path) -> None:
    assert run(2, _publish_saves, str(root), folder=tmp_path)[0] == [True] * 4


def _publish_where_one_skips(root: str) -> list[bool]:
    skipped = []
    with Checkpointer(root, Config(timeout=10.0)) as checkpointer:
        checkpointer.publish(checkpointer.save(1, sharded(1)))
        part = Publications(door_name(job_of_checkpoints(root, None), dist.get_rank()))
        held = None
        if dist.get_rank() == 1:  # here alone somebody reads
            part.refresh(10.0)
            ((published, there),) = part.all().items()
            held = part.lease(published, there)
        save = checkpointer.save(2, sharded(2))
        skipped.append(checkpointer.publish(save).skipped)
        if held is not None:
            held.give_back()
        part.close()
        skipped.append(checkpointer.publish(save, 2, roll_back=True).skipped)
        dist.barrier()
        if dist.get_rank() == 0:
            with WeightSubscriber.of_checkpoints(root) as subscriber, subscriber.acquire() as weights:
                assert weights.version == 2 and torch.equal(weights["rows"], whole(2)["rows"])
        dist.barrier()
    return skipped


def test_ranks_agree_on_versions_also_where_one_has_skipped(tmp_path: Path, root: Path) -> None:
    first, second = run(2, _publish_where_one_skips, str(root), folder=tmp_path)
    assert (first, second) == ([False, False], [True, False])


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
    with WeightPublisher(address, process_group=dist.group.WORLD) as publisher:
        publisher.publish(sharded(1), 1)
        shelf = publisher._shelves[-1]
        if dist.get_rank() == 1:
            shelf._table.withdraw(0)
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
