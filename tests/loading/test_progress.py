"""The progress bar on the terminal during a load or a verification."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from support.states import same, small_state, zeros_like

import asyncckpt
from asyncckpt import Checkpointer, cli
from asyncckpt.config import Config
from asyncckpt.loading import bar, progress, read_requests
from asyncckpt.loading import load as reader
from asyncckpt.report import verification


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """A terminal that fails after ``writes`` writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError("no more of this")
        return super().write(text)


NO_DELAY = 1e-9

Endpoints = list[tuple[float, float | None]]


@pytest.fixture(autouse=True)
def drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the bar without delay at every update, because these loads are short."""
    monkeypatch.setattr(bar.Bar, "__init__", partialmethod(bar.Bar.__init__, mininterval=0))
    monkeypatch.setattr(reader, "_LONG_S", NO_DELAY)
    monkeypatch.setattr(verification, "Progress", partial(progress.Progress, delay=NO_DELAY))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    """Record the count and the total of each bar at its end."""
    ends: Endpoints = []
    real = bar.Bar.close

    def close(closing: bar.Bar) -> None:
        if not closing.disable:
            ends.append((closing.n, closing.total))
        real(closing)

    monkeypatch.setattr(bar.Bar, "close", close)
    return ends


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return {**small_state(), "large": torch.randn(5 << 20), "values": {str(n): "x" * n for n in range(200)}}


@pytest.fixture
def saved(root: Path, state: dict[str, Any]) -> Path:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state)
    return root


def _load(root: Path, state: dict[str, Any], stderr: TextIO | None, config: Config | None = None) -> None:
    with Checkpointer(root, config) as checkpointer, redirect_stderr(stderr):
        checkpointer.load(into := zeros_like(state))
    assert same(into, state)


@pytest.mark.parametrize("batch_bytes", [read_requests._BATCH_BYTES, 10_000])
@pytest.mark.parametrize("directly", [True, False])
def test_a_load_reaches_its_total(
    directly: bool,
    batch_bytes: int,
    saved: Path,
    state: dict[str, Any],
    ends: Endpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_requests, "_BATCH_BYTES", batch_bytes)
    if not directly:
        monkeypatch.setattr(reader, "draft", lambda *_: None)
    _load(saved, state, terminal := Terminal())
    ((done, total),) = ends
    size = (saved / "step-00000001" / "__0_0.distcp").stat().st_size
    assert done == total and 20 << 20 < done <= size
    assert "loading" in terminal.getvalue() and terminal.getvalue().endswith("\r")


def test_part_of_a_state_is_part_of_the_bytes(saved: Path, state: dict[str, Any], ends: Endpoints) -> None:
    with redirect_stderr(Terminal()):
        asyncckpt.load({"model": zeros_like(state["model"])}, checkpoint_id=saved / "step-00000001")
    ((done, total),) = ends
    assert done == total and 8192 < done < 1 << 20


def test_a_short_load_shows_nothing(saved: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_LONG_S", 60.0)
    _load(saved, state, terminal := Terminal())
    assert not terminal.getvalue()


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_no_terminal_no_bar(stderr: io.StringIO | None, saved: Path, state: dict[str, Any], ends: Endpoints) -> None:
    _load(saved, state, stderr)
    assert not ends and (stderr is None or not stderr.getvalue())


def test_it_can_be_switched_off(
    saved: Path, state: dict[str, Any], ends: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    _load(saved, state, terminal := Terminal(), Config(progress=False))
    monkeypatch.setenv("ASYNC_CKPT_PROGRESS", "off")
    with redirect_stderr(terminal):
        asyncckpt.load(into := zeros_like(state), checkpoint_id=saved / "step-00000001")
    assert same(into, state) and not ends and not terminal.getvalue()


@pytest.mark.parametrize("writes", range(6))
def test_a_terminal_that_fails_does_no_harm(writes: int, saved: Path, state: dict[str, Any], ends: Endpoints) -> None:
    _load(saved, state, Gone(writes))
    ends.clear()
    _load(saved, state, terminal := Terminal())  # draws a bar, because the failed bar holds no lock
    ((done, total),) = ends
    assert done == total and "loading" in terminal.getvalue()


def test_it_leaves_no_thread(saved: Path, state: dict[str, Any], ends: Endpoints) -> None:
    before = threading.active_count()
    _load(saved, state, Terminal())
    assert ends and threading.active_count() == before


def test_verify_has_one(saved: Path, ends: Endpoints) -> None:
    path = saved / "step-00000001"
    with redirect_stderr(terminal := Terminal()):
        assert cli.main(["verify", str(path)]) == 0
        ((done, total),) = ends
        assert cli.main(["verify", "--json", str(path)]) == 0
    assert done == total and done > 20 << 20 and "verifying" in terminal.getvalue()
    assert len(ends) == 1
