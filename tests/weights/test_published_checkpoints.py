"""Readers get a save where it is staged, without a copy, and never block later saves."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import complete_steps, verify
from support.ranks import alone, run, say
from support.states import same, small_state, zeros_like
from support.weights import reads, sharded, whole
from support.workers import Faulty

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    StorageError,
    VersionError,
)
from asyncckpt.extension import job_of_checkpoints
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.takeover import ReaderClient
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from asyncckpt.weights.lease import RankPublications

pytestmark = pytest.mark.usefixtures("forkserver")


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
                assert publication.skipped  # the other slot is reserved for saves
                assert number_in(held) == 1 and subscriber.versions() == [1]
            held.release()
            assert not checkpointer.publish(checkpointer.save(12, numbered(12))).skipped
            with subscriber.acquire(12) as weights:
                assert number_in(weights) == 12
        checkpointer.wait()
        for step in checkpointer.steps()[-2:]:  # retention may be removing an older step
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
        weights = numbered(9)  # made before the fork, because torch computes nothing in a fork

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


def _train_and_die(root: str, last: int, slots: int = 2) -> None:
    checkpointer = Checkpointer(root, Config(slots=slots))
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


def test_what_was_removed_by_hand_is_gone_for_publication_too(root: Path) -> None:
    """The previous trainer's worker still has the removed step. Publication ignores the step, as loads do."""
    assert alone(_train_and_die, str(root), 3) == (-signal.SIGKILL, 3)
    with WeightSubscriber.of_checkpoints(root, prefix="model.") as subscriber:
        with subscriber.acquire() as weights:
            assert number_in(weights) == 3
        shutil.rmtree(root)
        with Checkpointer(root) as checkpointer:
            with pytest.raises(CheckpointNotFoundError):
                checkpointer.load(numbered(0))
            assert not checkpointer.publish(checkpointer.save(0, numbered(0))).skipped
            with subscriber.acquire() as weights:  # the version is marked as a roll-back for readers of newer versions
                assert number_in(weights) == weights.version == 0


def test_what_still_stands_is_not_published_again(root: Path) -> None:
    """Only the newest step was removed by hand. The step before it still counts as published."""
    assert alone(_train_and_die, str(root), 3, 3) == (-signal.SIGKILL, 3)
    shutil.rmtree(root / "step-00000003")
    with Checkpointer(root, Config(slots=3)) as checkpointer:
        assert checkpointer.load(numbered(0)) == 2
        save = checkpointer.save(3, numbered(3))
        with pytest.raises(VersionError, match="version 2 is not newer than 2, .* by the process before this one"):
            checkpointer.publish(save, 2)
        assert not checkpointer.publish(save).skipped


def _publish_one_and_die(root: str) -> None:
    checkpointer = Checkpointer(root, Config(keep_last=1))
    save = checkpointer.save(1, numbered(1))
    checkpointer.publish(save)
    save.result(60)
    checkpointer.save(2, numbered(2)).result(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_retention_has_removed_was_published_all_the_same(root: Path) -> None:
    assert alone(_publish_one_and_die, str(root))[0] == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while complete_steps(str(root)) != [2] and time.monotonic() < deadline:
        time.sleep(0.01)
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load(numbered(0)) == 2
        save = checkpointer.save(3, numbered(3))
        with pytest.raises(VersionError, match="not newer than 1"):
            checkpointer.publish(save, 1)


def _publish_saves(root: str) -> list[bool]:
    seen = []
    with Checkpointer(root) as checkpointer:
        for step in range(1, 5):
            save = checkpointer.save(step, sharded(step))
            assert not checkpointer.publish(save).skipped
            save.result(60)
            dist.barrier()
            if dist.get_rank() == 0:
                seen.append(reads(WeightSubscriber.of_checkpoints(root), step))
            dist.barrier()
    return seen


def test_saves_of_many_ranks_are_published(tmp_path: Path, root: Path) -> None:
    assert run(2, _publish_saves, str(root), folder=tmp_path)[0] == [True] * 4


def _publish_where_one_skips(root: str) -> list[bool]:
    skipped = []
    with Checkpointer(root, Config(timeout=60.0)) as checkpointer:
        checkpointer.publish(checkpointer.save(1, sharded(1)))
        endpoint = endpoint_name(job_of_checkpoints(root, None), dist.get_rank())
        part = RankPublications(partial(ReaderClient.connect, endpoint))
        held = None
        if dist.get_rank() == 1:  # only this rank has a reader
            part.refresh(60.0)
            (published,) = part.versions()
            held = (part.lease(published, "readonly") or [])[0]
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
