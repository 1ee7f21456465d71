"""Weights for readers: the newest of a training, in shared memory, for the rollout workers of its host and of others.

``WeightPublisher`` and ``WeightSubscriber`` are for one host, ``broadcast_weights`` reaches others.
"""

from __future__ import annotations

from asyncckpt.publication import Publication
from asyncckpt.weights.broadcast.broadcast import broadcast_weights, close_broadcasts, receive_weights
from asyncckpt.weights.broadcast.sender import Broadcast
from asyncckpt.weights.folders import WeightFolders
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.weights.weights import Weights

__all__ = [
    "Broadcast",
    "Publication",
    "WeightFolders",
    "WeightPublisher",
    "WeightSubscriber",
    "Weights",
    "broadcast_weights",
    "close_broadcasts",
    "receive_weights",
]
