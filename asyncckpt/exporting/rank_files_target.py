"""Lay out a checkpoint of torch_checkpointing as if one rank had saved it: a file of ``torch.save`` for each item."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from asyncckpt.errors import UnsavableStateError
from asyncckpt.exporting.batches import FilePlan
from asyncckpt.exporting.selection import Selection
from asyncckpt.exporting.torch_file_target import plan_torch_file
from asyncckpt.loading.source import RANKS_METADATA_NAME
from asyncckpt.planning.boxes import StoredTensor
from asyncckpt.planning.layout import contiguous_strides
from asyncckpt.planning.structure import Keys

_MESH = {"device_type": "cpu", "mesh_shape": (1,), "mesh_data": (0,), "mesh_dim_names": None}


def plan_rank_files(
    selection: Selection, pickles: Mapping[str, bytes], path: str, *, weights_only: bool
) -> tuple[list[FilePlan], dict[str, bytes]]:
    """Lay out the files. The top-level keys are the items. See ``plan_torch_file`` for the arguments and errors.

    Returns:
        The files, and the small files beside them.

    Raises:
        UnsavableStateError: An item's name cannot be the name of a file.
    """
    items: dict[str, dict[str, Keys]] = {}
    for name, keys in selection.keys.items():
        items.setdefault(keys[0], {})[name] = keys
    plans: list[FilePlan] = []
    about: dict[str, Any] = {}
    for item, names in items.items():
        if not item or "/" in item or "\0" in item:
            raise UnsavableStateError(f"{item!r} cannot be the name of a file; rename it", path=path)
        selected, file = replace(selection, keys=names), f"{item}_0.pt"
        plan = plan_torch_file(selected, pickles, path, item=item, weights_only=weights_only)
        plans.append(replace(plan, name=file))
        tensors = {
            json.dumps(keys[1:]): [{"sharding_metadata": _sharding(*selection.tensors[name]), "ranks": (0,)}]
            for name, keys in names.items()
            if name in selection.tensors
        }
        layout = {"file_path": file, "serialization_format": {"type": "TorchSerialization"}}
        about[item] = {"nested_path_to_metadata": tensors, "rank_to_layout_info": {0: layout}}
    metadata = {"metadata": about, "world_size": 1, "version": "2.0"}
    return plans, {RANKS_METADATA_NAME: pickle.dumps(metadata)}


def _sharding(tensor: StoredTensor, dtype: torch.dtype) -> dict[str, Any]:
    """Describe a whole tensor as torch_checkpointing does: a replicated DTensor, on a mesh of the only rank."""
    data = {
        "global_shape": list(tensor.shape),
        "dtype": str(dtype),
        "stride": list(contiguous_strides(tensor.shape)),
        "mesh_spec": _MESH,
        "placements": [{"type": "Replicate"}],
    }
    return {"type": "DTensorShardingMetadata", "data": data}
