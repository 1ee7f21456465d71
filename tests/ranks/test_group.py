"""Saves by many ranks: their collectives, their agreement, and equal errors on all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.checkpoints import verify
from support.ranks import CONSTANT, QUICK, Job, faulty, gated, run, say
from support.states import equal, replicas
from support.workers import stop

from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointError, RankFailedError, SaveDroppedError, SaveTimeoutError
from asyncckpt.extension import Engine, Rounds
from asyncckpt.ranks import group
from asyncckpt.ranks.group import address_to_listen_at, loopback_scope
from asyncckpt.ranks.store_connection import StoreConnection

pytestmark = pytest.mark.usefixtures("forkserver")


class Counter:
    """Counts the calls of all collectives, and the calls to the store."""

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.rounds: list[str] = []
        names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce"))]
        for name in [*names, "barrier", "monitored_barrier", "send", "recv", "new_group"]:
            if callable(getattr(dist, name)):
                setattr(dist, name, self._counted(getattr(dist, name), self.collectives, name))
        StoreConnection.call = self._counted(StoreConnection.call, self.rounds, "round")  # type: ignore[method-assign]

    @staticmethod
    def _counted(function: Callable[..., Any], into: list[str], name: str) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            into.append(name)
            return function(*args, **kwargs)

        return count


def _count(root: str, config: Config) -> tuple[list[str], list[str]]:
    state = replicas()
    with Checkpointer(root, config) as checkpointer:
        checkpointer.prepare(state)
        counter = Counter()
        for step in range(1, 5):
            state["step"] = step
            checkpointer.save(step, state).result(60)
    return counter.collectives, counter.rounds


def test_later_saves_make_no_collective(tmp_path: Path) -> None:
    for collectives, rounds in run(2, _count, str(tmp_path / "one"), CONSTANT, folder=tmp_path):
        assert collectives == [] and rounds == []  # no questions, and no byte of a plan
    for collectives, rounds in run(2, _count, str(tmp_path / "two"), QUICK, folder=tmp_path):
        assert collectives == [] and len(rounds) > 0


def _stop_when_staged(root: str) -> None:
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.prepare(replicas())
        dist.barrier()
        checkpointer.save(1, replicas())
        say(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)


def test_no_trainer_takes_part_in_a_commit(tmp_path: Path) -> None:
    job = Job(2, _stop_when_staged, str(tmp_path / "root"), folder=tmp_path)
    pids = [job.hear(rank) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not (tmp_path / "root/step-00000001").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not verify(str(tmp_path / "root/step-00000001")).damages
    for pid in pids:
        while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
    assert all(end.error is None for end in job.wait())


def _die_when_staged(root: str) -> None:
    checkpointer = Checkpointer(root, QUICK)
    checkpointer.prepare(replicas())
    dist.barrier()
    checkpointer.save(1, replicas())
    os.kill(os.getpid(), signal.SIGKILL)


def test_all_trainers_die_and_what_was_staged_is_saved(tmp_path: Path) -> None:
    ended = Job(2, _die_when_staged, str(tmp_path / "root"), folder=tmp_path).wait()
    assert all(end.killed for end in ended)
    into = replicas(5)
    with Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.load(into) == 1
    assert equal(into, replicas())


def _in_order(root: str) -> list[float]:
    if dist.get_rank() == 1:
        faulty("write:hold")
    times: dict[Any, float] = {}
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.prepare(replicas())
        saves = [checkpointer.save(step, replicas(step)) for step in range(2)]
        for save in saves:
            save.future.add_done_callback(lambda _, save=save: times.setdefault(save.step, time.monotonic()))  # type: ignore[misc]
        dist.barrier()
        if dist.get_rank() == 1:
            assert not any(save.done() for save in saves)
            Path(os.environ["ASYNCCKPT_TEST_GATE"]).touch()
        for save in reversed(saves):
            save.result(60)
        deadline = time.monotonic() + 60
        while len(times) < 2:  # another thread calls back
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return [times[0], times[1]]


def test_overlapping_saves_commit_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    for first, second in run(2, gated, _in_order, str(gate), str(tmp_path / "root"), folder=tmp_path):
        assert first <= second


def _meet(root: str, scopes: list[str]) -> str:
    """Return the address that this rank uses for the store."""
    setattr(group, "loopback_scope", lambda: scopes[dist.get_rank()])  # noqa: B010
    with Checkpointer(root, replace(QUICK, host="LOCALHOST")) as checkpointer:
        checkpointer.save(1, replicas()).result(60)
        found = checkpointer._engine._group
        assert found is not None and found._rendezvous is not None
        return found._rendezvous.address


@pytest.mark.parametrize(("scopes", "expected"), [(["a", "a"], "127.0.0.1"), (["a", "b"], "LOCALHOST")])
def test_only_who_shares_the_loopback_address_meets_there(tmp_path: Path, scopes: list[str], expected: str) -> None:
    """Equal host names do not prove that two ranks are on one host."""
    found = run(2, _meet, str(tmp_path / "root"), scopes, folder=tmp_path)
    assert found == ["127.0.0.1", expected]


def test_where_the_first_rank_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert address_to_listen_at("10.1.2.3", 8) == "10.1.2.3"
    assert address_to_listen_at("first.cluster", 8) == ""  # on other ranks the name may resolve to another address
    assert address_to_listen_at("localhost", 8) == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert address_to_listen_at("first.cluster", 8) == "127.0.0.1"  # torchrun: all ranks on one host
    assert address_to_listen_at("first.cluster", 16) == ""
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert address_to_listen_at("first.cluster", 16) == ""


def test_equal_names_are_no_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = loopback_scope()
    assert loopback_scope() == mine
    real = os.stat
    other = SimpleNamespace(st_dev=1, st_ino=2)  # a container's own network namespace
    monkeypatch.setattr(os, "stat", lambda path, **how: other if path == "/proc/self/ns/net" else real(path, **how))
    assert loopback_scope() != mine


def _ask_a_slow_first(root: str) -> tuple[bool, float]:
    with Checkpointer(root, replace(QUICK, timeout=90)) as checkpointer:
        checkpointer.save(1, replicas()).result(60)
        if dist.get_rank() == 0:
            Rounds.is_flag_set = _say_nothing  # type: ignore[method-assign]
        begun = time.monotonic()
        return checkpointer._engine.any_says(False), time.monotonic() - begun


def _say_nothing(self: Rounds, name: str) -> bool:
    raise SaveTimeoutError("the store says nothing (as the test wants)")


def test_a_question_that_the_first_rank_gives_up_is_answered(tmp_path: Path) -> None:
    """When the first rank's question times out, it still answers the other ranks, which would otherwise wait."""
    answers = run(2, _ask_a_slow_first, str(tmp_path / "root"), folder=tmp_path)
    assert [answer for answer, _ in answers] == [False, False]
    assert max(took for _, took in answers) < 45


def _ask_a_store_that_stops(root: str, silent_to: int) -> bool:
    """Rank 0 answers yes. The store stops for a moment, while rank 0 answers or while rank 1 asks."""
    group.ANSWER_S = 60.0  # type: ignore[attr-defined]
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, replicas()).result(60)
        engine = checkpointer._engine
        assert engine.worker is not None
        dist.barrier()  # both ranks know that the save is committed
        rank, answer = dist.get_rank(), False
        if (rank, silent_to) == (0, 1):
            answer = engine.any_says(True)
        if rank == 0:
            stop(engine.worker.pid)
        go_on = threading.Timer(3.0, os.kill, (engine.worker.pid, signal.SIGCONT))
        if (rank, silent_to) == (0, 0):
            go_on.start()
            answer = engine.any_says(True)
            go_on.join()
        dist.barrier()
        if rank == 1:
            answer = engine.any_says(False)
        elif silent_to == 1:
            go_on.start()
            go_on.join()
        dist.barrier()
        return answer


@pytest.mark.parametrize("silent_to", [0, 1])
def test_all_ranks_hear_the_same_of_a_store_that_stops_for_a_moment(tmp_path: Path, silent_to: int) -> None:
    """With different answers, one rank would end its training while the other waits for it in a collective."""
    assert run(2, _ask_a_store_that_stops, str(tmp_path / "root"), silent_to, folder=tmp_path) == [True, True]


# Saves while all slots are busy.


def _busy(root: str, policy: str, slow: int) -> tuple[list[str], list[int]]:
    if dist.get_rank() == slow:
        faulty("write:hold")
    config = Config(slots=2, when_busy=policy, timeout=20, commit_timeout=20)  # type: ignore[arg-type]
    ends = []
    with Checkpointer(root, config) as checkpointer:
        checkpointer.prepare(replicas())
        saves = [checkpointer.save(step, replicas(step)) for step in range(4 if policy == "skip" else 3)]
        dist.barrier()
        Path(os.environ["ASYNCCKPT_TEST_GATE"]).touch()
        for save in saves:
            try:
                save.result(60)
                ends.append("saved")
            except SaveDroppedError:
                ends.append("dropped")
        steps = checkpointer.steps()
    return ends, steps


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "latest"])
def test_the_policy_is_the_same_on_all_ranks(tmp_path: Path, policy: str, slow: int) -> None:
    gate = str(tmp_path / "gate")
    first, second = run(2, gated, _busy, gate, str(tmp_path / "root"), policy, slow, folder=tmp_path)
    assert first == second
    ends, steps = first
    if policy == "skip":
        assert ends == ["saved", "saved", "dropped", "dropped"]
    else:
        assert ends == ["saved", "dropped", "saved"]
    assert steps == [step for step, end in enumerate(ends) if end == "saved"]


# Saves that fail.


def _fails_to_plan(root: str, bad: int) -> tuple[str, int | None]:
    with Checkpointer(root, QUICK) as checkpointer:
        for state in (replicas(), replicas(1)):
            if dist.get_rank() == bad:
                state = state | {"generator": (number for number in range(3))}
            with pytest.raises(CheckpointError) as caught:
                checkpointer.save(1, state)
        checkpointer.save(2, replicas()).result(60)
    return type(caught.value).__name__, caught.value.rank


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_rank_cannot_save_all_are_told(tmp_path: Path, bad: int) -> None:
    ended = run(2, _fails_to_plan, str(tmp_path / "root"), bad, folder=tmp_path)
    assert {kind for kind, _ in ended} == {"UnsavableStateError"}
    assert all(rank == bad for number, (_, rank) in enumerate(ended) if number != bad)


def _not_shared(root: str) -> tuple[str, int | None]:
    engine = Engine(QUICK)
    with pytest.raises(CheckpointError) as caught:
        engine.save(f"{root}/{dist.get_rank()}/here", replicas()).result(60)
    with pytest.raises(CheckpointError):
        engine.wait()
        raise caught.value
    dist.barrier()  # the first rank's worker stays until both ranks have the error
    engine.close()
    return str(caught.value), caught.value.rank


def test_a_folder_that_is_not_shared_is_an_error_that_says_so(tmp_path: Path) -> None:
    for text, rank in run(2, _not_shared, str(tmp_path / "root"), folder=tmp_path):
        assert "file system that all nodes share" in text and rank == 1
    assert not list(tmp_path.glob("root/*/*")) and not list(tmp_path.glob("root/*/.*"))


def _save_on_one(root: str, folder: str, ready: str) -> tuple[str, float]:
    """Save on the first rank while the other rank waits for a file, as with a save under ``if rank == 0``."""
    if dist.get_rank() == 1:
        _wait_for_file(Path(folder, ready))
        return "", 0.0
    patched: Any = group
    real = patched.ranks_of
    patched.ranks_of = lambda process_group, timeout, *, first_s, lost: real(process_group, 1.0, lost=lost)
    begun = time.monotonic()
    try:
        with Checkpointer(root, QUICK) as checkpointer:
            checkpointer.save(1, replicas(1))
    except RankFailedError as error:
        return str(error), time.monotonic() - begun
    finally:
        Path(folder, ready).touch()
    return "it was saved", 0.0


def _wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + QUICK.timeout
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_first_save_of_one_rank_alone_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    """The call raises within its own timeout, although torch's timeout is half an hour."""
    (text, took), _ = run(2, _save_on_one, str(tmp_path / "root"), str(tmp_path), "over", folder=tmp_path)
    assert "if rank == 0" in text and took < QUICK.timeout
