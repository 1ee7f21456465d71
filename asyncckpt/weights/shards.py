"""Sharding: a process publishes alone, or the ranks of a group together, each the part it has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncckpt.errors import RankFailedError, UnsavableStateError, decode, encode, located
from asyncckpt.planning.structure import PLAIN, has_no_bytes, stateful_to_dict
from asyncckpt.weights.layout import TensorEntry

T = TypeVar("T")


class Sharding:
    """What of the weights this process publishes. ``rank`` of ``ranks``."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """``process_group``: those that publish together; None: this process alone."""
        self._process_group = process_group
        self._in_step = True
        # Names of tensors that are no DTensors: this rank's, the same until the others know, the first rank's.
        self._plain = set[str]()
        self._untold_plain: set[str] | None = None
        self._plain_of_first = set[str]()
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.ranks = 1 if process_group is None else dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this process is not in the process group it should publish with")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks do the same in here, a ``gather`` last. Where one raises, all do, at their next ``gather``."""
        self._in_step = True
        try:
            yield
        except BaseException as error:
            if self.ranks > 1 and self._in_step:
                with contextlib.suppress(RankFailedError):
                    self._exchange(None, encode(located(error, rank=self.rank, otherwise=RankFailedError)))
            raise

    def gather(self, value: T) -> list[T]:
        """What each rank has, in their order. Raises ``RankFailedError`` where one has failed, or does not answer."""
        if self.ranks == 1:
            return [value]
        told = self._exchange(value, None)
        for rank, (_, failure, _) in enumerate(told):
            if failure is not None:
                self._in_step = False  # they know
                theirs = decode(failure)
                raise RankFailedError(f"rank {rank} cannot publish: {theirs.message}", rank=rank) from theirs
        if lost := self._plain - self._plain_of_first:
            self._plain = set()
            raise UnsavableStateError(
                f"{min(lost)!r} is no DTensor: such the first rank publishes for all, and it has none of that name"
            )
        return [each for each, *_ in told]

    def _exchange(self, value: Any, failure: bytes | None) -> list[tuple[Any, bytes | None, set[str] | None]]:
        told: list[Any] = [None] * self.ranks
        in_step, self._in_step = self._in_step, False
        try:
            dist.all_gather_object(told, (value, failure, self._untold_plain), group=self._process_group)
        except RuntimeError as error:
            raise RankFailedError(f"the ranks that publish together lost each other: {error}") from error
        self._in_step = in_step
        self._untold_plain = None
        if told[0][2] is not None:
            self._plain_of_first = told[0][2]
        return told

    def walk(self, stream: Iterable[tuple[str, torch.Tensor]], take: Callable[[str, torch.Tensor], None]) -> None:
        """Call ``take`` with each name and tensor of ``stream``.

        Other ranks may walk along it, and wait for each other: so to its end, also where ``take`` raises.
        """
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

    def own(self, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Those tensors of a state dict that this rank publishes, by name; nested ones by their path, with dots."""
        weights = stateful_to_dict(weights)
        if any(isinstance(value, (Mapping, list)) for value in weights.values()):
            weights = flatten_state_dict(dict(weights))[0]
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        if self.ranks == 1:
            return tensors
        plain = {name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        if plain != self._plain:
            self._plain = self._untold_plain = plain
        return {name: tensor for name, tensor in tensors.items() if self.is_own(tensor)}

    def form(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorEntry:
        """What is published of a tensor. Raises ``UnsavableStateError`` where that is not to be.

        Args:
            name: Its name.
            tensor: This rank's own.
            dtype: What it is published as, if it is of floating point; None: what it is.
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
        # A tensor of eight bits has scales beside it, and means nothing without them.
        converts = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
        published = dtype if converts and dtype is not None else tensor.dtype
        return TensorEntry(name, published, tuple(shape), tuple(offsets), tuple(tensor.shape))

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether this rank publishes ``tensor``. All ranks have what is no DTensor, and the first one publishes it."""
        if self.ranks == 1 or not isinstance(tensor, DTensor):
            return self.rank == 0
        coordinate = tensor.device_mesh.get_coordinate()
        return coordinate is not None and not any(
            isinstance(placement, Replicate) and at for placement, at in zip(tensor.placements, coordinate, strict=True)
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that this process has."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: Any = tensor.to_local()
    bytes_here: torch.Tensor = part.wait() if hasattr(part, "wait") else part  # a collective may be filling it
    return bytes_here.detach()


def _pair(entry: Any) -> tuple[str, torch.Tensor]:
    """``entry``, of a stream. Raises ``TypeError`` where it is no pair of name and tensor."""
    is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2
    if is_pair and isinstance(entry[1], torch.Tensor):
        return entry[0], entry[1]  # a name that is none is refused as those of a state dict are
    found = f"({', '.join(type(each).__name__ for each in entry)})" if is_pair else type(entry).__name__
    raise TypeError(f"publish takes a state dict, or pairs of name and tensor, and here is {found} in the place of one")
