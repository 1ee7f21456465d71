"""verl's file with the latest step, by the tracker alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.integrations.verl_fsdp.tracker import StepTracker, latest_step


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[StepTracker]:
    tracker = StepTracker(str(tmp_path), 30.0)
    yield tracker
    tracker._expected.clear()


def _save(tracker: StepTracker, step: int) -> Path:
    folder = Path(tracker.step_folder(step))
    (folder / "actor").mkdir(parents=True)
    tracker.expect(step, ["actor"])
    tracker.wait()
    return folder


def test_a_note_that_stays_keeps_no_later_step_from_being_named(
    tracker: StepTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error of a file system in the network, say."""
    remove, refused = os.remove, list[Any]()

    def refuse_once(path: Any) -> None:
        if not refused:
            refused.append(path)
            raise OSError("as the test wants")
        remove(path)

    monkeypatch.setattr(os, "remove", refuse_once)
    folders = [_save(tracker, step) for step in (1, 2)]
    assert refused and latest_step(str(tmp_path)) == 2
    assert all(os.listdir(folder) == ["actor"] for folder in folders)
