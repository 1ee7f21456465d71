"""Files that are read by offsets, and are not what they seem: other byte orders, compressed records, conjugates."""

from __future__ import annotations

import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from asyncckpt.errors import DamagedCheckpointError, OutOfMemoryError, UnsavableStateError
from asyncckpt.exporting import copying, stock_source
from asyncckpt.exporting.export import export


def rewritten(path: Path, compression: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    """The archive with other contents of some ``records``, or compressed."""
    made = path.with_suffix(".other.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", compression) as new:
        for info in old.infolist():
            name = info.filename.rpartition("/")[2]
            new.writestr(info.filename, records.get("pickle" if name == "data.pkl" else name, old.read(info)))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(1000.0), "z": 1 + 2j}, tmp_path / "file.pt")
    return tmp_path / "file.pt"


def test_another_byte_order(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsavableStateError, match="bytes in big order"):
        export(rewritten(file, byteorder=b"big"), tmp_path / "out")


def test_compressed_records(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsavableStateError, match="compressed"):
        export(rewritten(file, zipfile.ZIP_DEFLATED), tmp_path / "out")


def test_damage_is_not_told_as_danger(file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        data = archive.read(name)
    with pytest.raises(DamagedCheckpointError):
        export(rewritten(file, pickle=data[: len(data) // 2]), tmp_path / "out")


def test_what_was_exported_is_exported_again(file: Path, tmp_path: Path) -> None:
    export(file, tmp_path / "one.pt", to="torch")
    assert export(tmp_path / "one.pt", tmp_path / "step-00000001", to="dcp").tensors == 1


def stock_save(state: dict[str, torch.Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)


def test_lazy_tensors_of_stock_checkpoints(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 1j])
    stock_save({"c": value.conj()}, tmp_path / "stock")
    with pytest.raises(UnsavableStateError, match="conj"):
        export(tmp_path / "stock", tmp_path / "out")
    stock_save({"c": value.conj().imag}, tmp_path / "other")  # DCP has made a plain tensor of it
    export(tmp_path / "other", tmp_path / "out.pt", to="torch")
    assert torch.load(tmp_path / "out.pt")["c"].tolist() == [-2.0, 1.0]


def test_another_byte_order_of_stock_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_save({"c": torch.ones(3)}, tmp_path / "stock")
    monkeypatch.setattr(stock_source, "_BYTE_ORDER", b"big")
    with pytest.raises(UnsavableStateError, match="another order"):
        export(tmp_path / "stock", tmp_path / "out")


def test_too_little_memory(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(copying, "own_buffer", refuse)
    with pytest.raises(OutOfMemoryError, match="'w'"):
        export(file, tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


def _flip(file: Path, its: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(its) + len(its) - 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_damaged_pickle_is_not_told_as_danger(file: Path, tmp_path: Path, weights_only: bool) -> None:
    """One byte of the name of what rebuilds a tensor: it is another name, and not one that is known."""
    _flip(file, b"_rebuild_tensor_v2")
    with pytest.raises(DamagedCheckpointError, match=r"data\.pkl") as raised:
        export(file, tmp_path / "out", weights_only=weights_only)
    assert raised.value.path == str(file)


def test_a_file_without_checksums(tmp_path: Path) -> None:
    """As ``torch.save`` can be told to leave them out: nothing is damaged, and what else is known is looked at."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000.0)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert export(tmp_path / "file.pt", tmp_path / "out").tensors == 1
    _flip(tmp_path / "file.pt", sys.byteorder.encode())
    with pytest.raises(UnsavableStateError, match="bytes in littme order"):
        export(tmp_path / "file.pt", tmp_path / "other")
