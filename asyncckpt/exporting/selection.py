"""Select the values of a stored state to export, their new names, and their new dtypes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from asyncckpt.errors import MismatchError, UnsavableStateError
from asyncckpt.exporting.stored import StoredState
from asyncckpt.planning.boxes import StoredTensor
from asyncckpt.planning.structure import Keys
from asyncckpt.threads import without_gc

Rename = Callable[[str], str] | Mapping[str, str] | str
"""A way to rename values: a function of the name; a mapping from old to new names; or a text, see ``renaming``."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Selection:
    """The values to export, by new names: each tensor with its new dtype, and the stored name of each object.

    ``keys`` lead to each value in the exported state. ``tied`` maps a name to an earlier name with the same bytes.
    """

    tensors: dict[str, tuple[StoredTensor, torch.dtype]] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Keys] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def tops(self) -> list[str]:
        """Return the top-level keys under which there are tensors."""
        return list(dict.fromkeys(str(self.keys[name][0]) for name in self.tensors if len(self.keys[name]) > 1))


def dtype_of(asked: str | torch.dtype | None) -> torch.dtype | None:
    """Return the requested dtype: bf16, fp16, fp32, or torch's name of one of them. Raises ``ValueError``."""
    dtype = _DTYPES.get(asked, asked) if isinstance(asked, str) else asked
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if asked is not None and dtype not in _DTYPES.values():
        raise ValueError(f"dtype={asked!r}: floating point tensors are exported as {', '.join(_DTYPES)}")
    return dtype


def renaming(rename: Rename | None) -> Callable[[str], str]:
    """Return the function for ``rename``.

    A text is "PATTERN=REPLACEMENT", as for ``re.sub`` and split at its last "=". A text that ends in ".json" is the
    path of a file with an object of new names by old names. Unknown names stay. Raises ``ValueError``.
    """
    if rename is None:
        return lambda name: name
    if isinstance(rename, str):
        if not rename.endswith(".json"):
            pattern, equals, replacement = rename.rpartition("=")
            try:
                known = re.compile(pattern)
                known.sub(replacement, "")
            except (re.error, IndexError) as error:
                raise ValueError(f"rename={rename!r}: {error}") from error
            if not equals:
                raise ValueError(f"rename={rename!r}: it is PATTERN=REPLACEMENT, or a file whose name ends in .json")
            return lambda name: known.sub(replacement, name)
        try:
            with open(rename, encoding="utf-8") as file:
                rename = json.load(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"rename={rename!r}: {error}") from error
    if isinstance(rename, Mapping):
        names = dict(rename)
        if not all(isinstance(name, str) for pair in names.items() for name in pair):
            raise ValueError("rename: names of values are text")
        return lambda name: names.get(name, name)
    if not callable(rename):
        raise ValueError(f"rename={rename!r}: it is a function, a dict of names, or text")
    return rename


@without_gc
def select(state: StoredState, only: str | None, rename: Callable[[str], str], dtype: torch.dtype | None) -> Selection:
    """Select the values to export.

    Args:
        state: The stored state.
        only: Keys, joined by dots, that lead to the part to export. This part becomes the whole exported state. With
            None, all values are exported.
        rename: Renames values, applied after ``only``.
        dtype: The new dtype of floating point tensors, except types of less than two bytes; None: no conversion.

    Raises:
        MismatchError: No value is left.
        UnsavableStateError: Two values get the same name.
    """
    found = Selection()
    prefix = f"{only.rstrip('.')}." if only and only.strip(".") else ""
    first: dict[object, str] = {}
    old: dict[str, str] = {}
    for name in state.keys:
        if not name.startswith(prefix):
            continue
        before = _without(state.keys[name], prefix)
        new = rename(name[len(prefix) :])
        if not isinstance(new, str):
            raise ValueError(f"rename gives {name!r} the name {new!r}, which is no text")
        if new in old:
            raise UnsavableStateError(
                f"{old[new]!r} and {name!r} both get the name {new!r}; rename them differently", path=state.path
            )
        old[new] = name
        found.keys[new] = _renamed(before, new)
        if name not in state.tensors:
            found.objects[new] = name
            continue
        tensor = state.tensors[name]
        is_converted = dtype is not None and tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2
        found.tensors[new] = tensor, dtype if dtype is not None and is_converted else tensor.dtype
        place = tensor.dtype, tensor.shape, tuple(tensor.boxes)
        if tensor.numel and first.setdefault(place, new) != new:
            found.tied[new] = first[place]
    if not old:
        tops = ", ".join(map(repr, dict.fromkeys(str(keys[0]) for keys in state.keys.values()))) or "nothing"
        raise MismatchError(f"there is nothing under {only!r}; at the top there is {tops}", path=state.path)
    return found


def _without(keys: Keys, prefix: str) -> Keys:
    """Return ``keys`` without the keys, or the part of a key, in ``prefix``."""
    while prefix:
        head = f"{keys[0]}."
        if prefix.startswith(head):
            keys, prefix = keys[1:], prefix[len(head) :]
        else:
            keys, prefix = (head[len(prefix) : -1], *keys[1:]), ""
    return (str(keys[0]), *keys[1:]) if isinstance(keys[0], int) else keys  # the top level is a dict


def _renamed(keys: Keys, new: str) -> Keys:
    """Return the keys of a value with the name ``new``.

    Change either the last key, or the keys above it. If neither gives ``new``, make ``new`` the only key.
    """
    above, last = keys[:-1], str(keys[-1])
    before = "".join(f"{key}." for key in above)
    if f"{before}{last}" == new:
        return keys
    if new.endswith(f".{before}{last}"):
        return (*new.removesuffix(f".{before}{last}").split("."), *keys)
    if above and new.startswith(before) and new != before:
        return (*above, new[len(before) :])
    if above and new.endswith(f".{last}"):
        parts = new[: -len(last) - 1].split(".")
        same = len(parts) == len(above)  # positions in lists stay numbers
        kept = [key if str(key) == part else part for key, part in zip(above, parts, strict=True)] if same else parts
        return (*kept, keys[-1])
    return (new,)


def check_nesting(keys: Mapping[str, Keys], path: str) -> None:
    """Raise ``UnsavableStateError`` if values cannot be nested: a value contains values, or a list has text keys."""
    is_list: dict[Keys, bool] = {}
    for name, each in keys.items():
        for length in range(len(each)):
            at_position = isinstance(each[length], int)
            if is_list.setdefault(each[:length], at_position) != at_position:
                raise UnsavableStateError(f"{name!r} would stand in a list and in a dict; rename it", path=path)
    for name, each in keys.items():
        if each in is_list:
            raise UnsavableStateError(f"{name!r} would be a value, and have others in it; rename it", path=path)


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes, from "5GB" (10**9 each) or "5GiB" (2**30). Raises ``ValueError``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(text), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size: write 5GB, or 500MB, or 5GiB")
    nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if nbytes < 1:
        raise ValueError(f"{text!r} is no size: a file has more than that")
    return nbytes
