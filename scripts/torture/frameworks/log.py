"""The log of a rank's training, in a file that survives a kill."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

_STEP_S = 0.1


class Log:
    """The log of one rank in one process. Each line is one write, so a kill leaves no partial line."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add_loss(self, step: int, loss: float) -> None:
        """Log the loss of a step, with all its bits, and sleep. Otherwise a save would take longer than many steps."""
        self._add(step=step, loss=loss.hex())
        time.sleep(_STEP_S)

    def add_prompts(self, **facts: Any) -> None:
        """Log which prompts a step was trained on, or which are left."""
        self._add(**facts)

    def add_end(self, state: Any) -> None:
        """Log the final state of the training."""
        self._add(end=digest(state))

    def add_error(self, error: BaseException) -> None:
        self._add(error=[each.__name__ for each in type(error).__mro__], text=str(error))

    def _add(self, **facts: Any) -> None:
        os.write(self._fd, json.dumps(facts).encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines logged so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(state: Any) -> str:
    """Return a digest of all values in a state, bit for bit."""
    found = hashlib.blake2b(digest_size=16)
    _add_to(found, state)
    return found.hexdigest()


def _add_to(found: Any, value: Any) -> None:
    if hasattr(value, "to_local"):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, numpy.ndarray):
        found.update(value.tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            found.update(f"{name}:".encode())
            _add_to(found, value[name])
    elif isinstance(value, (list, tuple)):
        for each in value:
            found.update(b",")
            _add_to(found, each)
    else:
        found.update(repr(value).encode())
