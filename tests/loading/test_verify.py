"""``verify`` and ``load`` find a flipped or missing byte anywhere, and name the file and the tensor."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.checkpoints import Manifest, read_manifest, verify
from support.states import zeros_like

from asyncckpt import Checkpointer
from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError, MismatchError
from asyncckpt.extension import MANIFEST_NAME, Engine, StorageSource
from asyncckpt.format.index import SPAN_BYTES, Index, Item, spans
from asyncckpt.loading import load as reader


def _state() -> dict[str, Any]:
    tensors = {f"layer.{number}": torch.randn(37, number + 1) for number in range(30)}
    return {**tensors, "large": torch.randn(3 * SPAN_BYTES // 4), "lr": 0.1, "names": ["a", "b"]}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "checkpoint"
    with Engine() as engine:
        engine.save(folder, _state(), step=3).result(60)
    return folder


FILES = [".metadata", "__0_0.distcp", "__0_0.index.json", "asyncckpt.json"]


def _flip(path: Path, offset: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def test_a_good_one_is_good(good: Path) -> None:
    report = verify(str(good))
    assert report.damages == []
    assert report.nbytes == read_manifest(str(good)).nbytes == sum((good / name).stat().st_size for name in FILES[:3])


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_flipped_byte_is_found(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    size = (good / name).stat().st_size
    offset = data.draw(st.integers(0, size - 1))
    # Another digit at this place makes another format version.
    assume(name != MANIFEST_NAME or offset != (good / name).read_bytes().index(b"5"))
    mask = data.draw(st.integers(1, 255))
    _flip(good / name, offset, mask)
    try:
        damages = verify(str(good)).damages
        assert damages and any(name in (damage.path or "") for damage in damages)
        state = zeros_like(_state())
        if name != "__0_0.distcp":
            with pytest.raises(DamagedCheckpointError):
                reader.load(state, str(good))
        else:
            _flip(good / name, offset, mask)
            items = [item for index in StorageSource(str(good)).indexes() for item in index.items]
            _flip(good / name, offset, mask)
            hit = [item.name for item in items if item.at <= offset < item.at + item.nbytes]
            assert len(damages) == 1
            for item in hit:
                assert repr(item) in damages[0].message
            if hit:
                with pytest.raises(DamagedCheckpointError, match=hit[0]):
                    reader.load(state, str(good))
    finally:
        _flip(good / name, offset, mask)
    assert verify(str(good)).damages == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "shorter", "empty", "longer"])
def test_a_file_of_another_size_is_found(good: Path, tmp_path: Path, name: str, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    file = copy / name
    if damage == "missing":
        file.unlink()
    elif damage == "longer":
        file.write_bytes(file.read_bytes() + b"\0")
    else:
        file.write_bytes(file.read_bytes()[: -1 if damage == "shorter" else 0])
    damages = verify(str(copy)).damages
    assert damages
    state = zeros_like(_state())
    if (name, damage) == ("asyncckpt.json", "missing"):
        return  # without its manifest this is a plain DCP checkpoint, which loads
    with pytest.raises(CheckpointError) as caught:
        reader.load(state, str(copy))
    assert name in str(caught.value)


def test_swapped_files_are_found(good: Path, tmp_path: Path) -> None:
    with Engine() as engine:
        engine.save(tmp_path / "other", _state(), step=4).result(60)
    for name in FILES[1:3]:
        copy = tmp_path / f"copy of {name}"
        shutil.copytree(good, copy)
        shutil.copy(tmp_path / "other" / name, copy / name)
        assert verify(str(copy)).damages
        with pytest.raises(DamagedCheckpointError):
            reader.load(zeros_like(_state()), str(copy))


def test_without_verification_damage_loads(good: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    (item,) = [item for index in StorageSource(str(copy)).indexes() for item in index.items if item.name == "layer.3"]
    _flip(copy / "__0_0.distcp", item.payload_at, 1)
    reader.load(zeros_like(_state()), str(copy), verify=False)
    part = {"layer.4": torch.zeros(37, 5)}
    reader.load(part, str(copy))  # undamaged tensors load


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify(str(tmp_path / "none"))
    with pytest.raises(CheckpointNotFoundError):
        verify(str(tmp_path))


def test_spans_cover_everything_and_begin_at_items() -> None:
    random.seed(3)
    for _ in range(200):
        nbytes = random.randrange(0, 5 * SPAN_BYTES)
        starts = [0, *(random.randrange(nbytes + 1) for _ in range(random.randrange(6)))] if nbytes else []
        bounds = spans([start for start in starts if start < nbytes], nbytes)
        assert bounds[0] == 0 and bounds[-1] == nbytes
        assert all(0 < end - begin <= SPAN_BYTES for begin, end in zip(bounds[:-1], bounds[1:], strict=True))
        assert {start for start in starts if start < nbytes} <= set(bounds)


def test_manifest_and_index_read_what_they_wrote() -> None:
    manifest = Manifest(
        "attempt", None, 1.5, 1, False, 7, {"a/b": {"bytes": 7, "index": "__0_0.index.json"}}, {"write_s": [0.25]}
    )
    assert Manifest.parse(manifest.encode(), "path") == manifest
    items = [
        Item('na"me', "tensor", "float32", [2], [0], 0, 100, 50, 8),
        Item("o", "object", "", [], [], 128, 64, 128, 64),
    ]
    bounds = spans([0, 128], 4096)
    from array import array

    sums = array("Q", range(len(bounds) - 1))
    index = Index.parse(Index.head("data", items) + Index.tail(4096, sums), "path")
    assert index.items == items and list(index.checksums) == list(sums) and index.names_at(0, 4096) == ['na"me', "o"]


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "no manifest"])
def test_an_older_one_is_loaded_when_that_is_asked_for(root: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.arange(300_000.0), "step": 0}
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            state["step"] = step
            checkpointer.save(step, state).result(60)
    for step in (2, 3):
        data = root / f"step-{step:08d}" / "__0_0.distcp"
        if how == "flipped":
            _flip(data, data.stat().st_size // 2, 1)
        elif how == "cut":
            os.truncate(data, data.stat().st_size // 2)
        elif how == "gone":
            data.unlink()
        else:
            (data.parent / "asyncckpt.json").write_bytes(b"{}")
    with Checkpointer(root) as checkpointer:
        with pytest.raises(DamagedCheckpointError, match="step-00000003"):
            checkpointer.load(into := {"w": torch.zeros(300_000), "step": 0})
        assert checkpointer.load(into, fallback=True) == 1
        assert into["step"] == 1 and torch.equal(torch.as_tensor(into["w"]), torch.as_tensor(state["w"]))
        assert checkpointer.steps() == [1] and (root / "step-00000003.damaged-1").is_dir()
        assert "falling back to step 1" in caplog.text and "falling back to step 2" in caplog.text
        data = root / "step-00000001" / "__0_0.distcp"
        _flip(data, data.stat().st_size // 2, 1)
        with pytest.raises(DamagedCheckpointError, match="step-00000001"):
            checkpointer.load(into, fallback=True)
        with pytest.raises(MismatchError):  # an error of the caller, not of the checkpoint
            checkpointer.load({"v": torch.zeros(3)}, 1, fallback=True)


class _Copied:
    """A ``Stateful`` value. It returns copies, as a model with another sharding does, and counts the live copies."""

    def __init__(self) -> None:
        self.states = weakref.WeakSet[torch.Tensor]()
        self.alive: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        self.alive.append(len(self.states))
        state = torch.zeros(300_000)
        self.states.add(state)
        return {"w": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_failed_trial_keeps_no_state(root: Path) -> None:
    """Each state may be as large as the model. The collector of garbage may run late."""
    value = _Copied()
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"its": value}).result(60)
    for step in (2, 1):
        value.alive.clear()
        data = root / f"step-{step:08d}" / "__0_0.distcp"
        _flip(data, data.stat().st_size // 2, 1)
        gc.collect()
        gc.disable()
        try:
            with Checkpointer(root) as checkpointer:
                with contextlib.suppress(DamagedCheckpointError):
                    checkpointer.load({"its": value}, fallback=True)
                assert value.alive == [0] * step and not value.states
        finally:
            gc.enable()
