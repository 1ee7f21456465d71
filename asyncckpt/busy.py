"""What a save does when all slots are busy (``Config.when_busy``): the first rank decides it for all."""

from __future__ import annotations

from asyncckpt.config import Config
from asyncckpt.errors import SaveDroppedError, SaveTimeoutError
from asyncckpt.group import Group
from asyncckpt.handle import Save
from asyncckpt.home import Home
from asyncckpt.worker.client import Pending


def take_slot(config: Config, group: Group, number: int, home: Home, save: Save) -> int | None:
    """A slot of ``home`` to stage ``save``, the one of that ``number``, in. None: it was dropped.

    Raises ``SaveTimeoutError``, ``WorkerDiedError``.
    """
    client = home.client
    if config.when_busy != "wait":
        skip, victim = group.follow_first("busy", number, lambda: _decide(config, group, home, save))
        if skip:
            dropped = "skipped: all slots were being written"
            save._resolve(SaveDroppedError(dropped, path=save.path, rank=group.rank, step=save.step))
            save._reported = True
            return None
        if victim is not None and group.rank > 0:
            # On the first rank it is taken back already; here it may be being written, and is so in vain.
            for pending in filter(None, home.pending):
                if pending.order.save_id == victim and not pending.slot_free:
                    if not pending.copied.wait(config.timeout):
                        raise SaveTimeoutError(
                            f"the copy of what is to be replaced has taken {config.timeout:g} s so far",
                            path=pending.order.path,
                            rank=pending.order.rank,
                            step=pending.order.step,
                        )
                    client.cancel(pending, _replaced(pending, save), config.timeout)
    slot: int | None = None

    def claimed() -> bool:
        nonlocal slot
        if slot is None:
            slot = home.claim_slot()
        return slot is not None

    client.wait_for(claimed, config.timeout, "waiting for a free slot")
    return slot


def _decide(config: Config, group: Group, home: Home, save: Save) -> tuple[bool, int | None]:
    """First rank: whether to skip ``save``, and which one it replaces."""
    # Until a save has ended, some rank may not have a free slot yet.
    busy = [pending for pending in home.pending if pending is not None and not pending.future.done()]
    if len(busy) < len(home.pending):
        # Unless all but those under way are being read: then another is free soon.
        return config.when_busy == "skip" and home.claim_slot() is None, None
    if config.when_busy == "skip":
        return True, None
    for pending in sorted(busy, key=lambda pending: -pending.order.save_id):
        if pending.slot_free or not pending.copied.is_set():
            continue  # its slot is free as it is, or is being copied into
        if home.client.cancel(pending, _replaced(pending, save), config.timeout):
            return False, pending.order.save_id
    if len(busy) > 1 and not group.alone:
        # Written here, but not yet everywhere. The oldest is spared, or slow ranks would never finish any.
        newest = max(busy, key=lambda pending: pending.order.save_id)
        group.fail(newest.order.save_id, _replaced(newest, save), begun=True)
        return False, newest.order.save_id
    return False, None


def _replaced(pending: Pending, save: Save) -> SaveDroppedError:
    return SaveDroppedError(
        f"replaced by the newer save of step {save.step} before it was written",
        path=pending.order.path,
        rank=pending.order.rank,
        step=pending.order.step,
    )
