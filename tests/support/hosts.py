"""Hosts of a job on this machine: each has a runtime folder, and an address of the loopback range."""

from __future__ import annotations

import os
from pathlib import Path

from asyncckpt.ranks.address import ADDRESS_VARIABLE, DOMAIN_VARIABLE
from asyncckpt.worker.endpoint import FOLDER_VARIABLE


def host_folder(folder: str | Path, host: int) -> Path:
    """The runtime folder of a host."""
    return Path(folder) / f"host-{host}"


def enter_host(folder: str | Path, host: int) -> None:
    """From now on this process is on that host."""
    os.environ[FOLDER_VARIABLE] = str(host_folder(folder, host))
    os.environ[ADDRESS_VARIABLE] = f"127.0.0.{host + 2}"
    os.environ[DOMAIN_VARIABLE] = str(host)
