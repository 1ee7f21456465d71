"""Copies under way: what overlaps with the training, for whoever is about to take the memory of tensors away."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import torch

from asyncckpt.errors import SaveTimeoutError
from asyncckpt.threads import Flag

_copies: weakref.WeakValueDictionary[int, Flag] = weakref.WeakValueDictionary()


def note_copy(copied: Flag) -> None:
    """A copy begins, on a thread of its own, that reads tensors until ``copied`` is set."""
    _copies[id(copied)] = copied


def held_memory(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``tensors`` as they are now, whatever becomes of them: ``parameter.data = ...`` gives one other memory.

    That is done to parameters, by ``Module.to`` for one; ``state_dict()`` has tensors of its own in their place.
    """
    if set(map(type, tensors)) <= {torch.Tensor}:  # 20 ns each, and detaching them is 500
        return tensors
    return [tensor if type(tensor) is torch.Tensor else tensor.detach() for tensor in tensors]


def wait_for_copies(timeout: float) -> None:
    """Return when no copy reads any tensor. Raises ``SaveTimeoutError`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    for copied in [known() for known in _copies.valuerefs()]:
        if copied is not None and not copied.wait(max(0.0, deadline - time.monotonic())):
            raise SaveTimeoutError(f"tensors are still being copied after {timeout:g} s")
