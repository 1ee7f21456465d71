"""A worker's services at its endpoint: answer processes that did not start it, and linger for the next trainer.

Readers can always see publications. After the trainer's death, a process that loads gets a list of the images, and the
memory. At its first save, a restarted trainer attaches to the worker over such a connection. This begins the next
session.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from asyncckpt.errors import CheckpointError
from asyncckpt.format.write_request import HeldImage, ImageKey, WriteRequest
from asyncckpt.link.api import (
    Images,
    Inventory,
    PublishedSegments,
    Served,
    TrainerAlive,
    WorkerApi,
    WorkerStatus,
)
from asyncckpt.link.calls import carry_out, send_answer, with_files
from asyncckpt.link.endpoint import Endpoint, peer_pid, redirect_log
from asyncckpt.link.process import Surroundings, WorkerOptions
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.protocol.worker_life import (
    AttachAsked,
    BeginSession,
    EndWorker,
    LifeAction,
    LifeEvent,
    LifeState,
    LookAgain,
    Looked,
    PeerCame,
    PeerLeft,
    Refuse,
    RetireAsked,
    SessionEnded,
    SessionFinishing,
    TellRestarted,
    WorkerLife,
)
from asyncckpt.shm.segment import Descriptor
from asyncckpt.threads import Flag, Mailbox
from asyncckpt.transfer.serving import Serving, listens_at

logger = logging.getLogger(__name__)

# Interval at which a lingering worker looks at its state. It is long, because the worker may linger for hours.
_LOOK_S = 0.05


@dataclass(frozen=True)
class Trainer:
    """A trainer that this worker serves, or serves next.

    Args:
        connection: The connection to the trainer.
        pid: The trainer's process id; 0 if the trainer is in another container.
        options: The options of the session.
        surroundings: The surroundings to take over; None: the worker has them already.
        stderr: The descriptor for the worker's stderr; None: the worker has it already.
        is_over: Set when the session has ended.
    """

    connection: SocketConnection
    pid: int
    options: WorkerOptions
    surroundings: Surroundings | None = None
    stderr: Descriptor | None = None
    is_over: Flag = field(default_factory=Flag)


class EndpointService:
    """Answer processes at one endpoint, each process on its own thread.

    The life of the worker is a state machine (``asyncckpt/protocol/worker_life.py``). All threads give events to the
    machine, one event at a time. The main thread begins sessions, and ends the worker.
    """

    def __init__(
        self,
        name: str | None,
        fingerprint: str,
        linger: float,
        segment_store: SegmentStore,
        serving: Serving,
        *,
        is_ahead: bool = False,
    ) -> None:
        """Do not listen yet.

        Args:
            name: The name of the endpoint; None: no process can connect.
            fingerprint: The fingerprint of this worker, see ``process.fingerprint``.
            linger: Seconds to wait for the next trainer; 0: the worker ends with its trainer.
            segment_store: The memory to show.
            serving: Serves the memory to other hosts.
            is_ahead: Whether the worker has no trainer yet.
        """
        self.is_not_wanted = False
        """Whether the first trainer got no session, and starts another worker."""
        self._name, self._fingerprint = name, fingerprint
        self._segment_store, self._serving = segment_store, serving
        self._endpoint: Endpoint | None = None
        self._trainer = 0
        self._lock, self._following = threading.Lock(), threading.Lock()
        self._life = WorkerLife(linger, time.monotonic() if is_ahead else None)
        self._numbers = itertools.count(1)
        self._peers: dict[int, SocketConnection] = {}
        self._asking: dict[int, tuple[Trainer, SimpleQueue[LifeAction]]] = {}
        self._decided: Mailbox[Trainer | None] = Mailbox()
        self._is_terminated = False  # a plain flag, because a signal handler sets it
        self._unended_saves: Callable[[], tuple[WriteRequest, ...]] = tuple
        self._on_restart: Callable[[], object] = lambda: None

    def open(self, trainer: int) -> None:
        """Take the endpoint. Raises ``JobTakenError``, or ``OSError`` if an endpoint is not possible.

        ``trainer``: the process id of the first trainer; 0: no trainer has come.
        """
        if self._name is not None:
            self._endpoint = Endpoint(self._name, trainer)
            self._endpoint.listen(self._answer)

    def begin_session(
        self, trainer: Trainer, unended_saves: Callable[[], tuple[WriteRequest, ...]], on_restart: Callable[[], object]
    ) -> None:
        """Note that a session begins.

        Args:
            trainer: The trainer of the session.
            unended_saves: Returns the session's saves that have not ended.
            on_restart: Called when the job was restarted.
        """
        self._trainer, self._is_terminated = trainer.pid, False
        self._unended_saves, self._on_restart = unended_saves, on_restart
        if self._endpoint is not None:
            self._endpoint.name_trainer(trainer.pid)
        self._segment_store.begin_session()

    def trainer_gone(self, *, closed: bool) -> None:
        """Note that the trainer is gone, and all its staged images are known. ``closed``: whether it has closed."""
        self._handle(SessionFinishing(closed))

    def next_trainer(self) -> Trainer | None:
        """Wait for the first or next trainer. Return None if the worker has to end."""
        if self._endpoint is None:  # no trainer could find this worker
            self._handle(RetireAsked(None))
        self._handle(SessionEnded())
        while True:
            try:
                return self._decided.get(_LOOK_S)
            except Empty:
                if self._is_terminated:
                    self._handle(RetireAsked(None))
                self._handle(Looked(self._segment_store.holds_anything() or self._serving.follows))

    def terminate(self) -> None:
        """End the worker if it only lingers. A signal handler may call."""
        self._is_terminated = True

    def close(self) -> None:
        """Release the endpoint, and disconnect all processes. A process may be waiting for the end of this worker."""
        if self._endpoint is not None:
            self._endpoint.close()
        for peer in list(self._peers.values()):
            peer.hang_up()

    def redirect_log(self) -> None:
        """Send the log of this process to the endpoint's log file, because its trainer is gone."""
        if self._name is not None:
            try:
                redirect_log(self._name)
            except OSError as error:
                logger.warning("the worker has no log: %s", error)

    def _handle(self, event: LifeEvent) -> None:
        """Give an event to the machine, and carry out its actions."""
        with self._lock:
            for action in self._life.handle(event, time.monotonic()):
                match action:
                    case TellRestarted():
                        self._on_restart()
                    case EndWorker():
                        self._decided.put(None)
                    case BeginSession(who):
                        trainer, answers = self._asking[who]
                        self._decided.put(trainer)
                        answers.put(action)
                    case Refuse(who):
                        self._asking[who][1].put(action)
                    case LookAgain(who):
                        if who in self._asking:
                            self._asking[who][1].put(action)
                        else:
                            self._peers[who].hang_up()

    def _answer(self, connection: SocketConnection) -> None:
        """Answer a process until it leaves. Raises ``EOFError`` or ``OSError`` when it leaves."""
        who = next(self._numbers)
        peer = _Peer(self, self._segment_store, self._serving, who, connection)
        request = connection.receive()
        while isinstance(request, tuple) and request[1:2] == (WorkerApi.status.__name__,):  # does not keep the worker
            carry_out(request, WorkerApi, peer, partial(send_answer, connection))
            request = connection.receive()
        self._peers[who] = connection
        self._handle(PeerCame(who))
        try:
            while True:
                carry_out(request, WorkerApi, peer, partial(send_answer, connection))
                request = connection.receive()
        finally:
            self._handle(PeerLeft(who))
            self._asking.pop(who, None)
            del self._peers[who]

    # What a peer calls.

    def attach(self, who: int, fingerprint: str, session: int, trainer: Trainer) -> NoReturn:
        """Wait for the begin and the end of a trainer's session.

        Args:
            who: The number of the peer.
            fingerprint: The fingerprint of the worker that the trainer would start.
            session: The number of the last session that the trainer has seen.
            trainer: The trainer.

        Raises:
            CheckpointError: The trainer gets no session.
            EOFError: The session is over, or the trainer has to look again.
        """
        trouble = None
        if fingerprint != self._fingerprint:
            trouble = "it was started by another version, or with other transports"
        self._forget_dead_next()
        answers: SimpleQueue[LifeAction] = SimpleQueue()
        self._asking[who] = trainer, answers
        with self._following:
            if self._serving.follows:
                trouble = trouble or "it has weights of another host"
            self._handle(AttachAsked(who, session, trouble, trainer.options.linger))
        match answers.get():
            case Refuse(_, why):
                del self._asking[who]
                if self._life.session == 0:  # this worker was started in advance for that trainer
                    self.is_not_wanted = True
                    logger.warning("the trainer %d gets no session, and starts another worker: %s", trainer.pid, why)
                raise CheckpointError(why)
            case BeginSession():
                trainer.is_over.wait()
        raise EOFError

    def retire(self, who: int) -> None:
        """End the worker after everything staged is written. ``who``: the number of the peer that asks."""
        self._forget_dead_next()
        self._handle(RetireAsked(who))

    def follow(self, locator: str) -> str | None:
        """Mirror a publication, unless this worker has a trainer, or a trainer waits for the next session."""
        with self._following:
            if (self._has_trainer or self._life.next_peer is not None) and not self._serving.follows:
                return "a trainer publishes here"
            return self._serving.follow(locator)

    def status(self) -> WorkerStatus:
        """Return the status of the worker."""
        life = self._life
        lingers = None if life.is_to_leave else life.lingers_s(time.monotonic())
        paths = tuple(each.path for each in self._unended_saves())
        return WorkerStatus(os.getpid(), self._has_trainer, paths, lingers, life.is_to_leave)

    def inventory(self) -> TrainerAlive | Inventory:
        """Return the memory of the worker, unless it has a trainer."""
        session = self._life.session  # read first, because another session may begin meanwhile
        if self._has_trainer:
            return TrainerAlive(os.getpid(), self._trainer)
        images = self._segment_store.held_images()
        published, held = self._segment_store.published_alone(), self._segment_store.held_segments()
        # If one of several trainers has died, its host may be lost. So the next trainer must not wait for their saves.
        alone = [each for each in self._unended_saves() if each.world_size == 1 and each.joint is None]
        waited_for = [*self._unended_saves()] if self._life.is_closed else alone
        saves = tuple(each.path for each in waited_for)
        return Inventory(os.getpid(), session, held, images, published, saves, self._serving.follows)

    def images(self) -> Images:
        """Return the images that a restarted job can load."""
        on_restart = self._on_restart  # read first, because the next session may begin just now
        if not (has_trainer := self._has_trainer):  # the peer belongs to the restarted job
            on_restart()
        images = self._segment_store.summaries(with_own=not has_trainer)
        return Images(images, self._trainer if has_trainer else None)

    @property
    def _has_trainer(self) -> bool:
        return self._life.state is LifeState.SERVING

    def _forget_dead_next(self) -> None:
        """Forget the next trainer if it is gone. Its thread waits for the session to begin, and cannot notice that."""
        if (who := self._life.next_peer) is not None:
            peer = self._peers.get(who)
            if peer is None or not peer.has_other_end():
                self._handle(PeerLeft(who))


class _Peer(WorkerApi):
    """Carries out the calls of one process."""

    def __init__(
        self,
        service: EndpointService,
        segment_store: SegmentStore,
        serving: Serving,
        who: int,
        connection: SocketConnection,
    ) -> None:
        self._service, self._segment_store, self._serving = service, segment_store, serving
        self._who, self._connection = who, connection
        self._shown: tuple[int, ...] = ()

    def status(self) -> WorkerStatus:
        return self._service.status()

    def inspect(self) -> TrainerAlive | Inventory:
        found = self._service.inventory()
        self._shown = () if isinstance(found, TrainerAlive) else found.segments
        return found

    def segments(self) -> None:
        return with_files(None, (self._segment_store.open(number) for number in self._shown))

    def attach(
        self, fingerprint: str, session: int, options: Mapping[str, Any], surroundings: Mapping[str, Any]
    ) -> NoReturn:
        stderr = self._connection.receive_descriptor()
        try:
            its = WorkerOptions(**options), Surroundings(**surroundings)
        except TypeError:  # of another version, which its fingerprint says
            its = WorkerOptions(), Surroundings({}, [])
        trainer = Trainer(self._connection, peer_pid(self._connection), *its, stderr)
        self._service.attach(self._who, fingerprint, session, trainer)

    def retire(self) -> None:
        self._service.retire(self._who)

    def published(self) -> PublishedSegments:
        return PublishedSegments(self._segment_store.published(), self._serving.trouble)

    def segment(self, number: int) -> None:
        return with_files(None, [self._segment_store.open(number, os.O_RDONLY)])

    def images(self) -> Images:
        return self._service.images()

    def image(self, key: ImageKey) -> HeldImage | None:
        return self._segment_store.held(key)

    def follow(self, locator: str) -> str | None:
        return self._service.follow(locator)

    def serve(self, key: bytes, address: str) -> Served:
        return self._serving.serve(key, listens_at(address), to_own_job=False)
