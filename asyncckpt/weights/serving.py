"""Serving: a publisher's ranks let readers of other hosts find the publication."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.endpoint_messages import Serve, Served
from asyncckpt.ranks.address import own_address
from asyncckpt.transfer.locator import Locator
from asyncckpt.transfer.requests import TransferAddress
from asyncckpt.weights.shards import Sharding

_KEY_BYTES = 32


class ServedPublication:
    """The serving of one publisher's ranks, which begins with ``begin``. All ranks call each method together."""

    def __init__(self, sharding: Sharding, config: Config) -> None:
        """``config``: supplies ``transport``, ``timeout``, and the default ``address``."""
        self._sharding, self._config = sharding, config
        self._host = self._file = ""
        self._key = b""
        self._client: WorkerClient | None = None
        self._own: TransferAddress | None = None
        self._locator: Locator | None = None

    @property
    def locator(self) -> Locator | None:
        """The locator of the serving ranks; None if they do not serve."""
        return self._locator

    def begin(
        self, client: WorkerClient, address: str | None, file: str | os.PathLike[str] | None, key: bytes | None
    ) -> Locator:
        """See ``WeightPublisher.serve``. ``client``: the worker of this rank."""
        self._host = own_address(address or self._config.address)
        self._file = os.path.abspath(file) if file is not None and self._sharding.rank == 0 else ""
        self._key = self._sharding.gather(self._first_key() if key is None else key)[0]
        self._client = self._locator = None
        own = self._sharding.gather(self.at(client))
        return self.update([each for each in own if each is not None])

    def at(self, client: WorkerClient | None) -> TransferAddress | None:
        """Return the address where this rank's worker serves; None if it does not. Raises ``StorageError``."""
        if self._key and client is not None and client is not self._client:
            doing = "serving weights to other hosts"
            # Listen at all addresses, because this host cannot know how others resolve its name.
            served = client.ask(Serve(self._key, ""), Served, self._config.timeout, doing)
            if served.trouble is not None:
                raise StorageError(f"the weights cannot be served to other hosts: {served.trouble}")
            self._client, self._own = client, TransferAddress(self._host, served.port)
        return self._own

    def update(self, addresses: Sequence[TransferAddress]) -> Locator:
        """Return the locator for ``addresses``, by rank, as ``at`` returned them. Write a new locator to the file."""
        locator = Locator(self._key, tuple(addresses), self._config.transport)
        if addresses and locator != self._locator:  # the same on all ranks
            if self._file:
                try:
                    locator.write(self._file)
                except OSError as error:
                    raise StorageError(f"where the weights are served cannot be written: {error}") from error
            self._sharding.gather(None)  # no rank goes on if one has failed
            self._locator = locator
        return locator

    def _first_key(self) -> bytes:
        """Return the key in the file of an earlier publisher, so that its readers can go on; otherwise a new key."""
        if self._file:
            with suppress(OSError, ValueError):
                return Locator.read_own(self._file).key
        return secrets.token_bytes(_KEY_BYTES)
