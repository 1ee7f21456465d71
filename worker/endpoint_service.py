"""A worker's services at its endpoint: answer processes that did not start it, and linger for a new trainer.

Readers can always see publications. After the trainer's death, a process that takes over gets a list of the images, and
the memory. A trainer that takes over first hands the memory to its own worker, and then lets the old worker leave. Only
after that its worker takes the endpoint. So at any instant one of the two workers holds the staged images and can be
found.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from asyncckpt.errors import JobTakenError
from asyncckpt.format.segment_layout import FileSetLayout, WeightsLayout
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.link import endpoint_messages
from asyncckpt.link.endpoint import Endpoint, redirect_log
from asyncckpt.link.messages import receive, send
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.link.socket_connection import SocketConnection
from asyncckpt.link.takeover import is_leaving
from asyncckpt.transfer.serving import Serving, listens_at

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_ANSWER_S = 10.0
# Timeout for the message that tells a worker to leave.
_RETIRE_S = 1.0


class EndpointService:
    """Answers at one endpoint, on a thread for each process that connects."""

    def __init__(self, name: str | None, trainer: int, segment_store: SegmentStore, serving: Serving) -> None:
        """Do not listen yet.

        Args:
            name: The name of the endpoint. Without a name this object does nothing.
            trainer: The process id of this worker's trainer.
            segment_store: The memory to show and to hand over.
            serving: Serves the memory to other hosts.
        """
        self._name, self._trainer = name, trainer
        self._segment_store, self._serving = segment_store, serving
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()
        self._peers: list[SocketConnection] = []
        self._last_left = 0.0
        self._lingers_since: float | None = None
        self._lingers_for = 0.0
        # A plain flag, because a signal handler may set it.
        self._retired = False
        self.is_closed_in_order = False
        """Whether the trainer has closed rather than died. If so, no other process has the unwritten images."""
        self.unended_saves: Callable[[], tuple[WriteRequest, ...]] = tuple
        """Returns the saves that have not ended."""
        self.on_restart: Callable[[], object] = lambda: None
        """Called when the job was restarted."""

    def open(self) -> None:
        """Take the endpoint. Raises ``JobTakenError``, or ``OSError`` if there can be no endpoint."""
        if self._name is not None and self._endpoint is None:
            self._endpoint = Endpoint(self._name, self._trainer)
            self._endpoint.listen(self._answer)

    def close(self) -> None:
        """Give the endpoint back, and disconnect all processes. They may be waiting for this."""
        if self._endpoint is not None:
            self._endpoint.close()
        with self._lock:
            for peer in self._peers:
                peer.hang_up()

    def redirect_log(self) -> None:
        """Send the log of this process to the endpoint's log file, because its trainer is gone."""
        if self._name is not None:
            try:
                redirect_log(self._name)
            except OSError as error:
                logger.warning("there is no log: %s", error)

    def retire(self) -> None:
        """Stop lingering. A signal handler may call."""
        self._retired = True
        self.on_restart()

    def linger(self, seconds: float) -> None:
        """Wait for a process that takes over, until ``seconds`` after the last process has left."""
        if not self._find_endpoint(seconds):
            return
        self._lingers_since, self._lingers_for = time.monotonic(), seconds
        while not self._retired and self._lingers() > 0:
            if not (self._segment_store.holds_anything() or self._serving.follows):
                break
            time.sleep(min(_POLL_S, seconds))

    def _lingers(self) -> float:
        """Return the seconds that this worker still lingers if no other process connects."""
        with self._lock:
            if self._peers or self._lingers_since is None:
                return self._lingers_for
            return max(self._lingers_since, self._last_left) + self._lingers_for - time.monotonic()

    def _find_endpoint(self, seconds: float) -> bool:
        """Take the endpoint if the trainer died before it could ask for that. Return whether this worker has it.

        The worker at the endpoint may be leaving, or about to be told to leave. If it stays, it has all images that
        this worker holds.
        """
        deadline = time.monotonic() + seconds
        stays_since: float | None = None
        while self._name is not None and self._endpoint is None and time.monotonic() < deadline:
            if not self._segment_store.holds_anything():
                break
            try:
                self.open()
            except JobTakenError:
                stays_since = None if is_leaving(self._name, _ANSWER_S) else stays_since or time.monotonic()
                if self._retired or (stays_since is not None and time.monotonic() - stays_since > _RETIRE_S):
                    break
                time.sleep(_POLL_S)
            except OSError as error:
                logger.warning("nobody will find what is held here: %s", error)
                break
        return self._endpoint is not None

    def _answer(self, peer: SocketConnection) -> None:
        """Answer a process until it leaves. Raises ``EOFError`` or ``OSError`` when it leaves."""
        while isinstance(message := receive(peer), endpoint_messages.AskStatus):  # keeps no worker
            send(peer, self._status())
        with self._lock:
            self._peers.append(peer)
        numbers: tuple[int, ...] = ()
        try:
            while True:
                match message:
                    case endpoint_messages.Inspect():
                        numbers = self._show(peer)
                    case endpoint_messages.TakeSegments():
                        for number in numbers:
                            peer.send_descriptor(self._segment_store.hosted(number).segment.fileno())
                    case endpoint_messages.Retire():
                        self.retire()
                    case endpoint_messages.ListPublished():
                        published, trouble = self._segment_store.published(), self._serving.trouble
                        send(peer, endpoint_messages.PublishedSegments(published, trouble))
                    case endpoint_messages.OpenSegment(number):
                        self._send_read_only(peer, number)
                    case endpoint_messages.AskImages():
                        trainer = self._trainer if self._segment_store.has_trainer() else None
                        if trainer is None:  # the peer belongs to the restarted job
                            self.on_restart()
                        send(peer, endpoint_messages.Images(self._segment_store.summaries(), trainer))
                    case endpoint_messages.AskImage(key):
                        send(peer, endpoint_messages.FoundImage(self._segment_store.held(key)))
                    case endpoint_messages.Follow(locator):
                        has_trainer = self._segment_store.has_trainer() and not self._serving.follows
                        followed = endpoint_messages.Followed("a trainer publishes here")
                        send(peer, followed if has_trainer else self._serving.follow(locator))
                    case endpoint_messages.Serve(secret, address):
                        send(peer, self._serving.serve(secret, listens_at(address), to_own_job=False))
                message = receive(peer)
        finally:
            with self._lock:
                self._peers.remove(peer)
                self._last_left = time.monotonic()

    def _status(self) -> endpoint_messages.WorkerStatus:
        has_trainer = self._segment_store.has_trainer()
        lingers = None if self._lingers_since is None or self._retired else max(0.0, self._lingers())
        paths = tuple(each.path for each in self.unended_saves())
        return endpoint_messages.WorkerStatus(os.getpid(), has_trainer, paths, lingers, self._retired)

    def _show(self, peer: SocketConnection) -> tuple[int, ...]:
        """Send the inventory. Return the numbers of the segments in it."""
        images = self._segment_store.held_images()
        if images is None:
            send(peer, endpoint_messages.TrainerAlive(os.getpid(), self._trainer))
            return ()
        numbers = {image.request.segment for image in images}
        published = []
        for each in self._segment_store.published():
            match each.layout:
                case WeightsLayout(slots):
                    published.append(each)
                    numbers.update((each.segment, *slots))
                case FileSetLayout():
                    published.append(each)
                    numbers.add(each.segment)
        held = tuple(sorted(numbers))
        # If one trainer of several has died, its host may be lost. Nobody should wait for the saves on that host.
        waited_for = [each for each in self.unended_saves() if each.world_size == 1 or self.is_closed_in_order]
        saves = tuple(each.path for each in waited_for)
        facts = os.getpid(), self._retired, held, images, tuple(published), saves, self._serving.follows
        send(peer, endpoint_messages.Inventory(*facts))
        return held

    def _send_read_only(self, peer: SocketConnection, number: int) -> None:
        fd = self._segment_store.open_read_only(number)
        if fd is None:
            raise EOFError  # released meanwhile, so the reader has to start over
        try:
            peer.send_descriptor(fd)
        finally:
            os.close(fd)
