"""Examine the ranks of a job together: clocks, versions, files of other ranks, and connections."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator

import torch

from asyncckpt.budgets import ANSWER_S, NOTICE_S
from asyncckpt.config import Config
from asyncckpt.doctor.finding import Finding, Level
from asyncckpt.doctor.place import CLOCK_S, PROBE
from asyncckpt.format.manifest import own_version
from asyncckpt.ranks.group import LOOPBACK, address_to_listen_at, first_address, loopback_scope, own_address
from asyncckpt.ranks.ranks import Ranks
from asyncckpt.ranks.store import listen
from asyncckpt.storage import is_address
from asyncckpt.threads import wait_until


def examine_together(ranks: Ranks, root: str, config: Config) -> Iterator[Finding]:
    """Yield the findings of this rank. All ranks of the job call this. Raises ``RankFailedError``."""
    yield from _differences(ranks, root)
    yield from _clocks(ranks)
    if not is_address(root):
        yield from _files(ranks, root)
    yield from _connections(ranks, config)


def _differences(ranks: Ranks, root: str) -> Iterator[Finding]:
    """Compare facts that have to be equal on all ranks."""
    for subject, mine in (
        ("root", root),
        ("user", os.geteuid()),
        ("asyncckpt", own_version()),
        ("torch", torch.__version__),
    ):
        found = ranks.gather(mine)
        if ranks.rank == 0 and len(set(found)) > 1:
            text = "; ".join(f"rank {found.index(each)} has {each}" for each in sorted(set(found), key=found.index))
            level: Level = "risk" if subject == "torch" else "fails"
            yield Finding(subject, level, text, "start all ranks with the same arguments, from the same image")


def _clocks(ranks: Ranks) -> Iterator[Finding]:
    ranks.gather(None)  # so that all ranks look at their clocks at the same time
    found = ranks.gather(time.time())
    if ranks.rank == 0 and (apart := max(found) - min(found)) > CLOCK_S:
        text = f"the clocks of ranks {found.index(min(found))} and {found.index(max(found))} are {apart:.0f} s apart"
        yield Finding("clocks", "risk", text, "set them by NTP: leftovers of dead jobs are removed by their age")


def _files(ranks: Ranks, root: str) -> Iterator[Finding]:
    """Write a file on each rank, and look for the files of other ranks."""
    token = ranks.from_first(lambda: secrets.token_hex(6))
    names = [f"{PROBE}{token}-{rank}" for rank in range(ranks.size)]
    mine = os.path.join(root, names[ranks.rank])
    trouble = ""
    try:
        try:
            with open(mine, "x"):
                pass
        except OSError as error:
            trouble = f"{error.strerror or error}: {root}"
            yield Finding("files of ranks", "fails", trouble, "mount the same folder on all hosts, for the same user")
        if any(ranks.gather(trouble)):
            return
        begun = time.monotonic()
        first = os.path.join(root, names[0])
        is_seen = wait_until(lambda: os.path.exists(first), ANSWER_S)
        seen_s = time.monotonic() - begun
        missing: set[str] = set(names)
        if ranks.rank == 0:
            with contextlib.suppress(OSError):  # then all are missing
                wait_until(lambda: not missing.difference(os.listdir(root)), ANSWER_S)
                missing -= set(os.listdir(root))
        listed_s = time.monotonic() - begun
        unseen = [rank for rank, each in enumerate(ranks.gather(is_seen)) if not each]
        if ranks.rank == 0:
            yield _seen(unseen, sorted(names.index(each) for each in missing), listed_s)
        elif is_seen and seen_s > 1.0:
            yield Finding("files of ranks", "slow", f"a file of rank 0 is seen {seen_s:.1f} s late")
    finally:
        with contextlib.suppress(OSError):
            os.unlink(mine)


def _seen(unseen: list[int], missing: list[int], seconds: float) -> Finding:
    advice = f"{PROBE}* was not there within {ANSWER_S:g} s: is the same folder mounted on all hosts?"
    if unseen or missing:
        text = f"ranks {unseen} do not see the files of rank 0, and rank 0 does not see the files of ranks {missing}"
        return Finding("files of ranks", "fails", text, advice)
    level: Level = "slow" if seconds > 1.0 else "ok"
    return Finding("files of ranks", level, f"all ranks see each other's files within {seconds:.2g} s")


def _connections(ranks: Ranks, config: Config) -> Iterator[Finding]:
    """Connect one rank of each host to the host of the first rank, and to the next host."""
    scope = loopback_scope()
    with contextlib.ExitStack() as held:
        name, listens_at, port, trouble = "", "", 0, ""
        try:
            name = first_address(config.host) if ranks.rank == 0 else own_address(config.address)
            listener, listens_at = listen(address_to_listen_at(name, ranks.size), config.ports)
            held.enter_context(listener)
            port = listener.getsockname()[1]
        except OSError as error:
            trouble = f"no port can be opened there: {error}"
        found = ranks.gather((scope, name, listens_at, port, trouble))
        scopes = [its for its, *_ in found]
        hosts = list(dict.fromkeys(scopes))
        after = hosts[(hosts.index(scope) + 1) % len(hosts)]
        others = {0, scopes.index(after)} if scopes.index(scope) == ranks.rank else set()
        for rank in sorted(others - {ranks.rank}):
            its, address, listens_at, port, trouble = found[rank]
            address = LOOPBACK if its == scope and listens_at in ("", LOOPBACK) else listens_at or address
            if why := trouble or _reach(address, port):
                text = f"rank {rank} cannot be reached at {address}: {why}"
                advice = "open ports between the hosts (Config.port_range), or set Config.host and Config.address"
                yield Finding("connections", "fails", text, advice)
        ranks.gather(None)  # until then the listeners stay
        if ranks.rank == 0:
            yield Finding("connections", "ok", f"the ranks reach each other, on {len(hosts)} hosts")


def _reach(address: str, port: int) -> str:
    """Return the reason why a port cannot be reached; "" if it can."""
    try:
        socket.create_connection((address, port), NOTICE_S).close()
    except (OSError, UnicodeError) as error:
        return str(error)
    return ""
