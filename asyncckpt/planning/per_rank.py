"""Values that differ between ranks: states of random number generators, a loader's position, the rank itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from asyncckpt.errors import MismatchError
from asyncckpt.planning.structure import give_states, stateful_to_dict, stateful_types

T = TypeVar("T")
RankOf = tuple[int, int]
"""A rank, and the number of ranks in its job."""
_STORED = re.compile(r"(?<![^.])rank-(\d+)-of-(\d+)(?=\.|$)")


class PerRank:
    """A value of a state dict that each rank saves and loads for itself.

    DCP treats the values of all ranks under one key as replicas: DCP saves one value and loads it on every rank.

        state = {"model": model, "rng": PerRank(torch.get_rng_state())}
        checkpointer.load(state)
        torch.set_rng_state(state["rng"].value)

    ``PerRank`` is ``Stateful``, so DCP itself can save and load it. In the checkpoint, the name of the value is its key
    followed by ``rank-3-of-8``. The ranks are counted in the whole job, even if only some of them save together.
    """

    def __init__(
        self, value: Any, *, missing: Literal["error", "rank0"] | Callable[[list[Any]], Any] = "error"
    ) -> None:
        """Wrap a value.

        Args:
            value: Any value that a state dict may have: a tensor, an object, a ``Stateful`` value, a dict or a list.
            missing: The action of a load if the job has another number of ranks than the job that saved. "error": raise
                ``MismatchError``. "rank0": give all ranks the value of rank 0. A function: call it with the list of the
                values of all ranks that saved, in rank order, as new tensors and objects (keys of dicts are text). The
                function returns the value for this rank.

        Raises:
            ValueError: ``missing`` is not "error", "rank0" or a function.
        """
        if missing not in ("error", "rank0") and not callable(missing):
            raise ValueError(f"missing={missing!r}: it is 'error', 'rank0' or a function of the values of all ranks")
        self.value = value
        """The value of this rank. A load writes into its tensors, and replaces other values."""
        self._missing = missing
        self._stored: dict[str, Any] | None = None  # the stored values, during a load with another number of ranks

    def state_dict(self) -> dict[str, Any]:
        """Return the value under the name of this rank. A save or a load calls this."""
        return self._stored or {_name(*rank_of()): self._state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the loaded value. A load calls this."""
        if callable(self._missing) and _name(*rank_of()) not in state_dict:
            self.value = self._missing(list(state_dict.values()))
        else:
            holder = {"": self.value}
            (state,) = state_dict.values()
            give_states(holder, {"": state})
            self.value = holder[""]

    def after_load(self) -> None:
        """Finish the load of this value, after all other values are loaded."""

    def _state(self) -> Any:
        return stateful_to_dict({"": self.value})[""]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PerRank is not pickled: it belongs in a state dict itself, or in the dicts and lists of one")

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    @contextlib.contextmanager
    def loaded_from(self, metadata: Metadata, name: str) -> Iterator[None]:
        """Make ``state_dict`` return the names that the checkpoint has, inside the context.

        Args:
            metadata: The metadata of the checkpoint.
            name: The name of this value in the state dict.

        Raises:
            MismatchError: Another number of ranks saved the value and ``missing`` is "error", or the state dict has
                this object under two names.
        """
        if self._stored is not None:
            raise MismatchError(f"{name!r} is a PerRank that is in the state dict under another name, too: make two")
        stored: dict[RankOf, list[str]] = {}
        for each in metadata.state_dict_metadata:
            if each.startswith(f"{name}.") and (found := _STORED.match(each, len(name) + 1)):
                stored.setdefault((int(found[1]), int(found[2])), []).append(each)
        self._stored = self._chosen(name, metadata, stored) if stored else None
        try:
            yield
        finally:
            self._stored = None

    def _chosen(self, name: str, metadata: Metadata, stored: Mapping[RankOf, list[str]]) -> dict[str, Any] | None:
        """Return the values of other ranks to load; None: load this rank's own.

        ``stored``: the names of the stored values of each rank.
        """
        _, ranks = rank_of()
        if any(of == ranks for _, of in stored):
            return None
        of = max(of for _, of in stored)
        if self._missing == "error":
            raise MismatchError(
                f"{name!r} is of each rank, was saved by {of} ranks, and this job has {ranks}: say by"
                " PerRank(..., missing=...) what they are to get"
            )
        if self._missing == "rank0":
            return {_name(0, of): self._state()}
        return empty_values(metadata, {rank: stored[rank] for rank in sorted(stored)})


def values_of_type(state_dict: Mapping[str, Any], wanted: type[T]) -> dict[str, T]:
    """Return all values of a ``Stateful`` type in ``state_dict``, by name.

    Raises ``TypeError`` if ``state_dict`` is no mapping.
    """
    top, deep = stateful_types(state_dict)
    return dict(_values(state_dict, wanted)) if any(issubclass(kind, wanted) for kind in top | deep) else {}


def of_any_rank(name: str) -> str:
    """Return ``name`` with "rank" in the place of "rank-3-of-8"."""
    return _STORED.sub("rank", name)


def _values(container: Any, wanted: type[T], prefix: str = "") -> Iterator[tuple[str, T]]:
    for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if isinstance(value, wanted):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping | list):
            yield from _values(value, wanted, f"{prefix}{key}.")


def empty_values(metadata: Metadata, stored: Mapping[RankOf, list[str]]) -> dict[str, Any]:
    """Return empty values of all ranks to load into, nested as DCP noted.

    ``stored``: the names of the stored values of each rank. Tensors are uninitialized, and other values are None.
    """
    empty: dict[str, Any] = {}
    for rank, names in stored.items():
        rank_name = _name(*rank)
        holder: dict[str, Any] = {}
        for each in names:
            known = metadata.state_dict_metadata[each]
            value = None
            if isinstance(known, TensorStorageMetadata):
                value = torch.empty(known.size, dtype=known.properties.dtype, device="cpu")
            path = (metadata.planner_data or {}).get(each, (rank_name,))
            set_element(holder, path[path.index(rank_name) :], value)
        empty[rank_name] = holder[rank_name]
    return empty


def _name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}"


def rank_of() -> RankOf:
    """Return the rank in the job, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
