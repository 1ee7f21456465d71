"""Provide a checkpoint engine for verl: the trainer publishes each sync in shared memory, and rollouts map it.

In verl's configuration, below ``actor_rollout_ref.rollout.checkpoint_engine``:

    backend: asyncckpt
    custom_backend_module: asyncckpt.integrations.verl
    engine_kwargs: {asyncckpt: {slots: 3}}        # arguments of SharedMemoryCheckpointEngine; may be left out

Workers that can share memory (workers of one user on one machine) are on one *host*. In each sync verl's manager calls

1. ``prepare`` on all workers, which report their hosts. The first actor also reports the address of its store;
2. ``build_topology`` in the driver, which gives each worker a role. Each actor on the first actor's host publishes a
   share of the weights, so that the copies use the links of all these actors. The other actors only iterate over the
   weights, because gathering a weight is a collective. The rollouts map the weights;
3. ``init_process_group`` on all;
4. ``send_weights`` and ``receive_weights`` on all at once. The first actor chooses the version, and posts a notice when
   all actors have published. The rollouts map that version on their host. One of our workers fetches it to the host
   once, from the actors' host or from another host that has it (see ``asyncckpt/transfer/mirror.py``);
5. ``finalize`` on all.

Between syncs, ``get_weights`` maps the newest or a given version on the caller's host. No other worker takes part.

The messages of a sync are in ``notices.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, RankFailedError, VersionError
from asyncckpt.extension import Rendezvous, Store, endpoint_scope
from asyncckpt.integrations.verl.notices import Member, Notice, NoticeBoard, Peer, PublishingActors, Role, roles
from asyncckpt.weights import WeightPublisher, Weights, WeightSubscriber

logger = logging.getLogger(__name__)

_PAUSE_S = 0.01


class LocalPublication:
    """One worker's access to the publication at ``address``. Call ``close`` at the end."""

    def __init__(self, address: str, slots: int, timeout: float) -> None:
        """Publish nothing yet.

        Args:
            address, slots: As for ``WeightPublisher``.
            timeout: Seconds to wait for a slot, and for an answer.
        """
        self.address = address
        self.locator: str | None = None
        """The locator of the publication; None if the publication is on this host. Set this before reading."""
        self._slots = slots
        self._config = Config(timeout=timeout)
        self._publisher: WeightPublisher | None = None
        self._actors: PublishingActors | None = None
        self._last: tuple[int, int] | None = None
        self._subscriber: tuple[str | None, WeightSubscriber] | None = None
        self._checkpoints: dict[str, WeightSubscriber] = {}

    def publish(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int | None,
        dtype: torch.dtype | None,
        *,
        actors: PublishingActors,
        host: str,
        key: bytes,
    ) -> Notice:
        """Publish ``weights``, together with the other ``actors``, which make the same call.

        Args:
            weights, dtype: As for ``WeightPublisher.publish``, which raises the errors.
            version: The version, on the first actor; the other actors pass None. It may be lower than the last version.
            actors: The publishing actors.
            host: Name of this host for other hosts.
            key: Key of the readers.
        """
        publisher = self._publisher if actors is self._actors else None
        told: list[Any] = actors.gather((version, None if publisher is None else self._last))
        # Make a new publisher if any actor is new or missed the end of the last sync: all must agree on the state.
        if publisher is None or any(last is None or last != self._last for _, last in told):
            if self._actors is not None and self._actors.rank != actors.rank:
                self.withdraw()
            actors.gather(None)  # wait until all have withdrawn, because no two actors may have one rank
            publisher = self._begin(actors, host, key)
        published = publisher.publish(weights, told[0][0], dtype=dtype, roll_back=True)
        self._last = published.version, published.epoch
        return Notice.of(published.version, published.epoch, publisher.locator or "")

    def withdraw(self) -> None:
        """Stop publishing, because other actors publish now."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def newest(self) -> int | None:
        """Return the newest version on this host."""
        return next(reversed(self.subscriber().versions()), None)

    def acquire(self, notice: Notice, pin: str | None) -> Weights:
        """Wait until the weights of a sync are on this host, and return them.

        ``pin`` is an argument of ``WeightSubscriber.acquire``, which raises the errors.
        """
        deadline = time.monotonic() + self._config.timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            weights = self.subscriber().acquire(version=notice.version, pin=pin, timeout=left)
            if weights.epoch == notice.epoch:
                return weights
            # In a repeated sync this host may still have the weights of the first attempt.
            weights.release()
            if not left:
                raise RankFailedError(f"version {notice.version} has not come to this host again", step=notice.version)
            time.sleep(_PAUSE_S)

    def subscriber(self) -> WeightSubscriber:
        """Return the subscriber to this publication; any thread may call."""
        if self._subscriber is None or self._subscriber[0] != self.locator:
            # The old subscriber is not closed, because another thread may still wait in it.
            subscriber = WeightSubscriber(self.address, locator=self.locator, config=self._config)
            self._subscriber = self.locator, subscriber
        return self._subscriber[1]

    def checkpoints(self, folder: str) -> WeightSubscriber:
        """Return the subscriber to the models in the images of the checkpoints in ``folder``; any thread may call."""
        if folder not in self._checkpoints:
            job_id = Config.from_env().job_id
            self._checkpoints[folder] = WeightSubscriber.of_checkpoints(folder, job_id=job_id, prefix="model.")
        return self._checkpoints[folder]

    def forget_versions(self) -> None:
        """Allow ``acquire`` to return versions older than the last."""
        self._subscriber = None

    def close(self) -> None:
        """Release everything, including the publication."""
        subscriber = None if self._subscriber is None else self._subscriber[1]
        for each in (subscriber, self._publisher, *self._checkpoints.values()):
            if each is not None:
                each.close()
        self._subscriber = self._publisher = None

    def _begin(self, actors: PublishingActors, host: str, key: bytes) -> WeightPublisher:
        """Make the publisher for these ``actors``. It replaces the publisher for earlier actors."""
        publisher = WeightPublisher(
            self.address, slots=self._slots, when_busy="wait", process_group=actors, config=self._config
        )
        try:
            publisher.serve(host, key=key)
        except BaseException:
            publisher.close()
            raise
        self._publisher, self._actors, self._last = publisher, actors, None
        return publisher


BACKEND = "asyncckpt"


class SharedMemoryCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]  # verl has no types
    """Implements verl's ``CheckpointEngineWithCache`` in shared memory. The module's docstring lists the calls."""

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        address: str | None = None,
        slots: int = 3,
        rollout_dtype: torch.dtype | str | None = None,
        roll_back: bool = False,
        timeout: float = 600.0,
        host: str | None = None,
        device: str | None = None,
        bypass_cpu: bool = False,
    ) -> None:
        """Take ``bucket_size`` and ``is_master`` from verl, and all other arguments from ``engine_kwargs``.

        Args:
            bucket_size: Ignored, because tensors are copied one by one.
            is_master: Whether this is the first actor.
            address: Name of the publication on each host; None: a name from the Ray job's id. Set a name if rollouts
                of other jobs read the publication, or if a restarted job shall find its old memory.
            slots: Number of versions kept: the version being written, the newest, and versions that are still being
                read.
            rollout_dtype: dtype for floating-point weights; None: no conversion.
            roll_back: Allow a running trainer to send lower ``global_steps``. A restarted trainer may always do so.
            timeout: Seconds that a worker waits for another worker.
            host: Name of this trainer's host for other hosts; None: Ray's name for the host.
            device: Device to which rollouts copy the weights from pinned memory, such as "cuda". If None, the weights
                stay in shared memory.
            bypass_cpu: Not supported. Use verl's own backend ``nccl`` to send weights from device to device.
        """
        if bypass_cpu:
            raise ValueError("bypass_cpu is no option: for weights from device to device take verl's backend 'nccl'")
        self._is_master = is_master
        self.local = LocalPublication(address or _job_address(), slots, timeout)
        self._dtype = getattr(torch, rollout_dtype) if isinstance(rollout_dtype, str) else rollout_dtype
        self._roll_back = roll_back
        self._timeout = timeout
        self._host = host
        self._device = device
        self._member = Member(uuid.uuid4().hex, os.readlink("/proc/self/ns/pid"), os.getpid())
        self._store: Store | None = None
        self._rendezvous: Rendezvous | None = None
        self._key = b""
        self._actors: PublishingActors | None = None
        self._syncs = 0
        self._notices: NoticeBoard | None = None  # only during a sync
        self._sent: int | None = None  # the version that this actor sent last
        self.version: int | None = None  # the version that this rollout got last

    def prepare(self) -> Peer:
        """Return this worker's report. Before the first sync, the first actor opens the store."""
        if self._is_master:
            if self._notices is not None:
                self._notices.post_failure(RankFailedError("the trainer has begun another sync"))
            self._syncs += 1
            if self._store is None:
                secret = secrets.token_bytes(32)
                self._store, self._key = Store(secret), secrets.token_bytes(32)
                host = self._host or _own_host()
                self._rendezvous = Rendezvous(host, self._store.port, uuid.uuid4().hex, secret, 0, 0)
        return Peer(self._member, endpoint_scope(), self._rendezvous, self._syncs, self._key)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Peer]
    ) -> tuple[dict[str, list[Role]], dict[str, list[Role]]]:
        """Give each worker its role: the argument of ``init_process_group``, for the actors and for the rollouts.

        Args:
            actor_wg_world_size, rollout_world_size: Numbers of actors and of rollouts.
            metadata: Results of ``prepare`` on all actors, followed by the results on all rollouts.
        """
        actors, rollouts = roles(metadata[:actor_wg_world_size], metadata[actor_wg_world_size:])
        return {"role": actors}, {"role": rollouts}

    def init_process_group(self, role: Role) -> None:
        """Take the role for this sync."""
        if self._notices is not None:
            self._notices.close()
        # Open a connection for each sync, because a wait on the old connection would never succeed.
        self._notices = NoticeBoard(role, self._timeout)
        if self._actors is None or role.part != "publish" or self._actors.members != role.publishers:
            self._leave()
            self._actors = PublishingActors(self._notices, self._member) if role.part == "publish" else None
        if self._actors is not None:
            self._actors.notices = self._notices

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish ``weights``, one tensor after the other, as version ``global_steps`` (None: the next).

        The first actor returns metrics: the version, and the seconds of the publication. A version that is not above
        the newest is accepted in three cases:

        - The trainer has just started, so it resumes from an older checkpoint. Newer versions are withdrawn, with a
          warning.
        - The sync is repeated.
        - ``roll_back`` is set.

        Any other such version raises ``VersionError``.
        """
        notices = self._current()
        if (actors := self._actors) is None:
            _exhaust(weights)
            return {}
        begun = time.perf_counter()
        try:
            version = self._version(global_steps) if notices.is_first else None
            host = self._host or _own_host()
            notice = self.local.publish(weights, version, self._dtype, actors=actors, host=host, key=notices.role.key)
            if notices.is_first:
                notices.post(notice)
            self._sent = notice.version
        except BaseException as error:
            if notices.is_first:
                notices.post_failure(error)
            if isinstance(error, Exception):
                _exhaust(weights)
            raise
        if not notices.is_first:
            return {}
        return {
            "checkpoint_engine/version": float(notice.version),
            "checkpoint_engine/publish_s": time.perf_counter() - begun,
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the weights of this sync, which must be of version ``global_steps`` (None: any version).

        The tensors are in shared memory, and stay there while they are referenced. Changes in place are private to the
        caller.
        """
        weights = await asyncio.to_thread(self._mapped, self._current(), global_steps)
        for pair in self._handed_over(weights):
            yield pair

    async def get_weights(
        self,
        version: int | None = None,
        *,
        min_version: int | None = None,
        roll_back: bool = False,
        timeout: float = 60.0,
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the newest complete weights on this host, or the weights of ``version``; no other worker takes part.

        The tensors are as from ``receive_weights``. ``self.version`` is set when the first tensor is yielded.

        Args:
            version, min_version, roll_back, timeout: As for ``WeightSubscriber.acquire``, which raises the errors.
        """
        acquire = self.local.subscriber().acquire
        which: dict[str, Any] = {"version": version, "roll_back": roll_back, "pin": self._device, "timeout": timeout}
        weights = await asyncio.to_thread(acquire, min_version, **which)
        self.version = weights.version
        for pair in self._handed_over(weights):
            yield pair

    async def get_checkpoint_weights(self, folder: str, **which: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the actor's weights from the image of a checkpoint that ``verl_engines`` publishes.

        The tensors are as from ``get_weights``. The version is the checkpoint's step.

        Args:
            folder: The folder of the trainer's checkpoints, its ``default_local_dir``.
            which: Arguments of ``WeightSubscriber.acquire``, which raises the errors.
        """
        weights = await asyncio.to_thread(self.local.checkpoints(folder).acquire, **which)
        self.version = weights.version
        with weights:
            for name, tensor in weights.items():
                converts = self._dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1
                yield name, tensor.to(self._dtype) if converts else tensor

    def finalize(self) -> None:
        """End the sync. The publication stays."""
        notices, self._notices = self._notices, None
        if notices is not None:
            if self._is_master:
                notices.clear()
            if notices.role.part == "iterate":
                self.local.withdraw()
            notices.close()

    def close(self) -> None:
        """Release everything that this worker holds and has published.

        verl does not call this method. The end of the process has the same effect, but the memory of a killed process
        lingers.
        """
        self.local.close()
        self._leave()
        if self._notices is not None:
            self._notices.close()
        if self._store is not None:
            self._store.close()
        self._notices = self._store = None

    def _current(self) -> NoticeBoard:
        if self._notices is None:
            raise CheckpointError("no sync is open: call prepare, build_topology and init_process_group first")
        return self._notices

    def _leave(self) -> None:
        """Leave the group of publishing actors, if this actor is in one."""
        if self._actors is not None:
            self._actors.close()
            self._actors = None

    def _version(self, global_steps: int | None) -> int:
        """Return the version to send. Raises ``VersionError``."""
        newest = self.local.newest() if self._sent is None else self._sent
        if newest is None or global_steps is None:
            return (0 if newest is None else newest + 1) if global_steps is None else global_steps
        if global_steps < newest and self._sent is None:
            logger.warning(
                "this trainer begins with version %d, and the trainer before it published version %d: rollouts go back",
                global_steps,
                newest,
            )
        elif global_steps < newest and not self._roll_back:
            raise VersionError(
                f"version {global_steps} comes after version {newest}, from the same trainer; if it means to go back,"
                " set roll_back in the engine_kwargs",
                step=global_steps,
            )
        return global_steps

    def _mapped(self, notices: NoticeBoard, global_steps: int | None) -> Weights:
        """Return a rollout's weights of this sync."""
        notice = notices.wait()
        notice.check(global_steps)
        self.local.locator = None if notices.role.is_here else notice.locator(notices.role.key)
        if self.version is not None and notice.version < self.version:
            self.local.forget_versions()
        weights = self.local.acquire(notice, self._device)
        self.version = notice.version
        return weights

    def _handed_over(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights on the rollout's device, and end their lease afterwards."""
        with weights:
            for name, tensor in weights.items():
                yield name, tensor if self._device is None else tensor.to(self._device, non_blocking=True)


def _exhaust(weights: Iterable[Any]) -> None:
    """Iterate over the remaining weights, because gathering each weight is a collective of all actors."""
    for _ in weights:
        pass


def _ray() -> Any:
    """Return the module ``ray`` in a process of Ray, else None."""
    import ray

    return ray if ray.is_initialized() else None


def _own_host() -> str:
    """Return the name of this host for other hosts."""
    ray = _ray()
    return str(ray.util.get_node_ip_address()).strip("[]") if ray is not None else socket.gethostname()


def _job_address() -> str:
    """Return an address that all workers of this job share, and no other job has."""
    ray = _ray()
    return f"verl-{ray.get_runtime_context().get_job_id()}" if ray is not None else "verl"


CheckpointEngineRegistry.register(BACKEND)(SharedMemoryCheckpointEngine)
