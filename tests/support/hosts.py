"""Hosts of a job on this machine: each has a runtime folder, and an address of the loopback range."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncckpt.ranks.address import ADDRESS_VARIABLE, DOMAIN_VARIABLE
from asyncckpt.worker.endpoint import FOLDER_VARIABLE
from support.workers import send_away

HOSTS = 4
"""As many as any test has."""


def host_folder(folder: str | Path, host: int) -> Path:
    """The runtime folder of a host."""
    return Path(folder) / f"host-{host}"


def enter_host(folder: str | Path, host: int) -> None:
    """From now on this process is on that host."""
    os.environ[FOLDER_VARIABLE] = str(host_folder(folder, host))
    os.environ[ADDRESS_VARIABLE] = f"127.0.0.{host + 2}"
    os.environ[DOMAIN_VARIABLE] = str(host)


def hosts_of(folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> Iterator[Path]:
    """The folder of the hosts' folders; in the end their workers are sent away."""
    yield folder
    for host in range(HOSTS):
        monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(folder, host)))
        send_away(host_folder(folder, host))
    monkeypatch.setenv(FOLDER_VARIABLE, str(runtime))
