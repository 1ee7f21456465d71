"""Search the images of a job that workers hold for trainers that died, on all hosts where ranks run now.

An image is identified by attempt and rank, not by the rank that asks: a restarted job may have more or fewer ranks, on
other hosts. The first rank of each host asks the workers there, and reports to the first rank of the job.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from asyncckpt.errors import CheckpointError
from asyncckpt.format.write_request import ImageKey, ImageSummary, WriteRequest
from asyncckpt.link.endpoint import endpoint_names, endpoint_scope
from asyncckpt.link.endpoint_messages import Images
from asyncckpt.link.takeover import ReaderClient, is_running
from asyncckpt.loading.image_files import HeldImages
from asyncckpt.ranks.address import own_address
from asyncckpt.ranks.collectives import from_first, gather, gather_to_first, rank_of
from asyncckpt.threads import Pool
from asyncckpt.transfer.requests import TransferAddress

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
# Maximum seconds for a worker to notice that its trainer is dead, and seconds between questions.
_NOTICE_S = 5.0
_POLL_S = 0.02
# Number of workers that are asked in parallel, because a stopped worker is waited for until its timeout.
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

    If ``key`` is None, all images of the worker. If ``endpoint`` is None, an image that a rank on the host has mapped.
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

    ``request``: the request of the first rank; its image is held.
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

    ``own``: the images of this rank's predecessor, mapped here. ``scope``: the scope of this host. ``key``: allows this
    job to read from workers on other hosts.
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
        """Return saves of dead trainers under ``root`` at later steps. They may still be committed. First rank only."""
        requests = [place.summary.request for place in self.places if not place.summary.committed]
        later = [each for each in requests if (each.step or 0) > step and os.path.dirname(each.path) == root]
        return [*{each.attempt: each for each in later}.values()]

    def attempts(self) -> Iterator[HeldAttempt]:
        """Yield the held attempts with all their images, the newest first. First rank only.

        An attempt needs the image of its first rank.
        """
        of: defaultdict[str, list[ImagePlace]] = defaultdict(list)
        for place in self.places:
            of[place.summary.request.attempt].append(place)
        firsts = [place.summary.request for place in self.places if place.summary.request.rank == 0]
        for attempt, request in {each.attempt: each for each in sorted(firsts, key=_age)}.items():
            places: defaultdict[int, list[ImagePlace]] = defaultdict(list)
            for place in of[attempt]:
                if place.summary.request.plan == request.plan:  # otherwise the parts do not belong together
                    places[place.summary.request.rank].append(place)
            yield HeldAttempt(request, any(place.summary.committed for place in of[attempt]), dict(places))


def find_images(
    job: str, own: HeldImages | None, address: str | None, ranks: ProcessGroup | None = None
) -> FoundImages:
    """Find the images that workers hold, on all ranks together.

    Args:
        job: The job of the images.
        own: The images that are held for this rank, and mapped here; None: none.
        address: The address of this host for other hosts; None: determine it.
        ranks: The ranks that search together; None: the whole job.
    """
    scope = _scope()
    scopes = gather(scope, ranks)
    key = from_first(lambda: secrets.token_bytes(_KEY_BYTES), ranks)
    is_first_here = scopes.index(scope) == rank_of(ranks)
    host = own_address(address) if len({*scopes}) > 1 else None
    here = list(_held_here(job, scope, key, host)) if is_first_here else []
    return FoundImages(own, scope, key, tuple(place for places in gather_to_first(here, ranks) for place in places))


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
            logger.warning("what a worker on this host holds is not loaded: %s", error)
            return []
        return [ImagePlace(each, scope, endpoint, served) for each in images]

    with Pool(_ASKED_AT_ONCE, thread_name_prefix="asyncckpt-ask") as pool:
        for places in pool.map(ask, endpoint_names(job)):
            yield from places


def _served(client: ReaderClient, key: bytes, host: str) -> TransferAddress | None:
    try:
        return TransferAddress(host, client.serve(key, host))
    except OSError as error:
        logger.warning("what a worker on this host holds cannot be read from others: %s", error)
        return None


def _settled(client: ReaderClient) -> Images:
    """Return the images of the worker, after it has noticed the death of its trainer, if the trainer is dead."""
    noticed = time.monotonic() + _NOTICE_S
    while (found := client.images()).trainer is not None:
        if is_running(found.trainer) or time.monotonic() > noticed:
            break
        time.sleep(_POLL_S)
    return found


def _scope() -> str:
    try:
        return endpoint_scope()
    except OSError:  # no worker can be found on this host
        return secrets.token_hex(_KEY_BYTES)
