"""The checkpoint engine for verl, driven by verl's own manager and worker classes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.peers import VERL
from support.states import same
from support.verl_scenarios import play
from support.verl_workers import Crew, WorkerGroup, is_version, load, manager, weights

from asyncckpt import Checkpointer, FileSet
from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.link.endpoint import connect, peer_pid

pytestmark = pytest.mark.usefixtures("forkserver")

NEWEST = VERL[-1]


@pytest.mark.parametrize("release", VERL)
def test_syncs_of_two_hosts(release: str, two_hosts: list[str]) -> None:
    play(syncs_of_two_hosts, release, two_hosts)


def syncs_of_two_hosts(workers: Crew) -> None:
    master, actor = workers.master(), workers.actor()
    rollouts = [workers.rollout(host) for host in (0, 1, 1)]
    sync = manager([master, actor], rollouts)
    assert issubclass(sync.backend_cls, load().CheckpointEngineWithCache)
    for version in (1, 2):
        metrics = sync.update_weights(global_steps=version)
        assert metrics is None or metrics["checkpoint_engine/version"] == version  # only newer releases return metrics
        assert master.call("how_many") == actor.call("how_many") == len(list(weights(0)))
        for rollout in rollouts:
            assert is_version(rollout.call("got"), version)
            assert rollout.call("options")["global_steps"] == version
            assert rollout.call("options").get("wire_format", "named_tensors") == "named_tensors"
    # Late rollouts pull an existing version, and keep it until the next pull.
    late = [workers.rollout(host) for host in (0, 1)]
    for rollout in late:
        assert rollout.call("pull_weights") == 2
        assert is_version(rollout.call("got"), 2)
        assert rollout.call("pull_weights", version=1) == 1
    for version in (3, 4, 4, 5):
        sync.update_weights(global_steps=version)
    for rollout in late:
        assert is_version(rollout.call("got"), 1)
    # The late rollouts join the next sync, which names no version.
    sync.add_replicas(manager([], late).replicas)
    sync.update_weights()
    for rollout in (*rollouts, *late):
        assert is_version(rollout.call("got"), 0)
        assert rollout.call("version") == 6


def test_rollouts_die(two_hosts: list[str]) -> None:
    play(rollouts_die, NEWEST, two_hosts)


def rollouts_die(workers: Crew) -> None:
    master = workers.master()
    here, reader, first, other = (workers.rollout(host) for host in (0, 0, 1, 1))
    manager([master], [here, reader, first, other]).update_weights(global_steps=1)
    reader.call("kill_at", "embedding")
    with pytest.raises(EOFError):
        manager([master], [here, reader, first, other]).update_weights(global_steps=2)
    for version in range(3, 8):  # the dead reader's lease is gone
        manager([master], [here, first, other]).update_weights(global_steps=version)
    first.call("kill_at", "embedding")  # one of the two has started the worker of their host
    begun = time.monotonic()
    with pytest.raises(EOFError):
        manager([master], [here, first, other]).update_weights(global_steps=8)
    assert time.monotonic() - begun < 40
    assert other.call("pull_weights") == 8
    assert is_version(other.call("got"), 8)
    manager([master], [here, other]).update_weights(global_steps=9)
    for rollout in (here, other, workers.rollout(1)):
        rollout.call("pull_weights")
        assert is_version(rollout.call("got"), 9)


def test_the_worker_of_a_host_dies(two_hosts: list[str]) -> None:
    play(the_worker_of_a_host_dies, NEWEST, two_hosts, two_hosts[1])


def the_worker_of_a_host_dies(workers: Crew, runtime: str) -> None:
    """Kill the worker, as happens when Ray kills the rollout that started it."""
    master = workers.master()
    rollouts = [workers.rollout(1) for _ in range(2)]
    sync = manager([master], rollouts)
    for version in (1, 2):
        sync.update_weights(global_steps=version)
        (lock,) = Path(runtime).glob("*.lock")
        connection = connect(lock.stem, runtime=runtime)
        assert connection is not None
        with connection:
            os.kill(peer_pid(connection), signal.SIGKILL)
    for rollout in rollouts:
        assert is_version(rollout.call("got"), 2)
        assert rollout.call("pull_weights") == 2
    sync.update_weights(global_steps=3)
    assert all(is_version(rollout.call("got"), 3) for rollout in rollouts)


def test_trainer_is_started_again(two_hosts: list[str]) -> None:
    play(trainer_is_started_again, NEWEST, two_hosts)


def trainer_is_started_again(workers: Crew) -> None:
    first = workers.master()
    rollouts = [workers.rollout(host) for host in (0, 1)]
    for version in (6, 7):
        manager([first], rollouts).update_weights(global_steps=version)
    first.call("kill_at", "embedding")
    begun = time.monotonic()
    with pytest.raises((EOFError, CheckpointError)):
        manager([first], rollouts).update_weights(global_steps=8)
    assert time.monotonic() - begun < 40
    for rollout in rollouts:
        assert rollout.call("pull_weights") == 7
        assert is_version(rollout.call("got"), 7)
    # The second trainer resumes from an older checkpoint, and continues from there.
    second = workers.master()
    for version in (4, 5):
        manager([second], rollouts).update_weights(global_steps=version)
        for rollout in (*rollouts, workers.rollout(0)):
            assert rollout.call("pull_weights") == version
            assert is_version(rollout.call("got"), version)
    with pytest.raises(VersionError):
        manager([second], rollouts).update_weights(global_steps=3)
    manager([second], rollouts).update_weights(global_steps=6)
    assert is_version(rollouts[1].call("got"), 6)


def test_errors_are_of_all(two_hosts: list[str]) -> None:
    play(errors_are_of_all, NEWEST, two_hosts)


def errors_are_of_all(workers: Crew) -> None:
    master = workers.master(roll_back=True)
    rollouts = [workers.rollout(host) for host in (0, 1, 1)]
    sync = manager([master], rollouts)
    sync.update_weights(global_steps=5)
    master.call("fail_at", "embedding")
    with pytest.raises(ValueError, match="no such weight"):
        sync.update_weights(global_steps=6)
    master.call("fail_at", None)
    for rollout in rollouts:
        assert rollout.call("pull_weights") == 5
        assert is_version(rollout.call("got"), 5)
    sync.update_weights(global_steps=3)  # versions may go back
    # A rollout refuses another version than the announced one.
    sync.build_process_group(WorkerGroup(rollouts))
    master.ask("update_weights", global_steps=7)
    for rollout in rollouts:
        with pytest.raises(RankFailedError, match="version 8 was expected, and version 7"):
            rollout.call("update_weights", global_steps=8)
    sync.update_weights(global_steps=9)
    assert all(is_version(rollout.call("got"), 9) for rollout in rollouts)


def test_bypass_cpu_is_refused(two_hosts: list[str]) -> None:
    play(bypass_cpu_is_refused, NEWEST, two_hosts)


def bypass_cpu_is_refused(workers: Crew) -> None:
    load()
    from asyncckpt.integrations.verl import SharedMemoryCheckpointEngine

    with pytest.raises(ValueError, match="take verl's backend 'nccl'"):
        SharedMemoryCheckpointEngine(1 << 20, bypass_cpu=True)


def test_dtype(two_hosts: list[str]) -> None:
    play(dtype, NEWEST, two_hosts)


def dtype(workers: Crew) -> None:
    master, rollouts = workers.master(rollout_dtype="bfloat16"), [workers.rollout(0), workers.rollout(1)]
    manager([master], rollouts).update_weights(global_steps=1)
    wanted = {name: each.bfloat16() if each.is_floating_point() else each for name, each in weights(1)}
    for rollout in rollouts:
        got = rollout.call("got")
        assert got["count"].dtype == torch.int64
        assert same(dict(sorted(got.items())), dict(sorted(wanted.items())))


def test_a_device(two_hosts: list[str]) -> None:
    play(on_a_device, NEWEST, two_hosts)


def on_a_device(workers: Crew) -> None:
    """A rollout on the meta device gets all tensors, without memory."""
    master, rollout = workers.master(), workers.rollout(0, device="meta")
    for version in range(1, 6):  # a leaked lease would block a later version
        manager([master], [rollout]).update_weights(global_steps=version)
    assert rollout.call("pull_weights") == 5
    got = rollout.call("forms")
    assert got == {name: ("meta", tuple(each.shape), each.dtype) for name, each in weights(5)}


def test_a_checkpoint_is_read_out_of_its_image(two_hosts: list[str], root: Path) -> None:
    play(a_checkpoint_is_read_out_of_its_image, NEWEST, two_hosts, str(root))


def a_checkpoint_is_read_out_of_its_image(workers: Crew, root: str) -> None:
    """Rollouts read weights from a checkpoint's image, as the FSDP engine's manager publishes it.

    See ``test_verl_engines.py``.
    """
    rollouts = [workers.rollout(0), workers.rollout(0)]
    half, elsewhere = workers.rollout(0, rollout_dtype="bfloat16"), workers.rollout(1)
    with Checkpointer(root) as checkpointer:
        for step in range(1, 4):
            files = FileSet()
            files.add_dcp_folder("", {"model": dict(weights(step)), "optimizer": dict(weights(100))})
            assert checkpointer.publish(checkpointer.save(step, files)).skipped == (step == 2)
            if step != 2:  # rollouts hold the slot of step 1 until they have step 3
                for rollout in rollouts:
                    assert rollout.call("pull_checkpoint", root, min_version=step) == step
            assert all(is_version(rollout.call("got"), step if step != 2 else 1) for rollout in rollouts)
            if step == 2:
                for rollout in rollouts:
                    rollout.call("let_go")
        half.call("pull_checkpoint", root, version=3)
        assert half.call("got")["embedding"].dtype == torch.bfloat16
        assert half.call("got")["count"].dtype == torch.int64
        with pytest.raises(WeightsTimeoutError):
            elsewhere.call("pull_checkpoint", root, timeout=0.1)


def test_all_of_verl(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run with Ray if the full verl is installed."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "verl")):
        pytest.skip("verl and Ray are not installed")
    script = Path(__file__).parents[1] / "support" / "verl_ray.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("ray"))],
        env=os.environ | {"PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all weights are as they were sent" in done.stdout
