"""Compare values that should be the same on all ranks. Only one rank saves each of these values."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from asyncckpt.errors import UnsavableStateError
from asyncckpt.format.write_request import WriteRequest

logger = logging.getLogger(__name__)

_SHOWN = 5


class ReplicaCheck:
    """Compare the digests of all ranks before a save is committed. Warn of each name only once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, request: WriteRequest, digests: Sequence[Mapping[str, int]]) -> None:
        """Look for names under which ranks have different values.

        Args:
            request: The save.
            digests: The digests of each rank by name, in the order of the ranks.

        Raises:
            UnsavableStateError: There are such names, and the request refuses them.
        """
        ranks: dict[str, dict[int, int]] = {}  # the first rank with each digest
        for rank, its in enumerate(digests):
            for name, digest in its.items():
                ranks.setdefault(name, {}).setdefault(digest, rank)
        differing = {name: [*of.values()] for name, of in ranks.items() if len(of) > 1 and name not in self._known}
        if not differing:
            return
        shown = ", ".join(f"{name!r} (ranks {of[0]} and {of[1]})" for name, of in list(differing.items())[:_SHOWN])
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        text = (
            f"{len(differing)} values differ from rank to rank, and of each only one is saved, which every rank will"
            f" load (of {len(ranks)} compared): {shown}{more}; wrap what is of each rank's own in asyncckpt.PerRank, or"
            " give it a name of its own on each rank, or make shards a DTensor; statistics of batches, as of BatchNorm,"
            " may differ"
        )
        if request.refuses_differing:
            raise UnsavableStateError(f"{text}; nothing is saved, as Config.differing_replicas is 'raise'")
        self._known.update(differing)
        logger.warning("%s [path %s]", text, request.path)
