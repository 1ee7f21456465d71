"""Test ``asyncckpt workers``: the list of workers, their states, and how to end a worker."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import complete_steps
from support.ranks import alone, say
from support.workers import stop

from asyncckpt import Checkpointer, async_save, cli
from asyncckpt.config import Config
from asyncckpt.engine import shared as engines
from asyncckpt.link import running_workers
from asyncckpt.link.takeover import is_running
from asyncckpt.weights import WeightPublisher

pytestmark = pytest.mark.usefixtures("forkserver")

STATE = {"w": torch.ones(300_000)}


class Shell:
    """Runs the command as a shell would."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: Any) -> tuple[int, str]:
        """Return the exit status and the printed text."""
        status = cli.main(["workers", *map(str, argv)])
        said = self._capsys.readouterr()
        return status, said.out + said.err

    def listed(self, worker: int) -> dict[str, Any] | None:
        """Return the facts about a worker, or None if it is not listed. Other workers may run on this host."""
        status, out = self("--json")
        assert status == 0
        return next((each for each in json.loads(out) if each["id"] == worker), None)

    def row(self, worker: int) -> str:
        return next(line for line in self()[1].splitlines() if line.lstrip().startswith(f"{worker} "))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setattr(running_workers, "_ANSWER_S", 30.0)  # workers on a loaded machine may need a moment
    return Shell(capsys)


def worker_of(checkpointer: Checkpointer) -> int:
    assert checkpointer._engine.worker is not None
    return checkpointer._engine.worker.pid


def left(root: Path, config: Config | None = None, *, wait: bool = True) -> int:
    """Return the worker of a training that has failed after a save."""
    with pytest.raises(ZeroDivisionError), Checkpointer(root, config) as checkpointer:
        save = checkpointer.save(1, STATE)
        if wait:
            save.result(60)
        worker = worker_of(checkpointer)
        _ = 1 / 0
    return worker


def wait_gone(worker: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(worker):
        assert time.monotonic() < deadline, f"the worker {worker} stays"
        time.sleep(0.01)


def _save_and_die(root: str) -> None:
    checkpointer = Checkpointer(root)
    checkpointer.save(1, STATE).result(60)
    say(worker_of(checkpointer))
    os.kill(os.getpid(), signal.SIGKILL)


def test_one_whose_trainer_lives(root: Path, shell: Shell) -> None:
    with Checkpointer(root, Config(job_id="a run", restart_pause=0)) as checkpointer:
        checkpointer.save(1, STATE).result(60)
        facts = shell.listed(worker := worker_of(checkpointer))
        assert facts is not None and (facts["root"], facts["job_id"], facts["rank"]) == (str(root), "a run", 0)
        assert (facts["trainer"], facts["has_trainer"], facts["does"]) == (os.getpid(), True, "serving")
        assert facts["bytes"] >= 1_200_000 and facts["age_s"] >= 0 and facts["lingers_s"] is None
        assert "waits for its trainer" in shell.row(worker) and f"{root} (job a run)" in shell.row(worker)
        status, out = shell("--end", worker)
        assert status == 2 and f"trainer {os.getpid()}" in out and "--force" in out and is_running(worker)
        checkpointer.save(2, STATE).result(60)
        client = checkpointer._engine.worker
        assert shell("--end", worker, "--force")[0] == 0 and shell.listed(worker) is None
        assert client is not None
        client.wait_for_end(30)
        checkpointer.save(3, STATE).result(60)
        assert worker_of(checkpointer) != worker and checkpointer.steps() == [1, 2, 3]


def test_one_that_lingers(root: Path, shell: Shell) -> None:
    worker = left(root)
    deadline = time.monotonic() + 60
    while (facts := shell.listed(worker)) is None or facts["does"] != "lingering":
        assert facts is not None and time.monotonic() < deadline, facts
    assert not facts["has_trainer"] and 0 < facts["lingers_s"] < 600
    again = shell.listed(worker)
    assert again is not None and again["lingers_s"] < facts["lingers_s"]  # a query does not prolong the lingering
    assert "lingers for another trainer" in shell.row(worker) and "(gone)" in shell.row(worker)
    status, out = shell("--end", worker)
    assert status == 0 and "has ended" in out and shell.listed(worker) is None
    status, out = shell("--end", worker, "--json")
    assert status == 2 and json.loads(out)[0]["id"] == worker and "no worker" in out


def test_one_that_still_writes(root: Path, shell: Shell, gate: Path) -> None:
    worker = left(root, wait=False)
    deadline = time.monotonic() + 60
    while (facts := shell.listed(worker)) is None or facts["has_trainer"]:
        assert facts is not None and time.monotonic() < deadline, facts
    assert facts["does"] == "writing" and facts["saving"] == [str(root / "step-00000001")]
    status, out = shell("--end", worker, "--timeout", "0.1")
    assert status == 2 and "still writes" in out
    deadline = time.monotonic() + 60
    while "step-00000001, then leaves" not in shell.row(worker):  # the worker may answer before it has read the request
        assert time.monotonic() < deadline
    gate.touch()
    wait_gone(worker)  # the worker does not linger any more
    assert complete_steps(str(root)) == [1]


def test_one_that_is_stopped(root: Path, shell: Shell) -> None:
    worker = left(root)
    stop(worker)
    facts = shell.listed(worker)
    assert facts is not None and facts["does"] == "stopped" and facts["root"] == str(root) and facts["bytes"] > 0
    status, out = shell("--end", worker)
    assert status == 2 and "kill -CONT" in out and "stopped" in shell.row(worker)
    assert shell("--end", worker, "--force")[0] == 0 and not is_running(worker)


def test_one_without_an_endpoint(root: Path, shell: Shell) -> None:
    async_save(STATE, checkpoint_id=root).result(60)
    (engine,) = engines.shared._engines.values()
    assert engine.worker is not None
    facts = shell.listed(worker := engine.worker.pid)
    assert facts is not None and facts["has_trainer"] and facts["does"] == "serving" and facts["root"] is None
    assert "serves its trainer" in shell.row(worker) and "single saves" in shell.row(worker)
    assert shell("--end", worker)[0] == 2 and is_running(worker)


def test_one_whose_endpoint_was_removed(root: Path, shell: Shell, runtime: Path) -> None:
    """A clean-up has removed the endpoint, so the command ends the worker by a signal."""
    code, worker = alone(_save_and_die, str(root))
    assert code == -signal.SIGKILL
    for file in runtime.iterdir():
        file.unlink()
    facts = shell.listed(worker)
    assert facts is not None and not facts["has_trainer"] and "no process listens at its endpoint" in facts["trouble"]
    assert shell("--end", worker)[0] == 0 and not is_running(worker)


def test_one_of_a_publisher(shell: Shell) -> None:
    with WeightPublisher("policy") as publisher:
        publisher.publish({"w": torch.ones(3)}, 1)
        assert publisher.worker is not None
        facts = shell.listed(publisher.worker.pid)
        assert facts is not None and facts["address"] == "policy" and facts["root"] is None
        assert "weights at 'policy'" in shell.row(publisher.worker.pid)
