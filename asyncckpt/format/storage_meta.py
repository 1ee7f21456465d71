"""Work on the pickled bytes of DCP's ``.metadata``: make and remove their end, and find the names of data files.

Only the end differs between saves. The end holds the path and the id of the checkpoint.
"""

from __future__ import annotations

import pickle
import re

# The pickle opcode that makes the name of a data file: its length, then the name.
_DATA_NAME = re.compile(rb"X(.{4})([^\x00-\x1f]{0,4000}?__\d+_\d+\.distcp)", re.DOTALL)


def storage_meta(path: str, save_id: str) -> bytes:
    """Return the replacement for the last byte of DCP's ``.metadata``. All bytes before it are the same in every save.

    The replacement holds the last opcodes of the pickle. They set the object's ``storage_meta``, as DCP's writer does.

    Args:
        path: Path of the checkpoint.
        save_id: An id that no other save has.
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
    """Return DCP's ``.metadata`` without its ``storage_meta``, if it has any."""
    found = metadata.rfind(_storage_meta_begin())  # a path has no zero bytes, so it cannot contain this
    return metadata if found < 0 else metadata[:found] + pickle.STOP


def data_names_in(metadata: bytes) -> list[str]:
    """Return the names of the data files that hold any values."""
    found = (match for match in _DATA_NAME.finditer(metadata) if int.from_bytes(match[1], "little") == len(match[2]))
    return list(dict.fromkeys(match[2].decode("utf-8", "surrogatepass") for match in found))


def _storage_meta_begin() -> bytes:
    kind = b"torch.distributed.checkpoint.metadata\nStorageMeta\n"
    return pickle.EMPTY_DICT + _text("storage_meta") + pickle.GLOBAL + kind


def _text(value: str) -> bytes:
    """Return the pickle opcode that makes a ``str``."""
    data = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data
