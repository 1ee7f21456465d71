"""Several verl actors on one host publish one share of the weights each."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.peers import VERL
from support.verl_scenarios import play
from support.verl_workers import Crew, Worker, is_version, manager, weights

from asyncckpt.errors import CheckpointError, RankFailedError
from asyncckpt.weights import WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")

NEWEST = VERL[-1]
ALL = len(list(weights(0)))


@pytest.mark.parametrize("release", VERL)
def test_actors_share_the_copies(release: str, two_hosts: list[str], tmp_path: Path) -> None:
    play(actors_share_the_copies, release, two_hosts, str(tmp_path))


def actors_share_the_copies(workers: Crew, folder: str) -> None:
    """The three actors on the first host publish shares. The actor on the other host only iterates."""
    actors = [workers.master(), workers.actor(), workers.actor(1), workers.actor()]
    rollouts = [workers.rollout(host) for host in (0, 1, 1)]
    sync = manager(actors, rollouts)
    for version in (1, 2, 3, 3):
        sync.update_weights(global_steps=version)
        assert [actor.call("how_many") for actor in actors] == [ALL] * 4
        assert all(is_version(rollout.call("got"), version) for rollout in rollouts)
        _check_shares(folder, 3)
    for host in (0, 1):
        late = workers.rollout(host)
        assert late.call("pull_weights") == 3
        assert is_version(late.call("got"), 3)


def _check_shares(folder: str, actors: int) -> None:
    """Check that shares differ by at most the largest tensor's size, and that no tensor is in two shares."""
    with WeightSubscriber("verl") as subscriber, subscriber.acquire() as found, found.safetensors(folder) as paths:
        shares = [load_file(path) for path in paths]
        assert len(shares) == actors and sum(map(len, shares)) == ALL
        nbytes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
        assert max(nbytes) - min(nbytes) <= max(tensor.nbytes for _, tensor in weights(0))
        assert min(nbytes) > 0


def test_an_actor_is_killed_in_a_sync(two_hosts: list[str]) -> None:
    play(an_actor_is_killed_in_a_sync, NEWEST, two_hosts)


def an_actor_is_killed_in_a_sync(workers: Crew) -> None:
    """All other actors raise within seconds, and still iterate over all weights. Rollouts keep their version."""
    actors = [workers.master(), workers.actor(), workers.actor()]
    rollouts = [workers.rollout(host) for host in (0, 1)]
    manager(actors, rollouts).update_weights(global_steps=1)
    actors[1].call("kill_at", "embedding")
    with pytest.raises(RankFailedError, match="actor 1, which publishes, has died") as raised:
        _in_time(actors, rollouts, 2)
    assert raised.value.rank == 1
    assert [actor.call("how_many") for actor in (actors[0], actors[2])] == [ALL] * 2
    for rollout in (*rollouts, workers.rollout(0)):
        assert rollout.call("pull_weights") == 1
        assert is_version(rollout.call("got"), 1)
    # After the actor's exit, the others continue without it, then with a replacement.
    actors[1].process.join(60)
    for crew_of_actors, version in (([actors[0], actors[2]], 2), ([actors[0], workers.actor(), actors[2]], 13)):
        for again in (0, 10):
            manager(crew_of_actors, rollouts).update_weights(global_steps=version + again)
            assert all(is_version(rollout.call("got"), version + again) for rollout in rollouts)


def _in_time(actors: list[Worker], rollouts: list[Worker], version: int) -> None:
    begun = time.monotonic()
    try:
        manager(actors, rollouts).update_weights(global_steps=version)
    finally:
        assert time.monotonic() - begun < 40


def test_the_first_actor_is_killed_in_a_sync(two_hosts: list[str]) -> None:
    play(the_first_actor_is_killed_in_a_sync, NEWEST, two_hosts)


def the_first_actor_is_killed_in_a_sync(workers: Crew) -> None:
    actors = [workers.master(), workers.actor()]
    rollouts = [workers.rollout(host) for host in (0, 1)]
    manager(actors, rollouts).update_weights(global_steps=1)
    actors[0].call("kill_at", "embedding")
    with pytest.raises((EOFError, CheckpointError)):
        _in_time(actors, rollouts, 2)
    assert actors[1].call("how_many") == ALL
    for rollout in rollouts:
        assert rollout.call("pull_weights") == 1
        assert is_version(rollout.call("got"), 1)


def test_what_an_actor_raises_all_raise(two_hosts: list[str]) -> None:
    play(what_an_actor_raises_all_raise, NEWEST, two_hosts)


def what_an_actor_raises_all_raise(workers: Crew) -> None:
    actors = [workers.master(), workers.actor()]
    rollouts = [workers.rollout(host) for host in (0, 1)]
    manager(actors, rollouts).update_weights(global_steps=5)
    actors[1].call("fail_at", "embedding")
    with pytest.raises(RankFailedError, match="rank 1 cannot publish: ValueError: no such weight"):
        _in_time(actors, rollouts, 6)
    assert actors[0].call("how_many") == ALL
    actors[1].call("fail_at", None)
    with pytest.raises(CheckpointError, match="version 4 comes after version 5"):
        _in_time(actors, rollouts, 4)
    assert [actor.call("how_many") for actor in actors] == [ALL] * 2
    for rollout in rollouts:
        assert rollout.call("pull_weights") == 5
    manager(actors, rollouts).update_weights(global_steps=6)
    assert all(is_version(rollout.call("got"), 6) for rollout in rollouts)


def test_the_worker_of_an_actor_dies(two_hosts: list[str]) -> None:
    play(the_worker_of_an_actor_dies, NEWEST, two_hosts)


def the_worker_of_an_actor_dies(workers: Crew) -> None:
    """A new worker serves at another address. Rollouts on other hosts get the new address."""
    actors = [workers.master(), workers.actor()]
    rollouts = [workers.rollout(host) for host in (0, 1)]
    for version, actor in enumerate((None, *actors)):
        if actor is not None:
            actor.call("kill_worker")
        _in_time(actors, rollouts, version)
        assert all(is_version(rollout.call("got"), version) for rollout in rollouts)


def test_jobs_of_other_numbers_of_actors(two_hosts: list[str], tmp_path: Path) -> None:
    play(jobs_of_other_numbers_of_actors, NEWEST, two_hosts, str(tmp_path))


def jobs_of_other_numbers_of_actors(workers: Crew, folder: str) -> None:
    """Each job follows a killed job, and starts at a lower version."""
    rollouts = [workers.rollout(host) for host in (0, 1)]
    for number, version in ((3, 20), (1, 15), (2, 10), (4, 5)):
        actors = [workers.master(), *(workers.actor() for _ in range(number - 1))]
        for later in range(2):
            manager(actors, rollouts).update_weights(global_steps=version + later)
            for rollout in (*rollouts, workers.rollout(0)):
                assert is_version(rollout.call("got"), version + later) or rollout.call("pull_weights")
                assert rollout.call("pull_weights") == version + later
                assert is_version(rollout.call("got"), version + later)
            _check_shares(folder, number)
        for actor in actors:
            actor.process.kill()
            actor.process.join()
