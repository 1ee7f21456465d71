"""Hosts of a job on this machine: each has a runtime folder, and an address of the loopback range."""

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
"""As many as any test has."""


def host_folder(folder: str | Path, host: int) -> Path:
    """The runtime folder of a host."""
    return Path(folder) / f"host-{host}"


def enter_host(folder: str | Path, host: int) -> None:
    """From now on this process is on that host."""
    os.environ[FOLDER_VARIABLE] = str(host_folder(folder, host))
    os.environ[ADDRESS_VARIABLE] = f"127.0.0.{host + 2}"
    os.environ[DOMAIN_VARIABLE] = str(host)


def damage_images(folder: Path, host: int, step: int, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a byte of each image of ``step`` on a host that is dead but for its workers.

    ``which``: has "copies" and "own images" in it, or one of the two.
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
                file = held.layout.data_files[0]
                at = held.layout.data(held.request.slot, file).offset + file.length // 2
                takeover.segments[held.request.segment].view[at] ^= 1


def hosts_of(folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: Path) -> Iterator[Path]:
    """The folder of the hosts' folders; in the end their workers are sent away."""
    yield folder
    for host in range(HOSTS):
        monkeypatch.setenv(FOLDER_VARIABLE, str(host_folder(folder, host)))
        send_away(host_folder(folder, host))
    monkeypatch.setenv(FOLDER_VARIABLE, str(runtime))
