"""Weights for readers: the newest of a training, in shared memory, for the rollout workers of its host and of others.

    publisher = WeightPublisher("policy")                   # the trainer
    publisher.publish(model.state_dict(), version=step)     # one copy

    subscriber = WeightSubscriber("policy")                 # any process of the host
    with subscriber.acquire() as weights:                   # no copy
        engine.load_weights(weights.items())

Trainers that keep their parameters off the device have ``OffloadedParameters`` and ``sync_with_offload``.
"""

from __future__ import annotations

from asyncckpt.versions import Publication
from asyncckpt.weights.metrics import SyncMetrics
from asyncckpt.weights.offload import loaded, sync_with_offload
from asyncckpt.weights.parameters import OffloadedParameters
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.weights.weights import Weights

__all__ = [
    "OffloadedParameters",
    "Publication",
    "SyncMetrics",
    "WeightPublisher",
    "WeightSubscriber",
    "Weights",
    "loaded",
    "sync_with_offload",
]
