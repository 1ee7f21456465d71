"""Clients of a worker that runs already: a restarted trainer, and processes that only read."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import weakref
from collections.abc import Collection
from dataclasses import asdict

import psutil

from asyncckpt.budgets import ANSWER_S, LONG_S, NOTICE_S, POLL_S
from asyncckpt.errors import CheckpointError, JobTakenError, SaveTimeoutError, decode, is_interrupt
from asyncckpt.format.segment_layout import ImageLayout
from asyncckpt.format.write_request import HeldImage, ImageKey
from asyncckpt.link.api import Images, Inventory, PublishedSegments, Served, TrainerAlive, WorkerApi
from asyncckpt.link.calls import await_answer, call, call_of, receive_answer, tell
from asyncckpt.link.endpoint import connect, endpoint_names, job_taken_error, peer_pid
from asyncckpt.link.process import (
    Surroundings,
    WorkerOptions,
    WorkerProcess,
    fingerprint,
    not_started,
    stderr_file,
)
from asyncckpt.link.socket_connection import OtherVersionError, SocketConnection
from asyncckpt.shm.segment import Segment
from asyncckpt.shm.slots import PublishedVersion, SlotTable
from asyncckpt.storage.history import was_removed

logger = logging.getLogger(__name__)


class Takeover:
    """A connection to the worker that a dead trainer has left, and the contents of the worker's memory.

    The worker stays while the connection is open, and lingers after that.

    Attributes:
        worker: The process id of the worker.
        segments: The segments that hold something, mapped here, by their numbers in the worker.
        images: The images of the dead trainer.
        copies: The copies of images of other hosts.
        published: The segments with publications of weights, or of sets of files without images.
    """

    def __init__(self, connection: SocketConnection, inventory: Inventory, segments: dict[int, Segment]) -> None:
        """Use a connection. Callers use ``find`` instead.

        Args:
            connection: The connection.
            inventory: The answer of the worker to ``WorkerApi.inspect``.
            segments: The segments of the inventory, by their numbers.
        """
        self._connection = connection
        self._session = inventory.session
        self.worker = inventory.worker
        self.segments = segments
        self.images = [each for each in inventory.images if not each.is_copy]
        self.copies = [each for each in inventory.images if each.is_copy]
        self.published = list(inventory.published)
        self._not_held = set(inventory.saves) - {image.request.path for image in self.images if image.layout.has_state}
        _connected.add(self)

    @classmethod
    def find(cls, endpoint: str, timeout: float, left: Collection[int] = ()) -> Takeover | None:
        """Connect to the worker that a dead trainer has left.

        Args:
            endpoint: The name of the endpoint.
            timeout: Timeout in seconds for each answer.
            left: The process ids of workers that this process itself has left, and that may not have noticed yet.

        Returns:
            The connection; None if there is no worker. A worker of another protocol is asked to exit, and what it
            holds is not loaded.

        Raises:
            JobTakenError: The trainer of the worker lives, or the worker is of another protocol and does not exit.
            SaveTimeoutError: The worker does not answer.
        """
        asked = False  # whether a worker of another protocol was asked to exit
        noticed, left_by = time.monotonic() + NOTICE_S, time.monotonic() + timeout
        while (connection := connect(endpoint, strict=True)) is not None:
            try:
                reply = call(connection, timeout, WorkerApi.inspect)
                if isinstance(reply, Inventory):
                    return cls(connection, reply, _take_segments(connection, reply, timeout))
                if not isinstance(reply, TrainerAlive):
                    raise OtherVersionError("the worker sent an inventory of another version")
                is_left = reply.worker in left and reply.trainer == os.getpid()
                # A busy worker notices the death of its trainer late. A trainer that is not found may live in another
                # container, unless the worker is in this container.
                is_near = reply.trainer > 0 and peer_pid(connection) == reply.worker
                limit = left_by if is_left or is_near else noticed
                if time.monotonic() > limit or (not is_left and is_running(reply.trainer)):
                    raise job_taken_error(reply.worker, reply.trainer)
            except CheckpointError:
                connection.close()
                raise
            except OtherVersionError as error:
                worker = peer_pid(connection)
                if asked and time.monotonic() > noticed:
                    connection.close()
                    raise JobTakenError(
                        f"a worker ({worker}) of another version of asyncckpt has a trainer as this rank of this job:"
                        " end that training, or save to another folder"
                    ) from error
                if not asked:
                    logger.warning("the worker %d is asked to exit, and its images are not loaded: %s", worker, error)
                asked = True
                with connection:
                    _retire(connection, worker, timeout)
            except (EOFError, OSError) as error:
                connection.close()  # the worker has just left
                if time.monotonic() > noticed:
                    raise SaveTimeoutError(f"a worker cannot be talked to at its endpoint: {error}") from error
            connection.close()
            time.sleep(POLL_S)
        return None

    def images_in(self, number: int) -> tuple[HeldImage, ...]:
        """Return the images in the segment with that number."""
        return tuple(each for each in self.images if each.request.segment == number)

    def layouts(self) -> dict[int, ImageLayout]:
        """Return the layouts of the segments that saves were staged in, by their numbers."""
        published = {each.segment: each.layout for each in self.published if isinstance(each.layout, ImageLayout)}
        return {**published, **{each.request.segment: each.layout for each in self.images}}

    def published_versions(self) -> dict[PublishedVersion, bool]:
        """Return the versions published in segments of saves, each with False if its checkpoint was removed."""
        found: dict[PublishedVersion, bool] = {}
        places = {(each.request.segment, each.request.slot): each for each in self.images}
        for number, layout in self.layouts().items():
            table = SlotTable(self.segments[number].view)
            for version, slot in table.publications(len(layout.slots)).items():
                image = places.get((number, slot))
                found[version] = image is None or not (image.committed and was_removed(image.request))
            table.close()
        return found

    def attach(self, options: WorkerOptions, timeout: float, longest: float = 0.0) -> WorkerProcess | None:
        """Open a session with the worker. The worker first writes everything that is staged.

        Args:
            options: The options of the session.
            timeout, longest: See ``retire``.

        Returns:
            The worker; None if it has left, was killed, or has another trainer. The segments stay mapped.

        Raises:
            SaveTimeoutError: The worker cannot be killed.
        """
        if self._connection.closed:  # an earlier call was interrupted
            return None
        try:
            process = WorkerProcess.attached(peer_pid(self._connection), self._connection, stderr_file())
        except OSError as error:
            raise not_started("the worker of the previous trainer cannot be used:", error) from error
        try:
            own = asdict(options), asdict(Surroundings.here())
            self._connection.send(call_of(1, WorkerApi.attach, fingerprint(), self._session, *own))
            process.send_stderr()
            timeout = self._timeout(timeout, longest)
            answer = receive_answer(self._connection) if _wait(self._connection, self.worker, timeout) else None
        except BaseException as error:
            process.end()  # the session may have begun
            if isinstance(error, CheckpointError) or not isinstance(error, EOFError | OSError) or is_interrupt(error):
                raise
            return None  # the worker has left
        if answer is not None:
            if answer.error is None:
                return process
            level = logging.INFO if self._session > 0 else logging.WARNING  # 0: started in advance for this trainer
            why = decode(answer.error).message
            logger.log(level, "the worker %d of the previous trainer is not used: %s", self.worker, why)
            self.retire(timeout, longest)
        process.end()
        return None

    def retire(self, timeout: float, longest: float = 0.0) -> None:
        """Tell the worker to leave, and wait until everything is written. The mapped segments stay.

        Args:
            timeout: Seconds after which the worker is killed, because storage may be stalled, or a host may be lost.
            longest: The least timeout in seconds if the worker writes saves without holding their images: sets of
                files without a state at their top, and saves of a trainer that has closed.

        Raises:
            SaveTimeoutError: The worker cannot be killed.
        """
        _retire(self._connection, self.worker, self._timeout(timeout, longest))
        self._connection.close()

    def _timeout(self, timeout: float, longest: float) -> float:
        """Return the timeout of a wait for the worker, which may still write. See ``retire``."""
        if self._not_held:
            timeout = max(timeout, longest)
            logger.info(
                "this trainer waits for worker %d, which writes %s", self.worker, ", ".join(sorted(self._not_held))
            )
        return timeout

    def close(self) -> None:
        """Close the connection, and unmap the memory."""
        self._connection.close()
        for segment in self.segments.values():
            segment.close()

    def __enter__(self) -> Takeover:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_connected: weakref.WeakSet[Takeover] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close the connections in a fork. An open connection would hide the death of the trainer from the worker."""
    for each in list(_connected):
        each._connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class ReaderClient:
    """A connection of a process that only reads to the worker at one endpoint. For one thread at a time.

    All calls raise ``EOFError`` or ``OSError`` if the worker has left, and ``CheckpointError`` if it does not answer or
    if it refuses.
    """

    def __init__(self, connection: SocketConnection, endpoint: str) -> None:
        self._connection, self._endpoint = connection, endpoint
        self.timeout = ANSWER_S
        """Timeout in seconds for each answer."""

    @classmethod
    def connect(cls, endpoint: str) -> ReaderClient | None:
        """Connect to the worker with that endpoint. Return None if there is no worker."""
        connection = connect(endpoint)
        return None if connection is None else cls(connection, endpoint)

    def published(self) -> PublishedSegments:
        """Return the segments in which something is published now."""
        return call(self._connection, self.timeout, WorkerApi.published)

    def follow(self, locator: str) -> str | None:
        """Let the worker mirror the publication at ``locator``, on another host. See ``WorkerApi.follow``."""
        return call(self._connection, self.timeout, WorkerApi.follow, locator)

    def images(self) -> Images:
        """Return the images that the worker holds, the oldest first."""
        return call(self._connection, self.timeout, WorkerApi.images)

    def image(self, key: ImageKey) -> HeldImage | None:
        """Return one image with its layout and checksums; None if the worker does not hold it any more."""
        self._connection.send(call_of(1, WorkerApi.image, key))
        until = time.monotonic() + max(self.timeout, LONG_S)
        while not self._connection.poll(self.timeout / 2):
            self._check_answers()  # a stopped worker computes no checksums
            if time.monotonic() > until:
                await_answer(self._connection, 0)
        held: HeldImage | None = receive_answer(self._connection).result()
        return held

    def _check_answers(self) -> None:
        """Raise an error if the worker is stopped. A running worker always answers on a second connection."""
        if (connection := connect(self._endpoint)) is None:
            raise EOFError("the worker has exited")
        with connection:
            call(connection, self.timeout / 2, WorkerApi.status)

    def serve(self, key: bytes, address: str) -> int:
        """Let the worker serve its images to processes of other hosts that know ``key``. Return the port.

        Raises ``OSError`` also if the worker cannot serve.
        """
        served: Served = call(self._connection, self.timeout, WorkerApi.serve, key, address)
        if served.trouble is not None:
            raise OSError(served.trouble)
        return served.port

    def open_segment(self, number: int) -> Segment:
        """Map the segment with that number for reading. The caller has to close it."""
        call(self._connection, self.timeout, WorkerApi.segment, number)
        return _receive_segment(self._connection, self.timeout, writable=False)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def retire_idle_workers(timeout: float) -> bool:
    """Tell lingering workers to leave if all their images are committed. Return whether any worker has left.

    ``timeout``: timeout in seconds for each worker.
    """
    found = False
    for endpoint in endpoint_names():
        if (connection := connect(endpoint)) is None:
            continue
        with connection, contextlib.suppress(CheckpointError, EOFError, OSError):
            noticed = time.monotonic() + NOTICE_S
            # A worker may notice the death of its trainer late, see ``Takeover.find``.
            while isinstance(reply := call(connection, timeout, WorkerApi.inspect), TrainerAlive):
                is_near = reply.trainer > 0 and peer_pid(connection) == reply.worker
                if not is_near or is_running(reply.trainer) or time.monotonic() > noticed:
                    break
                time.sleep(POLL_S)
            # A worker without a session yet has no memory to give.
            if not isinstance(reply, Inventory) or reply.session == 0 or reply.follows:
                continue
            if all(each.committed for each in reply.images):
                tell(connection, WorkerApi.retire)
                found |= connection.poll(timeout)
    return found


def _retire(connection: SocketConnection, worker: int, timeout: float) -> None:
    """Tell a worker to exit, and wait until it has written everything. Raises ``SaveTimeoutError``."""
    try:
        tell(connection, WorkerApi.retire)
        _wait(connection, worker, timeout)  # until the end of file
    except CheckpointError:
        raise
    except OSError:
        pass  # the worker has left


def _wait(connection: SocketConnection, worker: int, timeout: float) -> bool:
    """Wait for an answer of the worker. After the timeout kill it, and return False.

    Raises ``SaveTimeoutError``, ``OSError``.
    """
    if connection.poll(timeout):
        return True
    logger.warning("the worker %d of the previous trainer is killed, after %g s", worker, timeout)
    # The process id is 0 if the worker is in another container. A signal to 0 would go to our own process group.
    if (pid := peer_pid(connection)) > 0:
        os.kill(pid, signal.SIGKILL)
    if not connection.poll(NOTICE_S):
        raise SaveTimeoutError(f"the worker {worker} of the previous trainer cannot be killed")
    return False


def _take_segments(connection: SocketConnection, inventory: Inventory, timeout: float) -> dict[int, Segment]:
    segments: dict[int, Segment] = {}
    call(connection, timeout, WorkerApi.segments)
    with contextlib.ExitStack() as undo:
        for number in inventory.segments:
            segments[number] = undo.enter_context(_receive_segment(connection, timeout))
        undo.pop_all()
    return segments


def _receive_segment(connection: SocketConnection, timeout: float, *, writable: bool = True) -> Segment:
    await_answer(connection, timeout)
    return connection.receive_segment(writable=writable)


def is_running(pid: int) -> bool:
    """Return whether a process with that id runs on this host."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
