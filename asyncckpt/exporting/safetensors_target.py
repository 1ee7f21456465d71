"""Files of safetensors as ``save_pretrained`` leaves them: one, or several and an index that says what is in which."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

from asyncckpt.exporting.file_plan import FilePlan, PlacedTensor
from asyncckpt.exporting.safetensors_source import INDEX_NAME
from asyncckpt.exporting.selection import Selection
from asyncckpt.exporting.stored import StoredTensor
from asyncckpt.planning.safetensors_plan import in_order, lay_out

_METADATA = {"format": "pt"}

_Tensors = Mapping[str, tuple[StoredTensor, torch.dtype]]


def plan_safetensors(selection: Selection, most: int) -> tuple[list[FilePlan], dict[str, bytes]]:
    """Lay out tensors.

    Args:
        selection: The tensors; the first name of tied ones gets them, as the format knows no others.
        most: Bytes of tensors in a file, unless one alone has more.

    Returns:
        The files, and those beside them.

    Raises:
        UnsavableStateError: The format has no such type or name.
    """
    tensors = {name: its for name, its in selection.tensors.items() if name not in selection.tied}
    shards = _shards(tensors, most)
    if len(shards) == 1:
        return [_plan("model.safetensors", shards[0])], {}
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor, _ in tensors.values()),
            "total_size": sum(map(_nbytes, tensors.values())),
        },
        "weight_map": {each: name for name, shard in zip(names, shards, strict=True) for each in shard},
    }
    files = {INDEX_NAME: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}
    return [_plan(name, shard) for name, shard in zip(names, shards, strict=True)], files


def _nbytes(its: tuple[StoredTensor, torch.dtype]) -> int:
    return its[0].numel * its[1].itemsize


def _shards(tensors: _Tensors, most: int) -> Sequence[_Tensors]:
    """In their order, as huggingface_hub splits them: one that is too large alone has a file of its own."""
    shards: list[dict[str, tuple[StoredTensor, torch.dtype]]] = []
    current: dict[str, tuple[StoredTensor, torch.dtype]] = {}
    nbytes = 0
    for name, its in tensors.items():
        size = _nbytes(its)
        if size > most:
            shards.append({name: its})
            continue
        if nbytes + size > most:
            shards.append(current)
            current, nbytes = {}, 0
        current[name] = its
        nbytes += size
    return [*shards, current] if current or not shards else shards


def _plan(name: str, tensors: _Tensors) -> FilePlan:
    order = in_order({each: dtype for each, (_, dtype) in tensors.items()})
    header, begins = lay_out({each: (tensors[each][1], tensors[each][0].shape) for each in order}, _METADATA)
    placed = []
    for each in order:
        tensor, dtype = tensors[each]
        end = begins[each] + math.prod(tensor.shape) * dtype.itemsize
        placed.append(PlacedTensor(tensor, dtype, begins[each], end))
    return FilePlan(name, placed, [(0, header)], placed[-1].end if placed else len(header))
