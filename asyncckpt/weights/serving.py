"""Serving: what a publisher does so that readers of other hosts find what it publishes."""

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
    """What the ranks of one publisher serve: nothing, until ``begin``. Each method is for all ranks together."""

    def __init__(self, sharding: Sharding, config: Config) -> None:
        """``config``: its ``transport``, ``timeout``, and ``address``, which holds where no other is given."""
        self._sharding, self._config = sharding, config
        self._host = self._file = ""
        self._key = b""
        self._client: WorkerClient | None = None
        self._own: TransferAddress | None = None
        self._locator: Locator | None = None

    @property
    def locator(self) -> Locator | None:
        """Where they serve now; None: nowhere."""
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
        """Where this rank's worker serves what it has; None: nowhere. Raises ``StorageError``: it cannot."""
        if self._key and client is not None and client is not self._client:
            doing = "serving weights to other hosts"
            # At all of its addresses: what the name means to others is not known here.
            served = client.ask(Serve(self._key, ""), Served, self._config.timeout, doing)
            if served.trouble is not None:
                raise StorageError(f"the weights cannot be served to other hosts: {served.trouble}")
            self._client, self._own = client, TransferAddress(self._host, served.port)
        return self._own

    def update(self, addresses: Sequence[TransferAddress]) -> Locator:
        """The ranks serve at these ``addresses`` now, in their order, as ``at`` says; where it says something."""
        locator = Locator(self._key, tuple(addresses), self._config.transport)
        if addresses and locator != self._locator:  # on all ranks or on none
            if self._file:
                try:
                    locator.write(self._file)
                except OSError as error:
                    raise StorageError(f"where the weights are served cannot be written: {error}") from error
            self._sharding.gather(None)  # or none goes on
            self._locator = locator
        return locator

    def _first_key(self) -> bytes:
        """That of the publisher before this one, if its file is there: then its readers go on with this one."""
        if self._file:
            with suppress(OSError, ValueError):
                return Locator.read_own(self._file).key
        return secrets.token_bytes(_KEY_BYTES)
