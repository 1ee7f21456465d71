"""The replicator: a worker keeps copies of what the ranks of other hosts stage, so that a host may be lost.

For each rank that it keeps copies of there is a thread, which waits for the next image there, and fetches it while it
is being written to storage. When it has those of all its ranks, it reports that. Once all have reported, the step is
*replicated*: the first rank's worker concludes it, and each tells its trainer. No trainer takes part.
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
from asyncckpt.link.client import grace
from asyncckpt.link.messages import Rendezvous, Replicated
from asyncckpt.link.segment_store import SegmentStore
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
# How long the holder waits for the next image before it says that there is none; and a puller before it tries again.
_NEXT_S = 3.0
_PAUSE_S = 0.5
# How long the threads may take to end, and how long to wait for an outcome at least.
_END_S, _LEAST_S = 3.0, 1.0
# Saves that are remembered as staged here.
_REMEMBERED = 64
_NEWER = "a newer image of this rank was copied first"
# At how many of the newest saves it is looked whether all have copies of them already.
_LATER = 4


class Replicator:
    """Of one worker."""

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
            segment_store: Where copies are held.
            rendezvous: Where the ranks meet.
            timeout: Seconds that anything asked of the store may take.
            transport: The kind by which bytes are moved.
            rate: Bytes a second to fetch at most; None: as many as come.
            send: Tells the trainer which saves are replicated.
        """
        self.copies = Copies(segment_store)
        self._rendezvous, self._timeout = rendezvous, timeout
        self._transport, self._limit, self._send = transport, RateLimit(rate), send
        self._rounds = Rounds(rendezvous, timeout, Patience(timeout))
        self._outcomes = Rounds(rendezvous, timeout, Patience(timeout))
        self._lock = threading.Condition()
        self._announced: TransferAddress | None = None
        self._missing: dict[int, set[int]] = {}  # by save: the ranks whose images are not here yet
        self._waiting: set[int] = set()  # saves of which it is not known yet whether they are replicated
        self._staged: set[int] = set()  # the last that this rank has staged
        self._failed: set[int] = set()  # the last that have failed before: of these all are told so, whatever comes
        self._known = 0  # the last of which it is known
        self._concluded = 0  # that before which none is waited for: one that has failed is known of before others
        self._here: dict[int, int] = {}  # by rank: the save of its newest image here
        self._pullers: dict[int, _Puller] = {}
        self._queue: SimpleQueue[tuple[WriteRequest, float] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._conclude_all, name="asyncckpt-replicated", daemon=True)
        self._thread.start()

    def announce(self, address: TransferAddress) -> None:
        """Tell the other ranks' workers where this one serves its images."""
        self._announced = address
        self._rounds.put_soon(_ADDRESS, pickle.dumps((address.host, address.port)), self._timeout)

    def keep(self, plan: int, ranks: Collection[CopiedRank], plans: Collection[int]) -> None:
        """Keep copies of what ``ranks`` stage by ``plan``. Raises ``OutOfMemoryError``. ``plans``: as of ``Copies``."""
        self.copies.keep(plan, ranks, plans)
        with self._lock:
            for each in ranks:
                if each.rank not in self._pullers:
                    self._pullers[each.rank] = _Puller(each.rank, self._address_of, self._fetch)

    def expect(self, request: WriteRequest) -> None:
        """This rank has staged a save that is to be replicated."""
        save_id = request.save_id
        if self._announced is not None:  # again, as another worker may host the store by now
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
        """A save has failed. Where this rank has not staged it, there will be no copies; else there may be."""
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
        """Copy no more. What is here stays."""
        self._closed.set()
        # First, so that nobody waits for a store that may be gone for good.
        self._rounds.close()
        self._outcomes.close()
        with self._lock:
            self._lock.notify_all()
        for puller in self._pullers.values():
            puller.stop()
        for puller in self._pullers.values():
            puller.wait(_END_S)
        self._queue.put(None)
        self._thread.join(_END_S)  # it may wait for a store that lives, and says nothing any more
        self.copies.close()

    def _address_of(self, rank: int) -> tuple[TransferAddress, bytes, str] | None:
        found = self._rounds.get(_ADDRESS, rank)
        if found is None:
            return None
        host, port = pickle.loads(found)
        return TransferAddress(host, port), self._rendezvous.secret, self._transport

    def _fetch(self, holder: Holder, key: ImageKey, pool: ThreadPoolExecutor) -> None:
        """Copy an image, if it is not here, and report that."""
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
        """Wait until it is known whether the last image of ``rank`` that is here is replicated: until then it may be
        the one that is needed. Returns whether anything is to be copied at all.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._closed.is_set() or self._here.get(rank, 0) <= self._concluded)
        return not self._closed.is_set()

    def _conclude(self, save_id: int) -> None:
        """It is known of that save whether it is replicated."""
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
        """First rank: why the image of ``rank`` of that save will not be copied any more; None: it may be.

        Who keeps copies and has not seen that save, as after the death of a worker, copies the next one, and says
        nothing of this one.
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
        """Why a save is not replicated; None: it is. ``timeout``: seconds to wait for that."""
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
    """A thread that fetches what one rank stages."""

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
        """Stop, also in the middle of an image. ``wait`` for it."""
        self._closed.set()
        if (holder := self._holder) is not None:
            holder.close()

    def wait(self, timeout: float) -> None:
        """Wait until nothing is copied any more, ``timeout`` seconds at most: it may be just connecting."""
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
        """Fetch one image after the other; raises ``OSError`` when the holder is gone."""
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
                    except FileNotFoundError:  # it was overwritten just before
                        continue
