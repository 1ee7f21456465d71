"""Test ``asyncckpt timeline``: a trace of all ranks without overlaps in any lane."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import Manifest
from support.file_sets import make
from support.ranks import QUICK, run
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncckpt import Checkpointer, cli
from asyncckpt.extension import Engine
from asyncckpt.report.timeline import LaneSpan, spans_of, trace

NBYTES = 4 << 20
STEPS = (100, 200, 300)


def _save_on_all(root: str, overlap: bool) -> None:
    with Checkpointer(root, replace(QUICK, overlap=overlap)) as checkpointer:
        state = {f"w{dist.get_rank()}": torch.zeros(NBYTES, dtype=torch.uint8)}
        for step in STEPS:
            checkpointer.save(step, state)


def _check(found: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Check that ``found`` has the form of trace events. Return the spans."""
    events = found["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = [event for event in events if event["ph"] == "M"]
    assert len(spans) + len(names) == len(events)
    processes = {event["pid"]: event["args"]["name"] for event in names if event["name"] == "process_name"}
    assert processes == {rank: f"rank {rank}" for rank in range(ranks)}
    lanes = {(event["pid"], event["tid"]) for event in names if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} == lanes
    for event in spans:
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert type(event["ts"]) is type(event["dur"]) is int and event["ts"] >= 0 and event["dur"] >= 0
        assert {"step", "rank", "bytes_of_own_files", "path"} <= event["args"].keys()
    assert min(event["ts"] for event in spans) == 0
    place = itemgetter("pid", "tid")
    for _, lane in groupby(sorted(spans, key=place), place):
        _check_lane([(event["ts"], event["ts"] + event["dur"]) for event in lane])
    return spans


def _check_lane(spans: list[tuple[int, int]]) -> None:
    """Check that each span is within another span or beside it."""
    around: list[tuple[int, int]] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][1] <= begin:
            around.pop()
        assert not around or end <= around[-1][1]
        around.append((begin, end))


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_job_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], overlap: bool) -> None:
    root = tmp_path / "root"
    run(2, _save_on_all, str(root), overlap, folder=tmp_path)
    assert cli.main(["timeline", str(root)]) == 0
    spans = _check(json.loads(capsys.readouterr().out), ranks=2)
    for rank in range(2):
        its = [event for event in spans if event["pid"] == rank]
        for name in (*(f"save {step}" for step in STEPS), "plan", "copy", "write", "sync", "checksum", "commit"):
            assert sum(event["name"] == name for event in its) == (1 if name.startswith("save") else 3), name
        assert all(event["args"]["bytes_of_own_files"] > NBYTES for event in its)
        one = {event["name"]: event["ts"] for event in its if event["args"]["step"] == 200}
        assert (
            one["plan"] <= one["wait for a slot"] <= one["copy"] <= one["write"] + 50_000
            and one["write"] <= one["sync"]
        )
    out = tmp_path / "trace.json"
    step = root / "step-00000200"
    assert cli.main(["timeline", str(step), str(root / "step-00000300"), "-o", str(out)]) == 0
    assert "2 saves of 2 ranks" in capsys.readouterr().out
    steps = {event["args"]["step"] for event in _check(json.loads(out.read_bytes()), ranks=2)}
    assert steps == {200, 300}


def test_a_set_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(alone=True) as engine:
        engine.save(tmp_path / "set", make()).result(60)
    assert cli.main(["timeline", str(tmp_path / "set")]) == 0
    spans = _check(json.loads(capsys.readouterr().out), ranks=1)
    assert {"save", "write", "sync", "commit"} <= {event["name"] for event in spans}


def _manifest(timings: Mapping[str, list[float | None]], created: float = 20.0) -> Manifest:
    ranks = len(timings["called_at"])
    files = {"__0_0.distcp": {"bytes": 7, "index": "__0_0.index.json"}}
    return Manifest("a-1", 5, created, ranks, False, 7, files, timings)


WHOLE: dict[str, list[float | None]] = {
    "called_at": [10.0],
    "plan_s": [0.1],
    "slot_s": [0.2],
    "copy_from_s": [0.3],
    "copy_s": [0.4],
    "stall_s": [0.7],
    "write_from_s": [0.5],
    "write_s": [2.0],
    "checksum_from_s": [0.6],
    "checksum_s": [1.0],
    "sync_from_s": [2.0],
    "sync_s": [0.5],
}


def _names(spans: list[LaneSpan]) -> dict[str, list[str]]:
    return {f"{span.lane}: {span.name}": [each.name for each in span.within] for span in spans}


def test_what_a_dead_trainer_did_not_say_is_left_out() -> None:
    dead = {
        name: [*each, None if name in ("plan_s", "slot_s", "copy_s", "stall_s") else each[0]]
        for name, each in WHOLE.items()
    }
    whole, other = spans_of("there", _manifest(dead)).values()
    names = _names(other)
    assert names == {"write: write": ["sync"], "checksum: checksum": [], "commit: commit": []}
    assert _names(whole) == {"trainer: save 5": ["plan", "wait for a slot", "copy"], **names}
    assert [span.args["bytes_of_own_files"] for span in (whole[0], other[0])] == [7, None]
    commit = whole[-1]
    assert (commit.begin, commit.end) == (12.5, 20.0) and "rename" in commit.args["what"]


def test_a_copy_that_outlasts_the_call_has_a_lane() -> None:
    names = _names(spans_of("there", _manifest(WHOLE | {"stall_s": [0.35]}))[0])
    assert names["trainer: save 5"] == ["plan", "wait for a slot"] and names["copy: copy"] == []


def test_no_two_of_a_lane_overlap() -> None:
    """Two jobs may have saved at the same time, and clocks may differ by a little."""
    saves = [_manifest(WHOLE | {"called_at": [at], "sync_s": [0.50003]}) for at in (10.0, 10.6, 10.7, 30.0)]
    found = trace(spans_of("there", manifest) for manifest in saves)
    spans = _check(found, ranks=1)
    names = {event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"}
    assert {"trainer", "trainer 2", "write", "write 2", "write 3"} <= names and "write 4" not in names
    assert len([event for event in spans if event["name"] == "write"]) == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_says_nothing_of_when(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
    dcp_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "stock")
    assert cli.main(["timeline", str(tmp_path / "stock")]) == 2
    assert "how long they took" in capsys.readouterr().err
    assert cli.main(["timeline", str(tmp_path / "none"), str(root)]) == 2
    said = capsys.readouterr()
    _check(json.loads(said.out), ranks=1)  # the readable checkpoints are shown
    manifest = root / "step-00000001" / "asyncckpt.json"
    parsed = Manifest.parse(manifest.read_bytes(), "")
    manifest.write_bytes(replace(parsed, timings={"write_s": [1.0]}).encode())
    assert cli.main(["timeline", str(root)]) == 2
    assert "left out" in capsys.readouterr().err
    assert cli.main(["ls", str(root)]) == 0
    capsys.readouterr()


def test_a_rank_without_any_span_is_left_out() -> None:
    assert spans_of("there", _manifest({"called_at": [10.0]})) == {}
    assert trace([])["traceEvents"] == []


def test_what_cannot_be_written_is_not_said_to_be_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
    assert cli.main(["timeline", str(root), "-o", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert not said.out and "writing failed" in said.err


def test_the_bytes_are_those_of_own_large_files() -> None:
    """Small files do not count, because the manifest does not say which rank wrote them."""
    manifest = _manifest(WHOLE)
    files = {**manifest.files, "small": {"bytes": 5, "xxh3": "0"}}
    (span, *_) = spans_of("there", replace(manifest, files=files))[0]
    assert span.args["bytes_of_own_files"] == 7 and "bytes" not in span.args


def test_a_terminal_gets_no_trace(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
    assert cli.main(["timeline", str(root)]) == 0 and json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["timeline", str(root)]) == 2
    out, err = capsys.readouterr()
    assert not out and "name a file for it (-o trace.json)" in err
    assert cli.main(["timeline", str(root), "-o", str(root / "trace.json")]) == 0
