"""What does not change stands in memory once, for all slots."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerators import busy, module
from support.plans import counting_plans
from support.ranks import alone
from support.states import same, zeros_like
from support.unchanged import ELEMENTS, check, state_of, train, written
from support.workers import Faulty, wait_reached

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.engine.engine import Engine
from asyncckpt.errors import UnsavableStateError, WorkerDiedError
from asyncckpt.storage import step_folder
from asyncckpt.weights.subscriber import WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(Config(linger=0, slots=2), alone=True) as engine:
        yield engine


def _resident(engine: Engine) -> float:
    """Mebibytes of shared memory that there are."""
    (buffer,) = (known.buffer for known in engine._buffers.known)
    assert buffer is not None
    return os.fstat(buffer.segment.fileno()).st_blocks * 512 / (1 << 20)


def test_in_memory_it_is_there_once(engine: Engine, tmp_path: Path) -> None:
    state = state_of(16)
    resident = []
    for number in range(5):
        train(state)
        engine.save(tmp_path / str(number), state).result(60)
        resident.append(_resident(engine))
    assert resident[0] >= 32 and resident[4] < 16.5
    check(tmp_path / "4", state)


def test_beside_what_is_promised_more_is_learned(tmp_path: Path) -> None:
    """The second save compares, and what is promised stands elsewhere than in its slot."""
    state = state_of(16) | {"promised": {str(number): torch.rand(1 << 20) for number in range(8)}}
    with Engine(Config(linger=0, assume_unchanged=["promised.*"]), alone=True) as engine:
        for number in range(5):
            train(state)
            engine.save(tmp_path / str(number), state).result(60)
        assert _resident(engine) < 32 + 16.5 and written(tmp_path / "4") < 1 << 20
    check(tmp_path / "4", state)


def test_with_overlap_it_is_copied(tmp_path: Path) -> None:
    """Nobody may look at it in the call."""
    state = state_of(16)
    with Engine(Config(linger=0, overlap=True, slots=2), alone=True) as engine:
        for number in range(6):
            train(state)
            engine.save(tmp_path / str(number), state).result(60)
        assert _resident(engine) >= 32 and written(tmp_path / "5") < 1 << 20
    check(tmp_path / "5", state)


@pytest.mark.parametrize("form", ["transposed", "every other", "conjugate", "views of one"])
def test_tensors_in_any_form_are_seen_to_change(engine: Engine, tmp_path: Path, form: str) -> None:
    def formed(value: float) -> torch.Tensor:
        whole = torch.full((2048, 2048), value)
        whole[7, 9] = 0.5
        return {
            "transposed": lambda: whole.t(),
            "every other": lambda: whole[::2, ::2],
            "conjugate": lambda: torch.complex(whole, whole).conj(),
            "views of one": lambda: whole[1024:],
        }[form]()

    for number in range(8):
        state = {"base": formed(3.0 if number == 6 else 2.0), "adapter": torch.full((1000,), float(number)), "n": 1}
        engine.save(tmp_path / str(number), state).result(60)
        check(tmp_path / str(number), state)
    # What is not in one piece is not compared by the call, but by the worker, a save later.
    assert os.stat(tmp_path / "5" / "__0_1.distcp").st_nlink == (5 if form == "views of one" else 4)


def test_what_is_promised_not_to_change_is_linked_at_once(tmp_path: Path) -> None:
    state = state_of()
    with Engine(Config(linger=0, assume_unchanged=["base.*"]), alone=True) as engine:
        for number in range(5):
            train(state)
            engine.save(tmp_path / str(number), state).result(60)
        assert _resident(engine) < 5
    assert os.stat(tmp_path / "4" / "__0_1.distcp").st_nlink == 5
    check(tmp_path / "4", state)


def test_a_broken_promise_fails_a_save(tmp_path: Path) -> None:
    state = state_of()
    with Engine(Config(linger=0, assume_unchanged=["base.*"], check_unchanged_every=3), alone=True) as engine:
        for number in (1, 2):
            engine.save(tmp_path / str(number), state).result(60)
        train(state, "base.2")
        with pytest.raises(UnsavableStateError, match=r"'base\.2'") as raised:
            engine.save(tmp_path / "3", state)
        assert "assume_unchanged" in str(raised.value) and "base.1" not in str(raised.value)
        # What follows is as it is then.
        for number in (4, 5, 6):
            engine.save(tmp_path / str(number), state).result(60)
            check(tmp_path / str(number), state)
    assert not (tmp_path / "3").exists()


def test_a_worker_that_dies_takes_nothing_along(tmp_path: Path) -> None:
    """What slots share is known again by the next one, and not copied anew under those who may read it."""
    state = state_of()
    with Engine(Config(linger=0, restart_pause=0.01), alone=True) as engine:
        for number in range(8):
            train(state, *(["base.0"] if number == 6 else []))
            if number == 5:
                assert engine.worker is not None
                os.kill(engine.worker.pid, signal.SIGKILL)
                with contextlib.suppress(WorkerDiedError):
                    engine.save(tmp_path / "lost", state).result(60)
            engine.save(tmp_path / str(number), state).result(60)
            check(tmp_path / str(number), state)


def test_readers_of_checkpoints_see_all_of_it(tmp_path: Path) -> None:
    state = state_of()
    root = str(tmp_path)
    kept = []
    with (
        Checkpointer(root, config=Config(slots=4)) as ckpt,
        WeightSubscriber.of_checkpoints(root) as subscriber,
        contextlib.ExitStack() as until_the_end,
    ):
        for step in range(1, 8):
            train(state, *(["base.3"] if step == 6 else []))
            save = ckpt.save(step, state)
            save.result(60)
            ckpt.publish(save, step)
            with contextlib.ExitStack() as now:
                weights = (until_the_end if step in (4, 6) else now).enter_context(subscriber.acquire(min_version=step))
                assert all(same(weights[name], value) for name, value in state.items() if "." in name)
            if step in (4, 6):
                kept.append((weights, copy.deepcopy(state)))
        for weights, its in kept:
            assert all(same(weights[name], value) for name, value in its.items() if "." in name)


def _die(root: str, saves: int) -> None:
    state = state_of()
    torch.manual_seed(0)
    for name in state:
        if name.startswith("base"):
            state[name] = torch.randn(ELEMENTS)
    ckpt = Checkpointer(root)
    for step in range(1, saves + 1):
        train(state)
        ckpt.save(step, state).result(60)
    torch.save(state, f"{root}/state")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_trainer_finds_it_in_memory(tmp_path: Path) -> None:
    root = str(tmp_path)
    alone(_die, root, 5)
    state = torch.load(tmp_path / "state")
    with Checkpointer(root) as ckpt:
        assert ckpt.load(loaded := zeros_like(state)) == 5 and same(loaded, state)
        assert ckpt.loaded is not None and ckpt.loaded.source == "memory"
        for step in range(6, 9):
            train(loaded, *(["base.1"] if step == 8 else []))
            ckpt.save(step, loaded).result(60)
            check(step_folder(root, step), loaded)


def test_a_promise_is_kept_as_of_the_first_save(tmp_path: Path) -> None:
    """Whatever was prepared."""
    state = state_of()
    with Checkpointer(tmp_path, config=Config(linger=0, assume_unchanged=["base.*"])) as ckpt:
        ckpt.prepare(state)
        for name, value in state.items():
            if name.startswith("base"):
                value.copy_(torch.randn_like(value))  # the pretrained weights are loaded
        for step in (1, 2):
            ckpt.save(step, state).result(60)
            check(step_folder(str(tmp_path), step), state)


def _die_with_promise(root: str) -> None:
    ckpt = Checkpointer(root, config=Config(assume_unchanged=["base.*"]))
    ckpt.save(1, state_of()).result(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_another_base_in_the_memory_of_a_dead_trainer(tmp_path: Path) -> None:
    alone(_die_with_promise, str(tmp_path))
    torch.manual_seed(2)
    state = state_of()
    with Checkpointer(tmp_path, config=Config(assume_unchanged=["base.*"])) as ckpt:
        for step in (2, 3):
            train(state)
            ckpt.save(step, state).result(60)
            check(step_folder(str(tmp_path), step), state)


def test_a_promise_is_checked_whatever_else_is_saved(tmp_path: Path) -> None:
    state, other = state_of(), {"m": torch.randn(1000)}
    config = Config(linger=0, assume_unchanged=["base.*"], check_unchanged_every=4)
    with Engine(config, alone=True) as engine, pytest.raises(UnsavableStateError):
        for number in range(10):
            train(state, *(["base.1"] if number == 3 else []))
            engine.save(tmp_path / f"state{number}", state).result(60)
            engine.save(tmp_path / f"other{number}", other).result(60)


def _plans(tmp_path: Path, saves: int, change: Callable[[dict[str, Any], int], None]) -> int:
    state: dict[str, Any] = {f"layer.{number}": torch.randn(1 << 16) for number in range(32)}
    planned = 0
    with Engine(Config(linger=0), alone=True) as engine:
        for number in range(saves):
            change(state, number)
            with counting_plans() as counted:
                engine.save(path := tmp_path / str(number), state).result(60)
            planned += counted.called
            if number:
                shutil.rmtree(tmp_path / str(number - 1))
    check(path, state)
    return planned


def test_layers_that_take_turns_are_not_planned_again_and_again(tmp_path: Path) -> None:
    """As LISA and BAdam train: now these layers, now those."""
    chance = random.Random(1)

    def change(state: dict[str, Any], number: int) -> None:
        for layer in chance.sample(range(32), 2):
            state[f"layer.{layer}"] += 1

    assert _plans(tmp_path, 40, change) < 10


def test_nor_is_what_changes_now_and_then(tmp_path: Path) -> None:
    def change(state: dict[str, Any], number: int) -> None:
        state["layer.0"] += 1
        if number % 4 == 3:
            state["layer.1"] += 1

    assert _plans(tmp_path, 24, change) < 5


def test_old_values_do_not_stand_between_the_new_ones(engine: Engine, tmp_path: Path) -> None:
    """What settles later is seen: gaps are the same in all slots; and no file has bytes of another's tensors."""
    secret = 0x5EC5EC5E
    state = {f"base.{number}": torch.full((ELEMENTS + 100,), secret, dtype=torch.int32) for number in range(4)}
    state |= {f"late.{number}": torch.zeros(ELEMENTS + 100, dtype=torch.int32) for number in range(4)}
    found = []
    for number in range(12):
        for name, value in state.items():
            value += name.startswith("late") and number < 4
        engine.save(path := tmp_path / str(number), state).result(60)
        check(path, state)
        if 1 < number < 4:
            assert secret.to_bytes(4, "little") * 8 not in (path / "__0_0.distcp").read_bytes()
        found.append(written(path) // (4 * ELEMENTS))
    assert found[:2] == [8, 8] and found[2:4] == [4, 4] and found[-1] == 0


def test_a_change_does_not_wait_for_a_commit(
    tmp_path: Path, faulty_worker: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCCKPT_TEST_GATE", str(gate := tmp_path / "gate"))
    faulty_worker("finalize:hold:4")
    state = state_of()
    with Engine(Config(linger=0), alone=True) as engine:
        for number in range(3):
            train(state)
            engine.save(tmp_path / str(number), state).result(60)
        engine.save(tmp_path / "3", state)
        wait_reached(gate)
        train(state, "base.1")
        engine.save(tmp_path / "4", state)  # it returns
        gate.touch()
        engine.wait(60)
    check(tmp_path / "4", state)


@pytest.mark.device
@pytest.mark.parametrize("is_side", [False, True])
def test_promised_tensors_on_a_device_are_looked_at_on_the_callers_stream(
    device_type: str, tmp_path: Path, is_side: bool
) -> None:
    """As offloading does: the same values, in new memory."""
    values = {f"base.{number}": torch.randn(1 << 20).to(device_type) for number in range(6)}
    stream = module().Stream() if is_side else module().current_stream()
    config = Config(linger=0, assume_unchanged=["base.*"], check_unchanged_every=2)
    with module().stream(stream), Engine(config, alone=True) as engine:
        for number in range(5):
            state = {name: torch.zeros(value.shape, device=device_type) for name, value in values.items()}
            busy(0.2)
            for name, value in values.items():
                state[name].copy_(value, non_blocking=True)
            engine.save(tmp_path / str(number), state).result(60)
