"""Which images of a job the workers hold that trainers have left, on all hosts that a rank is on now.

They are known by what they are (attempt and rank), not by who asks: a job that is started again may have other ranks on
other hosts, or more of them, or fewer. The first rank of each host asks the workers there, and tells the first of all.
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
# How long a worker may take to see that its trainer is dead, and how often it is asked.
_NOTICE_S = 5.0
_POLL_S = 0.02
# Side by side: those that are stopped are waited for until each has had its time to answer.
_ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class ImagePlace:
    """An image, and where it is held: by the worker with that ``endpoint``, on the host of that ``scope``.

    ``served``: where other hosts can read it; None: nowhere.
    """

    summary: ImageSummary
    scope: str
    endpoint: str
    served: TransferAddress | None


class Unusable(NamedTuple):
    """What a rank could not load: the image of that ``key`` which the worker with that ``endpoint`` holds, on the host
    of that ``scope``; None for the key: all that it holds. None for the endpoint: what a rank there has mapped.
    """

    scope: str
    endpoint: str | None
    key: ImageKey | None

    def has(self, place: ImagePlace) -> bool:
        """Whether ``place`` is such."""
        same_worker = place.scope == self.scope and self.endpoint in (None, place.endpoint)
        return same_worker and self.key in (None, place.summary.key)


@dataclass(frozen=True)
class HeldAttempt:
    """What is held of one attempt: for each rank that saved it, the places of its image.

    ``request``: that of the first rank, which is there.
    """

    request: WriteRequest
    committed: bool
    places: dict[int, list[ImagePlace]]

    @property
    def is_whole(self) -> bool:
        """Whether the images of all ranks are there."""
        return len(self.places) == self.request.world_size


@dataclass(frozen=True)
class FoundImages:
    """What is held: ``places``, on the first rank. ``own``: what this rank's predecessor has left, mapped here;
    ``scope``: this host; ``key``: by which workers on other hosts let this job read.
    """

    own: HeldImages | None
    scope: str
    key: bytes
    places: tuple[ImagePlace, ...]

    def without(self, unusable: Collection[Unusable]) -> FoundImages:
        """All but what some rank could not load."""
        mapped = {each.key for each in unusable if each.endpoint is None and each.key is not None}
        own = None if self.own is None else self.own.without(mapped)
        places = tuple(place for place in self.places if not any(each.has(place) for each in unusable))
        return replace(self, own=own, places=places)

    def unfinished(self, root: str, step: int) -> list[WriteRequest]:
        """First rank: what dead trainers were saving under ``root`` at later steps, which may be committed yet."""
        requests = [place.summary.request for place in self.places if not place.summary.committed]
        later = [each for each in requests if (each.step or 0) > step and os.path.dirname(each.path) == root]
        return [*{each.attempt: each for each in later}.values()]

    def attempts(self) -> Iterator[HeldAttempt]:
        """First rank: what is held of each attempt of which the first rank's image is there, the newest first."""
        of: defaultdict[str, list[ImagePlace]] = defaultdict(list)
        for place in self.places:
            of[place.summary.request.attempt].append(place)
        firsts = [place.summary.request for place in self.places if place.summary.request.rank == 0]
        for attempt, request in {each.attempt: each for each in sorted(firsts, key=_age)}.items():
            places: defaultdict[int, list[ImagePlace]] = defaultdict(list)
            for place in of[attempt]:
                if place.summary.request.plan == request.plan:  # else the parts do not belong together
                    places[place.summary.request.rank].append(place)
            yield HeldAttempt(request, any(place.summary.committed for place in of[attempt]), dict(places))


def find_images(
    job: str, own: HeldImages | None, address: str | None, ranks: ProcessGroup | None = None
) -> FoundImages:
    """Look what is held, on all ranks together.

    Args:
        job: Of which the images are.
        own: What is held for this rank, and mapped here; None: nothing.
        address: By which other hosts reach this one; None: that is found out.
        ranks: That look; None: the whole job.
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
    """What the workers on this host hold. ``host``: its name to others; None: there are none."""

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
    """What it holds, once it has taken note of the death of its trainer, if that is dead."""
    noticed = time.monotonic() + _NOTICE_S
    while (found := client.images()).trainer is not None:
        if is_running(found.trainer) or time.monotonic() > noticed:
            break
        time.sleep(_POLL_S)
    return found


def _scope() -> str:
    try:
        return endpoint_scope()
    except OSError:  # no worker can be found here
        return secrets.token_hex(_KEY_BYTES)
