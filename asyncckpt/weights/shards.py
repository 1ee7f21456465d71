"""Sharding: one process publishes alone, or several ranks together publish their own parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from xxhash import xxh3_64_hexdigest

from asyncckpt.errors import RankFailedError, UnsavableStateError, decode, encode, located
from asyncckpt.planning.structure import PLAIN, has_no_bytes, plain_part, stateful_to_dict
from asyncckpt.ranks.ranks import Ranks, ranks_of
from asyncckpt.weights.layout import Ranges, TensorEntry, common, missing, shown

T = TypeVar("T")


def publishing_ranks(given: dist.ProcessGroup | Ranks | None) -> Ranks:
    """Return the ranks that publish together; for None, this process alone.

    Raises ``ValueError`` if this process is not in the process group.
    """
    if isinstance(given, Ranks):
        return given
    if given is not None and dist.get_rank(given) < 0:
        raise ValueError("this process is not in the process group it should publish with")
    return ranks_of(False if given is None else given)


class Sharding:
    """Decides which parts of the weights this process publishes, as ``rank`` of ``ranks``."""

    def __init__(self, together: Ranks) -> None:
        """Decide for the ranks in ``together``."""
        self._together = together
        self._in_step = True
        self.rank, self.ranks = together.rank, together.size
        # For the current stream: the names of tensors that all ranks have, and the bytes assigned to each rank.
        self._common: list[str] = []
        self._shares = [0] * self.ranks

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks, with a final ``gather``. If a rank raises, all raise at the next ``gather``."""
        self._in_step = True
        try:
            yield
        except BaseException as error:
            if self.ranks > 1 and self._in_step:
                with contextlib.suppress(RankFailedError):
                    self._exchange(None, encode(located(error, rank=self.rank, otherwise=RankFailedError)))
            raise

    def part(self) -> None:
        """End the cooperation. After the last gather, a failure stays on its own rank."""
        self._in_step = False

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank, by rank. Raises ``RankFailedError`` if a rank has failed or is silent."""
        if self.ranks == 1:
            return [value]
        told = self._exchange(value, None)
        for rank, (_, failure) in enumerate(told):
            if failure is not None:
                self._in_step = False  # the other ranks know the failure
                theirs = decode(failure)
                raise RankFailedError(f"rank {rank} cannot publish: {theirs.message}", rank=rank) from theirs
        return [each for each, _ in told]

    def _exchange(self, value: Any, failure: bytes | None) -> list[tuple[Any, bytes | None]]:
        in_step, self._in_step = self._in_step, False
        told = self._together.gather((value, failure))
        self._in_step = in_step
        return told

    def walk(self, stream: Iterable[tuple[str, torch.Tensor]], take: Callable[[str, torch.Tensor], None]) -> None:
        """Call ``take`` with each name and tensor of ``stream``.

        Walk to the end even if ``take`` raises, because the ranks may wait for each other during the stream.
        """
        self._common, self._shares = [], [0] * self.ranks
        failure: Exception | None = None
        for each in stream:
            try:
                if failure is None:
                    take(*_pair(each))
            except Exception as error:
                if self.ranks == 1:
                    raise
                failure = error
        if failure is not None:
            raise failure

    def held(self, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors, or parts of tensors, of a state dict that this rank has, by name.

        Nested tensors are named by their path, joined with dots.
        """
        weights = stateful_to_dict(weights)
        if any(isinstance(value, (Mapping, list)) for value in weights.values()):
            weights = flatten_state_dict(dict(weights))[0]
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        return {name: tensor for name, tensor in tensors.items() if is_here(tensor)}

    def own(self, forms: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Choose the parts that this rank publishes, on all ranks together. The first rank with a part publishes it.

        Raises ``UnsavableStateError`` on all ranks if parts are missing or do not fit together.
        """
        if self.ranks == 1 and forms:
            return list(forms)
        owners: dict[str, dict[Ranges, int]] = {}
        wholes: dict[str, TensorEntry] = {}
        for rank, theirs in enumerate(self.gather([form for form in forms if form.nbytes or 0 in (form.whole or ())])):
            for form in theirs:
                first = wholes.setdefault(form.name, form)
                if (form.dtype, form.whole) != (first.dtype, first.whole):
                    raise UnsavableStateError(
                        f"{form.name!r} is {form.dtype}, {form.whole}, on rank {rank}, and on another {first.dtype},"
                        f" {first.whole}"
                    )
                owners.setdefault(form.name, {}).setdefault(form.ranges, rank)
        if not owners:
            raise UnsavableStateError("there is no tensor in what is to be published")
        for name, parts in owners.items():
            _check_whole(wholes[name], parts)
        return [form for form in forms if owners.get(form.name, {}).get(form.ranges) == self.rank]

    def form(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorEntry:
        """Describe the published form of a tensor. Raises ``UnsavableStateError`` if it cannot be published.

        Args:
            name: The tensor's name.
            tensor: The tensor of this rank.
            dtype: The dtype to publish a floating-point tensor in; None: the tensor's dtype.
        """
        if not isinstance(tensor, torch.Tensor):
            raise UnsavableStateError(f"{name!r} is a {type(tensor).__name__}, and no tensor")
        shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            if any(isinstance(placement, Partial) for placement in tensor.placements):
                raise UnsavableStateError(f"{name!r} is a sum that is still to be taken over its ranks")
            shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            if self.ranks == 1 and tuple(shape) != tuple(tensor.shape):
                raise UnsavableStateError(
                    f"{name!r} is sharded over ranks, and this publisher is of one process: give it the process group"
                )
        elif type(tensor) not in PLAIN or has_no_bytes(tensor):
            raise UnsavableStateError(f"{name!r} is a {type(tensor).__name__} that has no plain bytes to publish")
        local(name, tensor)
        # Do not convert 8-bit tensors, because they are meaningless without their separate scales.
        converts = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        published = dtype if converts and dtype is not None else tensor.dtype
        return TensorEntry(name, published, tuple(shape), tuple(offsets), tuple(tensor.shape))

    def takes(self, form: TensorEntry, tensor: torch.Tensor) -> bool:
        """Return whether this rank publishes ``tensor``, the next tensor of the stream.

        All ranks have every plain tensor. The rank with the fewest bytes so far publishes the tensor, and the other
        ranks do not keep it. All ranks compute the same assignment.
        """
        if isinstance(tensor, DTensor):
            return True
        taker = self._shares.index(min(self._shares))
        self._shares[taker] += form.nbytes
        self._common.append(form.name)
        return taker == self.rank

    def have_walked(self, as_planned: bool) -> bool:
        """Return whether the stream was as planned on all ranks.

        Raises ``UnsavableStateError`` on all ranks if their streams differed, because the assignment is then unknown.
        """
        what = xxh3_64_hexdigest(repr(self._common).encode()), tuple(self._shares)
        told = self.gather((as_planned, what))
        if any(theirs != what for _, theirs in told):
            raise UnsavableStateError(
                "the ranks that publish together were given streams of different tensors: give all of them the same"
                " tensors, in the same order, or state dicts"
            )
        return all(theirs for theirs, _ in told)

    def check_kept(self, left: Collection[str], kept: Collection[str]) -> None:
        """Raise ``UnsavableStateError`` on all ranks unless a rank has kept (``kept``) each name in any ``left``."""
        told = self.gather((list(left), list(kept) if self.ranks > 1 else []))
        there = {name for _, theirs in told for name in theirs}
        if lost := [name for theirs, _ in told for name in theirs if name not in there]:
            raise UnsavableStateError(
                f"{lost[0]!r} did not come along the stream of the rank that had published it: give all ranks that have"
                " a tensor the same streams, or publish again"
            )


def local(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of the tensor. Raises ``UnsavableStateError`` if the part has no plain bytes."""
    return plain_part(tensor.to_local(), name).detach() if isinstance(tensor, DTensor) else tensor.detach()


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether this process has ``tensor`` or a part of the tensor."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def _check_whole(entry: TensorEntry, parts: Collection[Ranges]) -> None:
    """Raise ``UnsavableStateError`` unless ``parts`` make up the tensor of ``entry``."""
    name, whole = entry.name, entry.whole or ()
    if (gap := missing(whole, parts)) is not None:
        raise UnsavableStateError(f"of {name!r}, {whole}, no rank has {shown(gap)}")
    if (twice := common(parts)) is not None:
        raise UnsavableStateError(
            f"of {name!r}, {whole}, two ranks have {shown(twice)} as parts that are neither the same nor apart"
        )


def _pair(entry: Any) -> tuple[str, torch.Tensor]:
    """Return ``entry`` of a stream. Raises ``TypeError`` if ``entry`` is not a pair of name and tensor."""
    is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2
    if is_pair and isinstance(entry[1], torch.Tensor):
        return entry[0], entry[1]  # invalid names are refused later, as for state dicts
    found = f"({', '.join(type(each).__name__ for each in entry)})" if is_pair else type(entry).__name__
    raise TypeError(f"publish takes a state dict, or pairs of name and tensor, and here is {found} in the place of one")
