"""The bytes of DCP's ``.metadata``, as we pickle it: its end, which alone differs from save to save (where the
checkpoint stands, and who it is), and the data files that it names.
"""

from __future__ import annotations

import pickle
import re

# The step of a pickle that makes the name of a data file: its length, then itself.
_DATA_NAME = re.compile(rb"X(.{4})([^\x00-\x1f]{0,4000}?__\d+_\d+\.distcp)", re.DOTALL)


def storage_meta(path: str, save_id: str) -> bytes:
    """What takes the place of the last byte of DCP's ``.metadata``, of which all else is the same in every save.

    These are the last steps of its pickle: they give the object before them its ``storage_meta``, as DCP's writer does.

    Args:
        path: Where the checkpoint is to stand.
        save_id: What no other save has.
    """
    fields = {"checkpoint_id": _text(path), "save_id": _text(save_id), "load_id": pickle.NONE}
    fields["modules"] = pickle.EMPTY_LIST
    steps = [
        *(_storage_meta_begin(), pickle.EMPTY_TUPLE, pickle.NEWOBJ),
        *(pickle.EMPTY_DICT, pickle.MARK, *(_text(name) + value for name, value in fields.items())),
        *(pickle.SETITEMS, pickle.BUILD, pickle.SETITEM, pickle.BUILD, pickle.STOP),
    ]
    return b"".join(steps)


def without_storage_meta(metadata: bytes) -> bytes:
    """DCP's ``.metadata`` as it was before ``storage_meta`` took the place of its last byte, if that has happened."""
    found = metadata.rfind(_storage_meta_begin())  # a path has no zero bytes, so not in it
    return metadata if found < 0 else metadata[:found] + pickle.STOP


def data_names_in(metadata: bytes) -> list[str]:
    """The names of the data files in which something stands."""
    found = (match for match in _DATA_NAME.finditer(metadata) if int.from_bytes(match[1], "little") == len(match[2]))
    return list(dict.fromkeys(match[2].decode("utf-8", "surrogatepass") for match in found))


def _storage_meta_begin() -> bytes:
    kind = b"torch.distributed.checkpoint.metadata\nStorageMeta\n"
    return pickle.EMPTY_DICT + _text("storage_meta") + pickle.GLOBAL + kind


def _text(value: str) -> bytes:
    """The step of a pickle that makes a ``str``."""
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data
