"""Measure how fast a job restarts after the loss of one of two hosts, from the other's memory and from storage."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.ranks.group import ADDRESS_VARIABLE, DOMAIN_VARIABLE
from torture.hosts import lose_host
from torture.jobs import Job
from torture.leftovers import send_away
from torture.tally import CONFIG, LIMIT_S

_BEFORE, _THEN = [0, 0, 1, 1], [0, 0, 2, 2]
_PIECE_BYTES = 4 << 20


def time_host_restarts(folder: Path, rounds: int, nbytes: int) -> dict[str, float]:
    """Return medians over restarts of four ranks with ``nbytes`` each. Two ranks move to a spare host.

    ``limit_s``: a memcpy of one rank's bytes, and a transfer of each moved rank's bytes over loopback by plain sockets.
    """
    place = folder / "host-restarts"
    place.mkdir()
    with Job(4, _hold, str(place), nbytes) as job:
        for rank in range(4):
            job.hear(rank, "ready")
        job.kill(0)
    lose_host(place, 1)
    took: list[tuple[float, ...]] = []
    for _ in tqdm(range(rounds), desc="restarts from the memory of another host", unit="restart", disable=None):
        with Job(4, _restart, str(place), nbytes) as job:
            each = [job.hear(rank, "took") for rank in range(4)]
        took.append(tuple(max(times) for times in zip(*each, strict=True)))
    for host in (0, 2):
        os.environ[FOLDER_VARIABLE] = str(place / f"host-{host}")
        send_away(place / f"host-{host}")
    os.environ[FOLDER_VARIABLE] = str(folder / "runtime")
    names = ("hosts_memcpy_s", "hosts_loopback_s", "hosts_load_s", "hosts_storage_s")
    found = {name: statistics.median(times) for name, times in zip(names, zip(*took, strict=True), strict=True)}
    return found | {"hosts_limit_s": found["hosts_memcpy_s"] + found["hosts_loopback_s"]}


def _enter(place: str, host: int) -> None:
    os.environ[FOLDER_VARIABLE] = f"{place}/host-{host}"
    os.environ[ADDRESS_VARIABLE] = f"127.0.0.{host + 2}"
    os.environ[DOMAIN_VARIABLE] = str(host)


def _weights(rank: int, nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"rank {rank} layer {number}": torch.full((nbytes // 100 // 4,), value) for number in range(100)}


def _hold(pipe: Connection, rank: int, place: str, nbytes: int) -> None:
    _enter(place, _BEFORE[rank])
    checkpointer = Checkpointer(f"{place}/root", replace(CONFIG, replicas=1, slots=1, linger=3600.0))
    save = checkpointer.save(1, _weights(rank, nbytes, 1.0 + rank))
    save.wait_replicated(10 * LIMIT_S)
    save.result(10 * LIMIT_S)
    pipe.send(("ready",))
    threading.Event().wait(LIMIT_S)


def _restart(pipe: Connection, rank: int, place: str, nbytes: int) -> None:
    _enter(place, _THEN[rank])
    into = _weights(rank, nbytes, 0.0)
    moved = _THEN[rank] != _BEFORE[rank]
    memcpy, loopback = _limits(into, moved)
    with Checkpointer(f"{place}/root", CONFIG) as checkpointer:
        times = []
        for memory in (True, False):
            dist.barrier()
            begun = time.perf_counter()
            checkpointer.load(into, memory=memory)
            times.append(time.perf_counter() - begun)
            if not all(bool((tensor == 1.0 + rank).all()) for tensor in into.values()):
                raise RuntimeError("it has loaded something else")
            if memory and (checkpointer.loaded is None or "storage" in checkpointer.loaded.nbytes_from):
                raise RuntimeError("not loaded from memory")
            for tensor in into.values():
                tensor.zero_()
    pipe.send(("took", memcpy, loopback, *times))


def _limits(into: dict[str, torch.Tensor], moved: bool) -> tuple[float, float]:
    """Return the seconds of a memcpy on all ranks at once, and, if ``moved``, of a transfer through a plain socket."""
    source = {name: torch.full_like(tensor, 2.0) for name, tensor in into.items()}
    memcpy = []
    for _ in range(3):
        dist.barrier()
        begun = time.perf_counter()
        for name, tensor in into.items():
            tensor.copy_(source[name])
        memcpy.append(time.perf_counter() - begun)
    loopback = [0.0]
    for _ in range(3):
        dist.barrier()
        if moved:
            loopback.append(_through_socket(source, into))
    return statistics.median(memcpy), statistics.median(loopback[1:] or loopback)


def _through_socket(source: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as connection:
                for tensor in source.values():
                    connection.sendall(tensor.numpy().data)

        sender = threading.Thread(target=send)
        sender.start()
        connection, _ = server.accept()
        with connection:
            begun = time.perf_counter()
            for tensor in into.values():
                view = memoryview(tensor.numpy().data).cast("B")
                at = 0
                while at < len(view):
                    at += connection.recv_into(view[at : at + _PIECE_BYTES])
            took = time.perf_counter() - begun
        sender.join()
    return took
