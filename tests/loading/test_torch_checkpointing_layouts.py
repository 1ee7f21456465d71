"""Load checkpoints of torch_checkpointing in other formats and from object stores, and weights of Hugging Face."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import struct
import sys
import threading
import tracemalloc
import zipfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.forked_ranks import on_ranks
from support.object_stores import s3_root, s3_server
from support.peers import TORCH_CHECKPOINTING, needs_torch_checkpointing, python
from support.shared_files import flip
from support.states import same

import asyncckpt
from asyncckpt import cli
from asyncckpt.engine import shared as engines
from asyncckpt.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatError,
    MismatchError,
    StorageError,
    UntrustedValueError,
)
from asyncckpt.exporting.export import export
from asyncckpt.loading.data_file import fill
from asyncckpt.loading.rank_files import RankFiles
from asyncckpt.storage.objects import Objects, objects_at, split_address

__all__ = ["s3_root", "s3_server"]

TESTS = Path(__file__).parents[1]
RANKS = (1, 2, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of both managers, ``<ranks>-<ours>``, and the whole states."""
    folder = tmp_path_factory.mktemp("saved")
    _run("save_all", folder, TORCH_CHECKPOINTING)
    return folder


def _run(scenario: str, folder: Path, *peers: str) -> None:
    """Run a function of this file in a process of its own."""
    path = [str(TESTS), *(str(TESTS / each) for each in ("integrations", "loading"))]
    code = f"import sys; sys.path[:0] = {path}; import {Path(__file__).stem} as here; here.{scenario}()"
    python(code, *peers, arguments=(str(folder),))


# The functions down to ``save_all`` run in a process that can import torch_checkpointing.


def state() -> dict[str, Any]:
    """Return items for all formats, with plain and sharded tensors, and the same numbers on all ranks."""
    from test_torch_checkpointing import state as items
    from test_torch_checkpointing_folders import strided

    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = items(3)["model"]
    grid = {"strided": strided()} if ranks == 4 else {}
    weights = {**model, **grid, "flat.name": torch.arange(6.0), "deep": {"blocks": [torch.ones(2), torch.eye(3)]}}
    columns = torch.arange(2.0 * 4 * ranks).view(2, 4 * ranks)
    own = torch.cat([columns[:, 2 * rank :][:, :2], columns[:, 2 * (ranks + rank) :][:, :2]], 1)
    return {"weights": weights, "columns": {"c": own}, "config": {"width": [1, {"a": None}], "x": "y"}, "raw": b"\0\1"}


def specs() -> dict[str, Any]:
    from torch_checkpointing import ItemSpec
    from torch_checkpointing import checkpoint_layout as layouts
    from torch_checkpointing.default_metadata import DefaultShardingMetadata
    from torch_checkpointing.default_resharder import DefaultResharder

    class Columns(DefaultResharder):
        """Each rank has two of the parts of a tensor, side by side."""

        def extract_sharding_metadata(self, item_key: str, item_value: Any) -> Any:
            ranks, rank = dist.get_world_size(), dist.get_rank()
            offsets, begins = ((0, 2 * rank), (0, 2 * (ranks + rank))), ((0, 0), (0, 2))
            return {("c",): DefaultShardingMetadata((2, 4 * ranks), offsets, begins, ((2, 2),) * 2, "torch.float32")}

    class Nothing(DefaultResharder):
        """Metadata for an item without tensors, so that ``metadata.pkl`` names its files."""

        def extract_sharding_metadata(self, item_key: str, item_value: Any) -> Any:
            return {("none",): DefaultShardingMetadata((1,), (), (), (), "torch.float32")}

    def spec(name: str, form: Any, resharder: Any) -> Any:
        return ItemSpec(layout=layouts.LayoutInfo(name, form), resharder=resharder)

    tensors = layouts.SafetensorsSerialization({"by": "x"})
    return {
        "weights": spec("own/weights-{rank}.safetensors", tensors, DefaultResharder()),
        "columns": spec("columns-{rank}.safetensors", tensors, Columns()),
        "config": spec("config-{rank}.json", layouts.JsonSerialization(), Nothing()),
        "raw": spec("raw-{rank}.bin", layouts.RawSerialization(), Nothing()),
    }


def save_all() -> None:
    from test_torch_checkpointing import manager, whole

    folder = Path(sys.argv[1])

    def save(ranks: int) -> None:
        found = state()
        for ours in (True, False):
            saver = manager(ours=ours, items=specs())
            saver.save(str(folder / f"{ranks}-{ours}"), found).result(60)
            saver.close()
        known = whole(found)
        if dist.get_rank() == 0:
            blocks = known["weights"]["deep"]["blocks"]
            known["weights"]["deep"] = {"blocks": {str(number): each for number, each in enumerate(blocks)}}
            known["columns"]["c"] = torch.arange(8.0 * ranks).view(2, 4 * ranks)
            torch.save(known, folder / f"{ranks}.pt")
        dist.barrier()
        engines.shared.close()

    for ranks in RANKS:
        on_ranks(ranks, save, ranks, folder=folder)


# The functions and tests below run without torch_checkpointing.


def empty(value: Any) -> Any:
    """Return a state of the same structure with other values."""
    if isinstance(value, dict):
        return {key: empty(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "nothing"


def in_order(value: Any) -> Any:
    """Return a state with its keys in order."""
    return {key: in_order(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


def load(path: Path | str, into: dict[str, Any], **options: Any) -> dict[str, Any]:
    asyncckpt.load(into, checkpoint_id=str(path), **options)
    return into


@needs_torch_checkpointing
@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_format(saved: Path, ranks: int, ours: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, expected = saved / f"{ranks}-{ours}", torch.load(saved / f"{ranks}.pt", weights_only=False)
    assert any(path.glob("own/weights-0.safetensors"))
    asked = empty(expected)
    asked["config"]["width"] = [0, {"a": 0}]  # DCP asks for the leaves of a list with a dict in it
    assert same(load(path, asked), expected)
    blocks = [each.clone() for each in empty(expected)["weights"]["deep"]["blocks"].values()]
    nested = load(path, {"weights": {"deep": {"blocks": blocks}}})["weights"]["deep"]["blocks"]
    assert same(dict(enumerate(nested)), dict(enumerate(expected["weights"]["deep"]["blocks"].values())))
    export(path, tmp_path / "all.pt", to="torch")
    assert same(in_order(torch.load(tmp_path / "all.pt")), in_order(expected))
    assert cli.main(["verify", str(path)]) == 0
    assert ours or f"the structure of {4 * ranks} files without checksums" in capsys.readouterr().out
    assert not any(name.startswith("torch_checkpointing") for name in sys.modules)


@needs_torch_checkpointing
@pytest.mark.usefixtures("forkserver")
def test_other_ranks_load_into_other_placements(saved: Path) -> None:
    (saved / "hf").mkdir()
    save_file({"a.w": torch.arange(15.0).view(5, 3)}, saved / "hf/model.safetensors")
    _run("load_on_two_ranks", saved)


def load_on_two_ranks() -> None:
    folder = Path(sys.argv[1])

    def load_each() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        known = torch.load(folder / "4.pt", weights_only=False)["weights"]
        saved = {name: known[name] for name in ("grid", "uneven", "strided")}
        for item, path, expected in (
            ("weights", folder / "4-True", saved),
            ("weights", folder / "4-False", saved),
            ("model", folder / "hf", {"a.w": torch.arange(15.0).view(5, 3)}),
        ):
            for dim in (0, 1):
                empties = {name: torch.zeros_like(each) for name, each in expected.items()}
                into = {name: distribute_tensor(each, mesh, [Shard(dim)]) for name, each in empties.items()}
                load(path, {item: into})
                assert all(same(into[name].full_tensor(), each) for name, each in expected.items())

    on_ranks(2, load_each, folder=folder)


def write_metadata(folder: Path, items: dict[str, Any] | None = None, ranks: int = 1) -> None:
    """Write ``metadata.pkl``. ``items``: metadata of items."""
    metadata = {"version": "2.0", "metadata": items or {}, "world_size": ranks}
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def layout(path: str, kind: str = "SafetensorsSerialization") -> dict[str, Any]:
    return {"file_path": path, "serialization_format": {"type": kind}}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return a folder with the weights of Hugging Face, in one file."""
    (folder := tmp_path / "weights").mkdir()
    save_file({"a.w": torch.arange(6.0).view(2, 3), "b": torch.ones(4).bfloat16()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def in_two_files(folder: Path) -> None:
    save_file({"a.w": torch.arange(6.0).view(2, 3)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(4).bfloat16()}, folder / "model-2.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {"a.w": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("files", [1, 2])
def test_weights_of_hugging_face(weights: Path, files: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if files == 2:
        in_two_files(weights)
    expected = {"a.w": torch.arange(6.0).view(2, 3), "b": torch.ones(4).bfloat16()}
    assert same(load(weights, {"model": empty(expected)}), {"model": expected})
    assert same(load(weights, {"model": {"a": {"w": torch.zeros(2, 3)}}})["model"]["a"]["w"], expected["a.w"])
    export(weights, tmp_path / "out", to="dcp")
    assert same(load(tmp_path / "out", {"model": empty(expected)}), {"model": expected})
    export(weights, tmp_path / "out.pt", to="torch")
    assert same(torch.load(tmp_path / "out.pt"), {"model": expected})
    assert (
        cli.main(["inspect", str(weights)]) == cli.main(["ls", str(weights)]) == cli.main(["verify", str(weights)]) == 0
    )
    shown = capsys.readouterr().out
    assert "a checkpoint of Hugging Face, without checksums" in shown and "model.a.w" in shown
    assert f"the structure of {files} file" in shown and "(huggingface): good" in shown


def test_damaged_weights_of_hugging_face(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_two_files(weights)
    index = weights / "model.safetensors.index.json"
    known, into = json.loads(index.read_text())["weight_map"], {"model": {"b": torch.zeros(4).bfloat16()}}
    for change, error, match in (
        ({"c": "model-1.safetensors"}, DamagedCheckpointError, "no file has the tensor 'model.c'"),
        ({"c": "model-3.safetensors"}, DamagedCheckpointError, "is missing"),
        ({"c": "../model.safetensors"}, DamagedCheckpointError, "another folder"),
        ({"c": 5}, DamagedCheckpointError, "index"),
    ):
        index.write_text(json.dumps({"weight_map": known | change}))
        with pytest.raises(error, match=match):
            load(weights, into)
    save_file({"a.w": torch.ones(1)}, weights / "model-3.safetensors")
    index.write_text(json.dumps({"weight_map": {**known, "c": "model-3.safetensors"}}))
    with pytest.raises(MismatchError, match=r"two values have the name 'model\.a\.w'"):
        load(weights, into)
    (weights / "model-3.safetensors").write_bytes(b"")
    assert cli.main(["verify", str(weights)]) == 1
    assert "model-3.safetensors" in capsys.readouterr().out


def test_weights_beside_checkpoints(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints in the folder come first, and a folder of this library stays what it is."""
    with asyncckpt.Checkpointer(weights) as checkpointer:
        checkpointer.save(3, {"w": torch.ones(2)}).result(60)
    assert cli.main(["ls", str(weights)]) == 0
    assert "step-00000003" in (shown := capsys.readouterr().out) and "huggingface" not in shown
    step = weights / "step-00000003"
    (weights / "model.safetensors").rename(step / "model.safetensors")
    assert same(load(step, {"w": torch.zeros(2)}), {"w": torch.ones(2)})
    (step / "asyncckpt.json").unlink()
    with pytest.raises((DamagedCheckpointError, CheckpointNotFoundError)):
        load(step, {"model": {"b": torch.zeros(4).bfloat16()}})


def header(fields: Any, data: int = 24, length: int | None = None) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def field(begin: Any, end: Any, shape: Any = (2, 3), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        header({"a.w": field(0, 24)}, length=1 << 60),
        header({"a.w": field(0, 24)}, length=200),
        header(b"no JSON"),
        header(b"[" * 100_000),
        header([1]),
        header({"a.w": field(0, 24)}, data=23),
        header({"a.w": field(0, 24)}, data=25),
        header({"a.w": field(0, 20)}),
        header({"a.w": field(-24, 0)}),
        header({"a.w": field(4, 28)}, data=28),
        header({"a.w": field(0, 24), "b": field(0, 24)}),
        header({"a.w": field(0, 24), "b": field(20, 44)}, data=44),
        header({"a.w": field(0, 24, [2, -3])}),
        header({"a.w": field(0, 24, [-2, -3])}),
        header({"a.w": field(0, 24, [2.0, 3.0])}),
        header({"a.w": {"dtype": "F32"}}),
    ],
)
def test_a_header_that_lies(weights: Path, content: bytes) -> None:
    (weights / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as raised:
        load(weights, {"model": {"a.w": torch.zeros(2, 3)}})
    assert raised.value.path == str(weights / "model.safetensors")


def test_a_type_that_torch_does_not_have(weights: Path) -> None:
    (weights / "model.safetensors").write_bytes(header({"a.w": field(0, 24, dtype="F4")}))
    with pytest.raises(FormatError, match="F4"):
        load(weights, {"model": {"a.w": torch.zeros(2, 3)}})


def dtensor(shape: list[int], ranks: list[int], *placements: dict[str, Any]) -> dict[str, Any]:
    mesh = {"mesh_shape": (len(ranks),), "mesh_data": tuple(ranks)}
    return {
        "type": "DTensorShardingMetadata",
        "data": {"global_shape": shape, "mesh_spec": mesh, "placements": placements},
    }


def boxes(shape: list[int], offsets: list[int], begins: list[int], lengths: list[int]) -> dict[str, Any]:
    its = {"global_offsets": [offsets], "local_offsets": [begins], "local_sizes": [lengths]}
    return {"type": "default_tensor_v1", "data": {"global_shape": shape, **its}}


@pytest.mark.parametrize(
    "sharding, error",
    [
        (dtensor([4, 3], [0, 1], {"type": "Shard", "dim": 0}), "parts of 'item.a.w' are missing"),
        (dtensor([5, 3], [0, 1], {"type": "Shard", "dim": 0}), "a part of a DTensor has the shape"),
        (dtensor([2, 3], [1, 2], {"type": "Shard", "dim": 0}), "not in"),
        (dtensor([3, 3], [0], {"type": "Replicate"}), "a part of a DTensor has the shape"),
        (dtensor([4, 3], [0, 1], {"type": "Partial"}), "KeyError"),
        ({"type": "other", "data": {"global_shape": [2, 3]}}, "not known"),
        (boxes([2, 3], [0, 0], [1, 0], [2, 3]), "outside"),
        (boxes([2, 3], [1, 0], [0, 0], [2, 3]), "outside"),
    ],
)  # fmt: skip
def test_sharding_that_does_not_fit(weights: Path, sharding: dict[str, Any], error: str) -> None:
    paths = {'["a", "w"]': [{"sharding_metadata": sharding, "ranks": (0,)}]}
    items = {"item": {"nested_path_to_metadata": paths, "rank_to_layout_info": {0: layout("model.safetensors")}}}
    write_metadata(weights, items)
    torch.save(1, weights / "step_0.pt")
    with pytest.raises((DamagedCheckpointError, FormatError), match=error):
        load(weights, {"item": {"a": {"w": torch.zeros(2, 3)}}})


def test_files_of_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of more ranks are left over from another checkpoint. The file of each owner has to be there."""
    for rank, value in ((0, 5), (7, {"stale": 1})):
        torch.save(value, tmp_path / f"step_{rank}.pt")
    write_metadata(tmp_path, ranks=2)
    assert load(tmp_path, {"step": 0}) == {"step": 5}
    assert list(RankFiles(str(tmp_path)).files) == ["step_0.pt"]
    owned = {'["w"]': [{"sharding_metadata": {}, "ranks": (0, 1)}]}
    write_metadata(tmp_path, {"step": {"nested_path_to_metadata": owned, "rank_to_layout_info": {0: None}}}, ranks=2)
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert f"{tmp_path / 'step_1.pt'}: a file of this checkpoint is missing" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [dict, list])
def test_a_pickle_that_grows_without_limit(tmp_path: Path, kind: type) -> None:
    value: Any = 1
    for _ in range(64):
        value = {"a": value, "b": value} if kind is dict else [value, value]
    torch.save(value, tmp_path / "bomb_0.pt")
    write_metadata(tmp_path)
    with pytest.raises(DamagedCheckpointError, match="with shared ones") as raised:
        load(tmp_path, {"bomb": 0})
    assert raised.value.path == str(tmp_path / "bomb_0.pt")
    shared = {"a": [1, 2]}
    torch.save([shared, shared], tmp_path / "bomb_0.pt")
    assert load(tmp_path, {"bomb": [{"a": 0}, {"a": 0}]}) == {"bomb": [shared, shared]}


def test_a_class_of_torch_that_the_user_trusts(tmp_path: Path) -> None:
    data, weight = torch.utils.data.TensorDataset(torch.arange(3)), torch.nn.Parameter(torch.ones(2), False)
    torch.save({"data": data, "tuple": (weight,)}, tmp_path / "extra_0.pt")
    write_metadata(tmp_path)
    with pytest.raises(UntrustedValueError, match="TensorDataset"):
        load(tmp_path, {"extra": {"data": 0}})
    with torch.serialization.safe_globals([torch.utils.data.TensorDataset]):
        found = load(tmp_path, {"extra": {"data": 0, "tuple": 0}})["extra"]
    assert type(found["data"]) is torch.utils.data.TensorDataset and same(found["data"].tensors, data.tensors)
    assert type(found["tuple"][0]) is torch.nn.Parameter and not found["tuple"][0].requires_grad


def test_tensors_are_read_when_they_are_needed(tmp_path: Path) -> None:
    """A damaged tensor that is not contiguous fails only the load that asks for it, and takes no memory before."""
    turned = {"x": torch.arange(12.0).view(3, 4).t(), "y": torch.ones(1 << 22).view(2048, 2048).t(), "z": torch.ones(2)}
    torch.save(turned, tmp_path / "model_0.pt")
    write_metadata(tmp_path)
    content = (tmp_path / "model_0.pt").read_bytes()
    at = content.index(torch.tensor([7.0, 8.0]).numpy().tobytes())
    (tmp_path / "model_0.pt").write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert same(load(tmp_path, {"model": {"z": torch.zeros(2)}})["model"]["z"], turned["z"])
    assert same(load(tmp_path, {"model": {"y": torch.zeros(2048, 2048)}})["model"]["y"], turned["y"])
    with pytest.raises(DamagedCheckpointError, match="another CRC"):
        load(tmp_path, {"model": {"x": torch.zeros(4, 3)}})


def put_all(folder: Path, root: str) -> None:
    """Copy the files of a folder to an object store."""
    for file in folder.iterdir():
        objects_at(root).put(f"{split_address(root)[1]}/{file.name}", file.read_bytes())


def count_reads(patch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """Return the number of reads from object stores from now on, and of their bytes, by file."""
    requests, nbytes = Counter[str](), Counter[str]()
    lock, real = threading.Lock(), Objects._ask

    def counted(objects: Objects, doing: str, key: str, ask: Any) -> Any:
        found, name = real(objects, doing, key, ask), key.rpartition("/")[2]
        with lock:
            if doing == "reading" and found is not None:
                requests[name] += 1
                nbytes[name] += len(found if isinstance(found, memoryview) else found[0])
        return found

    patch.setattr(Objects, "_ask", counted)
    return requests, nbytes


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_object_store_is_read_in_ranges(
    s3_root: str, tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"layers.{number}.w": torch.randn(256, 256) for number in range(10)}
    for rank in range(ranks):
        torch.save(state, tmp_path / f"model_{rank}.pt")
    save_file(state, tmp_path / "weights.safetensors")
    one = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: layout("weights.safetensors")}}
    write_metadata(tmp_path, {"weights": one}, ranks)
    put_all(tmp_path, s3_root)
    with monkeypatch.context() as patch:
        requests, nbytes = count_reads(patch)
        files = RankFiles(s3_root).read()
    assert requests == {"metadata.pkl": 1, "weights.safetensors": 1, **{f"model_{rank}.pt": 2 for rank in range(ranks)}}
    assert sum(nbytes.values()) < (2 * ranks + 1) * (68 << 10) + 10_000  # and 2.6 MB a file are stored
    assert sorted(files.data_files()) == ["model_0.pt", "weights.safetensors"]
    export(s3_root, tmp_path / "out.pt", to="torch")
    assert same(torch.load(tmp_path / "out.pt"), {"model": state, "weights": state})
    assert cli.main(["verify", s3_root]) == 0


class Unseekable(io.RawIOBase):
    """A file that can only be written in order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


def write_as_stream(value: Any, path: Path, *, gap: int, is_64: bool) -> None:
    """Write an archive that ``torch.load`` reads, as another program may do.

    ``gap``: bytes between records, which begin at a multiple of 64 then. ``is_64``: use 64-bit fields.
    """
    torch.save(value, buffer := io.BytesIO())
    with (
        path.open("wb") as file,
        zipfile.ZipFile(buffer) as known,
        zipfile.ZipFile(Unseekable(file), "w") as archive,
    ):
        for record in known.infolist():
            info = zipfile.ZipInfo(record.filename.replace("archive", "\xe4rchive"))
            padding = -(file.tell() + 34 + len(info.filename.encode())) % 64 if gap else 0
            info.extra = struct.pack("<2H", int.from_bytes(b"FB", "little"), padding) + bytes(padding) if gap else b""
            with archive.open(info, "w", force_zip64=is_64) as to:
                to.write(known.read(record))
            archive.fp.write(bytes(gap))  # type: ignore[union-attr]
            archive.start_dir += gap


def test_places_that_are_computed_are_those_in_the_headers(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of storages follow from the directory of an archive of torch, or from the header of the record."""
    state = {f"w{number}": torch.randn(16 + number) for number in range(64)}
    torch.save(state, tmp_path / "model_0.pt")
    asyncckpt.torch_save(state, tmp_path / "ours_0.pt").result(60)
    write_as_stream(state, tmp_path / "large_0.pt", gap=0, is_64=True)
    write_as_stream(state, tmp_path / "gaps_0.pt", gap=64, is_64=False)
    write_metadata(tmp_path)
    items = ("model", "ours", "large", "gaps")
    assert all(same(torch.load(tmp_path / f"{item}_0.pt"), state) for item in items)
    assert same(load(tmp_path, {item: empty(state) for item in items}), dict.fromkeys(items, state))
    put_all(tmp_path, s3_root)
    with monkeypatch.context() as patch:
        requests, _ = count_reads(patch)
        assert RankFiles(s3_root).read()._places == RankFiles(str(tmp_path)).read()._places
    assert max(requests["model_0.pt"], requests["ours_0.pt"]) <= 2


def test_a_large_tensor_that_is_not_contiguous(tmp_path: Path) -> None:
    turned = torch.arange(3 << 20).view(1024, -1).t()
    torch.save({"x": turned, "y": torch.zeros(0, 3).t(), "z": turned[:8, 1:]}, tmp_path / "model_0.pt")
    write_metadata(tmp_path)
    export(tmp_path, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt")["model"]
    assert same(found["x"], turned) and same(found["z"], turned[:8, 1:]) and found["y"].shape == (3, 0)
    with closing((files := RankFiles(str(tmp_path)).read()).open("(made contiguous)")) as file:
        fill(data := memoryview(bytearray(5000)), file, 9 << 20)
    assert bytes(data) == turned.contiguous().view(torch.uint8).flatten()[9 << 20 :][:5000].numpy().tobytes()
    with closing(files.open("(made contiguous)")) as file:
        torch.save({"x": turned + 1}, tmp_path / "model_0.pt")
        with pytest.raises(StorageError, match="changed or replaced"):
            fill(data, file)


@needs_torch_checkpointing
@pytest.mark.usefixtures("forkserver")
def test_a_damaged_shard_of_our_manager(saved: Path, tmp_path: Path) -> None:
    """A shard of columns is not contiguous in its file."""
    path = Path(shutil.copytree(saved / "2-True", tmp_path / "copy"))
    flip(path / "columns-0.safetensors", (path / "columns-0.safetensors").stat().st_size - 3)
    with pytest.raises(DamagedCheckpointError) as raised:
        load(path, {"columns": {"c": torch.zeros(2, 8)}})
    assert raised.value.path == str(path / "columns-0.safetensors")


@needs_torch_checkpointing
@pytest.mark.usefixtures("forkserver")
def test_a_rank_outside_of_the_mesh(tmp_path: Path) -> None:
    _run("save_outside_of_a_mesh", tmp_path)
    write_metadata(tmp_path, ranks=2)
    assert same(load(tmp_path, {"model": {"w": torch.zeros(4, 2)}})["model"]["w"], torch.arange(8.0).view(4, 2))


def save_outside_of_a_mesh() -> None:
    folder = Path(sys.argv[1])

    def save() -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh("cpu", [0])
        sharded = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        torch.save({"w": sharded}, folder / f"model_{dist.get_rank()}.pt")

    on_ranks(2, save, folder=folder)


class Changeable:
    seen: ClassVar[set[tuple[str, bool, str]]] = set()

    def __setstate__(self, state: Any) -> None:
        self.seen.add((threading.current_thread().name, torch.is_grad_enabled(), str(torch.empty(1).device)))


def write_archive(path: Path, pickled: bytes, byteorder: str | bytes = sys.byteorder, method: int = 0) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", byteorder, method)


def test_a_pickle_changes_no_class(tmp_path: Path) -> None:
    """A pickle sets an attribute of a class that the user allows, or of the function that stands for ``set``."""
    write_metadata(tmp_path)
    path, one = tmp_path / "model_0.pt", b"\x80\x02}X\x01\x00\x00\x00a%bs."
    for module, name in ((__name__, "Changeable"), ("builtins", "set"), ("_codecs", "encode")):
        state = b"N" + pickle.dumps({"__module__": "x", "__defaults__": ((1, 2),), "added": 5}, 2)[2:-1] + b"\x86b"
        write_archive(path, one % (f"c{module}\n{name}\n".encode() + state))
        with torch.serialization.safe_globals([Changeable]), pytest.raises(DamagedCheckpointError, match="changes"):
            load(tmp_path, {"model": {"a": 0}})
    assert not hasattr(Changeable, "added") and Changeable.__module__ == __name__
    write_archive(path, one % b"cbuiltins\nset\n)R")
    assert load(tmp_path, {"model": {"a": 0}}) == {"model": {"a": set()}}


def test_code_that_is_trusted_runs_on_the_thread_of_the_caller(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    (value := Changeable()).x = 5  # type: ignore[attr-defined]
    torch.save({"a": value}, tmp_path / "model_0.pt")
    with torch.no_grad(), torch.device("meta"):
        load(tmp_path, {"model": {"a": 0}}, weights_only=False)
    assert Changeable.seen == {("MainThread", False, "meta")}


def test_memory(tmp_path: Path) -> None:
    """Few files are in memory at once, a record is not larger than the directory says, and views are small."""
    layouts = {rank: layout(f"raw-{rank}.bin", "RawSerialization") for rank in range(16)}
    for rank in layouts:
        (tmp_path / f"raw-{rank}.bin").write_bytes(bytes(8 << 20))
    write_metadata(tmp_path, {"raw": {"nested_path_to_metadata": {}, "rank_to_layout_info": layouts}}, 16)
    torch.save(list(range(100_000)), tmp_path / "list_0.pt")  # takes longer than the raw files
    whole = torch.arange(1 << 20)
    torch.save({"views": tuple(whole[at : at + 1] for at in range(8))}, tmp_path / "tuple_0.pt")
    tracemalloc.start()
    try:
        files = RankFiles(str(tmp_path)).read()
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
        assert len(files._memory) < 10 << 20
        views = load(tmp_path, {"tuple": {"views": 0}})["tuple"]["views"]
        assert same(views, tuple(whole[at : at + 1] for at in range(8)))
        write_archive(tmp_path / "bomb_0.pt", b"N.", bytes(200 << 20), zipfile.ZIP_DEFLATED)
        tracemalloc.reset_peak()
        with pytest.raises(DamagedCheckpointError, match="compressed"):
            RankFiles(str(tmp_path)).read()
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def one_item(sharding: dict[str, Any], *ranks: int) -> dict[str, Any]:
    """Return the metadata of an item "item" in one file, with a tensor "w" that ``ranks`` own."""
    paths = {'["w"]': [{"sharding_metadata": sharding, "ranks": ranks}]}
    return {"item": {"nested_path_to_metadata": paths, "rank_to_layout_info": {0: layout("item_0.safetensors")}}}


def test_shards_that_do_not_form_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "item_0.safetensors")
    torch.save({"w": torch.zeros(4)}, tmp_path / "item_0.pt")  # left over from an earlier save
    sharding = boxes([4], [0], [0], [4])
    write_metadata(tmp_path, one_item(sharding, 0))
    assert same(load(tmp_path, {"item": {"w": torch.zeros(4)}})["item"]["w"], torch.ones(4))
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert "checked: the structure of 1 file without checksums, and" in capsys.readouterr().out
    write_metadata(tmp_path, one_item(sharding, 1))
    with pytest.raises(DamagedCheckpointError, match="names no shard of 'w' for the rank 0"):
        load(tmp_path, {"item": {}})
    for name, pair in (("global_offsets", [[0], [1]]), ("local_offsets", [[0], [0]]), ("local_sizes", [[2], [2]])):
        sharding["data"][name] = pair
    write_metadata(tmp_path, one_item(sharding, 0))
    with pytest.raises(DamagedCheckpointError, match="or their parts overlap"):
        load(tmp_path, {"item": {"w": torch.zeros(4)}})
    assert cli.main(["verify", str(tmp_path)]) == 1
    items = one_item(boxes([4], [0], [0], [4]), 0)
    items["other"] = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: layout("item_0.safetensors")}}
    write_metadata(tmp_path, items)
    with pytest.raises(DamagedCheckpointError, match="the file of two items, 'item' and 'other'"):
        load(tmp_path, {"item": {"w": torch.zeros(4)}})


def test_metadata_of_the_user_and_weights(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with the name of the metadata makes no checkpoint of torch_checkpointing. Steps come first."""
    (weights / "metadata.pkl").write_bytes(pickle.dumps({"labels": [1, 2]}))
    assert same(load(weights, {"model": {"b": torch.zeros(4).bfloat16()}})["model"]["b"], torch.ones(4).bfloat16())
    (weights / "sub").mkdir()
    assert cli.main(["ls", str(weights), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["bytes"] == (weights / "model.safetensors").stat().st_size
    asyncckpt.save({"w": torch.ones(2)}, checkpoint_id=str(weights / "own"))
    for steps in (0, 1):
        if steps:
            torch.save(1, weights / "step_0.pt")
            (weights / "own").rename(weights / "step-00000003")
        with pytest.raises(CheckpointNotFoundError, match="name one"):
            load(weights, {"model": {"b": torch.zeros(4).bfloat16()}})
        assert cli.main(["verify", str(weights)]) == cli.main(["inspect", str(weights)]) == 0
        export(weights / ("step-00000003" if steps else "own"), weights.parent / f"out-{steps}")
    export(weights, weights.parent / "out-root")


def test_an_index_of_no_weights_and_names_that_are_alike(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_two_files(weights)
    save_file({"a.w": torch.ones(2), "b": torch.ones(2)}, weights / "model-1.safetensors")
    weight_map = {"a.w": "./model-1.safetensors", "b": "model-1.safetensors"}
    (index := weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(load(weights, {"model": {"b": torch.zeros(2)}})["model"]["b"], torch.ones(2))
    index.write_text(json.dumps({"weight_map": {}}))
    assert cli.main(["verify", str(weights)]) == 1
    assert "names no tensor" in (shown := capsys.readouterr().out) and "  checked:" not in shown
