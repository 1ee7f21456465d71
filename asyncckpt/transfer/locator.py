"""The locator of a publication: the key and the addresses that a reader on another host needs."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from asyncckpt.transfer.api import TransferAddress

_SCHEME = "asyncckpt"


@dataclass(frozen=True)
class Locator:
    """The key and the addresses of a publication.

    ``addresses``: the workers' addresses, by rank. ``transport``: the name of the transport kind.
    """

    key: bytes
    addresses: tuple[TransferAddress, ...]
    transport: str

    def __str__(self) -> str:
        places = ",".join(
            f"[{each.host}]:{each.port}" if ":" in each.host else f"{each.host}:{each.port}" for each in self.addresses
        )
        return f"{_SCHEME}://{self.key.hex()}@{places}?transport={self.transport}"

    @classmethod
    def parse(cls, text: str) -> Locator:
        """Parse a locator's text. Raises ``ValueError`` with a message that omits the key."""
        try:
            parts = urlsplit(text.strip())
            key, _, places = parts.netloc.partition("@")
            if parts.scheme != _SCHEME or not key:
                raise ValueError
            split = [place.rpartition(":") for place in places.split(",")]
            addresses = tuple(TransferAddress(host.strip("[]"), int(port)) for host, _, port in split if host)
            (transport,) = parse_qs(parts.query)["transport"]
            if len(addresses) != len(split):
                raise ValueError
            return cls(bytes.fromhex(key), addresses, transport)
        except (ValueError, KeyError):
            raise ValueError(
                f"the text is no locator: a locator begins with {_SCHEME}://, and a publisher's serve() returns it"
            ) from None

    @classmethod
    def read(cls, text: str) -> Locator:
        """Return the locator in ``text``, or in the file at that path. Raises ``ValueError``, ``OSError``."""
        if text.strip().startswith(f"{_SCHEME}://"):
            return cls.parse(text)
        with open(text, encoding="utf-8") as file:
            return cls.parse(file.read())

    @classmethod
    def read_own(cls, path: str) -> Locator:
        """Read a locator from a file that only this user can read or write. Raises ``ValueError``, ``OSError``."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
                raise ValueError("the file has another owner, or other users may read the key in it")
            return cls.parse(file.read())

    def write(self, path: str) -> None:
        """Write the locator atomically to a file that only this user may read. Raises ``OSError``."""
        partial = f"{path}.{secrets.token_hex(8)}.partial"  # unguessable, so no other process has it open
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(f"{self}\n")
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
