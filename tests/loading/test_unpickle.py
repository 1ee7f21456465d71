"""A checkpoint cannot run code, and strangers get no access."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import pickle
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.checkpoints import Manifest, checksum, verify
from support.states import pickle_enums_as_early_3_11, same, small_state, zeros_like
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import asyncckpt
from asyncckpt import Checkpointer, cli
from asyncckpt.errors import UntrustedValueError
from asyncckpt.extension import MANIFEST_NAME, METADATA_NAME, Engine, load
from asyncckpt.loading import load as reader

METADATA = "torch.distributed.checkpoint.metadata"


class Attack:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def _forge_metadata(folder: Path, data: bytes) -> None:
    """Replace the metadata and correct all checksums, like an attacker with write access."""
    (folder / METADATA_NAME).write_bytes(data)
    name = folder / MANIFEST_NAME
    manifest = Manifest.parse(name.read_bytes(), str(name))
    files = {**manifest.files, METADATA_NAME: {"bytes": len(data), "xxh3": f"{checksum(data):016x}"}}
    name.write_bytes(dataclasses.replace(manifest, files=files).encode())


@pytest.fixture
def by_dcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load through DCP, which unpickles ``.metadata``."""
    monkeypatch.setattr(reader, "draft", lambda *_: None)


def test_metadata_is_left_alone_where_it_is_not_needed(tmp_path: Path) -> None:
    folder, proof = tmp_path / "a", tmp_path / "proof"
    with Engine() as engine:
        engine.save(folder, state := small_state()).result(60)
    _forge_metadata(folder, pickle.dumps(Attack(proof)))
    load(into := zeros_like(state), str(folder))
    assert same(into, state) and not proof.exists()


def test_metadata_runs_nothing(tmp_path: Path, by_dcp: None) -> None:
    folder, proof = tmp_path / "a", tmp_path / "proof"
    with Engine() as engine:
        engine.save(folder, state := small_state()).result(60)
    _forge_metadata(folder, pickle.dumps(Attack(proof)))
    assert not verify(str(folder)).damages
    assert cli.main(["ls", str(folder)]) == 0 and cli.main(["inspect", str(folder)]) == 0
    with pytest.raises(UntrustedValueError, match=r"metadata.*mkdir"):
        load(zeros_like(state), str(folder))
    assert not proof.exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "torch.serialization.load", "builtins.eval", "torch.load", f"{METADATA}.dataclass", f"{METADATA}.os"],
)
def test_nor_by_names_that_sound_harmless(tmp_path: Path, by_dcp: None, name: str) -> None:
    folder = tmp_path / "a"
    with Engine() as engine:
        engine.save(folder, state := small_state()).result(60)
    module, _, attribute = name.rpartition(".")
    _forge_metadata(folder, f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(UntrustedValueError, match=name):
        load(zeros_like(state), str(folder))
    # A dotted name would lead out of a trusted module.
    _forge_metadata(folder, b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x06os.sys\x93.")
    with pytest.raises(UntrustedValueError):
        load(zeros_like(state), str(folder))


@pytest.mark.parametrize("end", [b".", b"\xff"], ids=["whole", "and ends in garbage"])
def test_nor_does_it_change_classes(tmp_path: Path, by_dcp: None, end: bytes) -> None:
    """The BUILD opcode, which sets an object's state, is applied to a class. A dataclass could then run text."""
    folder = tmp_path / "a"
    with Engine() as engine:
        engine.save(folder, state := small_state()).result(60)
    forged = (
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x14BytesStorageMetadata\x93"
        b"(N}\x8c\x04evil\x8c\x04textstb" + end
    )
    _forge_metadata(folder, forged)
    with pytest.raises(UntrustedValueError, match="changes the classes"):
        load(zeros_like(state), str(folder))
    assert not hasattr(BytesStorageMetadata, "evil")


def test_a_value_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with Engine() as engine:
        engine.save(tmp_path / "a", {"innocent": Attack(proof)}).result(60)
    proof.rmdir()  # a save unpickles its own values again
    with pytest.raises(UntrustedValueError, match="'innocent'"):
        load({"innocent": None}, str(tmp_path / "a"))
    assert not proof.exists()
    load({"innocent": None}, str(tmp_path / "a"), weights_only=False)
    assert proof.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_stock_dcp_wrote_runs_nothing_either(tmp_path: Path) -> None:
    folder, proof = tmp_path / "a", tmp_path / "proof"
    state_dict_saver.save(state := small_state(), checkpoint_id=folder)
    load(into := zeros_like(state), str(folder))
    assert same(into, state)
    state_dict_saver.save({"innocent": Attack(proof)}, checkpoint_id=tmp_path / "b")
    with pytest.raises(UntrustedValueError, match="'innocent'"):
        load({"innocent": None}, str(tmp_path / "b"))
    (folder / METADATA_NAME).write_bytes(pickle.dumps(Attack(proof)))
    with pytest.raises(UntrustedValueError, match="mkdir"):
        load(into, str(folder))
    assert not proof.exists()


def test_what_the_caller_allows_stays_allowed(tmp_path: Path) -> None:
    asyncckpt.save({"known": range(3)}, checkpoint_id=tmp_path / "a")
    with torch.serialization.safe_globals([range]):
        load(into := {"known": None}, str(tmp_path / "a"))
        assert range in torch.serialization.get_safe_globals() and slice not in torch.serialization.get_safe_globals()
    assert into["known"] == range(3)


def test_loads_on_two_threads_allow_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One load begins and ends while the other load is about to unpickle."""
    asyncckpt.save({"known": range(3)}, checkpoint_id=(path := str(tmp_path / "a")))
    before, unpickle = torch.serialization.get_safe_globals(), torch.load
    into: list[dict[str, Any]] = [{"known": None}, {"known": None}]

    def first(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(torch, "load", unpickle)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(load, into[1], path).result(60)
        return unpickle(*args, **options)

    monkeypatch.setattr(torch, "load", first)
    load(into[0], path)
    assert into == [{"known": range(3)}] * 2 and set(torch.serialization.get_safe_globals()) == set(before)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("written", [asyncckpt.save, state_dict_saver.save])
def test_nor_does_a_value_for_a_planner_of_dcps(written: Callable[..., Any], tmp_path: Path) -> None:
    """DCP's planner unpickles each value, and is used for partial loads."""
    proof = tmp_path / "proof"
    written({"innocent": Attack(proof), "known": range(3), "w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    if proof.exists():
        proof.rmdir()  # our save unpickles its own values again
    into: dict[str, Any] = {"innocent": None, "known": None, "w": torch.zeros(2), "more": torch.zeros(2)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(UntrustedValueError, match="'innocent'"):
        load(into, str(tmp_path / "a"), planner=planner)
    assert not proof.exists()
    del into["innocent"]
    load(into, str(tmp_path / "a"), planner=planner)
    assert into["known"] == range(3) and torch.equal(into["w"], torch.ones(2))
    load({"innocent": None}, str(tmp_path / "a"), planner=planner, weights_only=False)
    assert proof.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("reader_of", [lambda folder: None, FileSystemReader])
def test_metadata_of_each_rank_runs_nothing(reader_of: Callable[[Path], Any], tmp_path: Path) -> None:
    """Newer torch looks for the metadata of each rank if the common metadata is missing."""
    folder, proof = tmp_path / "a", tmp_path / "proof"
    state_dict_saver.save({"w": torch.ones(2)}, checkpoint_id=folder)
    (folder / METADATA_NAME).rename(own := folder / "__0.metadata")
    whole = own.read_bytes()
    own.write_bytes(pickle.dumps(Attack(proof)))
    with pytest.raises(UntrustedValueError, match="weights_only=False"):
        asyncckpt.load({"w": torch.zeros(2)}, reader_of(folder), checkpoint_id=folder)
    assert not proof.exists()
    own.write_bytes(whole)
    if "use_collectives" in inspect.signature(state_dict_saver.save).parameters:
        asyncckpt.load(into := {"w": torch.zeros(2)}, reader_of(folder), checkpoint_id=folder, weights_only=False)
        assert torch.equal(into["w"], torch.ones(2))


@dataclasses.dataclass
class Harmless:
    number: int


def test_classes_that_are_allowed(tmp_path: Path) -> None:
    with Engine() as engine:
        engine.save(tmp_path / "a", {"mine": Harmless(3)}).result(60)
    with torch.serialization.safe_globals([Harmless]):
        load(into := {"mine": None}, str(tmp_path / "a"))
    assert into == {"mine": Harmless(3)}


def test_usual_states_are_harmless(root: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "others": (1, 2.5, "text", b"bytes", b"", None, True, [1, {"a": {2}}, 1j, range(3), slice(1, 2)]),
        "random": random.getstate(),
        "generator": numpy.random.default_rng(3).bit_generator.state,
    }
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state).result(60)
        into = zeros_like(state)
        checkpointer.load(into)
    assert same(into["model"], state["model"]) and into["generator"] == state["generator"]
    assert into["others"] == state["others"] and into["random"] == state["random"]


@pytest.mark.parametrize(
    "value",
    [1 << 2040, -(1 << 4000), [1, (2, 1 << 4000, "text")], {"a": 1 << 10_000}],
    ids=["positive", "negative", "in a list", "in a dict"],
)
def test_large_integers_are_harmless(root: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Torch's own unpickler refuses integers of more than 2,040 bits."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"value": value}).result(60)
        checkpointer.load(into := zeros_like({"value": value}))
    assert into == {"value": value} and "could run code" not in caplog.text


def test_but_not_beside_what_could_run_code(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with Engine() as engine:
        engine.save(tmp_path / "a", {"innocent": (1 << 4000, Attack(proof))}).result(60)
    proof.rmdir()  # a save unpickles its own values again
    with pytest.raises(UntrustedValueError, match="'innocent'"):
        load({"innocent": None}, str(tmp_path / "a"))
    assert not proof.exists()


def test_files_are_as_the_umask_says(root: Path) -> None:
    before = os.umask(0o077)
    try:
        with Checkpointer(root) as checkpointer:
            path = Path(checkpointer.save(1, small_state()).result(60))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in path.iterdir())


def test_metadata_of_an_early_torch_is_trusted(tmp_path: Path) -> None:
    state = {"a": torch.ones(2, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns if there is only one process
        state_dict_saver.save(state, checkpoint_id=tmp_path / "stock")
    metadata: Any = FileSystemReader(tmp_path / "stock").read_metadata()
    metadata.state_dict_metadata["a"].properties = sharded_metadata.TensorProperties(torch.float32)
    (tmp_path / "stock" / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    load(into := {"a": torch.zeros(2, 3)}, str(tmp_path / "stock"))
    assert same(into, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_metadata_of_python_3_11_2_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's plans with members of another enum are trusted too."""
    state = {"a": torch.ones(2, 3), "b": (1, 2)}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "stock")
    metadata: Any = FileSystemReader(tmp_path / "stock").read_metadata()
    pickle_enums_as_early_3_11(monkeypatch)
    item = WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO)
    metadata.all_local_plans = [SavePlan([item])]
    assert (data := pickle.dumps(metadata)).count(b"getattr") == 1
    (tmp_path / "stock" / METADATA_NAME).write_bytes(data)
    load(into := {"a": torch.zeros(2, 3), "b": None}, str(tmp_path / "stock"))
    assert same(into, state)


@pytest.mark.parametrize(
    "arguments",
    [
        f"c{METADATA}\n_MEM_FORMAT_ENCODING\nV__class__\n",  # no member
        f"c{METADATA}\n_MEM_FORMAT_ENCODING\nVmro\n",
        f"c{METADATA}\n_MEM_FORMAT_ENCODING\nI0\n",
        f"c{METADATA}\nMetadata\nV__init__\n",  # no enum
        "cbuiltins\ngetattr\nV__call__\n",
        "Vtext\nVformat\n",
    ],
)
def test_getattr_gives_members_of_enums_alone(tmp_path: Path, by_dcp: None, arguments: str) -> None:
    with Engine() as engine:
        engine.save(tmp_path / "a", state := small_state()).result(60)
    _forge_metadata(tmp_path / "a", f"cbuiltins\ngetattr\n({arguments}tR.".encode())
    with pytest.raises(UntrustedValueError, match=r"builtins\.getattr"):
        load(zeros_like(state), str(tmp_path / "a"))


class Mode(enum.Enum):
    TRAIN = "train"


def test_an_enum_of_python_3_11_2_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Engine() as engine:
        pickle_enums_as_early_3_11(patch)
        engine.save(tmp_path / "a", {"mode": [Mode.TRAIN], "w": torch.ones(2)}).result(60)
    into: dict[str, Any] = {"mode": None}
    with pytest.raises(UntrustedValueError, match="Mode"):
        load(into, str(tmp_path / "a"))
    with torch.serialization.safe_globals([Mode]):
        load(into, str(tmp_path / "a"))
    assert into == {"mode": [Mode.TRAIN]}
