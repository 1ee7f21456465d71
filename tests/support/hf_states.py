"""Compare checkpoints of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from support.states import same

_OURS = re.compile(r"asyncckpt\.json|__\d+_\d+\.index\.json")


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in ``folder``."""
    return sorted(int(each.name.rpartition("-")[2]) for each in folder.glob("checkpoint-*"))


def content(file: Path) -> Any:
    """Return the content of a file without times and without the path of its folder."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    if file.suffix in (".pt", ".pth"):
        return torch.load(file, weights_only=False)
    if file.suffix == ".bin":
        return str(torch.load(file, weights_only=False)).replace(str(file.parent.parent), "")
    text = file.read_text()
    if file.name == "trainer_state.json":
        state = json.loads(text)
        for entry in state["log_history"]:
            for name in [name for name in entry if "runtime" in name or "per_second" in name]:
                del entry[name]
        return json.dumps(state).replace(str(file.parent.parent), "")
    return text


def same_files(one: Path, other: Path) -> None:
    """Assert that two checkpoints have equal files. asyncckpt's own metadata files in ``one`` do not count."""
    names = {file.relative_to(one) for file in one.rglob("*") if file.is_file() and not _OURS.fullmatch(file.name)}
    assert names == {file.relative_to(other) for file in other.rglob("*") if file.is_file()}
    for name in names:
        assert same(content(one / name), content(other / name)), name
