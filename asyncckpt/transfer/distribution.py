"""The distribution of versions: which host reads from which, so that each host sends a version once or twice.

Hosts that read the same version are a chain: the first one reads from the worker that has published it, the next one
from that host, while it is still coming in there, and so on. Who has all of it may be read from by those that come
later. It is the publishing worker that says who reads from whom, each time that it is asked; no host waits for another
one to come, and one that is lost is left out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asyncckpt.transfer.requests import TransferAddress

# Versions of which it is known who has them.
_VERSIONS = 4

Version = tuple[int, int]
"""Its epoch, and its number."""


@dataclass
class _Host:
    """``holder``: whom it reads from; None: who has published it. ``reading``: whether it still does."""

    reader: object
    holder: TransferAddress | None
    reading: bool


class Distribution:
    """That of what one worker publishes. Any thread may call. A ``reader`` is a connection of another host's worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of each version, the hosts that have it, or are getting it, in the order in which they came.
        self._hosts: dict[Version, dict[TransferAddress, _Host]] = {}

    def has(self, reader: object, own: TransferAddress, version: Version | None) -> None:
        """A reader has ``version`` (None: none), which may be read from it at ``own``; and is getting no other."""
        with self._lock:
            for each, hosts in self._hosts.items():
                if own in hosts and each != version and hosts[own].reading:
                    del hosts[own]
            if version is not None:
                self._of(version)[own] = _Host(reader, None, reading=False)

    def assign(
        self, reader: object, own: TransferAddress, version: Version, refused: Collection[TransferAddress]
    ) -> TransferAddress | None:
        """From whom a reader is to get ``version``; None: from the one that publishes it.

        Args:
            reader: Who asks.
            own: Where it passes on what it gets.
            version: Which.
            refused: From whom it could not be had.
        """
        with self._lock:
            hosts = self._of(version)
            hosts.pop(own, None)
            # Who is refused is gone, as a rule, before its connection here has broken: its holder has room again.
            loads = Counter(host.holder for at, host in hosts.items() if host.reading and at not in refused)
            could = [each for each in hosts if each not in refused and not _comes_from(own, each, hosts)]
            # Rather who has all of it; else the last one of the chain.
            chosen = min(could, key=lambda each: (loads[each], hosts[each].reading), default=None)
            if loads[chosen] > 0 and loads[None] == 0:
                chosen = None
            hosts[own] = _Host(reader, chosen, reading=True)
            return chosen

    def leave(self, reader: object) -> None:
        """A reader is gone: nobody is sent to it any more."""
        with self._lock:
            for hosts in self._hosts.values():
                for own in [own for own, host in hosts.items() if host.reader is reader]:
                    del hosts[own]

    def _of(self, version: Version) -> dict[TransferAddress, _Host]:
        hosts = self._hosts.setdefault(version, {})
        while len(self._hosts) > _VERSIONS:
            del self._hosts[next(iter(self._hosts))]
        return hosts


def _comes_from(own: TransferAddress, other: TransferAddress, hosts: Mapping[TransferAddress, _Host]) -> bool:
    """Whether what ``other`` is getting comes by way of ``own``."""
    at: TransferAddress | None = other
    while at is not None and at != own and at in hosts and hosts[at].reading:
        at = hosts[at].holder
    return at == own
