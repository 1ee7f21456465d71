"""Dict keys keep their types: values are loaded under the keys of the caller's state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt import Checkpointer


def _milestones() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4, 4])
    return {"schedule": schedule.state_dict()}


def _steps_of_an_optimizer(value: int) -> dict[str, Any]:
    """Return the state of a custom optimizer: numbers beside tensors, by the number of each parameter."""
    state = {number: {"step": value + number, "exp_avg": torch.full((3,), float(value))} for number in range(2)}
    return {"optimizer": {"state": state, "param_groups": [{"lr": 0.1 * value, "params": [0, 1]}]}}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "by DCP"])
@pytest.mark.parametrize("from_memory", [False, True])
def test_numbers_under_integer_keys_are_restored(
    root: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, from_memory: bool
) -> None:
    if not direct:
        monkeypatch.setattr("asyncckpt.loading.direct_load._MOST_FILES", 0)
    with Checkpointer(root) as checkpointer:
        save = checkpointer.save(1, _steps_of_an_optimizer(7))
        save.result(60)
        into = _steps_of_an_optimizer(1)
        checkpointer.load(into, memory=from_memory)
        state = into["optimizer"]["state"]
        assert list(state) == [0, 1]
        assert [state[number]["step"] for number in state] == [7, 8]
        assert into["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.7)
        assert torch.equal(state[1]["exp_avg"], torch.full((3,), 7.0))
        checkpointer.save(2, into).result(60)  # the loaded state can be saved


def test_milestones_of_a_schedule(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, saved := _milestones()).result(60)
        into = _milestones()
        into["schedule"]["milestones"] = Counter({2: 0, 4: 0})
        checkpointer.load(into)
        assert into["schedule"]["milestones"] == saved["schedule"]["milestones"] == Counter({2: 1, 4: 2})
        checkpointer.save(2, into).result(60)
