"""The handle of a save: what has to wait for its copies."""

from __future__ import annotations

import pytest

from asyncckpt.errors import CheckpointError, SaveTimeoutError
from asyncckpt.save_handle import Save, SaveState


def test_the_step_waits_and_not_the_host() -> None:
    fenced: list[bool] = []
    save = Save(state := SaveState("somewhere", 1))
    with pytest.raises(SaveTimeoutError, match="not queued"):
        save.synchronize_staging(0.01)
    state.copies_queued([lambda: fenced.append(True)])
    save.synchronize_staging(0.01)
    assert fenced == [True] and not save.staged()
    with pytest.raises(SaveTimeoutError, match="not staged"):
        save.wait_staged(0.01)


def test_with_the_hosts_tensors_alone_the_host_waits() -> None:
    save = Save(state := SaveState("somewhere", 1))
    state.copies_queued([])
    with pytest.raises(SaveTimeoutError, match="not staged"):
        save.synchronize_staging(0.01)
    failed = Save.finished("somewhere", CheckpointError("the device is lost"))
    failed.synchronize_staging(0.01)


def test_nobody_can_cancel_it() -> None:
    """``asyncio`` would, when it stops waiting for the future; then the save would count as ended."""
    save = Save(state := SaveState("somewhere", 1))
    assert not save.future.cancel() and not save.done()
    state.end(None)
    assert save.result(1) == state.path
