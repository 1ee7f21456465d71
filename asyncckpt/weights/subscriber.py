"""The subscriber, on the reader's side: lease the newest weights in the trainer's shared memory on this host."""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial

import torch

from asyncckpt.budgets import ANSWER_S, NOTICE_S
from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointError,
    ClosedError,
    JobTakenError,
    MismatchError,
    VersionError,
    WeightsTimeoutError,
    WorkerDiedError,
)
from asyncckpt.link.api import SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.endpoint import endpoint_name, runtime_folder
from asyncckpt.link.process import WorkerOptions
from asyncckpt.link.takeover import ReaderClient
from asyncckpt.publication import job_of_checkpoints, job_of_weights
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.weights.lease import Access, Lease, RankPublications
from asyncckpt.weights.weights import Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MirrorOptions:
    """The publication that a host's mirror follows (see ``transfer/locator.py``), and the options of the worker."""

    job: str
    locator: str
    config: Config

    def connect(self) -> ReaderClient | None:
        """Connect to the worker that has the publication on this host. If there is no worker, start one.

        Return None if the worker has just left. Raises ``CheckpointError`` if no worker can be started.
        """
        endpoint = endpoint_name(self.job, 0)
        if (client := ReaderClient.connect(endpoint)) is None:
            self._start(endpoint)
            client = ReaderClient.connect(endpoint)
        if client is None:
            return None
        client.timeout = self.config.timeout
        try:
            if (trouble := client.follow(self.locator)) is not None:
                logger.info("the worker of this host mirrors no publisher: %s", trouble)
        except BaseException as error:
            client.close()
            if isinstance(error, (EOFError, OSError)):
                return None
            raise
        return client

    def _start(self, endpoint: str) -> None:
        config = self.config
        options = WorkerOptions(
            nice=config.nice,
            io_class=config.io_class,
            start_timeout=config.start_timeout,
            ports=config.ports,
            linger=max(config.linger, NOTICE_S),
            endpoint=endpoint,
            job=self.job,
        )
        try:
            worker = _started(options)
        except JobTakenError:  # another reader has started a mirror, or a trainer publishes here
            return
        try:
            trouble = worker.call(config.timeout, SessionApi.follow, self.locator)
            if trouble is not None:
                raise CheckpointError(f"weights of another host cannot be fetched: {trouble}")
        except BaseException as error:
            worker.close(config.timeout)
            if isinstance(error, WorkerDiedError):  # the next connect starts another worker
                logger.warning("the mirror of this host was lost as it began: %s", error)
                return
            raise
        worker.detach()


def _started(options: WorkerOptions) -> WorkerClient:
    """Start a worker. If it dies during its start, start another one. Raises as ``WorkerClient``."""
    try:
        return WorkerClient(options)
    except WorkerDiedError as error:
        logger.warning("the mirror of this host was lost as it started: %s", error)
        return WorkerClient(options)


# The least timeout for the answer of a worker, if the caller has less time left.
_LEAST_ANSWER_S = 1.0
# Polling without a new version: shortest and longest pause between looks at mapped memory, and interval between
# requests to the worker.
_LEAST_PAUSE_S = 0.0005
_MOST_PAUSE_S = 0.01
_ASK_AGAIN_S = 0.05


class WeightSubscriber:
    """Reads the publications of a trainer's ``WeightPublisher``, which has the same user, host and ``address``.

    A subscriber may be created before the trainer starts. It outlives the trainer, and finds a restarted trainer. Any
    thread may call, also in a forked process. Any thread may use and release acquired weights. ``close`` the
    subscriber, use it as a context manager, or drop it. Leased weights stay leased.
    """

    def __init__(
        self, address: str, *, prefix: str = "", locator: str | None = None, config: Config | None = None
    ) -> None:
        """Create a subscriber. This sends no requests.

        Args:
            address: The publisher's address.
            prefix: Only tensors with this prefix are read. Their names lose the prefix.
            locator: For a publisher on another host: the text returned by ``WeightPublisher.serve``, or the path of the
                file that ``serve`` writes. A worker on this host then mirrors the newest version for all readers here.
            config: Supplies ``timeout``, ``linger`` and the options of the mirroring worker. Default: the environment.
        """
        self._address = address
        self._job = job_of_weights(address)
        self._mirror = None if locator is None else MirrorOptions(self._job, locator, Config.given(config))
        self._prefix = prefix
        self._ranks: list[RankPublications] = []
        self._newest: PublishedVersion | None = None
        self._closed = False
        self._lock = threading.RLock()
        _all_subscribers.add(self)

    @classmethod
    def of_checkpoints(
        cls, root: str | os.PathLike[str], *, job_id: str | None = None, prefix: str = ""
    ) -> WeightSubscriber:
        """Create a subscriber for the saves that a ``Checkpointer`` publishes.

        Args:
            root: The checkpointer's folder.
            job_id: The checkpointer's ``Config.job_id``.
            prefix: Only tensors with this prefix are read. Their names lose the prefix. The prefix applies to the names
                in the checkpoint: ``"model."``, with the dot, for a state dict with the weights under "model".
        """
        subscriber = cls(os.fspath(root), prefix=prefix)
        subscriber._job = job_of_checkpoints(root, job_id)
        return subscriber

    def versions(self) -> list[int]:
        """Return the versions that can be acquired now, oldest first."""
        with self._lock:
            self._refresh()
            return [published.version for published in sorted(self._complete())]

    def acquire(
        self,
        min_version: int | None = None,
        *,
        version: int | None = None,
        roll_back: bool = False,
        readonly: bool = False,
        pin: torch.device | str | None = None,
        timeout: float = 60.0,
    ) -> Weights:
        """Lease the newest weights that are complete on all publishing ranks. Nothing is copied.

        Args:
            min_version: Wait for this version or a later one.
            version: Wait for this version, instead of the newest.
            roll_back: Also take a version older than this reader's last version, even if the trainer did not publish it
                with ``roll_back``.
            readonly: Map the weights read-only: writing to a tensor is a segmentation fault. By default the reader may
                change tensors in place. No other process sees the changes. Each changed page takes extra memory.
            pin: A device to copy to. The memory is pinned for the device's driver, once for each slot, so that
                ``tensor.to(device, non_blocking=True)`` runs at the speed of the link. Implies ``readonly``.
            timeout: Timeout in seconds.

        Raises:
            WeightsTimeoutError: The requested weights were not published within ``timeout``.
            MismatchError: No name begins with the prefix.
            VersionError: The newest version is older than this reader's last version, see ``roll_back``.
            ClosedError: This subscriber is closed.
        """
        if version is not None and min_version is not None:
            raise ValueError("version and min_version exclude each other: give one of them")
        version = None if version is None else operator.index(version)
        min_version = None if min_version is None else operator.index(min_version)
        how: Access = torch.device(pin) if pin is not None else "readonly" if readonly else "private"
        deadline = time.monotonic() + timeout
        ask_at, pause = 0.0, _LEAST_PAUSE_S
        while True:
            with self._lock:
                if time.monotonic() >= ask_at:
                    self._refresh(min(ANSWER_S, max(_LEAST_ANSWER_S, deadline - time.monotonic())))
                    ask_at = time.monotonic() + _ASK_AGAIN_S
                if version is None:
                    weights = self._newest_from(min_version or 0, roll_back, how)
                else:
                    weights = self._exactly(version, how)
                if weights is not None:
                    return weights
                if time.monotonic() > deadline:
                    raise WeightsTimeoutError(self._what_is_missing(version, min_version, timeout))
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _MOST_PAUSE_S)

    def close(self) -> None:
        """Unmap all memory that is not leased. Safe to call twice."""
        with self._lock:
            self._closed = True
            for rank in self._ranks:
                rank.close()

    def __enter__(self) -> WeightSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _refresh(self, timeout: float = ANSWER_S) -> None:
        if self._closed:
            raise ClosedError("this subscriber is closed; make a new one")
        self._rank(0).refresh(timeout)
        # The first rank's versions contain the number of ranks.
        for rank in range(1, max((published.ranks for published in self._rank(0).versions()), default=1)):
            self._rank(rank).refresh(timeout)

    def _rank(self, rank: int) -> RankPublications:
        while len(self._ranks) <= rank:
            endpoint = endpoint_name(self._job, len(self._ranks))
            connect = partial(ReaderClient.connect, endpoint) if self._mirror is None else self._mirror.connect
            self._ranks.append(RankPublications(connect))
        return self._ranks[rank]

    def _complete(self) -> set[PublishedVersion]:
        """Return the versions that all ranks have published."""
        by_rank = [rank.versions() for rank in self._ranks]
        return {
            published
            for published in (by_rank[0] if by_rank else ())
            if published.ranks <= len(by_rank) and all(published in each for each in by_rank[: published.ranks])
        }

    def _lease(self, published: PublishedVersion, how: Access) -> Weights | None:
        parts: list[Lease] = []
        for rank in self._ranks[: published.ranks]:
            leases = rank.lease(published, how)
            if leases is None:
                for each in parts:
                    each.give_back()
                return None
            parts += leases
        device = how if isinstance(how, torch.device) else None
        weights = Weights(published, parts, self._prefix, self._older, device)
        if not weights and self._prefix:
            names = [name for part in parts for name in part.entries]
            weights.release()
            raise MismatchError(
                f"at {self._address!r} no tensor's name begins with {self._prefix!r}; they are called {names[:3]}"
            )
        return weights

    def _older(self, version: int) -> Weights | None:
        """Lease a version by its number; None if it is not in memory."""
        with self._lock:
            if not self._closed:
                self._refresh()
            return self._exactly(version, "readonly")

    def _exactly(self, version: int, how: Access) -> Weights | None:
        found = max((each for each in self._complete() if each.version == version), default=None)
        return None if found is None else self._lease(found, how)

    def _newest_from(self, min_version: int, roll_back: bool, how: Access) -> Weights | None:
        """Lease the newest version, or return None. Raises ``VersionError`` for a forbidden roll-back."""
        found, last = max(self._complete(), default=None), self._newest
        if found is None or found.version < min_version:
            return None
        # Ignore an older version of the same epoch. The slot of the newest version may be withdrawn for the moment.
        if last is not None and found < last and found.epoch == last.epoch:
            return None
        # Only a lease guarantees that the version, its epoch and its data belong together.
        weights = self._lease(found, how)
        if weights is None:
            return None
        if last is not None and found.version < last.version and not (found.rolled_back or roll_back):
            weights.release()
            raise VersionError(
                f"version {found.version} is the newest, and this reader has had {last.version}: the trainer was"
                " restarted from an older version; acquire with roll_back=True to take its versions"
            )
        self._newest = found
        return weights

    def _what_is_missing(self, version: int | None, min_version: int | None, timeout: float) -> str:
        later = "" if min_version is None else f" of version {min_version} or later"
        asked = later if version is None else f" of version {version}"
        trouble = next((rank.trouble for rank in self._ranks if rank.trouble), "")
        if not any(rank.is_reached for rank in self._ranks):
            if trouble:
                return f"no weights{asked} at {self._address!r} within {timeout:g} s: {trouble}"
            return (
                f"no publisher was found at {self._address!r} within {timeout:g} s; is the trainer running, on this"
                f" host, as this user, and with the same runtime folder (here it is {runtime_folder()})?"
            )
        complete = self._complete()
        there = ", ".join(str(published.version) for published in sorted(complete)) or "none"
        half = {published for rank in self._ranks for published in rank.versions()} - complete
        hint = ""
        if half:
            hint = f"; {max(half).ranks} ranks publish, and not all of them on this host: give a locator"
        elif trouble:
            hint = f"; the publisher sends nothing newer: {trouble}"
        return (
            f"no weights{asked} at {self._address!r} within {timeout:g} s; the published versions, in order:"
            f" {there}{hint}"
        )


_all_subscribers: weakref.WeakSet[WeightSubscriber] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for subscriber in list(_all_subscribers):
        subscriber._lock = threading.RLock()  # another thread may have held the lock


os.register_at_fork(after_in_child=_after_fork_in_child)
