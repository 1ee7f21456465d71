"""A checkpoint engine for verl: the trainer publishes each sync in shared memory, and rollouts map it from there.

In verl's configuration, below ``actor_rollout_ref.rollout.checkpoint_engine``:

    backend: asyncckpt
    custom_backend_module: asyncckpt.weights.verl
    engine_kwargs: {asyncckpt: {slots: 3}}        # what SharedMemoryCheckpointEngine takes; may be left out

Workers that can share memory (those of one user on one host) are at one *place*. In each sync verl's manager calls

1. ``prepare`` on all workers, which say where they are;
2. ``build_topology`` in the driver, which gives each a seat: the first actor sends, the other actors walk through the
   weights (making them is a collective), the first rollout of every place but the sender's is its relay, and the other
   rollouts read;
3. ``init_process_group`` on all: sender and relays form a group of their own, kept as long as they stay the same;
4. ``send_weights`` and ``receive_weights`` on all at once. The sender publishes, says so to all, and broadcasts to the
   relays, which publish at their places and say so there. Readers, and then the relays, map what is at their place;
5. ``finalize`` on all.

Between syncs, ``get_weights`` maps the newest version at its place, or one named. Nobody has to take part in that.

With ``bypass_cpu`` nothing is published: all rollouts are in the group, and take the weights as they come.

What the workers say to each other goes over a store that the sender hosts, sealed with a key that verl hands round
with the topology (see ``worker/rounds.py``); it is JSON, and nothing of it is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from asyncckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    RankFailedError,
    VersionError,
)
from asyncckpt.weights.broadcast import BUCKET_BYTES, Ends
from asyncckpt.weights.buckets import Named
from asyncckpt.weights.channel import Channel, meet
from asyncckpt.weights.place import Place
from asyncckpt.weights.topology import Group, Peer, Seat, seats
from asyncckpt.weights.turns import give_up
from asyncckpt.weights.weights import Weights
from asyncckpt.weights.word import Said, Word
from asyncckpt.worker.door import meeting_place
from asyncckpt.worker.messages import Meeting
from asyncckpt.worker.rounds import host as host_store

BACKEND = "asyncckpt"

# How long the members of a group, who are all prepared, may take to join it.
_JOIN_S = 60.0

logger = logging.getLogger(__name__)


class SharedMemoryCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]  # verl has no types
    """verl's contract for an engine with a cache, ``CheckpointEngineWithCache``; the module says who calls what."""

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        address: str | None = None,
        slots: int = 3,
        rollout_dtype: torch.dtype | str | None = None,
        bypass_cpu: bool = False,
        roll_back: bool = False,
        timeout: float = 600.0,
        host: str | None = None,
    ) -> None:
        """``bucket_size`` (bytes) and ``is_master`` come from verl, all else from ``engine_kwargs``.

        ``address``: what the publication is called at each place (default: one of this Ray job; name it if rollouts
        shall find it across jobs, or a restarted one its memory). ``slots``: how many versions have room: that being
        written, the newest, and those that somebody still reads. ``rollout_dtype``: what floating-point weights are
        converted to (default: they stay as they are). ``bypass_cpu``: no copy in shared memory, and so no
        ``get_weights``. ``roll_back``: let ``global_steps`` go back in a running trainer; a restarted one always may.
        ``timeout``: seconds that a worker may wait for another. ``host``: the name by which the others reach this
        trainer (default: as Ray has it).
        """
        self._bucket_bytes = min(bucket_size, BUCKET_BYTES)  # verl means those on a device
        self._is_master = is_master
        self._place = Place(address or _job_address(), slots, timeout)
        self._found_at = self._place.address  # where the last sync has published
        self._dtype = getattr(torch, rollout_dtype) if isinstance(rollout_dtype, str) else rollout_dtype
        self._bypass_cpu = bypass_cpu
        self._roll_back = roll_back
        self._timeout = timeout
        self._host = host
        self._name = uuid.uuid4().hex
        self._store: Any = None
        self._meeting: Meeting | None = None
        self._word: Word | None = None
        self._seat: Seat | None = None
        self._sync = 0
        self._ends: tuple[Group, Ends] | None = None
        self._sent: int | None = None
        self.version: int | None = None  # of the weights last taken here

    def prepare(self) -> Peer:
        """Who this worker is. The sender opens the store, the first time."""
        if self._is_master:
            if self._seat is not None and self._word is not None:
                self._word.give_up(RankFailedError("the trainer has begun another sync"))
            self._sync += 1
            if self._store is None:
                self._store = host_store(0)
                self._meeting = Meeting(
                    self._host or _own_host(), self._store.port, self._name, secrets.token_bytes(32), 0, 0
                )
        return Peer(
            self._name,
            meeting_place(),
            self._place.is_published_here,
            self._bypass_cpu,
            self._ends[0] if self._ends is not None and self._ends[1].channel.usable else None,
            self._meeting if self._is_master else None,
            self._sync,
        )

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Peer]
    ) -> tuple[dict[str, list[Seat]], dict[str, list[Seat]]]:
        """Who takes which part. ``metadata``: what all actors and then all rollouts have said."""
        actors, rollouts = seats(metadata[:actor_wg_world_size], metadata[actor_wg_world_size:])
        return {"seat": actors}, {"seat": rollouts}

    def init_process_group(self, seat: Seat) -> None:
        """Take that seat, and join its group if this worker is in one, and not in it yet.

        Raises ``RankFailedError`` where the others cannot be reached.
        """
        self._seat = seat
        if self._word is not None:
            self._word.close()
        # Another connection for each sync: somebody may still wait over the old one, for what will not come.
        self._word = Word(seat, self._timeout)
        if self._ends is not None and (self._ends[0] != seat.group or not self._ends[1].channel.usable):
            self._leave()
        _, members = seat.group
        if self._ends is None and self._name in members and len(members) > 1:
            self._ends = seat.group, self._joined(seat)

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send all ``weights``, which are taken one after the other, as version ``global_steps`` (None: the next).

        Returns the sender's metrics, in seconds. A version that is not above the newest is taken from a trainer that
        has just started (it resumes from an older checkpoint: what is newer is withdrawn, with a warning), for a sync
        that is repeated, and with ``roll_back``; else it raises ``VersionError``.
        """
        seat, word = self._begun()
        if seat.part == "walk":
            _walk_on(weights)
            return {}
        begun = time.perf_counter()
        try:
            version, back = self._version(global_steps)
            if self._bypass_cpu:
                said = Said(version, 0, "")
            else:
                said = self._place.publish(weights, version, self._dtype, roll_back=back, substitute=False)
            word.say(0, said)
            self._sent = version
            published = time.perf_counter()
            if self._bypass_cpu:
                # Not on another thread: the weights are made as they are asked for, on the device that is this one's.
                self._joined_ends().send(weights, bucket_bytes=self._bucket_bytes, version=version, bypass_cpu=True)
            elif self._ends is not None:
                await asyncio.to_thread(self._forward, version)
        except BaseException as error:
            word.give_up(error)
            if isinstance(error, Exception):
                _walk_on(weights)
            raise
        return {
            "checkpoint_engine/version": float(version),
            "checkpoint_engine/publish_s": 0.0 if self._bypass_cpu else published - begun,
            "checkpoint_engine/broadcast_s": 0.0 if self._ends is None else time.perf_counter() - published,
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The weights of this sync, which must be of version ``global_steps`` (None: whichever it is).

        The tensors are read-only and in shared memory, and stay as they are for as long as they are referred to; with
        ``bypass_cpu`` they are the rollout's own.
        """
        seat, word = self._begun()
        if seat.part == "take":
            async for pair in self._taken(word, global_steps):
                yield pair
        else:
            with await asyncio.to_thread(self._arrival, seat, word, global_steps) as weights:
                for pair in weights.items():
                    yield pair

    async def get_weights(
        self,
        version: int | None = None,
        *,
        min_version: int | None = None,
        roll_back: bool = False,
        timeout: float = 60.0,
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The newest weights that are complete at this place, or those of ``version``, with nobody else taking part.

        They are those of ``WeightSubscriber.acquire``, which says what the arguments mean and what is raised; and as
        those of ``receive_weights``. The version that they are of is ``self.version``, once the first has come. With
        ``bypass_cpu`` none are kept: ``CheckpointNotFoundError``.
        """
        if self._bypass_cpu:
            raise CheckpointNotFoundError(
                "the weights are sent with bypass_cpu, which keeps no version of them in memory; take them in a sync,"
                " or leave bypass_cpu out of the engine_kwargs"
            )
        acquire = self._place.between.acquire
        weights = await asyncio.to_thread(
            acquire, self._found_at, min_version, version=version, roll_back=roll_back, timeout=timeout
        )
        self.version = weights.version
        with weights:
            for pair in weights.items():
                yield pair

    def finalize(self) -> None:
        """The sync is over. What was published stays, and so does the process group."""
        seat, self._seat = self._seat, None
        if seat is not None and self._is_master and self._word is not None:
            self._word.clear()

    def close(self) -> None:
        """Give back what this worker holds, and what it has published; verl does not ask for it.

        Where it just ends, what it has published lingers, see ``Config.linger``.
        """
        self._seat = None
        self._leave()
        self._place.close()
        if self._word is not None:
            self._word.close()
        self._word = self._store = None

    def _begun(self) -> tuple[Seat, Word]:
        if self._seat is None or self._word is None:
            raise CheckpointError("not in a sync: prepare, build_topology and init_process_group come before")
        return self._seat, self._word

    def _joined(self, seat: Seat) -> Ends:
        """The group of the sender and those that the weights are broadcast to; it is none of ``torch.distributed``."""
        (name, members), meeting = seat.group, seat.meeting
        limit = timedelta(seconds=self._timeout)
        try:
            store = self._store or distributed.TCPStore(  # type: ignore[attr-defined]
                meeting.address, meeting.port, is_master=False, wait_for_workers=False, timeout=limit
            )
        except RuntimeError as error:
            raise RankFailedError(f"the trainer's store at {meeting.address}:{meeting.port} is out of reach") from error
        store = PrefixStore(f"asyncckpt/{meeting.token}/{name}", store)
        rank, joining_s = members.index(self._name), min(self._timeout, _JOIN_S)
        meet(rank, len(members), store, joining_s)
        channel = Channel(rank, len(members), 0, store, joining_s)
        channel.timeout = self._timeout
        return Ends(channel)

    def _leave(self) -> None:
        if self._ends is not None:
            self._ends[1].close()
            self._ends = None

    def _joined_ends(self) -> Ends:
        if self._ends is None:
            raise CheckpointError("not in the group that weights are broadcast to: please report this")
        return self._ends[1]

    def _version(self, global_steps: int | None) -> tuple[int, bool]:
        """Which version to send, and whether that goes back. Raises ``VersionError``."""
        newest = self._sent
        if newest is None and not self._bypass_cpu:
            newest = self._place.newest()
        if newest is None or global_steps is None:
            return (0 if newest is None else newest + 1) if global_steps is None else global_steps, False
        if global_steps < newest and self._sent is None:
            logger.warning(
                "this trainer begins with version %d, and one before it had got to %d: rollouts will go back",
                global_steps,
                newest,
            )
        elif global_steps < newest and not self._roll_back:
            raise VersionError(
                f"version {global_steps} comes after version {newest}, from the same trainer; if it means to go back,"
                " set roll_back in the engine_kwargs",
                step=global_steps,
            )
        return global_steps, global_steps <= newest

    def _arrival(self, seat: Seat, word: Word, global_steps: int | None) -> Weights:
        """A rollout's weights of this sync. The relay brings them to its place."""
        said = self._relay(seat, word) if seat.part == "relay" else word.hear(seat.place)
        said.check(global_steps)
        weights = self._place.in_sync.acquire(said.address, version=said.version, timeout=self._timeout)
        if weights.epoch != said.epoch:
            weights.release()
            raise RankFailedError(
                f"version {said.version} is of another epoch here than it was sent in: {weights.epoch}, {said.epoch}",
                step=said.version,
            )
        if self.version is not None and said.version < self.version:
            self._place.between.close()  # it would not take an older one
        self.version, self._found_at = said.version, said.address
        return weights

    def _relay(self, seat: Seat, word: Word) -> Said:
        sent = word.hear(0)
        received = self._received()
        try:
            # Which version may follow which, the sender has decided.
            said = self._place.publish(received, sent.version, self._dtype, roll_back=True, substitute=True)
        except BaseException as error:
            word.say(seat.place, error)
            with contextlib.suppress(CheckpointError):  # the sender is gone, too
                self._take_no_more(received, error)
            raise
        word.say(seat.place, said)
        return said

    def _forward(self, version: int) -> None:
        """Broadcast what was published."""
        address, timeout = self._place.address, self._timeout
        with self._place.in_sync.acquire(address, version=version, timeout=timeout) as weights:
            self._joined_ends().send(weights, bucket_bytes=self._bucket_bytes)

    def _take_no_more(self, received: Generator[tuple[str, torch.Tensor], None, None], error: BaseException) -> None:
        """Tell the sender and the other relays, who wait for this one, whether it has begun to take weights or not."""
        has_begun = inspect.getgeneratorstate(received) != inspect.GEN_CREATED
        received.close()
        channel = self._joined_ends().channel
        if not has_begun and channel.usable:
            give_up(channel, error)

    def _received(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """What comes by broadcast; each to be copied before the next is asked for."""
        for bucket in self._joined_ends().receive():
            yield from bucket

    async def _taken(self, word: Word, global_steps: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """What comes by broadcast, for a rollout. All fail if it stops early."""
        said = await asyncio.to_thread(word.hear, 0)
        receipt = self._joined_ends().receive()
        asked: asyncio.Future[list[Named] | None] | None = None
        try:
            while True:
                asked = asyncio.ensure_future(asyncio.to_thread(next, receipt, None))
                bucket = await asyncio.shield(asked)
                if bucket is None:
                    break
                said.check(global_steps)
                for name, tensor in bucket:
                    yield name, tensor.clone()  # engines gather some before they load them
        finally:
            if asked is not None:
                await asyncio.wait([asked])  # this may have been cancelled, and what runs in a thread cannot be closed
            receipt.close()
        self.version = said.version


def _walk_on(weights: Iterable[Any]) -> None:
    """Make all that are left, though nobody wants them: other actors make each together with this one."""
    for _ in weights:
        pass


def _ray() -> Any:
    """Ray, in one of its processes, or None."""
    import ray

    return ray if ray.is_initialized() else None


def _own_host() -> str:
    """The name by which other hosts reach this one."""
    ray = _ray()
    return str(ray.util.get_node_ip_address()).strip("[]") if ray is not None else socket.gethostname()


def _job_address() -> str:
    """An address that the workers of this job have in common, and no other job."""
    ray = _ray()
    return f"verl-{ray.get_runtime_context().get_job_id()}" if ray is not None else "verl"


CheckpointEngineRegistry.register(BACKEND)(SharedMemoryCheckpointEngine)
