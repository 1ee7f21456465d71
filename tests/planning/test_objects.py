"""Test values other than tensors: they are pickled with spare room, and refused if they cannot be unpickled."""

from __future__ import annotations

import collections
import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.states import stock_load
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import asyncckpt
from asyncckpt import Checkpointer
from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.layout import Place
from asyncckpt.planning.objects import Raw, StoredObjects
from asyncckpt.planning.structure import StructureChanged


class Mean:
    """An object that computes from a tensor while it is unpickled."""

    def __init__(self, total: torch.Tensor, count: int) -> None:
        self.total, self.count, self.mean = total, count, total / count

    def __getstate__(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["total"], state["count"])  # type: ignore[misc]


class Table:
    """An object that a function rebuilds from a tensor."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __reduce__(self) -> tuple[Any, ...]:
        return _table, (torch.tensor(self.counts),)


def _table(counts: torch.Tensor) -> Table:
    return Table(counts.tolist())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


_BITS = torch.arange(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        pytest.param(Mean(torch.arange(1000.0), 4), lambda its: its.mean.tolist(), id="computes when unpickled"),
        pytest.param(Table(list(range(500))), lambda its: its.counts, id="rebuilt by a function"),
        pytest.param(_generator(), lambda its: its.get_state().tolist(), id="generator"),
        pytest.param(
            torch.utils.data.RandomSampler(range(10), generator=_generator()),
            lambda its: its.generator.get_state().tolist(),
            id="sampler",
        ),
        *(
            pytest.param((_BITS.view(getattr(torch, name)), 1), lambda its: _bytes(its[0]), id=name)
            for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex32")
        ),
        pytest.param(
            collections.deque([torch.ones(4).to(torch.float8_e4m3fn)]), lambda its: _bytes(its[0]), id="deque of fp8"
        ),
    ],
)
def test_a_tensor_in_an_object(root: Path, value: Any, read: Callable[[Any], Any]) -> None:
    wanted = read(value)
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            path = checkpointer.save(step, {"value": value, "w": torch.ones(2)}).result(60)
        into: dict[str, Any] = {"value": None, "w": torch.zeros(2)}
        checkpointer.load(into, weights_only=False)
    assert read(into["value"]) == wanted
    into = {"value": None, "w": torch.zeros(2)}
    stock_load(into, path)
    assert read(into["value"]) == wanted


def test_a_warning_of_values_that_a_load_refuses_says_whose_they_are(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"rng": _generator(), "w": torch.ones(2)}
    with Checkpointer(root) as checkpointer:
        checkpointer.prepare(state)
        path = checkpointer.save(1, state | {"more": 1}).result(60)
    said = [record.getMessage() for record in caplog.records if "could run code" in record.getMessage()]
    begins = [f"1 values of {whose} are of kinds" for whose in ("the prepared state", path)]
    assert len(said) == 2 and all(each.startswith(begin) for each, begin in zip(said, begins, strict=True))
    assert all("'rng'" in each for each in said)


class Lost:
    """An object that pickles, but does not unpickle."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Lost, ()


def test_what_does_not_unpickle_is_refused_at_its_first_save(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        with pytest.raises(UnsavableStateError, match=r"'a\.lost', a Lost, .* TypeError"):
            checkpointer.save(1, {"a": {"lost": Lost(1)}, "w": torch.ones(2)})
        checkpointer.save(2, {"a": {"lost": None}, "w": torch.ones(2)}).result(60)
        with pytest.raises(UnsavableStateError, match=r"'a\.lost', a Lost, .* TypeError"):
            checkpointer.save(3, {"a": {"lost": Lost(1)}, "w": torch.ones(2)})
        assert checkpointer.steps() == [2]


class Planner(DefaultSavePlanner):
    """A planner that plans like DCP's, and pickles objects itself."""


def test_what_a_planner_pickled_and_does_not_unpickle_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {"lost": Lost(1)}, "w": torch.ones(2)}
    with pytest.raises(UnsavableStateError, match=r"'a\.lost' pickles, but could not be loaded again: TypeError"):
        asyncckpt.save(state, checkpoint_id=tmp_path / "1", planner=Planner())
    assert not (tmp_path / "1").exists()
    state["a"]["lost"] = Mean(torch.ones(3), 2)
    asyncckpt.save(state, checkpoint_id=tmp_path / "2", planner=Planner())
    stock_load(into := {"a": {"lost": None}, "w": torch.zeros(2)}, tmp_path / "2")
    assert torch.equal(into["a"]["lost"].mean, torch.ones(3) / 2)  # type: ignore[index]


@pytest.mark.parametrize("of_planner", [False, True])
def test_an_archive_fits_whatever_room_there_is_for_it(of_planner: bool) -> None:
    """Torch and Python read the archive. Zeros before its directory fill the room."""
    tensor = torch.arange(1000.0)
    torch.save((tensor, 1), buffer := io.BytesIO())
    value: Any = Raw(buffer.getvalue()) if of_planner else (tensor, 1)
    objects = StoredObjects(["value"], [value])
    for nbytes in (objects.reserved[0], len(buffer.getvalue()), len(buffer.getvalue()) + 1, 1 << 20):
        objects = StoredObjects(["value"], [value], [nbytes])
        image = memoryview(bytearray(nbytes))
        objects.write(0, image, [Place(0, nbytes, 0, nbytes)])
        found, number = torch.load(io.BytesIO(image))
        assert torch.equal(found, tensor) and number == 1
        assert zipfile.ZipFile(io.BytesIO(image)).testzip() is None
    with pytest.raises(StructureChanged):
        StoredObjects(["value"], [value], [len(buffer.getvalue()) - 1])


def test_an_object_with_tensors_may_shrink_and_grow(root: Path) -> None:
    """The plan stays while the object fits in the reserved room."""
    with Checkpointer(root) as checkpointer:
        for step, count in enumerate((100_000, 110_000, 10, 120_000)):
            checkpointer.save(step, {"value": (torch.arange(count), "x")}).result(60)
            checkpointer.load(into := {"value": None})
            assert torch.equal(into["value"][0], torch.arange(count))  # type: ignore[index]


class Lazy(Mapping[str, Any]):
    """A mapping that makes a value at each access."""

    def __init__(self, makers: dict[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, key: str) -> Any:
        return self._makers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def test_a_mapping_that_makes_its_values_is_saved(root: Path) -> None:
    now = 0.0
    inner = Lazy({"w": lambda: torch.full((3,), now), "names": lambda: ["a", "b"], "at": lambda: int(now)})
    state = {"model": Lazy({"inner": lambda: inner, "b": lambda: torch.full((2,), -now)}), "step": 1}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            now = float(step)
            checkpointer.save(step, state).result(60)
            into: dict[str, Any] = {
                "model": {"inner": {"w": torch.zeros(3), "names": [], "at": 0}, "b": torch.zeros(2)},
                "step": 0,
            }
            checkpointer.load(into)
            model = into["model"]
            assert model["inner"]["w"].tolist() == [now] * 3 and model["b"].tolist() == [-now] * 2
            assert model["inner"]["names"] == ["a", "b"] and model["inner"]["at"] == step
