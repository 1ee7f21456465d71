"""Test the device seam: which files may name a kind of device, and which files wait for a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.devices import CPU, TYPE, MadeUpDevices

import asyncckpt
from asyncckpt.devices import kinds
from asyncckpt.devices.kinds import ready_events

FOLDER = Path(asyncckpt.__file__).parent
SEAM = {"devices/kinds.py", "devices/pinners.py"}
WAITS = {
    *("staging/device_copy.py", "loading/device_buffers.py", "weights/streamed_copies.py"),
    "planning/replicas.py",
}


def _attributes() -> Iterator[tuple[str, str, ast.Attribute]]:
    """Yield every attribute access in the package: the file, the text, and the node."""
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                yield file.relative_to(FOLDER).as_posix(), ast.unparse(node), node


def test_no_kind_of_device_is_spoken_of_by_its_name() -> None:
    assert not [file for file, text, _ in _attributes() if text.split(".")[:2] in (["torch", "cuda"], ["torch", "xpu"])]


def test_the_whole_device_is_never_waited_for() -> None:
    """Saves and loads wait for their own events, and only in the files in ``WAITS``."""
    for file, text, node in _attributes():
        is_elsewhere = file != "demo.py" and file not in SEAM
        if is_elsewhere and node.attr in ("synchronize", "wait_stream", "default_stream"):
            assert node.attr == "synchronize" and file in WAITS, f"{file}: {text}"
        assert node.attr != "synchronize_used", f"{file}: {text}"  # only for measurements, as in examples


def test_events_are_of_devices_that_have_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(1), torch.zeros(1, device="meta")]
    made_up = MadeUpDevices()
    made_up.install(monkeypatch)
    assert not ready_events(tensors).keys() & {tensor.device for tensor in tensors}
    monkeypatch.setitem(kinds.KINDS, "meta", made_up)
    assert ready_events(tensors).keys() & {tensor.device for tensor in tensors} == {torch.device("meta")}


def test_the_host_has_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    MadeUpDevices().install(monkeypatch)
    assert kinds.kind_of(CPU) is None and kinds.kind_of(torch.device(TYPE, 1)) is not None
    with kinds.use(CPU), kinds.use(torch.device(TYPE)):
        pass


def test_what_was_queued_anywhere_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = MadeUpDevices()
    made_up.install(monkeypatch)
    done: list[bool] = []
    made_up.new_stream(torch.device(TYPE)).add(lambda: done.append(True))
    kinds.synchronize_used()
    assert done == [True]


def test_no_tensor_is_asked_where_the_kind_says_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up, used = MadeUpDevices(), [torch.device(TYPE, 0), torch.device(TYPE, 1)]
    made_up.install(monkeypatch)
    monkeypatch.setattr(made_up, "used", lambda: used)
    for type_ in kinds.KINDS.keys() - {TYPE}:
        monkeypatch.delitem(kinds.KINDS, type_)
    assert set(ready_events([])) == set(used)


def test_a_torch_that_raises_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6 raises here. Later versions return None."""

    def current_accelerator() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    tensors = [torch.ones(3)]
    assert CPU not in kinds.ready_events(tensors)
    kinds.synchronize_used()
