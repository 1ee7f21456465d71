"""The listening address of the first rank, and the ranks that reach it by loopback."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import uuid

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE, DOMAIN_VARIABLE = "ASYNC_CKPT_ADDRESS", "ASYNC_CKPT_DOMAIN"
"""Environment variables of a single host. They apply no matter how the ``Config`` was made."""


def address_to_listen_at(name: str, world_size: int) -> str:
    """Return the numeric address that the store should listen at; "" for all addresses of the host.

    ``name``: this host's name for the other ranks. Unless it is numeric, its meaning on their hosts is not known here.
    ``world_size``: size of the job.
    """
    sizes = {os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE"), str(world_size)}
    if name == "localhost" or len(sizes) == 1:  # torchrun says that all ranks are on this host
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""


def own_address(given: str | None) -> str:
    """Return the address of this host for other hosts of the job, as far as it is known.

    Args:
        given: Value of ``Config.address``. If it is None, use the environment, or else this host's address on the
            network to the first rank's host.
    """
    if given is not None or ADDRESS_VARIABLE in os.environ:
        return given or os.environ[ADDRESS_VARIABLE]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 9))  # a datagram socket sends nothing here
        found = str(probe.getsockname()[0])
        if not ipaddress.ip_address(found).is_loopback:
            return found
    return socket.gethostname()


def own_domain(given: str | None) -> str:
    """Return this host's failure domain: ``Config.domain``, or the environment's value, or else the machine's boot id.

    Containers of one machine may have their own folders and networks, but fail together.
    """
    if given is not None or DOMAIN_VARIABLE in os.environ:
        return given or os.environ[DOMAIN_VARIABLE]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def loopback_scope() -> str:
    """Return a text that is equal for two processes if they reach each other at the loopback address.

    The host name alone is not enough: hosts may have equal names, and containers of one host may have their own
    networks.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:  # unknown, so equal to no other process
        return uuid.uuid4().hex
    return f"{boot}/{network.st_dev:x}/{network.st_ino:x}/{socket.gethostname()}"
