"""Lay out safetensors as ``save_pretrained`` does: one file, or several files and an index that names their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from asyncckpt.exporting.batches import FilePlan, PlacedTensor
from asyncckpt.exporting.selection import Selection
from asyncckpt.planning.boxes import StoredTensor
from asyncckpt.planning.safetensors_plan import in_order, lay_out, shard

_METADATA = {"format": "pt"}

_Tensors = Mapping[str, tuple[StoredTensor, torch.dtype]]


def plan_safetensors(selection: Selection, most: int) -> tuple[list[FilePlan], dict[str, bytes]]:
    """Lay out tensors.

    Args:
        selection: The tensors. Only the first name of tied tensors is stored, because the format has no ties.
        most: Maximum bytes of tensors in a file, unless one tensor is larger.

    Returns:
        The files, and the small files beside them.

    Raises:
        UnsavableStateError: The format does not support a dtype or a name.
    """
    tensors = {name: its for name, its in selection.tensors.items() if name not in selection.tied}
    forms = {name: (dtype, tensor.shape) for name, (tensor, dtype) in tensors.items()}
    files, beside = shard("model.safetensors", forms, most)
    return [_plan(file, {name: tensors[name] for name in names}) for file, names in files.items()], beside


def _plan(name: str, tensors: _Tensors) -> FilePlan:
    order = in_order({each: dtype for each, (_, dtype) in tensors.items()})
    header, begins = lay_out({each: (tensors[each][1], tensors[each][0].shape) for each in order}, _METADATA)
    placed = []
    for each in order:
        tensor, dtype = tensors[each]
        end = begins[each] + math.prod(tensor.shape) * dtype.itemsize
        placed.append(PlacedTensor(tensor, dtype, begins[each], end))
    return FilePlan(name, placed, [(0, header)], placed[-1].end if placed else len(header))
