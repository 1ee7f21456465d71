"""Weights for readers: a training's newest weights in shared memory, for rollout workers on this and other hosts."""

from __future__ import annotations

from asyncckpt.publication import Publication
from asyncckpt.weights.folders import WeightFolders
from asyncckpt.weights.patch import Change, apply
from asyncckpt.weights.publisher import WeightPublisher
from asyncckpt.weights.subscriber import WeightSubscriber
from asyncckpt.weights.weights import Weights

__all__ = [
    "Change",
    "Publication",
    "WeightFolders",
    "WeightPublisher",
    "WeightSubscriber",
    "Weights",
    "apply",
]
