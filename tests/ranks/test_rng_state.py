"""``RngState``: a resumed rank draws the numbers that it would have drawn without the kill."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import accelerators
from support.ranks import QUICK, run

from asyncckpt import Checkpointer, RngState
from asyncckpt.errors import MismatchError

pytestmark = pytest.mark.usefixtures("forkserver")


def _draw() -> list[Any]:
    """Draw from each generator, twice from those that keep half of a normal pair."""
    return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.random(), torch.rand(3).tolist()]


class _Sampler:
    """A value that draws a number when it is loaded, as a ``DataLoader`` does that makes its iterator."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.rand(1)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _draw()


def _save(root: str) -> None:
    _seed(dist.get_rank())
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, {"rng": RngState(), "later": [RngState()], "sampler": _Sampler()}).result(30)


def _load(root: str) -> None:
    rank, seed = dist.get_rank(), 50 + dist.get_rank()
    _seed(rank if rank < 2 else seed)
    if rank >= 2:
        _Sampler().load_state_dict({})
    wanted = _draw()
    _seed(seed)
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.load({"rng": RngState(), "sampler": _Sampler()})
    assert _draw() == wanted


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_goes_on_with_its_own_numbers(ranks: int, tmp_path: Path) -> None:
    run(2, _save, str(tmp_path / "root"), folder=tmp_path)
    run(ranks, _load, str(tmp_path / "root"), folder=tmp_path)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_other_bit_generators_are_saved(kind: str, tmp_path: Path) -> None:
    of_numpy: Any = np.random
    before = of_numpy.get_bit_generator()
    try:
        of_numpy.set_bit_generator(getattr(np.random, kind)(3))
        np.random.random(3)
        with Checkpointer(tmp_path, QUICK) as checkpointer:
            checkpointer.save(1, {"rng": RngState()}).result(30)
            wanted = np.random.random(9).tolist()
            checkpointer.load({"rng": RngState()})
            assert np.random.random(9).tolist() == wanted
            of_numpy.set_bit_generator(before)
            with pytest.raises(MismatchError, match=rf"set_bit_generator\(np.random.{kind}\(\)\)"):
                checkpointer.load({"rng": RngState()})
    finally:
        of_numpy.set_bit_generator(before)


def _load_on_a_device(root: str) -> None:
    torch.ones(2, device=accelerators.load())
    before = accelerators.module().get_rng_state()
    _seed(0)
    wanted = _draw()
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.load({"rng": RngState()})
    assert _draw() == wanted and torch.equal(accelerators.module().get_rng_state(), before)


@pytest.mark.device
def test_a_checkpoint_without_a_device_is_loaded_on_one(tmp_path: Path) -> None:
    run(2, _save, str(tmp_path / "root"), folder=tmp_path)
    run(1, _load_on_a_device, str(tmp_path / "root"), folder=tmp_path)


def _save_and_load_on_a_device(root: str) -> None:
    torch.ones(2, device=accelerators.load())  # from here on the process uses the device
    before = accelerators.module().get_rng_state()
    with Checkpointer(root, QUICK) as checkpointer:
        checkpointer.save(1, {"rng": RngState()}).result(30)
        other = torch.zeros_like(before)  # CUDA takes this as the seed and the offset
        accelerators.module().set_rng_state(other)
        checkpointer.load({"rng": RngState()})
    assert torch.equal(accelerators.module().get_rng_state(), before) and not torch.equal(before, other)


@pytest.mark.device
def test_the_generator_of_the_device_is_saved(tmp_path: Path) -> None:
    run(1, _save_and_load_on_a_device, str(tmp_path / "root"), folder=tmp_path)
