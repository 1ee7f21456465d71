"""Load from memory: find the images that workers hold for dead trainers, and read a checkpoint from them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from asyncckpt.budgets import NOTICE_S, POLL_S
from asyncckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatError,
    MismatchError,
    unless_interrupt,
)
from asyncckpt.format.manifest import place_of_data
from asyncckpt.format.storage_meta import data_names_in
from asyncckpt.format.write_request import ImageKey, ImageSummary, WriteRequest
from asyncckpt.link.api import Images
from asyncckpt.link.endpoint import endpoint_names, endpoint_scope
from asyncckpt.link.takeover import ReaderClient, is_running
from asyncckpt.loading.data_file import ChecksummedFile
from asyncckpt.loading.image_files import FetchedImage, HeldImages, ImageFiles, MappedImage
from asyncckpt.loading.source import Candidate, StorageSource
from asyncckpt.ranks.group import own_address
from asyncckpt.ranks.ranks import Ranks
from asyncckpt.shm.slots import Readers, lease
from asyncckpt.storage import step_folder, storage_for
from asyncckpt.storage.history import StoredStep, history
from asyncckpt.threads import Pool
from asyncckpt.transfer.api import TransferAddress

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
# Number of workers to ask in parallel. A question to a stopped worker takes until its timeout.
_ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class ImagePlace:
    """An image, and the worker that holds it: the ``endpoint``, and the ``scope`` of its host.

    ``served``: the address where other hosts can read the image; None: there is none.
    """

    summary: ImageSummary
    scope: str
    endpoint: str
    served: TransferAddress | None


class Unusable(NamedTuple):
    """Images that a rank could not load: image ``key`` of the worker at ``endpoint``, on the host ``scope``.

    ``key`` None: all images of the worker. ``endpoint`` None: the image that a rank on the host has mapped.
    """

    scope: str
    endpoint: str | None
    key: ImageKey | None

    def has(self, place: ImagePlace) -> bool:
        """Return whether this excludes ``place``."""
        same_worker = place.scope == self.scope and self.endpoint in (None, place.endpoint)
        return same_worker and self.key in (None, place.summary.key)


@dataclass(frozen=True)
class HeldAttempt:
    """The held images of one attempt: the places of the image of each rank that saved it.

    ``request``: the request of the first rank. A worker holds the first rank's image.
    """

    request: WriteRequest
    committed: bool
    places: dict[int, list[ImagePlace]]

    @property
    def is_whole(self) -> bool:
        """Return whether the images of all ranks are held."""
        return len(self.places) == self.request.world_size


@dataclass(frozen=True)
class FoundImages:
    """The images that workers hold: ``places``, on the first rank only.

    ``own``: the images of this rank's previous trainer, mapped here. ``scope``: the scope of this host. ``key``: the
    secret with which this job may read from workers on other hosts.
    """

    own: HeldImages | None
    scope: str
    key: bytes
    places: tuple[ImagePlace, ...]

    def without(self, unusable: Collection[Unusable]) -> FoundImages:
        """Return all images except the unusable ones."""
        mapped = {each.key for each in unusable if each.endpoint is None and each.key is not None}
        own = None if self.own is None else self.own.without(mapped)
        places = tuple(place for place in self.places if not any(each.has(place) for each in unusable))
        return replace(self, own=own, places=places)

    def unfinished(self, root: str, step: int) -> list[WriteRequest]:
        """Return the uncommitted saves under ``root`` after ``step``, of dead trainers. First rank only.

        Workers may still commit these saves.
        """
        requests = [place.summary.request for place in self.places if not place.summary.committed]
        later = [each for each in requests if (each.step or 0) > step and os.path.dirname(each.path) == root]
        return [*{each.attempt: each for each in later}.values()]

    def attempts(self) -> Iterator[HeldAttempt]:
        """Yield the held attempts, each with all its held images, the newest attempt first. First rank only.

        Skip an attempt if no worker holds the image of its first rank.
        """
        of: defaultdict[str, list[ImagePlace]] = defaultdict(list)
        for place in self.places:
            of[place.summary.request.attempt].append(place)
        firsts = [place.summary.request for place in self.places if place.summary.request.rank == 0]
        for attempt, request in {each.attempt: each for each in sorted(firsts, key=_age)}.items():
            places: defaultdict[int, list[ImagePlace]] = defaultdict(list)
            for place in of[attempt]:
                if place.summary.request.plan == request.plan:  # parts of another plan do not fit
                    places[place.summary.request.rank].append(place)
            yield HeldAttempt(request, any(place.summary.committed for place in of[attempt]), dict(places))


def find_images(job: str, own: HeldImages | None, address: str | None, ranks: Ranks) -> FoundImages:
    """Find the images that workers hold. All ranks call this together.

    Args:
        job: The job of the images.
        own: The images that a worker holds for this rank, mapped here; None: there are none.
        address: The address of this host for other hosts; None: determine the address.
        ranks: The ranks that search together.
    """
    scope = _scope()
    scopes = ranks.gather(scope)
    key = ranks.from_first(lambda: secrets.token_bytes(_KEY_BYTES))
    is_first_here = scopes.index(scope) == ranks.rank
    host = own_address(address) if len({*scopes}) > 1 else None
    here = list(_held_here(job, scope, key, host)) if is_first_here else []
    return FoundImages(own, scope, key, tuple(place for places in ranks.gather_to_first(here) for place in places))


def _age(request: WriteRequest) -> tuple[float, int]:
    return -request.called_at, -request.save_id


def _held_here(job: str, scope: str, key: bytes, host: str | None) -> Iterator[ImagePlace]:
    """Yield the images that workers on this host hold.

    ``host``: the name of this host for other hosts, or None if there are no other hosts.
    """

    def ask(endpoint: str) -> list[ImagePlace]:
        try:
            if (client := ReaderClient.connect(endpoint)) is None:
                return []
            with closing(client):
                images = _settled(client).images
                served = _served(client, key, host) if host is not None and images else None
        except (CheckpointError, EOFError, OSError) as error:
            logger.warning("images of a worker on this host are not loaded: %s", error)
            return []
        return [ImagePlace(each, scope, endpoint, served) for each in images]

    with Pool(_ASKED_AT_ONCE, thread_name_prefix="asyncckpt-ask") as pool:
        for places in pool.map(ask, endpoint_names(job)):
            yield from places


def _served(client: ReaderClient, key: bytes, host: str) -> TransferAddress | None:
    try:
        return TransferAddress(host, client.serve(key, host))
    except OSError as error:
        logger.warning("images of a worker on this host cannot be read from other hosts: %s", error)
        return None


def _settled(client: ReaderClient) -> Images:
    """Return the images of the worker. If its trainer is dead, wait first until the worker has noticed."""
    noticed = time.monotonic() + NOTICE_S
    while (found := client.images()).trainer is not None:
        if is_running(found.trainer) or time.monotonic() > noticed:
            break
        time.sleep(POLL_S)
    return found


def _scope() -> str:
    try:
        return endpoint_scope()
    except OSError:  # then no worker can be found on this host, and a random scope fits no other host
        return secrets.token_hex(_KEY_BYTES)


if TYPE_CHECKING:
    from asyncckpt.transfer.holder import Holder

# Maximum number of times to list storage. Each commit of a worker that is finishing changes the list.
_MOST_LOOKS = 100

BytesFrom = Literal["memory", "peer", "storage"]


def held_candidates(
    found: FoundImages,
    choose: Callable[[FoundImages], HeldAttempt | None],
    transport: str,
    ranks: Ranks,
) -> Iterator[MemorySource]:
    """Yield the checkpoints to try in memory, one after the other, the same on all ranks, until one is loaded.

    If an image is damaged or unreachable, the next one is another copy of the same checkpoint, or an older step.

    Args:
        found: The images that are held.
        choose: Chooses the attempt to load. Called on the first rank.
        transport: The kind of transport for bytes of other hosts.
        ranks: The ranks that load together.
    """
    attempt = ranks.from_first(lambda: choose(found))
    if attempt is None:
        return
    with closing(MemorySource(found, attempt, choose, transport, ranks)) as source:
        while True:
            yield source
            if source.is_loaded:
                return
            words = str(source.failure)
            source.failure = None  # the error has references to the memory
            if not source.choose_again():
                logger.warning("the state is not loaded from memory: %s", words)
                return
            logger.warning("step %s is loaded from other images in memory, because one failed: %s", source.step, words)


def choose_in_memory(places: Sequence[str], step: int | None, found: FoundImages) -> HeldAttempt | None:
    """Choose the checkpoint to load from memory: a complete checkpoint that is not older than the newest in storage.

    Storage decides, because the checkpoint may have been replaced there, or removed by a user who did not want it.

    Args:
        places: The places that the load looks at; saves go to the first.
        step: The step to load; None: the newest.
        found: The images that are held.
    """
    attempts = [each for each in found.attempts() if each.request.step is not None]
    if not attempts:
        return None
    stored = history(*places) if step is None else []
    for _ in range(_MOST_LOOKS):
        chosen = _choose(places[0], step, attempts, stored[-1] if stored else None)
        # A dead trainer's worker may be writing. List storage again: a commit during the choice would otherwise look
        # like another checkpoint.
        before, stored = stored, history(*places) if step is None else []
        if [each[:2] for each in stored] == [each[:2] for each in before]:  # compare steps and times of creation
            return chosen
    return None  # another program may be copying checkpoints here


def _choose(
    root: str, step: int | None, attempts: Sequence[HeldAttempt], newest: StoredStep | None
) -> HeldAttempt | None:
    storage = storage_for(root)
    for each in attempts:
        request = each.request
        is_wanted = step in (None, request.step) and request.path == step_folder(root, request.step or 0)
        if not is_wanted:
            continue
        # Check that the file exists before checking that it is final. A commit in between would otherwise look like
        # another checkpoint.
        is_taken = request.existing != "set aside" and storage.exists(request.path)
        is_finalized = False
        with contextlib.suppress(DamagedCheckpointError, FormatError):  # a damaged checkpoint still exists
            is_finalized = storage.is_finalized(request.path, request.attempt)
        if is_finalized:
            is_newest = newest is not None and newest.step == request.step and root in newest.roots
            return each if step is not None or is_newest else None
        if each.committed or is_taken or not each.is_whole or request.joint is not None:
            continue
        return each if step is not None or _is_newer(request, newest) else None
    return None


def _is_newer(request: WriteRequest, newest: StoredStep | None) -> bool:
    """Return whether a staged, uncommitted checkpoint is newer than the newest checkpoint in storage."""
    if newest is None or newest.step < (request.step or 0):
        return True
    return newest.created is not None and newest.created <= request.since  # the training had gone back before that step


class MemorySource(Candidate):
    """One checkpoint in the memory of workers.

    Parts that a worker on this host holds are read in place; parts on other hosts are fetched. If no worker holds a
    part, it is read from the checkpoint in storage, if that is committed.
    """

    tier = "memory"
    _expected = (*Candidate._expected, FormatError)

    def __init__(
        self,
        found: FoundImages,
        attempt: HeldAttempt,
        choose: Callable[[FoundImages], HeldAttempt | None],
        transport: str,
        ranks: Ranks,
    ) -> None:
        """Read nothing yet.

        Args:
            found: The images that are held.
            attempt: The attempt to load, the same on all ranks.
            choose: Chooses another attempt if this one cannot be loaded. Called on the first rank.
            transport: The kind of transport for bytes of other hosts.
            ranks: The ranks that load together.
        """
        self._become(attempt)
        self._found, self._choose = found, choose
        self._transport, self._ranks = transport, ranks
        self._images: dict[int, ImageFiles | None] = {}
        self._origins: dict[int, Unusable] = {}  # by rank: excludes the rank's open image if reading it fails
        self._unusable: set[Unusable] = set()
        self._holders: dict[TransferAddress, Holder] = {}
        self._held = ExitStack()
        self._metadata = b""
        self._opened: list[tuple[BytesFrom, ChecksummedFile]] = []

    def _become(self, attempt: HeldAttempt) -> None:
        self.request, self._places = attempt.request, attempt.places
        self.attempt, self.path, self.step = self.request.attempt, self.request.path, self.request.step or 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[MemorySource]:
        """Read the metadata of the checkpoint. All ranks call this together. Raises as ``open``."""
        self._metadata = self._ranks.from_first(self._first_metadata)
        yield self

    def choose_again(self) -> bool:
        """Exclude the images that some rank could not load, and choose again. All ranks call this together.

        Return True if another checkpoint, or another copy of this checkpoint, is left. This source then changes to that
        checkpoint. Its trial may find that the state does not fit, because the caller prepared it for the first one.
        """
        for rank, origin in self._origins.items():
            image = self._images.get(rank)
            if image is not None and (image.is_damaged or image.is_gone):
                self._unusable.add(origin._replace(key=None) if image.is_gone else origin)
        unusable = {each for of_rank in self._ranks.gather(self._unusable) for each in of_rank}
        self.close()
        if not unusable:
            return False
        self._found = self._found.without(unusable)
        attempt = self._ranks.from_first(lambda: self._choose(self._found))
        if attempt is None:
            return False
        self._become(attempt)
        self._opened = []
        self._expected = (*MemorySource._expected, MismatchError)
        return True

    def metadata(self) -> bytes:
        return self._metadata

    def data_files(self) -> list[str]:
        return data_names_in(self._metadata)  # the saving job may have had another number of ranks

    def open(self, name: str) -> ChecksummedFile:
        """Open a data file, see ``Source.open``. Raises ``CheckpointNotFoundError`` if the file is unreachable."""
        request = self.request
        rank, number = place_of_data(name)
        image = self._image(rank)
        if image is not None and image.has(name):
            origin: BytesFrom = "peer" if isinstance(image, FetchedImage) else "memory"
            return self._noted(origin, image.file(number))
        if storage_for(request.path).is_finalized(request.path, request.attempt):
            stored = StorageSource(request.path)
            if stored.attempt == request.attempt:  # otherwise another checkpoint has just replaced this one
                return self._noted("storage", stored.open(name))
        raise CheckpointNotFoundError(
            f"{name} is in no reachable memory, and not yet in storage", path=request.path, step=request.step
        )

    def nbytes_from(self) -> dict[str, int]:
        """Return the bytes read from each source: memory of this host, memory of other hosts ("peer"), storage."""
        counts: dict[str, int] = {}
        for origin, file in self._opened:
            counts[origin] = counts.get(origin, 0) + file.nbytes_done
        return {origin: nbytes for origin, nbytes in counts.items() if nbytes}

    def close(self) -> None:
        """Release all images."""
        self._held.close()
        self._images.clear()
        self._origins.clear()
        self._unusable.clear()
        self._holders.clear()

    def _noted(self, origin: BytesFrom, file: ChecksummedFile) -> ChecksummedFile:
        self._opened.append((origin, file))
        return file

    def _first_metadata(self) -> bytes:
        image = self._image(0)
        if image is None:
            raise CheckpointNotFoundError(
                "the image of the first rank is not held any more", path=self.request.path, step=self.request.step
            )
        return image.metadata()

    def _image(self, rank: int) -> ImageFiles | None:
        """Return the image of a rank of the job that saved; None: no reachable worker holds it."""
        if rank not in self._images:
            self._images[rank] = self._opened_image(rank)
        return self._images[rank]

    def _opened_image(self, rank: int) -> ImageFiles | None:
        own = self._found.own
        if own is not None and not own.is_closed():
            for held in own.images:
                is_it = (held.request.attempt, held.request.rank) == (self.request.attempt, rank)
                if is_it and (files := own.files(held)) is not None:
                    self._origins[rank] = Unusable(self._found.scope, None, ImageKey(self.request.attempt, rank))
                    return self._held.enter_context(closing(files))
        # Try this host first.
        places = sorted(self._places.get(rank, []), key=lambda place: place.scope != self._found.scope)
        for place in places:
            origin, image = Unusable(place.scope, place.endpoint, place.summary.key), None
            if origin._replace(key=None) in self._unusable:
                continue  # this worker did not answer before
            try:
                image = self._mapped(place) if place.scope == self._found.scope else self._fetched(place)
            except unless_interrupt(CheckpointError, EOFError, OSError) as error:
                logger.warning("an image of %s cannot be read: %s", self.request.path, error)
                if not isinstance(error, FileNotFoundError):
                    origin = origin._replace(key=None)
            if image is not None:
                self._origins[rank] = origin
                return self._held.enter_context(closing(image))
            self._unusable.add(origin)
        return None

    def _mapped(self, place: ImagePlace) -> ImageFiles | None:
        key = place.summary.key
        if (client := ReaderClient.connect(place.endpoint)) is None:
            return None
        with ExitStack() as undo:
            undo.callback(client.close)
            if (held := client.image(key)) is None:
                return None
            segment = undo.enter_context(client.open_segment(held.request.segment))
            fd = lease(segment.fileno(), held.request.slot, Readers.OF_IMAGE)
            if fd is None:
                return None
            undo.callback(fd.close)
            again = client.image(key)
            # If the image has changed, the slot was reused before this process got the lease.
            if again is None or replace(again, committed=held.committed) != held:
                return None
            undo.pop_all()
        client.close()
        return MappedImage(held, segment, fd)

    def _fetched(self, place: ImagePlace) -> ImageFiles | None:
        if place.served is None:
            return None
        from asyncckpt.transfer.holder import Holder  # imported only when needed

        holder = self._holders.get(place.served)
        if holder is None:
            holder = Holder(place.served, self._found.key, self._transport)
            self._holders[place.served] = self._held.enter_context(holder)
        return FetchedImage(holder.open(place.summary.key, with_checksums=True))
