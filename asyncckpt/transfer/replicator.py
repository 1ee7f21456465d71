"""The replicator: a worker keeps copies of the images that ranks of other hosts stage, so that a host may be lost.

A thread for each copied rank waits for the rank's next image, and fetches it while the rank's worker writes it to
storage. When a worker has the images of all its ranks, it reports that. Once all workers have reported, the step is
*replicated*: the first rank's worker concludes the round, and each worker tells its trainer. Trainers do nothing.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

from asyncckpt.errors import CheckpointError, SaveDroppedError
from asyncckpt.format.write_request import CopiedRank, ImageKey, WriteRequest
from asyncckpt.link.messages import Rendezvous, Replicated
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.protocol.commit import grace
from asyncckpt.ranks.rounds import Rounds, round_name
from asyncckpt.ranks.store_connection import Patience
from asyncckpt.transfer.copies import Copies
from asyncckpt.transfer.holder import Holder
from asyncckpt.transfer.image_copy import ImageCopy, RateLimit
from asyncckpt.transfer.requests import TransferAddress
from asyncckpt.transfer.sockets import CONNECTIONS

logger = logging.getLogger(__name__)

_KIND = "replicated"
_ADDRESS = "serves"
# Maximum time to wait for the next image in one question, and the pause before a failed puller retries.
_NEXT_S = 3.0
_PAUSE_S = 0.5
# Timeout for the end of the threads, and the least time to wait for an outcome.
_END_S, _LEAST_S = 3.0, 1.0
# Number of saves that are remembered as staged or failed here.
_REMEMBERED = 64
_NEWER = "a newer image of this rank was copied first"
# Number of newer saves that are examined for copies on all ranks.
_LATER = 4


class Replicator:
    """The replicator of one worker."""

    def __init__(
        self,
        segment_store: SegmentStore,
        rendezvous: Rendezvous,
        timeout: float,
        transport: str,
        rate: float | None,
        send: Callable[[Replicated], object],
    ) -> None:
        """Copy nothing yet.

        Args:
            segment_store: The memory for the copies.
            rendezvous: The meeting point of the ranks.
            timeout: Timeout in seconds for requests to the store.
            transport: The name of the transport kind.
            rate: Maximum bytes a second to fetch; None: no limit.
            send: Tells the trainer which saves are replicated.
        """
        self.copies = Copies(segment_store)
        self._rendezvous, self._timeout = rendezvous, timeout
        self._transport, self._limit, self._send = transport, RateLimit(rate), send
        self._rounds = Rounds(rendezvous, timeout, Patience(timeout))
        self._outcomes = Rounds(rendezvous, timeout, Patience(timeout))
        self._lock = threading.Condition()
        self._announced: TransferAddress | None = None
        self._missing: dict[int, set[int]] = {}  # by save: the ranks whose images are missing here
        self._waiting: set[int] = set()  # saves with an unknown outcome
        self._staged: set[int] = set()  # the last saves that this rank has staged
        self._failed: set[int] = set()  # the last saves that failed before staging; their failure is already reported
        self._known = 0  # the last save with a known outcome
        self._concluded = 0  # all saves up to this one are concluded, though failed saves may conclude out of order
        self._here: dict[int, int] = {}  # by rank: the save of its newest image here
        self._pullers: dict[int, _Puller] = {}
        self._queue: SimpleQueue[tuple[WriteRequest, float] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._conclude_all, name="asyncckpt-replicated", daemon=True)
        self._thread.start()

    def announce(self, address: TransferAddress) -> None:
        """Tell the other ranks' workers where this worker serves its images."""
        self._announced = address
        self._rounds.put_soon(_ADDRESS, pickle.dumps((address.host, address.port)), self._timeout)

    def keep(self, plan: int, ranks: Collection[CopiedRank], plans: Collection[int]) -> None:
        """Keep copies of images of ``plan`` from ``ranks``. Raises ``OutOfMemoryError``. See ``Copies.keep``."""
        self.copies.keep(plan, ranks, plans)
        with self._lock:
            for each in ranks:
                if each.rank not in self._pullers:
                    self._pullers[each.rank] = _Puller(each.rank, self._address_of, self._fetch)

    def expect(self, request: WriteRequest) -> None:
        """Await the copies of a save that this rank has staged."""
        save_id = request.save_id
        if self._announced is not None:  # repeat, because another worker may host the store now
            self.announce(self._announced)
        with self._lock:
            if save_id in self._failed:
                return
            missing = {rank for rank in self._pullers if self._here.get(rank, 0) != save_id}
            passed = any(self._here.get(rank, 0) > save_id for rank in missing)
            if not passed:
                self._missing[save_id] = missing
            self._staged = {number for number in self._staged if number > save_id - _REMEMBERED} | {save_id}
            self._waiting.add(save_id)
        self._queue.put((request, time.monotonic() + request.timeout))
        if passed:
            self._rounds.fail_soon(round_name(_KIND, save_id), SaveDroppedError(_NEWER), self._timeout)
        elif not missing:
            self._report(save_id)

    def on_failed(self, request: WriteRequest, error: CheckpointError) -> None:
        """Handle a failed save. If this rank has staged the save, copies are still possible; otherwise they are not."""
        save_id = request.save_id
        with self._lock:
            is_staged = save_id in self._staged
            if not is_staged:
                self._failed = {number for number in self._failed if number > save_id - _REMEMBERED} | {save_id}
        if not is_staged:
            name = round_name(_KIND, request.save_id)
            if request.rank > 0:
                self._rounds.fail_soon(name, error, self._timeout)
            else:
                self._rounds.conclude_failed_soon(name, error, self._timeout)
            self._conclude(request.save_id)
            self._send(Replicated(request.save_id, error))

    def close(self) -> None:
        """Stop copying. The copies that are here stay."""
        self._closed.set()
        # Close these first, so that no thread waits for a store that may be gone for good.
        self._rounds.close()
        self._outcomes.close()
        with self._lock:
            self._lock.notify_all()
        for puller in self._pullers.values():
            puller.stop()
        for puller in self._pullers.values():
            puller.wait(_END_S)
        self._queue.put(None)
        self._thread.join(_END_S)  # the thread may wait for a store that is alive but silent
        self.copies.close()

    def _address_of(self, rank: int) -> tuple[TransferAddress, bytes, str] | None:
        found = self._rounds.get(_ADDRESS, rank)
        if found is None:
            return None
        host, port = pickle.loads(found)
        return TransferAddress(host, port), self._rendezvous.secret, self._transport

    def _fetch(self, holder: Holder, key: ImageKey, pool: ThreadPoolExecutor) -> None:
        """Copy an image unless it is here already, and report the copy."""
        if not self._may_copy(key.rank):
            return
        image = holder.open(key, with_checksums=False)
        try:
            request = image.held.request
            if self._here.get(key.rank, 0) >= request.save_id:
                return
            try:
                incoming = self.copies.begin(image.held)
                incoming.finish(*ImageCopy(image, incoming, self._limit).run(pool))
            except CheckpointError as error:
                logger.warning("save %d of rank %d is not copied: %s", request.save_id, key.rank, error)
                self._rounds.fail_soon(round_name(_KIND, request.save_id), error, self._timeout)
                return
        finally:
            image.close()
        self._on_copied(key.rank, request.save_id)

    def _may_copy(self, rank: int) -> bool:
        """Wait until it is known whether the newest copy of ``rank`` is replicated, because it may be needed till then.

        Return False if nothing is to be copied any more.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._closed.is_set() or self._here.get(rank, 0) <= self._concluded)
        return not self._closed.is_set()

    def _conclude(self, save_id: int) -> None:
        """Note that the outcome of a save is known."""
        with self._lock:
            self._missing.pop(save_id, None)
            self._waiting.discard(save_id)
            self._known = max(self._known, save_id)
            self._concluded = max(self._concluded, min([self._known, *(number - 1 for number in self._waiting)]))
            self._lock.notify_all()

    def _on_copied(self, rank: int, save_id: int) -> None:
        with self._lock:
            self._here[rank] = save_id
            passed = [number for number, missing in self._missing.items() if number < save_id and rank in missing]
            self._missing.get(save_id, set()).discard(rank)
            is_done = self._missing.get(save_id) == set()
            for number in passed:
                del self._missing[number]
        for number in passed:
            newer = SaveDroppedError(_NEWER, rank=rank)
            self._rounds.fail_soon(round_name(_KIND, number), newer, self._timeout)
        if is_done:
            self._report(save_id)

    def _report(self, save_id: int) -> None:
        self._rounds.report_soon(round_name(_KIND, save_id), b"", self._timeout)

    def _conclude_all(self) -> None:
        while (entry := self._queue.get()) is not None and not self._closed.is_set():
            request, deadline = entry
            failure = self._outcome(request, max(_LEAST_S, deadline - time.monotonic()))
            if self._closed.is_set():
                return
            if failure is None:
                self.copies.on_replicated(request.plan, request.save_id)
            self._conclude(request.save_id)
            self._send(Replicated(request.save_id, failure))

    def _superseded(self, save_id: int, rank: int) -> CheckpointError | None:
        """Return why the image of ``rank`` will not be copied for this save; None if it still may be. First rank only.

        A worker that has not seen a save, for example after the death of another worker, copies the next save. It
        reports nothing about the missed save.
        """
        if self._closed.is_set():
            return SaveDroppedError("nothing is copied any more", rank=rank)
        with self._lock:
            later = sorted(number for number in self._waiting if number > save_id)[-_LATER:]
        for number in later:
            if len(self._outcomes.who_reported(round_name(_KIND, number))) == self._rendezvous.world_size:
                return SaveDroppedError(_NEWER, rank=rank)
        return None

    def _outcome(self, request: WriteRequest, timeout: float) -> CheckpointError | None:
        """Wait at most ``timeout`` seconds. Return why the save is not replicated; None if it is."""
        name = round_name(_KIND, request.save_id)
        try:
            if request.rank > 0:
                outcome = self._outcomes.outcome(name, timeout + grace(timeout))
                return outcome if isinstance(outcome, CheckpointError) else None
            try:
                self._outcomes.collect(name, timeout, lost=partial(self._superseded, request.save_id))
                self._outcomes.conclude(name, b"")
            except CheckpointError as error:
                self._outcomes.conclude_failed(name, error)
                return error
            finally:
                self._outcomes.clear(_KIND, request.save_id)
        except CheckpointError as error:
            return error
        return None


class _Puller:
    """A thread that fetches the images that one rank stages."""

    def __init__(
        self,
        rank: int,
        address_of: Callable[[int], tuple[TransferAddress, bytes, str] | None],
        fetch: Callable[[Holder, ImageKey, ThreadPoolExecutor], None],
    ) -> None:
        self._rank, self._address_of, self._fetch = rank, address_of, fetch
        self._closed = threading.Event()
        self._holder: Holder | None = None
        self._thread = threading.Thread(target=self._run, name="asyncckpt-copies", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, even in the middle of an image. Call ``wait`` afterwards."""
        self._closed.set()
        if (holder := self._holder) is not None:
            holder.close()

    def wait(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the end of the thread, which may be connecting."""
        self._thread.join(timeout)

    def _run(self) -> None:
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="asyncckpt-copy-io") as pool:
            while not self._closed.is_set():
                try:
                    found = self._address_of(self._rank)
                    if found is not None:
                        self._follow(Holder(*found), pool)
                except (OSError, CheckpointError) as error:
                    logger.info("rank %d cannot be copied from, for now: %s", self._rank, error)
                except Exception:
                    logger.exception("copying from rank %d has failed: please report this", self._rank)
                self._closed.wait(_PAUSE_S)

    def _follow(self, holder: Holder, pool: ThreadPoolExecutor) -> None:
        """Fetch image after image. Raises ``OSError`` when the holder is gone."""
        self._holder = holder
        with holder:
            count = 0
            if self._closed.is_set():
                return
            while not self._closed.is_set():
                if (found := holder.next_image(count, _NEXT_S)) is not None:
                    count, key = found
                    try:
                        self._fetch(holder, key, pool)
                    except FileNotFoundError:  # the image was just overwritten
                        continue
