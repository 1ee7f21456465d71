"""Test that ``asyncckpt ls`` shows the disk space that each checkpoint adds to the earlier ones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Manifest
from support.shared_files import share
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from asyncckpt import Checkpointer, cli
from asyncckpt.report.answers import size_of
from asyncckpt.report.listing import DiskUse
from asyncckpt.storage.local import LocalStorage
from asyncckpt.storage.storage import FileIdentity

DATA = "__0_0.distcp"


@pytest.fixture
def shared(root: Path) -> Path:
    """Return a root with three steps. The last two have the same data file."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((100_000,), float(min(step, 2)))}).result(60)
    share(root / "step-00000003", root / "step-00000002")
    return root


def _rows(capsys: pytest.CaptureFixture[str], *argv: Any) -> list[dict[str, Any]]:
    assert cli.main(["ls", *map(str, argv), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_shared_file_counts_where_it_is_listed_first(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(capsys, shared)
    data = (shared / "step-00000001" / DATA).stat().st_size
    assert all(row["bytes"] > data > 400_000 for row in rows)
    assert all(row["bytes"] <= row["bytes_on_disk"] < row["bytes"] + 4096 for row in rows[:2])
    assert rows[2]["bytes_on_disk"] == rows[2]["bytes"] - data
    # The order of the arguments counts. A checkpoint that is listed alone has all its bytes.
    rows = _rows(capsys, shared / "step-00000003", shared / "step-00000002", shared / "step-00000003")
    assert [row["bytes_on_disk"] >= data for row in rows] == [True, False, False]
    assert _rows(capsys, shared / "step-00000003")[0]["bytes_on_disk"] >= data


def test_the_table_has_a_total(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _rows(capsys, shared)
    total, on_disk = (size_of(sum(row[key] for row in found)) for key in ("bytes", "bytes_on_disk"))
    assert cli.main(["ls", str(shared)]) == 0
    first, headers, _, *rows = capsys.readouterr().out.splitlines()
    assert first == f"{shared}: 3 checkpoints, {total}, {on_disk} on disk" and total.startswith("1.2 MiB")
    assert "size       on disk" in headers and len(rows) == 3
    assert f" {size_of(found[2]['bytes'])}  {size_of(found[2]['bytes_on_disk'])} " in rows[2]


def test_a_root_that_is_empty_has_no_total(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root.mkdir()
    assert cli.main(["ls", str(root)]) == 0
    assert capsys.readouterr().out == f"{root}: 0 checkpoints\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_others_have_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        dcp_save({"w": torch.ones(100_000)}, checkpoint_id=str(tmp_path / name))
    (tmp_path / "second" / DATA).unlink()
    os.link(tmp_path / "first" / DATA, tmp_path / "second" / DATA)
    first, second = _rows(capsys, tmp_path / "first", tmp_path / "second")
    assert first["bytes_on_disk"] >= first["bytes"] > 400_000 and second["bytes_on_disk"] < 10_000


def test_a_storage_without_links_has_all_that_the_manifest_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "identity", lambda *_: None)
    files = {"a": {"bytes": 5, "xxh3": ""}, DATA: {"bytes": 7, "index": "__0_0.index.json"}}
    manifest = Manifest("a-1", 1, 0.0, 1, False, 12, files, {})
    disk_use = DiskUse()
    assert disk_use.of_ours("/none", manifest) == disk_use.of_ours("/none", manifest) == 12


def test_small_files_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 1,000 steps with 100 small files each, this would take seconds, or minutes on a network file system."""
    looked: list[str] = []

    def identity(_: LocalStorage, path: str) -> FileIdentity:
        looked.append(path)
        return FileIdentity(1, len(looked), 1, 4096)

    monkeypatch.setattr(LocalStorage, "identity", identity)
    small = {f"small-{number}": {"bytes": 5, "xxh3": ""} for number in range(100)}
    files = {**small, DATA: {"bytes": 7, "index": "__0_0.index.json"}}
    manifest = Manifest("a-1", 1, 0.0, 1, False, 507, files, {})
    disk_use = DiskUse()
    begun = time.perf_counter()
    assert [disk_use.of_ours(f"/root/step-{step:08d}", manifest) for step in range(1000)] == [500 + 4096] * 1000
    assert len(looked) == 1000 and time.perf_counter() - begun < 5
