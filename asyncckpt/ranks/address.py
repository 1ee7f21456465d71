"""Where on its host the first rank listens, and which ranks reach it there without a network."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import uuid

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE, DOMAIN_VARIABLE = "ASYNC_CKPT_ADDRESS", "ASYNC_CKPT_DOMAIN"
"""Facts of one host, so that they are heeded whatever makes the ``Config``."""


def address_to_listen_at(name: str, world_size: int) -> str:
    """The numeric address at which alone the store is to be reached, as far as that is known; "": at all.

    ``name``: by which the other ranks find this host. What it means to them is not known here, unless it is numeric.
    ``world_size``: that of the job.
    """
    sizes = {os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE"), str(world_size)}
    if name == "localhost" or len(sizes) == 1:  # torchrun says that all ranks are on this host
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""


def own_address(given: str | None) -> str:
    """By which other hosts of the job reach this one, as far as that is known.

    Args:
        given: What ``Config.address`` says; None: what the environment says, or else the address by which this host
            reaches the first rank's.
    """
    if given is not None or ADDRESS_VARIABLE in os.environ:
        return given or os.environ[ADDRESS_VARIABLE]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 9))  # which sends nothing
        found = str(probe.getsockname()[0])
        if not ipaddress.ip_address(found).is_loopback:
            return found
    return socket.gethostname()


def own_domain(given: str | None) -> str:
    """What may be lost at once with this host: what ``Config.domain``, or the environment, says; or the machine.

    Containers of one machine may have folders and networks of their own, and are lost together.
    """
    if given is not None or DOMAIN_VARIABLE in os.environ:
        return given or os.environ[DOMAIN_VARIABLE]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def loopback_scope() -> str:
    """A text that is the same for two processes if they reach each other at the loopback address.

    Hosts may have equal names, and containers of one host networks of their own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:  # nobody can say
        return uuid.uuid4().hex
    return f"{boot}/{network.st_dev:x}/{network.st_ino:x}/{socket.gethostname()}"
