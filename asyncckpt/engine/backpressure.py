"""Backpressure: what a save does when no slot is free (``Config.when_busy``). The first rank decides it for all."""

from __future__ import annotations

from asyncckpt.config import Config
from asyncckpt.engine.save_operation import SaveOperation
from asyncckpt.errors import SaveDroppedError, SaveTimeoutError
from asyncckpt.staging.buffer import StagingBuffer
from asyncckpt.worker.open_saves import TrackedSave


def take_slot(config: Config, save: SaveOperation, buffer: StagingBuffer) -> int | None:
    """Find a slot to stage ``save`` in.

    Args:
        config: ``when_busy`` says what to do where none is free; ``timeout``, in seconds, how long to wait for one.
        save: It ends where it is dropped.
        buffer: The staging buffer of its plan.

    Returns:
        The slot; None where the save was dropped.

    Raises:
        SaveTimeoutError: None has become free in time.
        WorkerDiedError: There is nobody left who would free one.
    """
    if config.when_busy != "wait":
        group, number = save.group, save.number
        skips, replaced = group.follow_first("slot", number, lambda: _decide(config, save, buffer))
        if skips:
            dropped = "skipped: all slots were being written"
            save.is_reported = True
            save.end(SaveDroppedError(dropped, path=save.path, rank=group.rank, step=save.step))
            return None
        if replaced is not None and group.rank > 0:
            _give_up(config, save, buffer, replaced)
    slot: int | None = None

    def claimed() -> bool:
        nonlocal slot
        if slot is None:
            slot = buffer.claim_slot()
        return slot is not None

    buffer.client.wait_for(claimed, config.timeout, "waiting for a free slot")
    return slot


def _give_up(config: Config, save: SaveOperation, buffer: StagingBuffer, replaced: int) -> None:
    """The first rank has taken back the save of that number; here it may be being written, and is so in vain."""
    for other in filter(None, buffer.saves):
        if other.request.save_id != replaced or other.is_written:
            continue
        if not other.copied.wait(config.timeout):
            raise SaveTimeoutError(
                f"the copy of what is to be replaced has taken {config.timeout:g} s so far",
                path=other.request.path,
                rank=other.request.rank,
                step=other.request.step,
            )
        buffer.client.cancel(other, _replaced(other, save), config.timeout)


def _decide(config: Config, save: SaveOperation, buffer: StagingBuffer) -> tuple[bool, int | None]:
    """First rank: whether to skip ``save``, and which one it replaces."""
    # Until a save has ended, some rank may not have a free slot yet.
    under_way = [other for other in buffer.saves if other is not None and not other.has_ended]
    if len(under_way) < len(buffer.saves):
        # Unless all but those under way are being read: then another is free soon.
        return config.when_busy == "skip" and buffer.claim_slot() is None, None
    if config.when_busy == "skip":
        return True, None
    for other in sorted(under_way, key=lambda other: -other.request.save_id):
        if other.is_written or not other.copied.is_set():
            continue  # its slot is free as it is, or is being copied into
        if buffer.client.cancel(other, _replaced(other, save), config.timeout):
            return False, other.request.save_id
    if len(under_way) > 1 and not save.group.alone:
        # Written here, but not yet everywhere. The oldest is spared, or slow ranks would never finish any.
        newest = max(under_way, key=lambda other: other.request.save_id)
        save.group.report_failure(newest.request.save_id, _replaced(newest, save), begun=True)
        return False, newest.request.save_id
    return False, None


def _replaced(other: TrackedSave, save: SaveOperation) -> SaveDroppedError:
    return SaveDroppedError(
        f"replaced by the newer save of step {save.step} before it was written",
        path=other.request.path,
        rank=other.request.rank,
        step=other.request.step,
    )
