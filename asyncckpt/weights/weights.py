"""Weights: one published version under a lease, as a mapping of names to tensors."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from asyncckpt.devices.kinds import wait_for
from asyncckpt.errors import ClosedError, MismatchError
from asyncckpt.shm.segment import Descriptor
from asyncckpt.shm.slots import PublishedVersion, reopen
from asyncckpt.weights.layout import Ranges, TensorEntry, copied_as, missing, shown
from asyncckpt.weights.lease import Lease
from asyncckpt.weights.patch import Change, change_of

logger = logging.getLogger(__name__)


class Weights(Mapping[str, torch.Tensor]):
    """The tensors of one version by name, in the trainer's shared memory. Nothing is copied.

    The reader may change the tensors in place, as loaders of some models do. No other process sees the changes. Only a
    tensor with parts on several ranks is copied: each access assembles the tensor in new memory.

    No other process writes to the memory during the lease. The lease ends with ``release``, at the end of a ``with``
    block, or with this process. If tensors are still in use, the lease ends when the last tensor is gone.
    """

    def __init__(
        self,
        published: PublishedVersion,
        parts: Sequence[Lease],
        prefix: str,
        other: Callable[[int], Weights | None] = lambda _: None,
        device: torch.device | None = None,
    ) -> None:
        """Collect the tensors of one version.

        Args:
            published: The version.
            parts: The leases on the slots of the ranks, by rank.
            prefix: Only tensors with this prefix are used. The prefix is removed from the names.
            other: Returns another version with the same prefix if it is in memory. Kept until the lease ends.
            device: The device that the memory is pinned for, or None. The device may still be copying at the end of the
                lease.
        """
        self.version = published.version
        self.epoch = published.epoch
        """The publisher's epoch. A restarted publisher has a greater epoch."""
        self._parts: Sequence[Lease] = parts
        self._device = device
        self._other: Callable[[int], Weights | None] = other
        self._chunks: dict[str, dict[Ranges, tuple[Lease, TensorEntry]]] = {}
        for part in parts:
            for name, entry in part.entries.items():
                if name.startswith(prefix):
                    self._chunks.setdefault(name[len(prefix) :], {}).setdefault(entry.ranges, (part, entry))
        self._released = False

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor with this name.

        Raises ``KeyError``, ``ClosedError`` after ``release``, and ``MismatchError`` if a part is missing.
        """
        chunks = self._chunks[name]
        if self._released:
            raise ClosedError(f"the lease on version {self.version} has ended; acquire it again")
        part, entry = next(iter(chunks.values()))
        whole = _whole(chunks)
        if entry.shape == whole:
            return part.tensor(entry)
        if (gap := missing(whole, chunks)) is not None:
            raise MismatchError(f"of {name!r}, {whole}, nobody has published {shown(gap)} in version {self.version}")
        as_copied = copied_as(entry.dtype)
        tensor = torch.empty(whole, dtype=as_copied, device="cpu")
        for at, (part, each) in chunks.items():
            tensor[tuple(slice(side.start, side.stop) for side in at)] = part.tensor(each).view(as_copied)
        return tensor.view(entry.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __repr__(self) -> str:
        return f"<Weights version {self.version}, {len(self)} tensors{', released' if self._released else ''}>"

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def nbytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(entry.nbytes for chunks in self._chunks.values() for _, entry in chunks.values())

    def changed_since(self, version: int) -> set[str]:
        """Return the names of tensors with other bytes than in another ``version``. Compare the published bytes.

        Return all names if the other version is no longer in memory. Takes as long as reading both versions.
        """
        other = self._other(version)
        if other is None or self._released:
            return set(self)
        with other:
            return {name for name, chunks in self._chunks.items() if not _same(chunks, other._chunks.get(name, {}))}

    def patch(self, since: int, *, epoch: int | None = None) -> Iterator[Change] | None:
        """Return the changed elements since another version, for an engine with that version.

        The published bytes are compared tensor by tensor, as the changes are requested. ``asyncckpt.weights.apply``
        applies the changes. Both versions stay leased until the last change was requested.

        Args:
            since: The version of the engine.
            epoch: The ``epoch`` of the engine's weights. Default: the epoch of these weights.

        Returns:
            The changes; None if the engine must take the whole version: the other version is no longer in memory, or
            has other names, shapes or dtypes, or these weights were released.
        """
        old, new = self._other(since), self._other(self.version)
        if old is None or new is None or old._forms != new._forms:
            return None
        if (old.epoch, new.epoch) != (self.epoch if epoch is None else epoch, self.epoch):
            return None
        return _changes(old, new)

    @property
    def _forms(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and the shape of each tensor."""
        return {name: (next(iter(chunks.values()))[1].dtype, _whole(chunks)) for name, chunks in self._chunks.items()}

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield all tensors in groups of at most ``nbytes`` bytes. A larger tensor comes alone. Nothing is copied."""
        if nbytes <= 0:
            raise ValueError(f"a bucket has some bytes, not {nbytes}")
        bucket: list[tuple[str, torch.Tensor]] = []
        left = nbytes
        for name in self:
            size = sum(entry.nbytes for _, entry in self._chunks[name].values())
            if bucket and size > left:
                yield bucket
                bucket, left = [], nbytes
            bucket.append((name, self[name]))
            left -= size
        if bucket:
            yield bucket

    @contextlib.contextmanager
    def safetensors(self, folder: str | os.PathLike[str] | None = None) -> Iterator[list[str]]:
        """Offer the memory as safetensors files, for readers that need a path. Readers map the memory without a copy.

        Yields the paths of links in ``folder`` (None: a temporary folder), one for each publishing rank. The links are
        removed at the end of the block. Readers must not use the memory after the end of the lease.

        Raises ``ValueError`` for weights of a checkpoint, which has another format, and for dtypes that the format
        lacks. Also raises ``ValueError`` for sharded weights, because each file would have a part of a tensor under the
        name of the whole tensor.
        """
        if not all(part.is_file for part in self._parts):
            raise ValueError("weights of a checkpoint are no safetensors files; only a WeightPublisher's are")
        entries = [entry for chunks in self._chunks.values() for _, entry in chunks.values()]
        if any(entry.shape != entry.whole for entry in entries):
            raise ValueError("some tensors are in parts, one a rank, which no reader of such files puts together")
        if (odd := next((entry for entry in entries if not entry.is_known), None)) is not None:
            raise ValueError(f"{odd.name!r} is {odd.dtype}, which the format of safetensors lacks")
        if self._released or any(part.segment.closed for part in self._parts):
            raise ClosedError(f"the lease on version {self.version} has ended, or its subscriber is closed")
        with contextlib.ExitStack() as stack:
            if folder is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncckpt-"))
            paths = []
            for rank, part in enumerate(self._parts):
                # Use a separate descriptor, because the subscriber may close the segment's descriptor, and its number
                # would be reused.
                file = stack.enter_context(Descriptor.of(reopen, part.segment.fileno(), os.O_RDONLY))
                path = Path(folder, f"weights-{os.getpid()}-{file.fileno()}-{self.version}-{rank}.safetensors")
                path.symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
                stack.callback(path.unlink, missing_ok=True)  # some readers remove the link themselves
                paths.append(os.fspath(path))
            yield paths

    def release(self) -> None:
        """End the lease. If tensors are still in use, the last tensor ends the lease. Safe to call twice.

        If the memory is pinned for a device, first wait for the device's copies.
        """
        self._released = True
        if self._device is not None and self._parts:
            wait_for(self._device)
        parts, self._parts = self._parts, ()
        self._other = lambda _: None
        if not all([part.give_back() for part in parts]):
            logger.info("tensors of version %d are still in use: their memory is kept as it is", self.version)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _changes(old: Weights, new: Weights) -> Iterator[Change]:
    with old, new:
        for name in new:
            if (change := change_of(name, old[name], new[name])) is not None:
                yield change


_Chunks = Mapping[Ranges, tuple[Lease, TensorEntry]]


def _same(chunks: _Chunks, others: _Chunks) -> bool:
    """Return whether two tensors have the same parts with the same bytes."""
    return chunks.keys() == others.keys() and all(
        (entry.dtype, entry.shape) == (others[at][1].dtype, others[at][1].shape) and part.has_same(entry, *others[at])
        for at, (part, entry) in chunks.items()
    )


def _whole(chunks: _Chunks) -> tuple[int, ...]:
    """Return the shape of the whole tensor of these parts."""
    _, first = next(iter(chunks.values()))
    if first.whole is not None:
        return first.whole
    return tuple(max(side.stop for side in sides) for sides in zip(*chunks, strict=True))
