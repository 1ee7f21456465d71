"""DCP's ``.metadata``, as every torch from 2.6 on reads it."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

# How many properties of a tensor torch 2.6 knows.
_PROPERTIES = 5


def pickle_metadata(metadata: Metadata) -> bytes:
    """DCP's ``.metadata``, in the form that every torch from 2.6 on reads: the properties of a tensor are the first
    five, which all of them know. The strides that torch 2.14 added are not needed to load.
    """
    buffer = io.BytesIO()
    # The last protocol without frames: the worker puts other steps in the place of the last one.
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _reduce_properties}
    pickler.dump(metadata)
    return buffer.getvalue()


def _reduce_properties(properties: TensorProperties) -> tuple[Any, ...]:
    state = properties.__getstate__()[:_PROPERTIES]  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]
