"""Endpoints: all that this process has of a channel, which it takes to broadcast again and again."""

from __future__ import annotations

import torch.distributed as dist

from asyncckpt.weights.broadcast.channel import Channel
from asyncckpt.weights.broadcast.receiver import Receiver
from asyncckpt.weights.broadcast.sender import Sender


class BroadcastEndpoints:
    """The ``sender`` for the source, the ``receiver`` for any other rank; the rank decides which is used.

    ``broadcast_weights`` keeps those of a group. Ranks that are no group of ``torch.distributed``, in which each may be
    in a job of its own, make theirs of a ``Channel`` over a store that they have in common; they gather no shards.
    """

    def __init__(self, channel: Channel, group: dist.ProcessGroup | None = None) -> None:
        self.channel = channel
        self.sender = Sender(channel, group)
        self.receiver = Receiver(channel, group)

    def close(self) -> None:
        """Drop the connections, and give the buffers back."""
        for each in (self.channel, self.sender, self.receiver):
            each.close()
