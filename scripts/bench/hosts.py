"""Measure how long new weights take to other hosts, each with a link of its own, also while a host is lost.

A host is a network namespace of this machine, joined to the others by a bridge. ``tc`` limits its sending and receiving
rate. This needs root, and Linux's ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from asyncckpt.config import Config
from asyncckpt.link.endpoint import FOLDER_VARIABLE, connect, endpoint_names, peer_pid
from asyncckpt.weights import WeightPublisher, WeightSubscriber
from bench.states import GIB

_PREFIX = "asyncckpt"
_ADDRESS = "policy"
_LIMIT_S = 600.0
_CONFIG = Config(timeout=60.0, linger=5.0)
_NEEDED = ("ip", "tc")
# Seconds from a publication to the loss of a host.
_INTO_IT_S = 1.0


def missing() -> str | None:
    """Return the reason why hosts cannot be measured here, or None."""
    if os.geteuid() != 0:
        return "network namespaces can only be made by root"
    return next((f"there is no {tool} (Debian: iproute2)" for tool in _NEEDED if shutil.which(tool) is None), None)


LINK = "the bytes over one link"
"""The limit."""


def measure(gib: float, tensors: int, hosts: int, mbit: int, rounds: int, folder: str) -> dict[str, Any]:
    """Measure new weights to one host, to ``hosts`` hosts, to a late host, and while another host is lost."""
    with _Hosts(hosts + 2, mbit, folder, gib, tensors) as running:
        publisher, readers = running.publisher, running.readers
        running.come()
        found = {"one host": _turns(publisher, readers, rounds)}
        while len(readers) < hosts:
            running.come()
        found[f"{hosts} hosts"] = _turns(publisher, readers, rounds)
        found["one that comes later, its process and memory too"] = [running.come()]
        found[f"{hosts} hosts, while another one is lost"] = [_with_a_loss(publisher, readers)]
    title = f"{gib:g} GiB in {tensors:,} tensors to other hosts, each with a link of {mbit:,} Mbit/s"
    return {
        "title": title,
        "limits": {LINK: [gib * GIB * 8 / mbit / 1e6]},
        "results": {name: {"elapsed_s": seconds} for name, seconds in found.items()},
        "nbytes": int(gib * GIB),
        "sent": {many: statistics.mean(nbytes for n, nbytes in publisher.sent if n == many) for many in (1, hosts)},
    }


SHARES = (1.0, 0.5, 0.03, 0.01, 0.0)
"""Shares of the values that change, for ``measure_sparse``."""


def measure_sparse(gib: float, tensors: int, hosts: int, mbit: int, rounds: int, folder: str) -> dict[str, Any]:
    """Measure versions in which only a share of the values has changed, scattered, to ``hosts`` hosts."""
    results, sent = {}, {}
    with _Hosts(hosts + 1, mbit, folder, gib, tensors) as running:
        while len(running.readers) < hosts:
            running.come()
        for share in SHARES:
            running.publisher.sent.clear()
            name = f"{share:.0%} changed"
            results[name] = {"elapsed_s": _turns(running.publisher, running.readers, rounds, share)}
            sent[name] = statistics.mean(nbytes for _, nbytes in running.publisher.sent[1:])
    title = f"{gib:g} GiB of bfloat16 to {hosts} hosts, each with a link of {mbit:,} Mbit/s, by changed values"
    limits = {LINK: [gib * GIB * 8 / mbit / 1e6]}
    return {"title": title, "limits": limits, "results": results, "nbytes": int(gib * GIB), "sent": sent}


def _turns(publisher: _Process, readers: list[_Process], rounds: int, share: float = 1.0) -> list[float]:
    """Return the seconds until all readers have the next version. The first, cold turn does not count."""
    found = []
    for _ in range(rounds + 1):
        before = publisher.link()
        publisher.tell(str(share))
        began = publisher.said()["at"]
        found.append(max(reader.said()["at"] for reader in readers) - began)
        publisher.sent.append((len(readers), publisher.link() - before))
    return found[1:]


def _with_a_loss(publisher: _Process, readers: list[_Process]) -> float:
    publisher.tell("1.0")
    began = publisher.said()["at"]
    time.sleep(_INTO_IT_S)
    readers.pop(0).lose()
    return float(max(reader.said()["at"] for reader in readers) - began)


class _Process:
    """A process on a host. It reads commands from standard input, and writes results to standard output, as lines."""

    def __init__(self, host: str, folder: str, *what: object) -> None:
        self.runtime = Path(folder, host)
        environment = os.environ | {FOLDER_VARIABLE: str(self.runtime), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "bench.hosts", *map(str, what)]
        pipe = subprocess.PIPE
        self._host = host
        self.sent: list[tuple[int, float]] = []
        """For the publisher, in each turn: the number of reading hosts, and the bytes sent over its link."""
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._in: IO[str] = self._process.stdin  # type: ignore[assignment]  # both pipes exist
        self._out: IO[str] = self._process.stdout  # type: ignore[assignment]

    def tell(self, text: str) -> None:
        self._in.write(f"{text}\n")
        self._in.flush()

    def said(self) -> dict[str, Any]:
        if not (line := self._out.readline()):
            raise RuntimeError(f"the process on {self._host} has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def link(self) -> float:
        """Return the bytes that the host has sent so far."""
        command = ["ip", "-s", "-j", "-n", self._host, "link", "show", "host"]
        shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return float(shown[0]["stats64"]["tx"]["bytes"])

    def lose(self) -> None:
        """Kill the process first, because it would restart its worker, then the worker."""
        self._process.kill()
        self._process.wait()
        os.environ[FOLDER_VARIABLE] = str(self.runtime)
        for name in endpoint_names():
            if (connection := connect(name)) is not None:
                with connection:
                    os.kill(peer_pid(connection), signal.SIGKILL)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.lose()
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        self._out.close()


class _Hosts(contextlib.ExitStack):
    """A network of hosts, with a publisher on the first. A reader comes on each other host when it is asked for."""

    def __init__(self, hosts: int, mbit: int, folder: str, gib: float, tensors: int) -> None:
        super().__init__()
        self._folder = folder
        self._names = self.enter_context(_network(hosts, mbit))
        self.publisher = self.enter_context(_Process(self._names[0], folder, "publish", gib, tensors))
        self._locator = self.publisher.said()["locator"]
        self.publisher.tell("1.0")
        self.publisher.said()
        self.readers: list[_Process] = []

    def come(self) -> float:
        """Start a reader on the next host. Return the seconds until it has the version."""
        began = time.time()
        name = self._names[len(self.readers) + 1]
        self.readers.append(self.enter_context(_Process(name, self._folder, "read", self._locator)))
        return float(self.readers[-1].said()["at"]) - began


@contextlib.contextmanager
def _network(hosts: int, mbit: int) -> Iterator[list[str]]:
    """Create namespaces joined by a bridge. Each has an address, and a link of ``mbit`` Mbit/s."""
    names = [f"{_PREFIX}-{number}" for number in range(hosts)]
    bridge = f"{_PREFIX}-br"
    limit = f"root tbf rate {mbit}mbit burst 256kb latency 50ms"
    with contextlib.ExitStack() as undo:
        _run(f"ip link add {bridge} type bridge")
        undo.callback(_run, f"ip link del {bridge}")
        _run(f"ip link set {bridge} up")
        for number, name in enumerate(names):
            _run(f"ip netns add {name}")
            undo.callback(_run, f"ip netns del {name}")
            _run(f"ip link add {_PREFIX}-v{number} type veth peer name host netns {name}")
            _run(f"ip link set {_PREFIX}-v{number} master {bridge} up")
            _run(f"ip -n {name} addr add 10.213.0.{number + 1}/24 dev host")
            for device in ("host", "lo"):
                _run(f"ip -n {name} link set {device} up")
            _run(f"tc qdisc add dev {_PREFIX}-v{number} {limit}")
            _run(f"tc -n {name} qdisc add dev host {limit}")
        yield names


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def _publish(gib: float, tensors: int) -> None:
    torch.set_num_threads(1)
    elements = int(gib * GIB) // tensors // 2
    state = {f"layers.{n}.weight": torch.rand(elements).bfloat16() for n in range(tensors)}
    with WeightPublisher(_ADDRESS, config=_CONFIG) as publisher:
        _say(locator=publisher.serve("10.213.0.1"))
        version = 0
        while line := sys.stdin.readline():
            version += 1
            for tensor in state.values():
                _change(tensor, float(line))
            began = time.time()
            publisher.publish(state, version)
            _say(at=began)


def _change(tensor: torch.Tensor, share: float) -> None:
    """Change the lowest bit of a share of the values, scattered."""
    words = tensor.view(torch.int16)
    if share == 1.0:
        words ^= 1
    elif share:
        words[torch.randint(len(words), [int(len(words) * share)])] ^= 1


def _read(locator: str) -> None:
    torch.set_num_threads(1)
    version = 0
    with WeightSubscriber(_ADDRESS, locator=locator, config=_CONFIG) as subscriber:
        while True:
            with subscriber.acquire(version + 1, timeout=_LIMIT_S) as weights:
                version = weights.version
                _say(at=time.time())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["publish", gib, tensors]:
            _publish(float(gib), int(tensors))
        case ["read", locator]:
            _read(locator)
