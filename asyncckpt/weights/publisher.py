"""The publisher, on the trainer's side: copy the newest weights to shared memory, for readers on the same host."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncckpt.config import Config
from asyncckpt.errors import ClosedError, JobTakenError, StorageError, VersionError, WeightsTimeoutError
from asyncckpt.link.api import SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.takeover import Takeover
from asyncckpt.planning.structure import StructureChanged
from asyncckpt.publication import Publication, Versions, job_of_weights
from asyncckpt.ranks.group import own_address
from asyncckpt.ranks.ranks import Ranks
from asyncckpt.shm.slots import MAX_SLOTS, PublishedVersion
from asyncckpt.staging.host_copy import copy_threads
from asyncckpt.supervisor import Supervisor
from asyncckpt.threads import Turn
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.locator import Locator
from asyncckpt.weights.buffer import WeightBuffer
from asyncckpt.weights.layout import copied_as
from asyncckpt.weights.plan import WeightPlan
from asyncckpt.weights.shards import Sharding, publishing_ranks
from asyncckpt.weights.streamed_copies import StreamCopy, StreamedCopies

logger = logging.getLogger(__name__)

_KEY_BYTES = 32


class ServedPublication:
    """Serves one publisher's ranks to other hosts, from ``begin`` on. All ranks call each method together."""

    def __init__(self, sharding: Sharding, config: Config) -> None:
        """Serve nothing yet. ``config`` supplies ``transport``, ``timeout``, and the default ``address``."""
        self._sharding, self._config = sharding, config
        self._host = self._file = ""
        self._key = b""
        self._client: WorkerClient | None = None
        self._own: TransferAddress | None = None
        self._locator: Locator | None = None

    @property
    def locator(self) -> Locator | None:
        """The locator of the serving ranks; None if the ranks do not serve."""
        return self._locator

    def begin(
        self, client: WorkerClient, address: str | None, file: str | os.PathLike[str] | None, key: bytes | None
    ) -> Locator:
        """Begin serving, see ``WeightPublisher.serve``. ``client``: the worker of this rank."""
        self._host = own_address(address or self._config.address)
        self._file = os.path.abspath(file) if file is not None and self._sharding.rank == 0 else ""
        self._key = self._sharding.gather(self._first_key() if key is None else key)[0]
        self._client = self._locator = None
        own = self._sharding.gather(self.at(client))
        return self.update([each for each in own if each is not None])

    def at(self, client: WorkerClient | None) -> TransferAddress | None:
        """Return the address where this rank's worker serves; None if it does not serve. Raises ``StorageError``."""
        if self._key and client is not None and client is not self._client:
            # Listen at all addresses, because this host cannot know how other hosts resolve its name.
            served = client.call(self._config.timeout, SessionApi.serve, self._key, "")
            if served.trouble is not None:
                raise StorageError(f"the weights cannot be served to other hosts: {served.trouble}")
            self._client, self._own = client, TransferAddress(self._host, served.port)
        return self._own

    def update(self, addresses: Sequence[TransferAddress]) -> Locator:
        """Return the locator for ``addresses``, by rank, as ``at`` returned them. Write a new locator to the file."""
        locator = Locator(self._key, tuple(addresses), self._config.transport)
        if addresses and locator != self._locator:  # all ranks decide the same here
            if self._file:
                try:
                    locator.write(self._file)
                except OSError as error:
                    raise StorageError(f"the file for the locator cannot be written: {error}") from error
            self._sharding.gather(None)  # if one rank has failed, all ranks fail
            self._locator = locator
        return locator

    def _first_key(self) -> bytes:
        """Return the key in the file of an earlier publisher, so that its readers can continue. Otherwise a new key."""
        if self._file:
            with suppress(OSError, ValueError):
                return Locator.read_own(self._file).key
        return secrets.token_bytes(_KEY_BYTES)


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PAUSE_S = 0.002
_TAKES = "publish takes a state dict, or pairs of name and tensor"


class WeightPublisher:
    """Publishes weights, version after version, to every ``WeightSubscriber`` with its ``address`` on this host.

    A worker process holds the memory, so readers can continue when the trainer dies. A restarted trainer continues with
    the same memory and versions. Only one thread at a time may call. ``close`` the publisher, or use it as a context
    manager.
    """

    def __init__(
        self,
        address: str,
        *,
        slots: int = 3,
        when_busy: Literal["skip", "wait"] = "skip",
        process_group: ProcessGroup | Ranks | None = None,
        config: Config | None = None,
    ) -> None:
        """Allocate no memory and start no worker yet. Raises ``ValueError`` for an argument that is out of range.

        Args:
            address: Any text. Readers find this publisher by the address.
            slots: Maximum number of images of the weights in memory, 2 or more. One slot has the newest version, and
                one slot is for the next version. More slots are allocated if readers keep older versions. The memory of
                unused extra slots is given back.
            when_busy: The behavior if readers hold all slots except the slot of the newest version. "skip": skip the
                publication. "wait": wait until a slot is free, at most ``Config.timeout`` seconds.
            process_group: The ranks that publish together, or other ``Ranks``. All ranks make the same calls,
                and each rank publishes its part of sharded weights (DTensors). Readers need all ranks on their host. If
                None, this process publishes alone.
            config: Supplies ``timeout``, ``linger`` and the options of the worker process. Default: the environment.
        """
        if not address:
            raise ValueError("an address is a text that is not empty")
        if not 2 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots is from 2 to {MAX_SLOTS}, not {slots}")
        if when_busy not in ("skip", "wait"):
            raise ValueError(f"when_busy is 'skip' or 'wait', not {when_busy!r}")
        self.address = address
        self._slots = slots
        self._when_busy = when_busy
        self._config = replace(Config.given(config), metrics_folder=None)  # metrics are only for saves
        self._sharding = Sharding(publishing_ranks(process_group))
        self._supervisor = Supervisor(
            self._config,
            job_of_weights(address),
            on_death=lambda: logger.warning("the worker of the weights at %r has died: another is started", address),
            hand_over=self._hand_over,
            replace=self._replace_worker,
            close=lambda linger: self._close(linger=linger),
        )
        self._plan: WeightPlan | None = None
        # Versions go to the last buffer. Buffers of other structures are kept until the last buffer has a version.
        self._buffers: list[WeightBuffer] = []
        self._versions = Versions()
        self._threads, self._streamed = copy_threads(), StreamedCopies()
        self._timings: dict[str, float] = {}
        self._served = ServedPublication(self._sharding, self._config)
        self._closed = self._has_left = False
        self._turn = Turn()
        self._supervisor.register()

    @property
    def worker(self) -> WorkerClient | None:
        """The worker, or None before its start."""
        return self._supervisor.client

    def publish(
        self,
        weights: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        dtype: torch.dtype | None = None,
        roll_back: bool = False,
    ) -> Publication:
        """Copy ``weights`` and publish them atomically. The caller may change the weights when this returns.

        After an error, nothing is published. The newest version and all leased versions stay.

        Args:
            weights: A state dict, as for ``Checkpointer.save`` (non-tensors are ignored). Or pairs of name and tensor:
                each tensor is copied before the next pair is taken.
            version: 0 or more, and greater than the last published version, including versions of an earlier trainer.
            dtype: The dtype to convert floating-point tensors to, except tensors of 8 bits.
            roll_back: Allow a version that is not newer than the last version. Readers take this version.

        Returns:
            The publication; ``skipped`` is True if readers hold all slots.

        Raises:
            VersionError, UnsavableStateError, OutOfMemoryError, ClosedError: See their docstrings.
            JobTakenError: Another process publishes under this address.
            WorkerDiedError: The worker died. The next call starts another worker.
            RankFailedError: Another rank raised, or did not answer within the timeout of the process group.
            WeightsTimeoutError: ``when_busy`` is "wait", and readers held all slots until the timeout.
        """
        with self._turn.take(), self._sharding.together():
            _check(weights, dtype)
            self._running_client()  # may take over an earlier publisher's worker
            published = self._versions.admit(version, self._sharding.ranks, self._sharding.gather, roll_back=roll_back)
            self._timings = {"plan_s": 0.0, "wait_s": 0.0, "stage_s": 0.0}
            slot = self._copy_all(weights, dtype) if isinstance(weights, Mapping) else self._copy_each(weights, dtype)
            # Publish only after all ranks have copied.
            told = self._sharding.gather((published, self._served.at(self.worker)))
            if len({each for each, _ in told}) > 1:
                versions = ", ".join(str(each.version) for each, _ in told)
                raise VersionError(f"the ranks do not publish the same version, but {versions}")
            self._served.update([address for _, address in told if address is not None])
            self._sharding.part()
            self._show(slot, published)
            nbytes = 0 if slot is None or self._plan is None else self._plan.places.nbytes
            done = Publication(published.version, published.epoch, slot is None, nbytes, self._timings)
            if not done.skipped:
                self._supervisor.listeners.tell(done.event(self._sharding.rank, self.address))
            return done

    def prepare(self, weights: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> None:
        """Start the worker, plan for ``weights`` in ``dtype``, and allocate two slots, to make publications faster.

        All ranks call together. Raises as ``publish`` does.
        """
        with self._turn.take(), self._sharding.together():
            self._running_client()  # may take over an earlier publisher's worker
            plan, _ = self._planned(weights, dtype)
            self._buffer_for(plan).fill(plan)
            self._sharding.gather(None)

    @property
    def locator(self) -> str | None:
        """The current locator; None if nothing is served. The locator changes after a worker's death."""
        return None if self._served.locator is None else str(self._served.locator)

    def serve(
        self,
        address: str | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        key: bytes | None = None,
    ) -> str:
        """Serve the publications to readers on other hosts, see ``WeightSubscriber``. All ranks call together.

        Args:
            address: Name or address of this host for other hosts. None: ``Config.address``.
            file: A path where the first rank also writes the locator, readable only by this user. The file is rewritten
                when the locator changes after the death of a worker. A restarted trainer keeps the key in the file.
            key: 32 unguessable bytes, shared by all readers. Default: the key in the file, or a new key.

        Returns:
            The locator. Any process with the locator can read the weights.

        Raises:
            StorageError: The worker cannot serve, or the file cannot be written. Further errors as in ``publish``.
        """
        with self._turn.take(), self._sharding.together():
            return str(self._served.begin(self._running_client(), address, file, key))

    def close(self) -> None:
        """End the worker and release the memory. Readers keep the versions they have leased. Safe to call twice."""
        self._close(linger=False)

    def _close(self, *, linger: bool) -> None:
        with self._turn.take():
            if self._has_left:
                return
            self._closed = True
            if self._supervisor.is_forked:
                return
            failure = self._supervisor.leave(linger=linger)
            while self._buffers:
                self._buffers[-1].close()
                self._buffers.pop()
            self._threads.close()
            self._supervisor.close()
            self._has_left = True  # set last, so that a call after an interruption can finish
            if failure is not None:
                raise failure

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Let the worker linger after an error, because the training is likely to be restarted.
        self._close(linger=kind is not None and issubclass(kind, Exception))

    # The steps of a publication.

    def _running_client(self) -> WorkerClient:
        if self._closed:
            raise ClosedError("this publisher is closed; make a new one")
        try:
            return self._supervisor.running(self._sharding.rank)
        except JobTakenError as error:
            raise JobTakenError(
                f"another process publishes at {self.address!r}, or has just died: give each publisher its own"
                f" address; if these are the ranks of a job, give all of them the process group ({error})"
            ) from error

    def _hand_over(self, client: WorkerClient, predecessor: Takeover | None, is_attached: bool) -> None:
        while is_attached and self._buffers:  # left by an interrupted call
            self._buffers.pop().close()
        if predecessor is not None and not self._buffers:  # left by an earlier publisher
            for each in predecessor.published:
                control = predecessor.segments[each.segment]
                images = [predecessor.segments[number] for number in each.layout.slots]
                self._buffers.append(WeightBuffer(control, images, client, self._config.timeout))
                if is_attached:
                    self._buffers[-1].stay(each.segment, each.layout.slots)
            # Unlike checkpoints, versions have no folder that a user could remove. So all versions count until the
            # worker has left.
            self._versions.inherit({version: True for buffer in self._buffers for version in buffer.published()})
        if not is_attached:
            for buffer in self._buffers:
                buffer.hand_over(client)

    def _replace_worker(self) -> None:
        with self._turn.take():
            self._running_client()

    def _show(self, slot: int | None, published: PublishedVersion) -> None:
        self._versions.log(published.version, f"readers at {self.address!r} have all slots" if slot is None else None)
        if slot is not None:
            self._buffers[-1].publish(slot, published)
            self._versions.note(published)
            for buffer in self._buffers[:-1]:
                buffer.give_back()
            del self._buffers[:-1]

    def _planned(
        self, weights: Mapping[str, Any], dtype: torch.dtype | None
    ) -> tuple[WeightPlan, Sequence[torch.Tensor]]:
        """Return the plan, and the tensors that this rank publishes. All ranks call together."""
        held = self._sharding.held(weights)
        plan, tensors = self._plan, None
        if plan is not None:
            try:
                tensors = plan.capture(held, dtype)
            except StructureChanged as error:
                logger.info("the weights at %r are planned anew: %s", self.address, error)
        if not all(self._sharding.gather(tensors is not None)) or plan is None or tensors is None:
            self._plan = None  # if this fails on a rank, all ranks plan again
            plan = self._plan = WeightPlan.make(held, dtype, self._sharding)
            tensors = plan.capture(held, dtype)
        return plan, tensors

    def _buffer_for(self, plan: WeightPlan) -> WeightBuffer:
        """Return the buffer for images of ``plan``, and make it the last buffer."""
        buffer = next((buffer for buffer in self._buffers if buffer.is_for(plan)), None)
        if buffer is None:
            buffer = WeightBuffer.allocate(self._running_client(), self._config.timeout)
        else:
            self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _claim(self, plan: WeightPlan) -> int | None:
        """Claim a slot for ``plan`` on all ranks, or return None on all ranks."""
        deadline = time.monotonic() + self._config.timeout
        buffer = self._buffer_for(plan)
        while True:
            slot = buffer.claim(plan, self._slots)
            if all(self._sharding.gather(slot is not None)):
                return slot
            if self._when_busy == "skip":
                return None
            if time.monotonic() > deadline:
                raise WeightsTimeoutError(
                    f"readers have kept all slots at {self.address!r} for {self._config.timeout:g} s; have more slots,"
                    " or when_busy='skip'"
                )
            time.sleep(_PAUSE_S)

    def _copy_all(self, weights: Mapping[str, Any], dtype: torch.dtype | None) -> int | None:
        """Copy into a slot, and return the slot; None if all ranks skip the publication."""
        with _timed(self._timings, "plan_s"):
            plan, tensors = self._planned(weights, dtype)
        with _timed(self._timings, "wait_s"):
            slot = self._claim(plan)
        if slot is not None:
            with _timed(self._timings, "stage_s"):
                self._buffers[-1].copy(slot, plan, tensors, self._threads)
        return slot

    def _copy_each(self, stream: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> int | None:
        """Do the same as ``_copy_all`` for a stream of tensors. A tensor may be gone when the next tensor comes."""
        plan = self._plan
        known = all(self._sharding.gather(plan is not None and plan.dtype == dtype))
        with _timed(self._timings, "wait_s"):
            slot = self._claim(plan) if known and plan is not None else None
        if known and slot is None:
            self._sharding.walk(stream, lambda *_: None)  # walk to the end, because other ranks may wait for this rank
            return None
        planned = None
        if plan is not None and slot is not None:
            planned = plan, partial(self._buffers[-1].views, slot, plan)
        with _timed(self._timings, "stage_s"):
            copy = StreamCopy(self._sharding, dtype, self._streamed, planned)
            with self._streamed:
                self._sharding.walk(stream, copy.take)
            done = self._sharding.have_walked(copy.is_as_planned)
            kept = {} if done else copy.tensors()
        if not done:
            self._plan = None  # if this publication fails, the next one must keep all tensors
            self._sharding.check_kept(copy.left_to_others, kept)
        return slot if done else self._copy_all(kept, dtype)


@contextlib.contextmanager
def _timed(timings: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    timings[phase] += time.perf_counter() - begun


def _check(weights: object, dtype: object) -> None:
    if isinstance(weights, torch.nn.Module):
        raise TypeError("publish takes a state dict: give it module.state_dict()")
    if isinstance(weights, (str, bytes, type, torch.Tensor)) or not isinstance(weights, Iterable):
        raise TypeError(f"{_TAKES}, and this is a {type(weights).__name__}")
    # Torch can convert only to these dtypes.
    converts = isinstance(dtype, torch.dtype) and dtype.is_floating_point and copied_as(dtype) is dtype
    if dtype is not None and not converts:
        raise ValueError(f"dtype is one of torch's of floating point, not {dtype!r}")
