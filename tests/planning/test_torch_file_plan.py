"""Test that the pickle of a torch file equals torch's own, also for tensors that are pickled without torch."""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from typing import Any

import pytest
import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.planning.torch_file_plan import TorchFileContents


def stock(obj: object) -> bytes:
    """Return the pickle that ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(obj, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return archive.read(name)


def ours(obj: object) -> bytes:
    return TorchFileContents(obj, 2).pickle


@pytest.mark.parametrize("protocol", [2, 5])
def test_tensors_of_all_kinds(protocol: int) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    noted = torch.ones(3)
    noted.note = "of somebody"  # type: ignore[attr-defined]
    negated = torch.randn(2, dtype=torch.complex64).conj().imag
    tensors: list[Any] = [base, base.t(), base[1:3, ::2], base, torch.empty(0), torch.empty(3, 0), torch.tensor(3)]
    tensors += [torch.zeros(2, dtype=dtype) for dtype in (torch.bool, torch.float16, torch.complex128, torch.uint16)]
    tensors += [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), noted, negated]
    tensors += [torch.ones(3).as_subclass(torch.nn.Buffer), torch.eye(2).to_sparse()]
    file = io.BytesIO()
    torch.save(tensors, file, pickle_protocol=protocol)
    with zipfile.ZipFile(file) as archive:
        assert TorchFileContents(tensors, protocol).pickle == archive.read("archive/data.pkl")


def test_hooks_are_warned_of() -> None:
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsavableStateError, match="backward hook"):  # a warning is an error here
        ours(tensor)


def test_somebody_else_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"it": torch.ones(2)}
    plain = ours(state)
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (list, (tensor.tolist(),)))
    assert pickle.loads(ours(state)) == {"it": [1.0, 1.0]} and ours(state) == stock(state)
    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda tensor, protocol: (list, (tensor.tolist(),)))
    assert pickle.loads(ours(state)) == {"it": [1.0, 1.0]}
    monkeypatch.undo()
    assert ours(state) == plain == stock(state)
