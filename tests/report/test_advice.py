"""Test ``asyncckpt ls`` and ``advise`` against numbers that were computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Manifest

from asyncckpt import Checkpointer, cli
from asyncckpt.report.answers import duration
from asyncckpt.report.listing import Measured

TIMES = [(1e-5, "0.01 ms"), (0.0312, "31.2 ms"), (1, "1 s"), (119, "119 s"), (150, "2.5 min"), (14400, "4 h")]


@pytest.mark.parametrize(("seconds", "shown"), [*TIMES, (172800, "2 d"), (9e7, "1,042 d"), (0, "0 ms")])
def test_durations_are_shown_with_three_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def _manifest(
    step: int,
    number: int,
    called_at: float,
    stall_s: float = 0.5,
    lag_s: float = 20.0,
    slot_s: float | None = 0.0,
    later_s: float = 1.0,
) -> Manifest:
    """Return a manifest of two ranks. The second rank is called ``later_s`` later by its clock, and stalls for less."""
    timings: dict[str, list[float | None]] = {
        "called_at": [called_at, called_at + later_s],
        "slot_s": [slot_s, slot_s],
        "stall_s": [stall_s, stall_s / 2],
        "write_from_s": [2.0, 0.5],
        "write_s": [8.0, 3.5],
    }
    files = {"small": {"bytes": 850, "xxh3": "0" * 16}}
    return Manifest(f"{step:012x}-{number}", step, called_at + lag_s, 2, False, 850, files, timings)


def _write(root: Path, *manifests: Manifest) -> None:
    for manifest in manifests:
        (folder := root / f"step-{manifest.step:08d}").mkdir(parents=True)
        (folder / "asyncckpt.json").write_bytes(manifest.encode())


def _advice(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> dict[str, Any]:
    assert cli.main(["advise", str(root), "--mtbf", "4h", "--json", *options]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    return dict(facts)


def test_the_numbers_of_a_save() -> None:
    its = Measured.of(_manifest(1, 1, 1000.0))
    assert (its.called_at, its.stall_s, its.durable_after_s) == (1000.0, 0.5, 20.0)
    assert its.bytes_per_s == 100.0  # from 1001.5 to 1010
    nothing = Measured.of(Manifest("a", 1, 5.0, 1, False, 7, {}, {}))
    assert nothing == Measured(*[None] * 6)
    assert Measured.of(Manifest("a", 1, 5.0, 1, False, 7, {}, {"write_s": [2.0]})).bytes_per_s == 3.5


def test_ls_shows_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, _manifest(7, 3, 1000.0))
    assert cli.main(["ls", str(root)]) == 0
    out = capsys.readouterr().out
    assert all(each in out for each in ("500 ms", "20 s", "100 B/s", "850 B", "durable after"))


def test_advice_by_hand(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are two runs. The first save of each, which plans, and the pause between the runs do not count."""
    _write(
        root,
        _manifest(100, 1, 1000.0, stall_s=9.0, lag_s=99.0),
        _manifest(200, 2, 1200.0),
        _manifest(300, 3, 1400.0, stall_s=0.7, lag_s=40.0),
        _manifest(400, 2, 9000.0, stall_s=8.0, lag_s=98.0),
        _manifest(500, 3, 9200.0, lag_s=10.0),
    )
    facts = _advice(capsys, root, "--restart", "2m")
    assert (facts["stall_s"], facts["durable_s"], facts["saves"], facts["saves_left_out"]) == (0.5, 20.0, 3, 2)
    assert (facts["mtbf_s"], facts["restart_s"], facts["step_s"]) == (14400.0, 120.0, 2.0)
    assert facts["young_s"] == 120.0  # sqrt(2 x 0.5 x 14400)
    assert facts["interval_s"] == pytest.approx(120 * (1 + 0.0041667 / 3), abs=1e-3)  # x = sqrt(0.5 / 28800)
    now, suggested = facts["now"], facts["suggested"]
    assert now["interval_s"] == 200.0 and now["steps"] == 100 and suggested["steps"] == 60
    assert now["per_failure_s"] == 240.0  # 200 / 2 + 20 + 120
    assert now["save_part"] == 0.0025 and now["failure_part"] == pytest.approx(240 / 14400, abs=1e-6)
    assert cli.main(["advise", str(root), "--mtbf", "4h"]) == 0
    out = capsys.readouterr().out
    for each in (
        "3 saves; 2 first saves",
        "Young (1974)",
        "= 2 min",
        "200 / 2 + 20 s = 2 min",
        "0.25% + 0.83% = 1.08%",
    ):
        assert each in out, out
    assert "not given (--restart 2m), and left out" in out


def test_what_a_save_waits_for_a_slot_is_no_cost_of_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, *(_manifest(step, step, 100.0 * step, stall_s=1.5, lag_s=21.0, slot_s=1.0) for step in (5, 6, 7)))
    facts = _advice(capsys, root)
    assert (facts["stall_s"], facts["durable_s"], facts["young_s"]) == (0.5, 20.0, 120.0)
    assert (facts["saves"], facts["saves_left_out"]) == (3, 0)  # the first save of the run is gone


def test_the_clocks_of_other_hosts_do_not_count(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, *(_manifest(step, step, 10_000.0 * step, later_s=-3600.0) for step in (5, 6)))
    assert _advice(capsys, root)["durable_s"] == 20.0


def test_now_is_of_the_newest_saves(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tenth save is kept, and the last three."""
    numbers = (10, 20, 30, 31, 32)
    _write(root, *(_manifest(10 * number, number, 100.0 * number) for number in numbers))
    facts = _advice(capsys, root)
    assert (facts["now"]["interval_s"], facts["step_s"]) == (100.0, 10.0)


def test_where_failures_come_too_fast_that_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, *(_manifest(step, step, 100.0 * step) for step in (5, 6)))
    assert cli.main(["advise", str(root), "--mtbf", "10s"]) == 0
    assert "gets nowhere" in capsys.readouterr().out
    for wrong in ("9" * 400, "0", "1e9"):
        assert cli.main(["advise", str(root), "--mtbf", wrong]) == 2


def test_the_pause_between_two_runs_is_no_interval(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, _manifest(100, 1, 1000.0), _manifest(200, 2, 1200.0), _manifest(300, 1, 9000.0))
    facts = _advice(capsys, root)
    assert (facts["now"]["interval_s"], facts["step_s"], facts["saves_left_out"]) == (200.0, 2.0, 2)


def test_where_storage_decides(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(root, _manifest(1, 5, 1000.0, lag_s=600.0))
    facts = _advice(capsys, root)
    assert facts["bound_by_storage"] and facts["interval_s"] == 600.0 and facts["now"] is None
    assert (facts["saves"], facts["saves_left_out"], facts["step_s"]) == (1, 0, None)
    assert cli.main(["advise", str(root), "--mtbf", "4h"]) == 0
    assert "cannot be told" in capsys.readouterr().out


def test_a_real_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(root) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, {"w": torch.zeros(1000)}).result(60)
    facts = _advice(capsys, root)
    assert (facts["saves"], facts["saves_left_out"]) == (2, 1) and facts["now"]["steps"] == 10
    assert 0 < facts["stall_s"] < facts["durable_s"] < 60


@pytest.mark.parametrize("wrong", [["--mtbf", "often"], ["--mtbf", "4h", "--restart", "soon"], ["--mtbf", "0s"]])
def test_times_that_cannot_be(root: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    _write(root, _manifest(1, 1, 1000.0))
    assert cli.main(["advise", str(root), *wrong]) == 2
    assert ("above 0" if "0s" in wrong else "no duration") in capsys.readouterr().err


def test_a_root_of_which_nothing_is_known(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.mkdir()
    assert cli.main(["advise", str(root), "--mtbf", "4h"]) == 2
    _write(root, Manifest("a", 1, 5.0, 1, False, 7, {}, {"write_s": [2.0]}))
    assert cli.main(["advise", str(root), "--mtbf", "4h"]) == 2
    assert "none of these checkpoints says how long it took" in capsys.readouterr().err
    assert cli.main(["advise", str(root / "none"), "--mtbf", "4h"]) == 2


def test_numbers_that_no_save_has(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest may hold impossible numbers by mistake or on purpose."""
    _write(root, _manifest(1, 1, 1000.0, stall_s=0.0, lag_s=0.0), replace(_manifest(2, 2, 9.0), created=1e300))
    for command in (["ls"], ["inspect"], ["timeline"], ["advise", "--mtbf", "4h"]):
        assert cli.main([command[0], str(root), *command[1:]]) == 0
    assert "1e+300" in capsys.readouterr().out
