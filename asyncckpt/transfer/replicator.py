"""The replicator: a worker keeps copies of the images that ranks of other hosts stage, so that a host may be lost.

The machine in ``asyncckpt/protocol/replication.py`` decides which image is copied, and when a save is replicated. A
thread for each copied rank waits for the rank's next image. The thread fetches the image while the rank's worker writes
it to storage. Trainers take no part.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from asyncckpt.budgets import CHECK_S, NOTICE_S
from asyncckpt.errors import CheckpointError, SaveTimeoutError, WorkerDiedError
from asyncckpt.format.write_request import CopiedRank, HeldImage, ImageKey
from asyncckpt.link.api import Rendezvous, TrainerApi
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.protocol import replication
from asyncckpt.ranks.rounds import COPIES_BEGIN, KEPT_ROUNDS, REPLICATED, Rounds, round_name
from asyncckpt.ranks.store_connection import Patience
from asyncckpt.threads import start
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.copies import Copies
from asyncckpt.transfer.fetch import RateLimit
from asyncckpt.transfer.holder import NEXT_S, Holder, RemoteImage
from asyncckpt.transfer.sockets import CONNECTIONS

logger = logging.getLogger(__name__)

_ADDRESS = "serves"


class Replicator:
    """The replicator of one worker."""

    def __init__(
        self,
        segment_store: SegmentStore,
        rendezvous: Rendezvous,
        timeout: float,
        transport: str,
        rate: float | None,
        tell: Callable[..., object],
        post: Callable[[replication.OfCopies], object],
    ) -> None:
        """Copy nothing yet.

        Args:
            segment_store: The memory for the copies.
            rendezvous: The meeting point of the ranks.
            timeout: Timeout in seconds for requests to the store.
            transport: The name of the transport kind.
            rate: Maximum bytes a second to fetch; None: no limit.
            tell: Calls a method of ``TrainerApi`` in the trainer.
            post: Gives an event to the machines. Does not wait.
        """
        self.copies = Copies(segment_store)
        self._rendezvous, self._timeout = rendezvous, timeout
        self._transport, self._limit, self._tell, self._post = transport, RateLimit(rate), tell, post
        self._rounds = Rounds(rendezvous, timeout, Patience(timeout))
        self._outcomes = Rounds(rendezvous, timeout, Patience(timeout))
        self._announced: TransferAddress | None = None
        self._pullers: dict[int, _Puller] = {}
        self._to_hear: SimpleQueue[int | None] = SimpleQueue()
        self._newest = 0  # the newest save whose outcome is awaited
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="asyncckpt-replicated", daemon=True)
        start(self._thread)

    def announce(self, address: TransferAddress) -> None:
        """Tell the other ranks' workers where this worker serves its images."""
        self._announced = address
        self._rounds.put_soon(_ADDRESS, pickle.dumps((address.host, address.port)), self._timeout)

    def keep(self, plan: int, ranks: Collection[CopiedRank], plans: Collection[int]) -> None:
        """Keep copies of images of ``plan`` from ``ranks``. Raises ``OutOfMemoryError``. See ``Copies.keep``."""
        self.copies.keep(plan, ranks, plans)
        for each in ranks:
            if each.rank not in self._pullers:
                puller = self._pullers[each.rank] = _Puller(each.rank, self._address_of, self._fetch, self._post)
                try:
                    puller.start()
                except CheckpointError:
                    del self._pullers[each.rank]
                    raise
                self._post(replication.Copying(each.rank))

    def carry_out(self, action: replication.CopyAction) -> None:
        """Carry out an action of the machine. This may wait only for a trainer that reads no messages."""
        match action:
            case replication.AllowCopy(source):
                self._pullers[source].allow()
            case replication.SayBegin(save, timeout):
                self._rounds.put_soon(COPIES_BEGIN, b"%d" % save, timeout)
            case replication.ReportCopies(save, timeout):
                self._rounds.report_soon(round_name(REPLICATED, save), b"", timeout)
            case replication.FailCopies(save, error, timeout):
                self._rounds.fail_soon(round_name(REPLICATED, save), error, timeout)
            case replication.AwaitCopies(save):
                if self._announced is not None:  # repeat, because another worker may host the store now
                    self.announce(self._announced)
                self._newest = save
                self._to_hear.put(save)
            case replication.ProtectCopies(save):
                self.copies.on_replicated(save)
            case replication.TellCopies(save, error):
                self._tell(TrainerApi.replicated, save, error)

    def close(self) -> None:
        """Stop copying. Finished copies stay, and the other ranks get no more messages."""
        self._closed.set()
        self._to_hear.put(None)
        # Close these first, so that no thread waits for a store that may be gone for good.
        self._rounds.close()
        self._outcomes.close()
        for puller in self._pullers.values():
            puller.stop()
        for puller in self._pullers.values():
            puller.wait(NOTICE_S)
        self._thread.join(NOTICE_S)  # the thread may wait for a store that is alive but silent
        self.copies.close()

    def _address_of(self, rank: int) -> tuple[TransferAddress, bytes, str] | None:
        found = self._rounds.get(_ADDRESS, rank)
        if found is None:
            return None
        host, port = pickle.loads(found)
        return TransferAddress(host, port), self._rendezvous.secret, self._transport

    def _fetch(self, image: RemoteImage[HeldImage], pool: ThreadPoolExecutor) -> replication.OfCopies:
        """Copy an image. Return the event for the machine."""
        save, rank = image.described.request.save_id, image.described.request.rank
        try:
            self.copies.begin(image.described).fill(image, pool, self._limit)
        except CheckpointError as error:
            logger.warning("save %d of rank %d is not copied: %s", save, rank, error)
            return replication.ImageHere(save, rank, error)
        return replication.ImageHere(save, rank)

    def _hear(self) -> None:
        """Wait for the first rank's decision about one save after the other."""
        while (save := self._to_hear.get()) is not None:
            store = b""
            event: replication.OfCopies | None = None
            while event is None and not self._closed.is_set():
                try:
                    before, store = store, self._outcomes.store_id(self._timeout)
                    if before not in (b"", store) or self._newest - save >= KEPT_ROUNDS:
                        event = replication.OutcomeLost(save)
                    else:
                        event = self._outcome(save)
                except SaveTimeoutError:
                    continue
                except WorkerDiedError:  # retry, because the first rank may only be unreachable
                    self._closed.wait(CHECK_S)
                except CheckpointError:  # the first rank will not report an outcome
                    event = replication.OutcomeLost(save)
            if event is not None:
                self._post(event)

    def _outcome(self, save: int) -> replication.OfCopies:
        outcome = self._outcomes.outcome(round_name(REPLICATED, save), NOTICE_S)
        return replication.CopiesOutcome(save, outcome if isinstance(outcome, CheckpointError) else None)


class _Puller:
    """A thread that fetches the images that one rank stages."""

    def __init__(
        self,
        rank: int,
        address_of: Callable[[int], tuple[TransferAddress, bytes, str] | None],
        fetch: Callable[[RemoteImage[HeldImage], ThreadPoolExecutor], replication.OfCopies],
        post: Callable[[replication.OfCopies], object],
    ) -> None:
        self._rank, self._address_of, self._fetch, self._post = rank, address_of, fetch, post
        self._allowed: SimpleQueue[None] = SimpleQueue()
        self._closed = threading.Event()
        self._holder: Holder | None = None
        self._copied = 0  # the save of the newest image
        self._thread = threading.Thread(target=self._run, name="asyncckpt-copies", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises ``CheckpointError`` if the process has reached its limit of threads."""
        start(self._thread)

    def allow(self) -> None:
        """Allow the thread to copy the next image."""
        self._allowed.put(None)

    def stop(self) -> None:
        """Stop, even in the middle of an image. Call ``wait`` afterwards."""
        self._closed.set()
        self.allow()
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
                self._closed.wait(CHECK_S)

    def _follow(self, holder: Holder, pool: ThreadPoolExecutor) -> None:
        """Fetch image after image. Raises ``OSError`` when the holder is gone."""
        self._holder = holder
        with holder:
            count = 0
            while not self._closed.is_set():
                if (found := holder.next_image(count, NEXT_S)) is None:
                    continue
                count, key = found
                self._post(replication.CopyWanted(self._rank))
                self._allowed.get()
                if self._closed.is_set():
                    return
                with contextlib.suppress(FileNotFoundError):  # the image was just overwritten
                    self._copy(holder, key, pool)

    def _copy(self, holder: Holder, key: ImageKey, pool: ThreadPoolExecutor) -> None:
        with contextlib.closing(holder.open(key)) as image:
            save = image.described.request.save_id
            if save > self._copied:
                event = self._fetch(image, pool)
                self._copied = save
                self._post(event)
