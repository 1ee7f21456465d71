"""Simulated hosts of a job on this machine: each has a runtime folder and a loopback address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.link.takeover import Takeover
from asyncckpt.ranks.group import ADDRESS_VARIABLE, DOMAIN_VARIABLE
from support.workers import send_away

HOSTS = 4
"""The maximum number of hosts in any test."""


def host_folder(folder: str | Path, host: int) -> Path:
    """Return the runtime folder of a host."""
    return Path(folder) / f"host-{host}"


def enter_host(folder: str | Path, host: int) -> None:
    """Move this process to a host."""
    os.environ[FOLDER_VARIABLE] = str(host_folder(folder, host))
    os.environ[ADDRESS_VARIABLE] = f"127.0.0.{host + 2}"
    os.environ[DOMAIN_VARIABLE] = str(host)


def damage_images(folder: Path, host: int, step: int, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a byte of each image of ``step`` on a host where only the workers are alive.

    ``which`` contains "copies", "own images", or both.
    """
    monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(folder, host)))
    for lock in host_folder(folder, host).glob("*.lock"):
        takeover = Takeover.find(lock.stem, 30)
        assert takeover is not None
        with takeover:
            images = takeover.copies * ("copies" in which) + takeover.images * ("own images" in which)
            of_step = [each for each in images if each.request.step == step]
            assert of_step
            for held in of_step:
                file = held.layout.data_files()[0]
                at = held.layout.data(held.request.slot, file).offset + file.length // 2
                takeover.segments[held.request.segment].view[at] ^= 1


def hosts_of(folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> Iterator[Path]:
    """Yield the folder of the hosts' runtime folders. At the end, stop their workers."""
    yield folder
    for host in range(HOSTS):
        monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(folder, host)))
        send_away(host_folder(folder, host))
    monkeypatch.setenv(FOLDER_VARIABLE, str(runtime))
