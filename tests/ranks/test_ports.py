"""Test the ports and the addresses at which workers listen for other hosts."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.abilities import need_command
from support.ranks import QUICK, run

from asyncckpt import Checkpointer
from asyncckpt.config import Config
from asyncckpt.ranks.store import listen

pytestmark = pytest.mark.usefixtures("forkserver")


def _free_range(count: int) -> int:
    """Return the first of ``count`` neighbouring ports that are free."""
    for first in range(21_000, 29_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise RuntimeError("there are no free ports")


def test_the_first_free_port_of_a_range_is_taken() -> None:
    first = _free_range(3)
    listeners = [listen("127.0.0.1", (first, first + 2))[0] for _ in range(3)]
    assert [each.getsockname()[1] for each in listeners] == [first, first + 1, first + 2]
    with pytest.raises(OSError, match="already in use"):
        listen("127.0.0.1", (first, first + 2))
    for each in listeners:
        each.close()


@pytest.mark.parametrize("text", ["20000", "0-5", "5-4", "1-70000", "a-b", "-5"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="port_range"):
        Config(port_range=text)


def _save(root: str, config: Config) -> list[tuple[str, int]]:
    """Save, and return the addresses at which the worker listens."""
    with Checkpointer(root, config) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(100)}).result(60)
        worker = checkpointer._engine.worker
        assert worker is not None
        found = psutil.Process(worker.pid).net_connections("inet")
        dist.barrier()
    return [(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_workers_listen_in_the_range_only(root: Path, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    first = _free_range(4)
    config = replace(QUICK, host=host, address=host, port_range=f"{first}-{first + 3}")
    listening = [address for found in run(2, _save, str(root), config, folder=root.parent) for address in found]
    assert listening and all(address == host and first <= port <= first + 3 for address, port in listening)


def test_a_host_with_ipv6_alone() -> None:
    """Its address is that of its network to the first rank's host."""
    code = """if True:
        import socket
        from asyncckpt.ranks.group import address_to_listen_at, own_address
        from asyncckpt.ranks.store import listen
        assert own_address(None) == "fd00::1", own_address(None)
        listener, address = listen(address_to_listen_at("fd00::1", 8), (0, 0))
        assert address == "fd00::1"
        socket.create_connection(listener.getsockname()[:2], 5).close()
    """
    setup = 'ip link set lo up && ip -6 addr add fd00::1/128 dev lo nodad && exec "$0" "$@"'
    before = ("unshare", "--net", "sh", "-c", setup)
    need_command(*before, "true")
    subprocess.run([*before, "env", "MASTER_ADDR=fd00::1", sys.executable, "-c", code], check=True, timeout=60)
