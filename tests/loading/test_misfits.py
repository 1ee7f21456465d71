"""What cannot be loaded as it is asked for is refused by an error of ours, an ``Exception`` that names it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from asyncckpt.engine.engine import Engine
from asyncckpt.errors import CheckpointError, MismatchError
from asyncckpt.loading import load as reader


class Gone:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint ``ours``, and the same by DCP, ``stock``."""
    folder = tmp_path_factory.mktemp("misfits")
    state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3), "gone": Gone(), "step": 7}
    with Engine() as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.save(folder / "ours", state).result(60)
        state_dict_saver.save(state, checkpoint_id=folder / "stock")
    return folder


def _freed() -> torch.Tensor:
    tensor = torch.zeros(3, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


UNFIT: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "int": lambda: 3,
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "expanded": lambda: torch.zeros(3, 1).expand(3, 4),
    "sparse": lambda: torch.eye(3, 4).to_sparse(),
    "freed": _freed,
}


@pytest.mark.parametrize("written", ["ours", "stock"])
@pytest.mark.parametrize("case", UNFIT)
def test_what_a_tensor_cannot_be_loaded_into_is_named(case: str, written: str, folder: Path) -> None:
    rest = torch.zeros(3)
    with pytest.raises(MismatchError, match=r"'w'"):
        reader.load({"b": rest, "w": UNFIT[case]()}, str(folder / written))
    assert not rest.any()  # nothing was loaded


@pytest.mark.parametrize("written", ["ours", "stock"])
def test_a_value_that_fails_to_unpickle_is_named(written: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(globals(), "Gone")
    with pytest.raises(CheckpointError, match="'gone'.*AttributeError"):
        reader.load({"gone": None}, str(folder / written), weights_only=False)


class _Broken(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise ValueError("of the planner")


def test_what_a_planner_raises_is_an_exception_of_ours(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ValueError: of the planner.*ours") as raised:
        reader.load({"step": 0}, str(folder / "ours"), planner=_Broken())
    assert isinstance(raised.value.__cause__, CheckpointException)
    with pytest.raises(MismatchError, match="'w' cannot be filled"):
        reader.load({"w": UNFIT["expanded"]()}, str(folder / "ours"), planner=DefaultLoadPlanner())


def test_ctrl_c_is_still_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise CheckpointException("read", {0: _wrap_exception(KeyboardInterrupt())})

    monkeypatch.setattr(reader, "load_by_dcp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reader.load({"step": 0}, str(folder / "stock"))
