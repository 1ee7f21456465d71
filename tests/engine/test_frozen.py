"""Test that frozen parameters get their own data file in every configuration."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerators import busy, module
from support.checkpoints import step_folder, verify
from support.plans import counting_plans
from support.ranks import alone
from support.states import same
from support.unchanged import ELEMENTS, check, state_of, train, written
from torch import nn

from asyncckpt import Checkpointer, FileSet
from asyncckpt.config import Config
from asyncckpt.extension import Engine
from asyncckpt.weights.subscriber import WeightSubscriber

pytestmark = pytest.mark.usefixtures("forkserver")

_WIDTH = 512  # 1 MiB per layer


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(Config(linger=0), alone=True) as engine:
        yield engine


class Adapted(nn.Module):
    """A frozen base with tied weights, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.tied = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.tied.weight = self.base.weight
        self.adapter = nn.Linear(_WIDTH, 2)
        self.register_buffer("mean", torch.zeros(3))


def _step(model: nn.Module, *names: str) -> None:
    """Change the trained parameters, and the parameters in ``names``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or name in names:
                parameter.add_(1)


def _check(path: Path, model: nn.Module) -> None:
    check(path, {"model": model.state_dict()})


def test_a_frozen_base_is_written_once(engine: Engine, tmp_path: Path) -> None:
    model = Adapted()
    for number in range(4):
        _step(model)
        with counting_plans() as counted:
            engine.save(path := tmp_path / str(number), {"model": model, "step": number}).result(60)
        assert counted.called == (number == 0)
        assert written(path) < 4 * ELEMENTS or number == 0
    assert os.stat(path / "__0_1.distcp").st_nlink == 4
    shutil.rmtree(tmp_path / "0")
    check(path, {"model": model.state_dict(), "step": 3})


def test_a_frozen_parameter_that_changes_is_saved_as_it_is(engine: Engine, tmp_path: Path) -> None:
    model = Adapted()
    for number in range(4):
        _step(model, *(["base.weight"] if number == 2 else []))
        engine.save(tmp_path / str(number), {"model": model}).result(60)
        _check(tmp_path / str(number), model)


def test_what_is_frozen_may_change(engine: Engine, tmp_path: Path) -> None:
    """A training may unfreeze its layers one by one, and freeze them again."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))
    sizes = []
    for number, frozen in enumerate([(), (0, 1), (0, 1), (0,), (0,), (), (0, 1, 2), (0, 1, 2)]):
        for layer, each in enumerate(model):
            each.requires_grad_(layer not in frozen)
        _step(model)
        with counting_plans() as counted:
            engine.save(path := tmp_path / str(number), {"model": model}).result(60)
        assert counted.called == (number in (0, 1, 3, 5, 6))
        _check(path, model)
        sizes.append(round(written(path) / 4 / ELEMENTS))
    assert sizes == [3, 3, 1, 3, 2, 3, 3, 0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: {"models": [model, {"teacher": copy.deepcopy(model)}]},
        lambda model: {"parameters": dict(model.named_parameters())},
        lambda model: {"model": torch.compile(model)},
    ],
    ids=["deep", "parameters", "compiled"],
)
def test_in_other_places(engine: Engine, tmp_path: Path, wrap: Callable[[nn.Module], dict[str, Any]]) -> None:
    model = Adapted()
    state = wrap(model)
    for number in range(2):
        _step(model)
        engine.save(path := tmp_path / str(number), state).result(60)
    assert os.stat(path / "__0_1.distcp").st_nlink == 2 and written(path) < 4 * ELEMENTS
    assert not verify(str(path)).damages


def test_where_all_is_frozen_the_rest_has_a_file(engine: Engine, tmp_path: Path) -> None:
    model = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
    for number in range(2):
        engine.save(path := tmp_path / str(number), {"model": model, "step": number}).result(60)
        check(path, {"model": model.state_dict(), "step": number})
    assert written(path) < 4 * ELEMENTS


def test_constant_structure_is_not_about_what_is_frozen(tmp_path: Path) -> None:
    model = Adapted()
    with Engine(Config(linger=0, assume_constant_structure=True), alone=True) as engine:
        for number in range(3):
            model.base.requires_grad_(number > 0)
            _step(model)
            engine.save(tmp_path / str(number), {"model": model}).result(60)
            _check(tmp_path / str(number), model)


def test_readers_of_checkpoints_see_all_of_it(tmp_path: Path) -> None:
    state = state_of()
    root = str(tmp_path)
    kept = []
    with (
        Checkpointer(root, config=Config(slots=4, assume_unchanged=["base.*"])) as ckpt,
        WeightSubscriber.of_checkpoints(root) as subscriber,
        ExitStack() as until_the_end,
    ):
        for step in range(1, 8):
            train(state, *(["base.3"] if step == 6 else []))
            save = ckpt.save(step, state)
            save.result(60)
            ckpt.publish(save, step)
            with ExitStack() as now:
                weights = (until_the_end if step in (4, 6) else now).enter_context(subscriber.acquire(min_version=step))
                assert all(same(weights[name], value) for name, value in state.items() if "." in name)
            if step in (4, 6):
                kept.append((weights, copy.deepcopy(state)))
        for weights, its in kept:
            assert all(same(weights[name], value) for name, value in its.items() if "." in name)


def _die(root: str) -> None:
    torch.manual_seed(0)
    model = Adapted()
    ckpt = Checkpointer(root)
    for step in (1, 2, 3):
        _step(model)
        ckpt.save(step, {"model": model}).result(60)
    torch.save(model.state_dict(), f"{root}/state")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("memory", [True, False])
def test_the_next_trainer_goes_on_with_its_plan(tmp_path: Path, memory: bool) -> None:
    root = str(tmp_path)
    alone(_die, root)
    model = Adapted()
    with Checkpointer(root) as ckpt:
        assert ckpt.load({"model": model}, memory=memory) == 3
        assert same(dict(model.state_dict()), torch.load(tmp_path / "state"))
        assert ckpt.loaded is not None and (ckpt.loaded.source == "memory") == memory
        for step in range(4, 7):
            _step(model, *(["base.weight"] if step == 6 else []))
            with counting_plans() as counted:
                ckpt.save(step, {"model": model}).result(60)
            assert not counted.called
            _check(Path(step_folder(root, step)), model)
        assert os.stat(Path(step_folder(root, 5)) / "__0_1.distcp").st_nlink == 2


def test_another_configuration_than_that_of_the_checkpoint(tmp_path: Path) -> None:
    state = state_of()
    for step, patterns in enumerate([[], ["base.*"], ["base.1"], []], start=1):
        with Checkpointer(tmp_path, Config(linger=0, assume_unchanged=patterns)) as ckpt:
            if step > 1:
                ckpt.load(state)
            train(state)
            with counting_plans() as counted:
                ckpt.save(step, state).result(60)
            assert counted.called
        check(step_folder(str(tmp_path), step), state)


def test_a_set_of_files_with_modules(engine: Engine, tmp_path: Path) -> None:
    files = FileSet()
    files.add_dcp_folder("model", {"model": Adapted()})
    engine.save(tmp_path / "1", files).result(60)
    assert not verify(str(tmp_path / "1")).damages


@pytest.mark.device
@pytest.mark.parametrize("is_side", [False, True])
def test_frozen_tensors_on_a_device_are_copied_behind_the_callers_stream(
    device_type: str, tmp_path: Path, is_side: bool
) -> None:
    """Each save has the same values in new memory, as with offloading."""
    values = {f"base.{number}": torch.randn(1 << 20).to(device_type) for number in range(6)}
    stream = module().Stream() if is_side else module().current_stream()
    config = Config(linger=0, assume_unchanged=["base.*"])
    with module().stream(stream), Engine(config, alone=True) as engine:
        for number in range(3):
            state = {name: torch.zeros(value.shape, device=device_type) for name, value in values.items()}
            busy(0.2)
            for name, value in values.items():
                state[name].copy_(value, non_blocking=True)
            engine.save(tmp_path / str(number), state).result(60)
        assert os.stat(tmp_path / "2" / "__0_1.distcp").st_nlink == 3
