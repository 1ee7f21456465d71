"""Values that every rank has of its own: states of random number generators, a loader's position, the rank itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from asyncckpt.errors import MismatchError
from asyncckpt.planning.structure import give_states, stateful_to_dict, stateful_types

_STORED = re.compile(r"(?<![^.])rank-(\d+)-of-(\d+)(?=\.|$)")


class PerRank:
    """A value of a state dict that every rank keeps for itself.

    Under one key DCP takes the values of all ranks for replicas: it saves one of them, and gives that to every rank.

        state = {"model": model, "rng": PerRank(torch.get_rng_state())}
        checkpointer.load(state)
        torch.set_rng_state(state["rng"].value)

    It is ``Stateful``, so DCP itself knows what to do with it. In the checkpoint the value has the name of its key with
    ``rank-3-of-8`` behind it. Ranks are those of the whole job, whichever of them save together.
    """

    def __init__(
        self, value: Any, *, missing: Literal["error", "rank0"] | Callable[[list[Any]], Any] = "error"
    ) -> None:
        """Wrap a value.

        Args:
            value: What a state dict may have: a tensor, an object, a dict or list of them, what is ``Stateful``.
            missing: What a load is to do where the job has another number of ranks than the one that saved. "error":
                raise ``MismatchError``. "rank0": give all ranks the value of rank 0. A function: it is given the values
                of all ranks that saved, in their order, as new tensors and objects (keys of dicts are text), and
                returns the one for this rank.

        Raises:
            ValueError: ``missing`` is none of these.
        """
        if missing not in ("error", "rank0") and not callable(missing):
            raise ValueError(f"missing={missing!r}: it is 'error', 'rank0' or a function of the values of all ranks")
        self.value = value
        """Of this rank. A load fills its tensors, and replaces other values."""
        self._missing = missing
        self._stored: dict[str, Any] | None = None  # while another job's checkpoint is loaded: what it has

    def state_dict(self) -> dict[str, Any]:
        """For whoever saves or loads: the value under the name of this rank."""
        return self._stored or {_name(*_rank()): self._state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For whoever loads: take over what is loaded."""
        if callable(self._missing) and _name(*_rank()) not in state_dict:
            self.value = self._missing(list(state_dict.values()))
        else:
            holder = {"": self.value}
            (state,) = state_dict.values()
            give_states(holder, {"": state})
            self.value = holder[""]

    def _state(self) -> Any:
        return stateful_to_dict({"": self.value})[""]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PerRank is not pickled: it belongs in a state dict itself, or in the dicts and lists of one")

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    @contextlib.contextmanager
    def loaded_from(self, metadata: Metadata, name: str) -> Iterator[None]:
        """Ask for what a checkpoint has, meanwhile.

        Args:
            metadata: Of the checkpoint.
            name: That of this value.

        Raises:
            MismatchError: Another number of ranks has saved it, and nobody has said what to do then; or it is in the
                state dict twice.
        """
        if self._stored is not None:
            raise MismatchError(f"{name!r} is a PerRank that is in the state dict under another name, too: make two")
        _, ranks = _rank()
        stored: dict[tuple[int, int], list[str]] = {}
        for each in metadata.state_dict_metadata:
            if each.startswith(f"{name}.") and (found := _STORED.match(each, len(name) + 1)):
                stored.setdefault((int(found[1]), int(found[2])), []).append(each)
        if stored and all(of != ranks for _, of in stored):
            of = max(of for _, of in stored)
            if self._missing == "error":
                raise MismatchError(
                    f"{name!r} is of each rank, was saved by {of} ranks, and this job has {ranks}: say by"
                    " PerRank(..., missing=...) what they are to get"
                )
            if self._missing == "rank0":
                self._stored = {_name(0, of): self._state()}
            else:
                self._stored = _empty(metadata, {_name(*each): stored[each] for each in sorted(stored)})
        try:
            yield
        finally:
            self._stored = None


def per_rank_values(state_dict: Mapping[str, Any]) -> dict[str, PerRank]:
    """All that are in ``state_dict``, by their names. Raises ``TypeError`` where it is no state dict."""
    top, deep = stateful_types(state_dict)
    return dict(_values(state_dict)) if any(issubclass(kind, PerRank) for kind in top | deep) else {}


def of_any_rank(name: str) -> str:
    """``name`` with "rank" in the place of "rank-3-of-8"."""
    return _STORED.sub("rank", name)


def _values(container: Any, prefix: str = "") -> Iterator[tuple[str, PerRank]]:
    for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        if isinstance(value, PerRank):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping | list):
            yield from _values(value, f"{prefix}{key}.")


def _empty(metadata: Metadata, stored: Mapping[str, list[str]]) -> dict[str, Any]:
    """What ``stored`` says is there of each rank, with tensors to be filled, nested as DCP has noted it."""
    empty: dict[str, Any] = {}
    for rank_name, names in stored.items():
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


def _rank() -> tuple[int, int]:
    """This rank of the job, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
