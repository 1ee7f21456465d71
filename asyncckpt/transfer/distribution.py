"""The distribution of versions: assigns a source to each host, so that a host sends a version once or twice.

Hosts that read the same version form a chain. The first host reads from the worker that published the version. The next
host reads from the first while the version is still arriving there, and so on. A host that has the whole version serves
later hosts. The publishing worker assigns the source each time a host asks. No host waits for another host to ask, and
a lost host is skipped.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asyncckpt.shm.slots import VersionKey
from asyncckpt.transfer.api import TransferAddress

# Number of versions to remember, with the hosts that have each version.
_VERSIONS = 4


@dataclass
class _Host:
    """A host that reads a version.

    ``holder``: the host that this host reads from; None: the publisher. ``reading``: whether this host still reads.
    """

    reader: object
    holder: TransferAddress | None
    reading: bool


class Distribution:
    """The distribution of one worker's publications. Any thread may call.

    A ``reader`` is a connection of another host's worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By version: the hosts that have or read the version, in the order of their requests.
        self._hosts: dict[VersionKey, dict[TransferAddress, _Host]] = {}

    def has(self, reader: object, own: TransferAddress, version: VersionKey | None) -> None:
        """Note that a reader has ``version`` (None: no version), serves it at ``own``, and reads no other version."""
        with self._lock:
            for each, hosts in self._hosts.items():
                if own in hosts and each != version and hosts[own].reading:
                    del hosts[own]
            if version is not None:
                self._of(version)[own] = _Host(reader, None, reading=False)

    def assign(
        self, reader: object, own: TransferAddress, version: VersionKey, refused: Collection[TransferAddress]
    ) -> TransferAddress | None:
        """Choose the host from which a reader gets ``version``; None: from the publisher.

        Args:
            reader: The connection of the worker that asks.
            own: The address where the reader will serve the version.
            version: The version.
            refused: The hosts from which the reader could not get the version.
        """
        with self._lock:
            hosts = self._of(version)
            hosts.pop(own, None)
            # A refused host is usually gone before its connection here breaks. Do not count it as a load on its holder.
            loads = Counter(host.holder for at, host in hosts.items() if host.reading and at not in refused)
            could = [each for each in hosts if each not in refused and not _comes_from(own, each, hosts)]
            # Prefer a host that has the whole version, otherwise the last host of the chain.
            chosen = min(could, key=lambda each: (loads[each], hosts[each].reading), default=None)
            if loads[chosen] > 0 and loads[None] == 0:
                chosen = None
            hosts[own] = _Host(reader, chosen, reading=True)
            return chosen

    def leave(self, reader: object) -> None:
        """Forget a reader that is gone, so that no host is assigned to it."""
        with self._lock:
            for hosts in self._hosts.values():
                for own in [own for own, host in hosts.items() if host.reader is reader]:
                    del hosts[own]

    def _of(self, version: VersionKey) -> dict[TransferAddress, _Host]:
        hosts = self._hosts.setdefault(version, {})
        while len(self._hosts) > _VERSIONS:
            del self._hosts[next(iter(self._hosts))]
        return hosts


def _comes_from(own: TransferAddress, other: TransferAddress, hosts: Mapping[TransferAddress, _Host]) -> bool:
    """Return whether ``other`` gets its data, directly or indirectly, from ``own``."""
    at: TransferAddress | None = other
    while at is not None and at != own and at in hosts and hosts[at].reading:
        at = hosts[at].holder
    return at == own
