"""Test the arithmetic of save intervals against published numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncckpt import Checkpointer, Save
from asyncckpt.engine.saves import RecentSaves
from asyncckpt.errors import CheckpointError, NothingMeasuredError
from asyncckpt.interval import Advice, parse_duration
from asyncckpt.save_handle import SaveState

MINUTE = 60.0


# Figures 3, 4 and 5 of Daly's paper: a dump takes 5 minutes, and the mean time to interrupt is 24 h, 6 h, 15 min.
@pytest.mark.parametrize(("mtbf_min", "optimum_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_it_is_dalys(mtbf_min: float, optimum_min: float) -> None:
    advice = Advice(5 * MINUTE, 0.0, mtbf_min * MINUTE, 1)
    training_min = (advice.daly_s - advice.stall_s) / MINUTE  # between two saves, as in the paper
    assert training_min == pytest.approx(optimum_min, abs=0.5 if optimum_min > 10 else 0.05)


def test_youngs_and_the_loss_by_hand() -> None:
    advice = Advice(stall_s=2.0, durable_s=30.0, mtbf_s=10_000.0, saves=3)
    assert advice.young_s == 200.0  # sqrt(2 x 2 x 10,000)
    assert advice.daly_s == pytest.approx(200 * (1 + 0.01 / 3 + 0.0001 / 9))  # x = sqrt(2 / 20,000) = 0.01
    loss = advice.loss(400.0)
    assert (loss.per_failure_s, loss.save_part, loss.failure_part) == (230.0, 0.005, 0.023)  # 400 / 2 + 30; of 10,000
    assert loss.part == pytest.approx(0.028)
    restarting = Advice(2.0, 30.0, 10_000.0, 3, restart_s=70.0).loss(400.0)
    assert restarting.per_failure_s == 300.0 and restarting.failure_part == 0.03


def test_the_interval_of_young_loses_the_least() -> None:
    advice = Advice(2.0, 30.0, 10_000.0, 3)
    least = advice.loss(advice.young_s).part
    assert least < advice.loss(0.9 * advice.young_s).part and least < advice.loss(1.1 * advice.young_s).part


def test_no_more_often_than_storage_takes_it() -> None:
    quick, slow = Advice(0.01, 5.0, 3600.0, 1), Advice(0.01, 20.0, 3600.0, 1)
    assert not quick.is_bound_by_storage and quick.interval_s == quick.daly_s
    assert slow.is_bound_by_storage and slow.interval_s == 20.0


def test_failures_that_come_faster_than_saves() -> None:
    assert Advice(100.0, 0.0, 10.0, 1).daly_s == 110.0


@pytest.mark.parametrize("wrong", [{"mtbf_s": 0.0}, {"mtbf_s": -1.0}, {"mtbf_s": math.inf}, {"restart_s": -1.0}])
def test_times_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        Advice(1.0, 1.0, saves=1, **({"mtbf_s": 1.0} | wrong))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("4h", 14400), ("2d", 172800), ("7", 7), ("1.5 H", 5400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "4 hours", "-4h", "0 hours", "1e3", "4h30m", "nan", "9" * 400])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="4h"):
        parse_duration(text)


def _ended(stall_s: float, durable_s: float, failure: CheckpointError | None = None) -> Save:
    state = SaveState("there", 1)
    state.timings |= {"stall_s": stall_s + 4.0, "slot_s": 4.0}
    state.is_reported = True
    state.end(failure)
    state.timings["durable_s"] = durable_s + 4.0
    return Save(state)


def test_the_first_save_and_failures_count_for_nothing() -> None:
    recent = RecentSaves()
    recent.add(_ended(9.0, 90.0))
    assert recent.advice(100.0, None).stall_s == 9.0  # until there are other saves
    recent.add(_ended(5.0, 50.0, CheckpointError("it failed")))
    for stall_s in (1.0, 2.0, 3.0):
        recent.add(_ended(stall_s, 10 * stall_s))
    recent.add(Save(SaveState("under way", 2)))
    advice = recent.advice(100.0, 7.0)
    assert (advice.stall_s, advice.durable_s, advice.saves, advice.restart_s) == (2.0, 20.0, 3, 7.0)


def test_a_checkpointer_is_asked(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        with pytest.raises(NothingMeasuredError):
            checkpointer.suggested_interval(3600)
        for step in range(3):
            save = checkpointer.save(step, {"w": torch.zeros(1000)})
            save.result(60)
        advice = checkpointer.suggested_interval(3600.0)
        assert advice.saves == 2 and 0 < advice.stall_s < advice.durable_s < 60
        assert checkpointer.suggested_interval("4h", restart="2m").mtbf_s == 14400 and "every" in str(advice)
        assert advice.interval_s == max(advice.daly_s, advice.durable_s)
        with pytest.raises(ValueError):
            checkpointer.suggested_interval(0)
    assert checkpointer.suggested_interval(3600.0).saves == 2


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_an_interval_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="no interval"):
        Advice(2.0, 30.0, 10_000.0, 3).loss(wrong)
