"""The group of the sender and the workers to which it broadcasts the weights; it is none of ``torch.distributed``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore

from asyncckpt.errors import RankFailedError
from asyncckpt.integrations.verl.topology import Role
from asyncckpt.weights.broadcast.buckets import Named
from asyncckpt.weights.broadcast.channel import Channel
from asyncckpt.weights.broadcast.membership import Membership
from asyncckpt.weights.broadcast.receiver import Receiver
from asyncckpt.weights.broadcast.sender import Sender

# Seconds that the members of a group, who are all prepared, may take to join it.
_JOIN_S = 60.0


def group_store() -> Any:
    """On the sender: the store by which groups meet, as torch has it, until it is garbage."""
    timeout = timedelta(seconds=_JOIN_S)
    return distributed.TCPStore(  # type: ignore[attr-defined]
        "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout
    )


class BroadcastGroup:
    """A worker's membership in the group that ``role`` names."""

    def __init__(self, role: Role, worker: str, store: Any, timeout: float) -> None:
        """Join the group, as all members do at the same time. Raises ``RankFailedError`` if they cannot be reached.

        Args:
            role: Names the members and the store.
            worker: This one's name.
            store: On the sender its own store, else None.
            timeout: Seconds that a member may wait for another.
        """
        self.members, rendezvous = role.members, role.rendezvous
        try:
            store = store or distributed.TCPStore(  # type: ignore[attr-defined]
                rendezvous.address,
                role.group_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
            )
        except RuntimeError as error:
            raise RankFailedError(
                f"the trainer's store at {rendezvous.address}:{role.group_port} is out of reach"
            ) from error
        store = PrefixStore(f"asyncckpt/{rendezvous.token}/{self.members.group}", store)
        workers = self.members.workers
        membership = Membership(workers.index(worker), len(workers), store)
        joining_s = min(timeout, _JOIN_S)
        membership.wait_for_all(joining_s)
        self._channel = Channel(membership, 0, joining_s)
        self._channel.timeout = timeout
        self._sender, self._receiver = Sender(self._channel), Receiver(self._channel)
        self.send = self._sender.send
        """On the sender: broadcasts weights."""

    @property
    def usable(self) -> bool:
        """Whether it can still be used: no member is known to be gone."""
        return self._channel.usable

    async def receive(self) -> AsyncGenerator[list[Named], None]:
        """The weights that the sender broadcasts, in buckets. All members fail if this is closed early."""
        receipt = self._receiver.receive()
        asked: asyncio.Future[list[Named] | None] | None = None
        try:
            while True:
                asked = asyncio.ensure_future(asyncio.to_thread(next, receipt, None))
                if (bucket := await asyncio.shield(asked)) is None:
                    break
                yield bucket
        finally:
            if asked is not None:
                await asyncio.wait([asked])  # this may have been cancelled, and what runs in a thread cannot be closed
            receipt.close()

    def close(self) -> None:
        """Leave the group."""
        for end in (self._sender, self._receiver):
            end.close()
