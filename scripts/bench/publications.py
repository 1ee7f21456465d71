"""Measure how long weights take to publish to readers on the same host, and to acquire there."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncckpt import Checkpointer, Config
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from bench.contestants import told
from bench.limits import Limits
from bench.states import GIB, Request, make, tensors_of
from bench.turns import Pace, take

SHARED_MEMORY = "/dev/shm"
LIMIT_S = 60.0

Named = dict[str, torch.Tensor]


class Way(ABC):
    """A way to publish weights."""

    def __init__(self, weights: Named, folder: str) -> None:
        self.weights = weights
        self.folder = folder
        self.version = 0

    def turn(self) -> float:
        """Publish the next version, and return the seconds."""
        self.version += 1
        begun = time.perf_counter()
        self.publish()
        return time.perf_counter() - begun

    @abstractmethod
    def publish(self) -> None: ...

    def close(self) -> None:
        """Release all resources. Does nothing by default."""
        return


class Ours(Way):
    def __init__(self, weights: Named, folder: str) -> None:
        super().__init__(weights, folder)
        self._publisher = WeightPublisher(type(self).__name__)
        self._publisher.prepare(weights)

    def publish(self) -> None:
        if self._publisher.publish(self.given(), self.version).skipped:
            raise RuntimeError("it was skipped")

    def given(self) -> Any:
        return self.weights

    def close(self) -> None:
        self._publisher.close()


class OursOneByOne(Ours):
    def given(self) -> Any:
        return iter(self.weights.items())


class OursStaged(Way):
    """Publication of a save that is just staged. The time of the save does not count."""

    def __init__(self, weights: Named, folder: str) -> None:
        super().__init__(weights, folder)
        self._checkpointer = Checkpointer(f"{folder}/staged", Config(keep_last=1))

    def turn(self) -> float:
        self.version += 1
        save = self._checkpointer.save(self.version, self.weights)
        begun = time.perf_counter()
        publication = self._checkpointer.publish(save)
        elapsed = time.perf_counter() - begun
        if publication.skipped:
            raise RuntimeError("it was skipped")
        save.result(LIMIT_S)
        return elapsed

    def publish(self) -> None:
        """Do nothing. This class overrides ``turn``."""

    def close(self) -> None:
        self._checkpointer.close()


class SharedCopies(Way):
    """Copies into one shared tensor for each weight, created once. There are no versions, and a reader may see half."""

    def __init__(self, weights: Named, folder: str) -> None:
        super().__init__(weights, folder)
        self._shared = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        for tensor in self._shared.values():
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def publish(self) -> None:
        for name, tensor in self.weights.items():
            self._shared[name].copy_(tensor)


class FreshCopies(Way):
    """A clone into new memory each time, as in verl's engine for MoonshotAI's, which then copies again and pins."""

    def publish(self) -> None:
        self._copies = {name: tensor.clone() for name, tensor in self.weights.items()}


class File(Way):
    """A safetensors file in memory. Readers load the file again for each version."""

    def __init__(self, weights: Named, folder: str) -> None:
        super().__init__(weights, folder)
        import safetensors.torch

        self.library = safetensors
        self.path = f"{SHARED_MEMORY}/asyncckpt-bench-{os.getpid()}.safetensors"

    def publish(self) -> None:
        self.library.torch.save_file(self.weights, f"{self.path}.new")
        Path(f"{self.path}.new").rename(self.path)

    def close(self) -> None:
        Path(self.path).unlink(missing_ok=True)


FILE = "a safetensors file in /dev/shm"
WAYS: dict[str, type[Way]] = {
    "asyncckpt": Ours,
    "asyncckpt, from a generator": OursOneByOne,
    "asyncckpt, of a save just staged": OursStaged,
    "copy_ into shared tensors": SharedCopies,
    "clone of each": FreshCopies,
    FILE: File,
}
ACQUIRE, ACQUIRE_FIRST, OPEN = "acquire: asyncckpt", "acquire: asyncckpt, a new subscriber", "acquire: that file"


def _acquire(subscriber: WeightSubscriber, tensors: int) -> float:
    begun = time.perf_counter()
    with subscriber.acquire() as weights:
        taken = list(weights.values())
        elapsed = time.perf_counter() - begun
        if len(taken) != tensors:
            raise RuntimeError("some are missing")
    return elapsed


def _acquire_first(tensors: int) -> float:
    begun = time.perf_counter()
    with WeightSubscriber(Ours.__name__) as subscriber:
        _acquire(subscriber, tensors)
        return time.perf_counter() - begun


def _open(file: File, tensors: int) -> float:
    begun = time.perf_counter()
    with file.library.safe_open(file.path, "pt") as opened:
        taken = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118 - it is no mapping
        elapsed = time.perf_counter() - begun
        if len(taken) != tensors:
            raise RuntimeError("some are missing")
    return elapsed


def measure(request: Request, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure all ways in turns, next to copies of the bytes."""
    made = make(request)
    weights = {f"layer.{number}.weight": tensor for number, tensor in enumerate(tensors_of(made.state))}
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = f"{folder}/runtime"
    ways: dict[str, Way] = {}
    left_out: dict[str, str] = {}
    try:
        for name, way in WAYS.items():
            try:
                ways[name] = way(weights, folder)
            except Exception as error:
                left_out[name] = told(error)
        with Limits(made.nbytes, folder, request.device) as limits, WeightSubscriber(Ours.__name__) as subscriber:
            turns: dict[str, Callable[[], float]] = dict(limits.of_copies())
            turns |= {name: way.turn for name, way in ways.items()}
            published = take(turns, pace, f"publish {request.label}")
            file = ways.get(FILE)
            turns = {
                ACQUIRE: partial(_acquire, subscriber, len(weights)),
                ACQUIRE_FIRST: partial(_acquire_first, len(weights)),
            }
            if isinstance(file, File):
                turns[OPEN] = partial(_open, file, len(weights))
            acquired = take(turns, pace, f"acquire {request.label}")
    finally:
        for each in ways.values():
            each.close()
        os.environ.pop(FOLDER_VARIABLE)
        if before is not None:
            os.environ[FOLDER_VARIABLE] = before
    found = published.found | acquired.found
    return {
        "title": f"{made.description}, {made.nbytes / GIB:.3g} GiB",
        "state": made.facts(),
        "limits": {name: seconds[1:] for name, seconds in published.found.items() if name not in ways},
        "results": {
            name: {"elapsed_s": found[name][1:], "first_s": found[name][0]}
            for name in (*WAYS, ACQUIRE, ACQUIRE_FIRST, OPEN)
            if name in found
        },
        "left_out": left_out | published.left_out | acquired.left_out,
    }
