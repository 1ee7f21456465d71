"""Resolve on storage how a save has ended, at any instant of the save."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.attempts import checkpoint_attempt
from support.checkpoints import PAGE

from asyncckpt.errors import SaveTimeoutError, StorageError
from asyncckpt.format.write_request import Existing
from asyncckpt.shm.segment import Segment
from asyncckpt.storage import partial, resolve
from asyncckpt.storage.partial import PARTIAL_SUFFIX, TRASH_SUFFIX


@pytest.mark.parametrize(("code", "says"), [(errno.EIO, None), (errno.ESTALE, None), (errno.EROFS, False)])
def test_where_storage_fails_nobody_can_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: bool | None
) -> None:
    """The rename of a finalizing process may succeed a moment later, but never on a read-only file system."""

    def rename(*_: str) -> None:
        raise OSError(code, os.strerror(code))

    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment, "refuse")
        attempt.write(pool)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            if says is None:
                with pytest.raises(SaveTimeoutError, match="outcome of the save is not known"):
                    resolve(attempt.request, 60.0)
            else:
                assert resolve(attempt.request, 60.0) is says
        attempt.discard()


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("existing", ["refuse", "replace", "join"])
def test_whoever_resolves_it_at_any_instant_knows_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing, exchanges: bool
) -> None:
    """``resolve`` runs between any two steps of finalizing, and its answer is final."""
    if not exchanges:
        monkeypatch.setattr(partial, "exchange", lambda *_: False)
    real, calls, said = os.rename, 0, [False]

    def rename(one: str, other: str) -> None:
        nonlocal calls
        if not one.endswith(PARTIAL_SUFFIX) or not other.endswith(TRASH_SUFFIX):
            calls += 1
            if calls == resolves_at:
                said[0] = resolve(request, 60.0)
        real(one, other)

    monkeypatch.setattr(os, "rename", rename)
    resolves_at, verdicts = 1, set()
    while True:
        root = tmp_path / str(resolves_at)
        final = root / "root" / "final"
        if existing != "refuse":
            final.mkdir(parents=True)
            (final / ("asyncckpt.json" if existing == "replace" else "mine.txt")).touch()
        with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
            attempt = checkpoint_attempt(root, segment, existing)
            request, calls, committed = attempt.request, 0, True
            attempt.write(pool)
            report = json.loads(attempt.seal())
            try:
                attempt.commit([report])
                attempt.release()
            except StorageError:
                committed = False
                attempt.discard()
        is_there = (final / ".metadata").exists()
        assert is_there == committed and is_there == ("attempt" in _text(final / "asyncckpt.json"))
        assert existing == "refuse" or final.exists()
        assert existing != "join" or (final / "mine.txt").exists()
        assert os.listdir(root / "root") == (["final"] if final.exists() else [])
        if calls < resolves_at:  # ``resolve`` would run after the last step
            assert committed and resolve(request, 60.0) and is_there
            break
        assert said[0] == committed
        verdicts.add(committed)
        resolves_at += 1
    assert False in verdicts or (existing == "replace" and exchanges)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
