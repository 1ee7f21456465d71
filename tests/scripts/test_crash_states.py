"""Test the model of the states that a crash may leave, and a short run of ``scripts/torture --crash-states``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torture.crash_disk import BLOCK, Disk, Tree
from torture.recorded_calls import ROOT, Event, Names, Recording, Size, Sync, Synced, Write, has_compiler

_FILE, _FOLDER = 1, 2


def _disk(*events: Event) -> Disk:
    return Disk(Recording([*events], {ROOT: "d", _FILE: "f", _FOLDER: "d"}))


def _trees(disk: Disk) -> list[set[str]]:
    """Return the names in each state that a crash at the end may leave.

    The first state keeps no loose call. Each other state keeps one loose call and the calls that it needs.
    """
    point = disk.point(len(disk.recording.events))
    kept = [set[int](), *(disk.with_needs([at]) & {*point.loose} for at in point.loose)]
    return [{*disk.tree(point, frozenset(each), lambda _: "new")} for each in kept]


def _create(folder: int, name: str, file: int) -> Names:
    return Names({(folder, name): file}, f"create {name}")


def test_a_name_is_durable_after_an_fsync_of_its_folder() -> None:
    create = _create(ROOT, "a", _FILE)
    assert _trees(_disk(create)) == [set(), {"a"}]
    assert _trees(_disk(create, Sync(_FILE), Synced(1))) == [set(), {"a"}]
    assert _trees(_disk(create, Sync(ROOT))) == [set(), {"a"}]  # the fsync has not ended
    assert _trees(_disk(Sync(ROOT), create, Synced(0))) == [set(), {"a"}]  # the fsync began before the create
    assert _trees(_disk(create, Sync(ROOT), Synced(1))) == [{"a"}]
    assert _trees(_disk(create, Sync(None), Synced(1))) == [{"a"}]


def test_a_rename_is_atomic_and_needs_both_folders() -> None:
    begin = _create(ROOT, "d", _FOLDER), _create(_FOLDER, "a", _FILE), Sync(None), Synced(2)
    rename = Names({(_FOLDER, "a"): None, (ROOT, "b"): _FILE}, "rename d/a -> b")
    before, after = {"d", "d/a"}, {"d", "b"}
    assert _trees(_disk(*begin, rename)) == [before, after]
    assert _trees(_disk(*begin, rename, Sync(ROOT), Synced(5))) == [before, after]
    assert _trees(_disk(*begin, rename, Sync(ROOT), Synced(5), Sync(_FOLDER), Synced(7))) == [after]


def test_calls_on_one_name_keep_their_order_and_others_do_not() -> None:
    create, remove = _create(ROOT, "a", _FILE), Names({(ROOT, "a"): None}, "remove a")
    other = _create(ROOT, "d", _FOLDER)
    assert _trees(_disk(create, remove, other)) == [set(), {"a"}, set(), {"d"}]


def test_bytes_are_durable_after_an_fsync_of_their_file() -> None:
    old, new = b"o" * 100, b"n" * (3 * BLOCK)
    disk = _disk(_create(ROOT, "a", _FILE), Write(_FILE, 0, old), Sync(_FILE), Synced(2), Write(_FILE, 0, new))
    point = disk.point(5)

    def content(data: str | int) -> bytes:
        tree: Tree = disk.tree(point, frozenset(point.loose), lambda _: data)
        return disk.bytes_of(tree["a"])

    assert (content("old"), content("new")) == (old, new)
    assert content("size") == old.ljust(len(new), b"\0")
    mixed = {content(seed) for seed in range(100)}
    assert {len(each) for each in mixed} == {len(old), len(new)} and len(mixed) > 10
    assert all(each[:1] in (b"o", b"n") and set(each) <= {0, *b"on"} for each in mixed)
    cut = _disk(*disk.recording.events, Size(_FILE, 1), Sync(_FILE), Synced(6))
    point = cut.point(8)
    assert cut.bytes_of(cut.tree(point, frozenset(point.loose), lambda _: "old")["a"]) == b"n"


@pytest.mark.skipif(not has_compiler(), reason="there is no compiler")
def test_no_crash_breaks_a_promise(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = Path(__file__).parents[2] / "scripts/torture"
    options = ["--crash-states=30", "--scenarios", "files", "--seed=3", f"--json={report}"]
    trial = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=200)
    assert trial.returncode == 0, trial.stdout + trial.stderr
    facts = json.loads(report.read_text())
    assert facts["losses"] == []
    assert facts["crash states: files"] == facts["crash states: both fsyncs"] == 30
    # The check can fail: it has found each of these broken variants.
    assert facts["crash states: files: fsyncs whose loss is found"] == facts["crash states: files: fsyncs"] == 10
    assert sum(name.endswith("broken, as it must be") for name in facts) == 4
