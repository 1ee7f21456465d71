"""How safetensors files share tensors, and how they are called, as ``save_pretrained`` of transformers has it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from asyncckpt.planning.safetensors_plan import Form

SUFFIX = ".safetensors"


def index_name_of(name: str) -> str:
    """The file that says which tensor is in which, where there are several in the place of ``name``."""
    return f"{name}.index.json"


def shard(name: str, forms: Mapping[str, Form], most: int) -> tuple[dict[str, Sequence[str]], dict[str, bytes]]:
    """Divide tensors among files.

    Args:
        name: Of the file, if it is one.
        forms: The dtype and the shape of each tensor.
        most: Bytes of tensors in a file, unless one alone has more.

    Returns:
        The files with the names of their tensors, and the bytes of those beside them.
    """
    shards = _shards({each: _nbytes(form) for each, form in forms.items()}, most)
    if len(shards) == 1:
        return {name: shards[0]}, {}
    stem = name.removesuffix(SUFFIX)
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(1, len(shards) + 1)]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in forms.values()),
            "total_size": sum(map(_nbytes, forms.values())),
        },
        "weight_map": {each: file.rpartition("/")[2] for file, its in zip(names, shards, strict=True) for each in its},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return dict(zip(names, shards, strict=True)), {index_name_of(name): text.encode()}


def _nbytes(form: Form) -> int:
    dtype, shape = form
    return math.prod(shape) * dtype.itemsize


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """In their order, as huggingface_hub splits them: one that is too large alone has a file of its own."""
    shards: list[list[str]] = []
    current: list[str] = []
    nbytes = 0
    for name, size in sizes.items():
        if size > most:
            shards.append([name])
            continue
        if nbytes + size > most:
            shards.append(current)
            current, nbytes = [], 0
        current.append(name)
        nbytes += size
    return [*shards, current] if current or not shards else shards
