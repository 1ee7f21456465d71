"""The trainer's end: puts its newest weights where readers of its host can take them."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncckpt.address import job_of_weights
from asyncckpt.config import Config
from asyncckpt.errors import (
    ClosedError,
    JobTakenError,
    UnsavableStateError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.host_copy import copy_pool
from asyncckpt.shm.slots import MAX_SLOTS
from asyncckpt.structure import StructureChanged
from asyncckpt.versions import Publication, Versions
from asyncckpt.weights.image import Form
from asyncckpt.weights.plan import WeightPlan
from asyncckpt.weights.sharing import Sharing, local
from asyncckpt.weights.shelf import Shelf
from asyncckpt.worker.client import WorkerClient, deserted
from asyncckpt.worker.door import door_name
from asyncckpt.worker.succession import start_worker
from asyncckpt.worker.visit import Visit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_PAUSE_S = 0.002


class WeightPublisher:
    """Publishes weights, version after version, for every ``WeightSubscriber`` with its ``address`` on this host.

    The memory is held by a worker process, so readers go on when the trainer dies, and one that is started in its place
    goes on where it was. The methods are for one thread at a time. ``close`` it, or use it as a context manager.
    """

    def __init__(
        self,
        address: str,
        *,
        slots: int = 3,
        when_busy: Literal["skip", "wait"] = "skip",
        process_group: ProcessGroup | None = None,
        config: Config | None = None,
    ) -> None:
        """``address``: any text, by which readers find this.

        ``slots``: images of the weights in memory, 2 or more, taken as they are needed: one to publish in, the others
        are the newest versions, which stay readable. A slot that is read is left alone; when all but that with the
        newest version are, a publication is skipped (``when_busy="skip"``), or waits for a reader to end, at most
        ``Config.timeout`` seconds.

        ``process_group``: its ranks publish together, each its part of sharded weights (DTensors), by the same calls;
        readers are to be where all of them are. None: this process alone. Of ``config``: ``timeout``, ``linger`` and
        what is about the worker process.
        """
        if not address:
            raise ValueError("an address is a text that readers are told, and not empty")
        if not 2 <= slots <= MAX_SLOTS:
            raise ValueError(f"slots is from 2 to {MAX_SLOTS}, not {slots}")
        if when_busy not in ("skip", "wait"):
            raise ValueError(f"when_busy is 'skip' or 'wait', not {when_busy!r}")
        self.address = address
        self._slots = slots
        self._when_busy = when_busy
        self._config = config or Config()
        self._sharing = Sharing(process_group)
        self._door = door_name(job_of_weights(address), self._sharing.rank)
        self._client: WorkerClient | None = None
        self._plan: WeightPlan | None = None
        # The last one is published in; those before it, of other structures, are left until that has a version.
        self._shelves: list[Shelf] = []
        self._versions = Versions()
        self._pool = copy_pool()
        self._skips = False
        self._closed = False
        self._lock = threading.Lock()

    def publish(
        self,
        weights: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        dtype: torch.dtype | None = None,
        roll_back: bool = False,
    ) -> Publication:
        """Copy ``weights`` and let readers see them, all at once, as ``version`` (0 or more).

        ``weights``: a state dict, as ``Checkpointer.save`` takes it (what in it is no tensor is left out), or pairs of
        name and tensor, taken one by one, each copied before the next is asked for. When this returns the caller may
        change them. ``dtype``: what tensors of floating point are converted to on the way (not those of 8 bits).

        Versions grow. ``roll_back=True`` allows one that is not newer than the last one published, also by a trainer
        before this one, and readers take it.

        Raises ``VersionError``, ``UnsavableStateError``, ``OutOfMemoryError``, ``JobTakenError`` where another process
        publishes under this address, ``WorkerDiedError`` (the next call starts another worker), ``ClosedError``,
        ``RankFailedError`` where another rank raises, or is not heard of within the timeout of the process group,
        ``WeightsTimeoutError`` where ``when_busy`` is "wait" and readers do not end. Then nothing is published; the
        newest version stays, and what is being read.
        """
        with self._lock, self._sharing.together():
            if isinstance(weights, torch.nn.Module):
                raise TypeError("publish takes a state dict: give it module.state_dict()")
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"dtype is one of torch's of floating point, not {dtype!r}")
            client = self._running_client()
            published = self._versions.admit(version, self._sharing.ranks, self._sharing.gather, roll_back=roll_back)
            timings = {"plan_s": 0.0, "wait_s": 0.0, "stage_s": 0.0}
            if isinstance(weights, Mapping):
                slot = self._copy_all(weights, dtype, client, timings)
            else:
                slot = self._copy_each(iter(weights), dtype, client, timings)
            said = self._sharing.gather(published)  # all have copied, or none publishes
            if len(set(said)) > 1:
                raise VersionError(
                    f"the ranks do not publish the same version, but {', '.join(str(each.version) for each in said)}"
                )
            if slot is None and not self._skips:
                logger.warning("version %d is not published: readers at %r have all slots", version, self.address)
            self._skips = slot is None
            if slot is not None:
                self._shelves[-1].publish(slot, published)
                self._versions.note(published)
                for shelf in self._shelves[:-1]:
                    shelf.give_back(client)
                del self._shelves[:-1]
            nbytes = 0 if slot is None or self._plan is None else self._plan.image.nbytes
            return Publication(published.version, published.epoch, slot is None, nbytes, timings)

    def prepare(self, weights: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> None:
        """Do all that first publications would have to: start the worker, plan, take the memory of all slots.

        Publishes nothing. Raises as ``publish`` does.
        """
        with self._lock:
            client = self._running_client()
            plan, _ = self._planned(self._sharing.own(weights), dtype)
            self._shelf_for(plan, client).fill(plan, client, self._slots, self._config.timeout)

    def close(self) -> None:
        """End the worker, and give the memory back; readers keep what they have leased. Safe to call twice."""
        self._close(linger=False)

    def _close(self, *, linger: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._client is not None and linger:
                    self._client.desert(self._config.timeout)
                elif self._client is not None:
                    self._client.close(self._config.timeout)
            finally:
                while self._shelves:
                    self._shelves.pop().close()
                self._pool.shutdown()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A training that ends by an error is likely to be started again.
        self._close(linger=kind is not None and issubclass(kind, Exception))

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            if self._client is not None:
                self._client.abandon()
                for shelf in self._shelves:
                    shelf.close()
                warnings.warn("a WeightPublisher was not closed", ResourceWarning, stacklevel=2, source=self)
            self._closed = True

    # What a publication goes through.

    def _running_client(self) -> WorkerClient:
        if self._closed:
            raise ClosedError("this publisher is closed; make a new one")
        timeout = self._config.timeout
        if self._client is not None:
            self._client.check_owner()
        if self._client is not None and not self._client.alive:
            logger.warning("starting another worker for the weights at %r, as one has died", self.address)
            self._client.close(timeout)
            self._client = None
        if self._client is None:
            try:
                self._client = self._start_worker(timeout)
            except JobTakenError as error:
                raise JobTakenError(
                    f"another process publishes at {self.address!r}, or has just died: give each an address of its own;"
                    f" or, if these are the ranks of a job, all of them the process group ({error})"
                ) from error
        return self._client

    def _start_worker(self, timeout: float) -> WorkerClient:
        visit = None if self._shelves else Visit.pay(self._door, timeout, deserted())
        if visit is not None:
            self._inherit(visit)
        options = replace(self._config.worker_options(), door=self._door)
        return start_worker(options, visit, self._hand_over, timeout)

    def _hand_over(self, client: WorkerClient) -> None:
        for shelf in self._shelves:
            shelf.hand_over(client, self._config.timeout)

    def _inherit(self, visit: Visit) -> None:
        """Take over what a publisher before this one has left."""
        for shelf in visit.shelves:
            images = [visit.segments[number] for number in shelf.layout.slots]
            self._shelves.append(Shelf(visit.segments[shelf.segment], images))
        self._versions.inherit(max((each for shelf in self._shelves for each in shelf.published()), default=None))

    def _planned(
        self, own: Mapping[str, torch.Tensor], dtype: torch.dtype | None
    ) -> tuple[WeightPlan, Sequence[torch.Tensor]]:
        if self._plan is not None:
            try:
                return self._plan, self._plan.capture(own, dtype)
            except StructureChanged as error:
                logger.info("the weights at %r are planned anew: %s", self.address, error)
        if self._sharing.ranks == 1 and not own:
            raise UnsavableStateError("there is no tensor in what is to be published")
        self._plan = WeightPlan.make(own, dtype, self._sharing)
        return self._plan, self._plan.capture(own, dtype)

    def _shelf_for(self, plan: WeightPlan, client: WorkerClient) -> Shelf:
        """Where images of ``plan`` go, from now on the last one."""
        shelf = next((shelf for shelf in self._shelves if shelf.is_for(plan)), None)
        if shelf is None:
            shelf = Shelf.make(client, self._config.timeout)
        else:
            self._shelves.remove(shelf)
        self._shelves.append(shelf)
        return shelf

    def _claim(self, plan: WeightPlan, client: WorkerClient, timings: dict[str, float]) -> int | None:
        """A slot of ``plan``'s shelf, on all ranks, or on none."""
        begun = time.perf_counter()
        deadline = time.monotonic() + self._config.timeout
        shelf = self._shelf_for(plan, client)
        while True:
            slot = shelf.claim(plan, client, self._slots, self._config.timeout)
            if all(self._sharing.gather(slot is not None)):
                timings["wait_s"] += time.perf_counter() - begun
                return slot
            if self._when_busy == "skip":
                return None
            if time.monotonic() > deadline:
                raise WeightsTimeoutError(
                    f"readers have kept all slots at {self.address!r} for {self._config.timeout:g} s; have more slots,"
                    " or when_busy='skip'"
                )
            time.sleep(_PAUSE_S)

    def _copy_all(
        self, weights: Mapping[str, Any], dtype: torch.dtype | None, client: WorkerClient, timings: dict[str, float]
    ) -> int | None:
        begun = time.perf_counter()
        plan, tensors = self._planned(self._sharing.own(weights), dtype)
        timings["plan_s"] += time.perf_counter() - begun
        slot = self._claim(plan, client, timings)
        if slot is None:
            return None
        begun = time.perf_counter()
        self._shelves[-1].copy(slot, plan, tensors, self._pool)
        timings["stage_s"] += time.perf_counter() - begun
        return slot

    def _copy_each(
        self,
        stream: Iterator[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None,
        client: WorkerClient,
        timings: dict[str, float],
    ) -> int | None:
        """As ``_copy_all``, for tensors that come one by one, and may be gone when the next one comes."""
        plan = self._plan
        slot: int | None = None
        known = all(self._sharing.gather(plan is not None and plan.dtype == dtype))
        if known and plan is not None:
            slot = self._claim(plan, client, timings)
        skipped = known and slot is None
        begun = time.perf_counter()
        copied: dict[str, int] = {}
        kept: dict[str, torch.Tensor] = {}

        def take(name: str, tensor: torch.Tensor) -> None:
            """Into the slot, if it is as planned; what comes from the first on that is not, is kept."""
            if skipped or not self._sharing.is_own(tensor):
                return
            form = self._whole(name, tensor, dtype)
            if name in copied or name in kept:
                raise UnsavableStateError(f"{name!r} comes twice")
            number = plan.find(form) if plan is not None and slot is not None and not kept else None
            if number is None or plan is None or slot is None:
                kept[name] = local(tensor).to("cpu", form.dtype, copy=True)
            else:
                self._shelves[-1].targets(slot, plan, tensor.device)[number].copy_(local(tensor))
                copied[name] = number

        self._walk(stream, take)
        as_planned = plan is not None and slot is not None and not kept and len(copied) == len(plan.names)
        done = skipped or all(self._sharing.gather(as_planned))
        if not done and plan is not None and slot is not None:
            there = self._shelves[-1].targets(slot, plan)
            kept = {name: there[number].clone() for name, number in copied.items()} | kept
        timings["stage_s"] += time.perf_counter() - begun
        return slot if done else self._copy_all(kept, dtype, client, timings)

    def _walk(self, stream: Iterator[tuple[str, torch.Tensor]], take: Callable[[str, torch.Tensor], None]) -> None:
        """Have all of ``stream`` taken. Other ranks may walk along it, and wait for each other: so to its end in any
        case, also where taking fails.
        """
        failure: Exception | None = None
        for name, tensor in stream:
            try:
                if failure is None:
                    take(name, tensor)
            except Exception as error:
                if self._sharing.ranks == 1:
                    raise
                failure = error
        if failure is not None:
            raise failure

    def _whole(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> Form:
        form = self._sharing.form(name, tensor, dtype)
        if form.shape != form.whole:
            raise UnsavableStateError(f"{name!r} is a part of a tensor: publish such as a state dict, not one by one")
        return form
