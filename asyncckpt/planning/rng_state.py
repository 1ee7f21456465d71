"""The states of a rank's random number generators, as one value of a state dict."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from asyncckpt.devices.kinds import used_module
from asyncckpt.errors import MismatchError
from asyncckpt.planning.per_rank import PerRank, RankOf, empty_values, rank_of

logger = logging.getLogger(__name__)


class RngState(PerRank):
    """The random number generators of Python, numpy, torch and the current device, on each rank.

        state = {"model": model, "optimizer": optimizer, "rng": asyncckpt.RngState()}

    A save reads the generators. A load sets them, after all other values are loaded, so that a resumed training draws
    the numbers that come next. If the job has another number of ranks than the job that saved, rank 3 gets the
    generators of the old rank 3. A rank with a number that the old job did not have keeps its generators as they are.

    The device's generator is saved and set if the process uses the device: put the model on the device before a load.
    The generator of numpy is the global one (``np.random.seed``). A ``np.random.Generator`` or ``torch.Generator`` of
    your own is a value of its own.
    """

    def __init__(self) -> None:
        """Make the value. It reads no generator yet."""
        super().__init__(None)
        self._is_own = True  # whether the loaded value is of a rank with the number of this rank

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the generators to the loaded states. A load calls this.

        Raises:
            MismatchError: numpy's global generator is of another kind than the saved one.
        """
        (self.value,) = state_dict.values()
        if self._is_own:
            _set(self.value)
            _set_device(self.value.get("device"))

    def after_load(self) -> None:
        """Set the generators again, because other values may have drawn numbers while they were loaded."""
        if self._is_own:
            _set(self.value)
            if why_not := _set_device(self.value.get("device")):
                logger.warning("the random number generator of the device is not set: %s", why_not)

    def _state(self) -> dict[str, Any]:
        return _read()

    def _chosen(self, name: str, metadata: Metadata, stored: Mapping[RankOf, list[str]]) -> dict[str, Any]:
        rank, ranks = rank_of()
        of = ranks if (rank, ranks) in stored else max(of for _, of in stored)
        self._is_own = (rank, of) in stored
        source = (rank, of) if self._is_own else min(stored)
        return empty_values(metadata, {source: stored[source]})


def _read() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    states = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": _as_tensors(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if (device := used_module()) is not None:
        states["device"] = device.get_rng_state()
    return states


def _set(states: dict[str, Any]) -> None:
    """Set the generators, except the device's. Raises ``MismatchError``."""
    python, of_numpy = states["python"], _as_arrays(states["numpy"])
    stored, present = of_numpy["bit_generator"], np.random.get_state(legacy=False)["bit_generator"]
    if stored != present:
        raise MismatchError(
            f"numpy's global random number generator was a {stored} when it was saved, and is a {present}: call"
            f" np.random.set_bit_generator(np.random.{stored}()) before the load"
        )
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(of_numpy)
    torch.set_rng_state(states["torch"])


def _set_device(stored: torch.Tensor | None) -> str:
    """Set the device's generator. Return the reason if that is impossible, otherwise an empty text."""
    if (device := used_module()) is None:
        return "" if stored is None else "this process uses no device yet; put the model on the device before a load"
    if stored is None:
        return "the checkpoint was saved without a device"
    if stored.shape != device.get_rng_state().shape:
        return "the checkpoint was saved on another kind of device"
    device.set_rng_state(stored)
    return ""


def _as_tensors(value: Any) -> Any:
    """Return a state of numpy with tensors in the place of arrays, which a load without code accepts."""
    if isinstance(value, dict):
        return {key: _as_tensors(each) for key, each in value.items()}
    return torch.from_numpy(value.view(f"i{value.itemsize}")) if isinstance(value, np.ndarray) else value


def _as_arrays(value: Any) -> Any:
    """Return what ``_as_tensors`` got. The arrays of numpy's generators are unsigned."""
    if isinstance(value, dict):
        return {key: _as_arrays(each) for key, each in value.items()}
    return value.numpy().view(f"u{value.itemsize}") if isinstance(value, torch.Tensor) else value
