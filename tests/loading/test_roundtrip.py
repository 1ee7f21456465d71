"""All states that DCP can save are saved, and stock DCP reads them in a process that never imports asyncckpt."""

from __future__ import annotations

import atexit
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.states import same, zeros_like

from asyncckpt.config import Config
from asyncckpt.errors import UntrustedValueError
from asyncckpt.extension import Engine, load

pytestmark = pytest.mark.timeout(600)  # some tests load many checkpoints

STOCK = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
for line in sys.stdin:
    into, path, out = line.rstrip("\\n").split("\\t")
    try:
        state = torch.load(into, weights_only=False)
        dcp.load(state, checkpoint_id=path)
        torch.save(state, out)
        assert not [name for name in sys.modules if name.startswith("asyncckpt")]
        print("good", flush=True)
    except BaseException as error:
        print("bad", repr(error)[-600:].replace("\\n", " "), flush=True)
"""


class StockReader:
    """A process that imports torch, and not asyncckpt."""

    def __init__(self) -> None:
        self._start()
        atexit.register(self.close)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", STOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )

    def load(self, state: Any, path: Path) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, f"{folder}/into")
            answer = self._ask(f"{folder}/into\t{path}\t{folder}/out")
            assert answer == "good\n", answer
            return torch.load(f"{folder}/out", weights_only=False)

    def _ask(self, question: str) -> str:
        """Return the process's answer.

        After an interrupted wait the process is replaced, so that a late answer never belongs to the next question.
        """
        assert self._process.stdin and self._process.stdout
        answer = ""
        try:
            print(question, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        finally:
            if not answer:
                self.close()
                self._start()
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def stock() -> Iterator[StockReader]:
    reader = StockReader()
    yield reader
    reader.close()


def check(engine: Engine, stock: StockReader, state: dict[str, Any], folder: Path) -> None:
    expected = torch_copy(state)
    path = folder / "checkpoint"
    engine.save(path, state, existing="replace").result(60)
    assert same(stock.load(zeros_like(expected), path), expected)
    ours = zeros_like(expected)
    load(ours, str(path))
    assert same(ours, expected)


def torch_copy(state: Any) -> Any:
    """Copy a state deeply. Empty mappings are left out, because DCP does not store them."""
    if isinstance(state, dict):
        return {key: torch_copy(value) for key, value in state.items()}
    if isinstance(state, list):
        return [torch_copy(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


class Thing:
    def __init__(self, size: int) -> None:
        self.tensor = torch.arange(size)
        self.name = "thing"

    def __repr__(self) -> str:
        return f"{self.name} {self.tensor.tolist()}"


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32),
]


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bytes, because any byte value must survive."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        raw = tensor.reshape(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 2 if dtype == torch.bool else 255, raw.shape))
    return tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, stock: StockReader, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (5,), (3, 0, 2), (4, 7), (1, 1, 3), (70_000,)]
    with Engine() as engine:
        check(engine, stock, {str(shape): filled(dtype, shape) for shape in shapes}, tmp_path)


def test_every_form(stock: StockReader, tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    complexes = torch.randn(6, dtype=torch.complex64)
    large = torch.randn(300, 400)
    parameter = torch.nn.Parameter(torch.randn(50))
    with Engine() as engine:
        check(
            engine,
            stock,
            {
                "transposed": base.t(),
                "large transposed": large.t(),
                "sliced": base[::2, 3:9],
                "expanded": torch.randn(5, 1).expand(5, 8),
                "overlapping": torch.randn(20).as_strided((5, 6), (2, 1)),
                "channels last": image,
                "conjugated": complexes.conj(),
                "large conjugated": torch.randn(70_000, dtype=torch.complex64).conj(),
                "negative": complexes.conj().imag,
                "real": complexes.real,
                "parameter": parameter.detach(),
                "flipped": base.flip(0),
            },
            tmp_path,
        )


def test_tensors_without_plain_bytes(stock: StockReader, tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    state = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.randn(8), 0.1, 3, torch.qint8),
        "plain": dense,
    }
    with Engine() as engine:
        check(engine, stock, state, tmp_path)
        state["coo"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to_sparse()  # more bytes than before
        check(engine, stock, state, tmp_path)


def test_objects(stock: StockReader, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "int": 1 << 70,
        "nan": float("nan"),
        "minus zero": -0.0,
        "none": None,
        "true": True,
        "text": "grüße",
        "tuple": (0.9, 0.95, ("a", None)),
        "tensors in a tuple": (torch.ones(2), 3),
        "list": [1, 2, [3]],
        "set": {4},
        "dtype": torch.bfloat16,
        "nested": {"a": [{"b": {"c": 2}}, torch.ones(3)], "d": {}},
        "bytes": bytes(1000),
        "generator": torch.get_rng_state(),
    }
    with Engine() as engine:
        expected = torch_copy(state)
        path = tmp_path / "checkpoint"
        engine.save(path, state).result(60)
        for loaded in (stock.load(zeros_like(expected), path), ours(expected, path)):
            assert repr(loaded) == repr(expected)


def ours(expected: Any, path: Path) -> Any:
    state = zeros_like(expected)
    load(state, str(path))
    return state


def test_an_object_with_tensors_inside(tmp_path: Path) -> None:
    state: dict[str, Any] = {"thing": Thing(3)}
    with Engine() as engine:
        engine.save(tmp_path / "a", state).result(60)
        state["thing"].tensor.add_(1)
        engine.save(tmp_path / "b", state).result(60)
    for name, expected in (("a", "thing [0, 1, 2]"), ("b", "thing [1, 2, 3]")):
        into: dict[str, Any] = {"thing": None}
        with pytest.raises(UntrustedValueError, match=r"'thing' .* test_roundtrip.Thing"):
            load(into, str(tmp_path / name))
        load(into, str(tmp_path / name), weights_only=False)
        assert repr(into["thing"]) == expected


def test_tied_weights_are_stored_once(stock: StockReader, tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)
    state = {"embedding": weight, "head": weight, "other": torch.randn(3)}
    with Engine() as engine:
        check(engine, stock, state, tmp_path)
        assert (tmp_path / "checkpoint/__0_0.distcp").stat().st_size < 1.1 * weight.nbytes
        state["head"] = torch.randn(1000, 100)  # no longer tied
        check(engine, stock, state, tmp_path)


def test_an_empty_state(stock: StockReader, tmp_path: Path) -> None:
    with Engine() as engine:
        check(engine, stock, {}, tmp_path)
        check(engine, stock, {"empty": torch.empty(0)}, tmp_path)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = filled(draw(st.sampled_from(DTYPES)), shape)
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and tensor.shape[0] > 2 and draw(st.booleans()):
        tensor = tensor[1:]
    return tensor


leaves = st.one_of(tensors(), scalars, st.tuples(scalars, scalars), st.lists(scalars, min_size=1, max_size=3))
states = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
        ),
        max_leaves=8,
    ),
    max_size=5,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(Config(slots=1)) as engine:
        yield engine


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=states)
def test_any_state(engine: Engine, stock: StockReader, state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(engine, stock, state, Path(folder))
