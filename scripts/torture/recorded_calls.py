"""Record all calls of trainers and workers that change a folder or make it durable, by ``recording_calls.c``.

The calls of all threads and processes have one order, the order of their changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import psutil
import torch
import torch.distributed as dist

from torture.scenarios import Scenario
from torture.tally import LIMIT_S

Entry: TypeAlias = tuple[int, str]
"""The number of a folder, and a name in this folder."""

ROOT = 0
"""The number of the recorded folder. All files and folders have numbers, like inodes."""

# The same values as in recording_calls.c.
(_CREATE, _LINK, _UNLINK, _RENAME, _EXCHANGE, _WRITE, _SIZE, _SYNC, _SYNCED, _MARK, _UNKNOWN) = range(1, 12)
_HEADER = struct.Struct("QQQ")
_HEADER_BYTES = 128
_RECORD = struct.Struct("4I4q")
_LOG_BYTES = 256 << 20
_POLL_S = 0.02


@dataclass(frozen=True)
class Names:
    """A call that changes names, all or none. Maps each name to its new file, or to None if the name is removed."""

    changes: dict[Entry, int | None]
    text: str


@dataclass(frozen=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Size:
    file: int
    nbytes: int


@dataclass(frozen=True)
class Sync:
    """The begin of an fsync. If ``file`` is None, the fsync covers all files and folders."""

    file: int | None


@dataclass(frozen=True)
class Synced:
    """The end of the fsync that began with event number ``begun``."""

    begun: int


@dataclass(frozen=True)
class Mark:
    """A trainer is about to save ``step``, or ``result()`` has returned (``is_done``)."""

    step: int
    is_done: bool


Event: TypeAlias = Names | Write | Size | Sync | Synced | Mark


@dataclass
class Recording:
    """All events in order. ``kinds``: "f", "d" or "l" (file, folder, symbolic link), by number."""

    events: list[Event] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=lambda: {ROOT: "d"})
    targets: dict[int, str] = field(default_factory=dict)


def record(folder: Path, root: Path, scenario: Scenario, steps: int) -> Recording:
    """Save ``steps`` steps to ``root``, which must not exist, and return the recorded calls.

    ``folder``: the folder for the library and the log.
    """
    library, log = folder / "recording_calls.so", folder / "log"
    source = Path(__file__).with_name("recording_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl", "-pthread"], check=True)
    with log.open("wb") as file:
        file.truncate(_LOG_BYTES)
    root.mkdir()
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    with _environment(
        LD_PRELOAD=str(library), ASYNCCKPT_TORTURE_LOG=str(log), ASYNCCKPT_TORTURE_LOG_OF=os.path.realpath(root)
    ):
        context = multiprocessing.get_context("spawn")
        trainers = [
            context.Process(target=_train, args=(scenario, root, rank, steps, f"file://{meeting}"))
            for rank in range(scenario.ranks)
        ]
        for trainer in trainers:
            trainer.start()
    try:
        for trainer in trainers:
            trainer.join(4 * LIMIT_S)
            if trainer.exitcode != 0:
                raise RuntimeError(f"{scenario.name}: a trainer ended with {trainer.exitcode}")
    finally:
        for trainer in trainers:
            trainer.kill()
    _wait_for_workers(log)
    try:
        return _parsed(log, root.stat().st_ino)
    finally:
        log.unlink()


def _train(scenario: Scenario, root: Path, rank: int, steps: int, rendezvous: str) -> None:
    mark = ctypes.CDLL(None).asyncckpt_torture_mark
    torch.set_num_threads(1)
    if scenario.ranks > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=scenario.ranks)
    with scenario.saving(root, rank) as save:
        for step in range(1, steps + 1):
            mark(f"begun {step}".encode())
            save(step)
            mark(f"done {step}".encode())
    if scenario.ranks > 1:
        dist.destroy_process_group()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait_for_workers(log: Path) -> None:
    """Wait until no worker has the log mapped."""
    deadline = time.monotonic() + LIMIT_S
    while any(_has_mapped(process, log) for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            raise RuntimeError("a recorded worker does not end")
        time.sleep(_POLL_S)


def _has_mapped(process: psutil.Process, log: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        is_recorded = process.environ().get("ASYNCCKPT_TORTURE_LOG") == str(log)
        return is_recorded and "asyncckpt.worker" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class _Parser:
    recording: Recording
    numbers: dict[int, int]  # by inode, for existing files
    entries: dict[Entry, int] = field(default_factory=dict)
    places: dict[int, Entry] = field(default_factory=dict)
    syncs: dict[int, int] = field(default_factory=dict)  # event numbers, by offset in the log

    def create(self, inode: int, kind: str) -> int:
        number = self.numbers[inode] = len(self.recording.kinds)
        self.recording.kinds[number] = kind
        return number

    def path(self, entry: Entry) -> str:
        folder, name = entry
        return name if folder == ROOT else f"{self.path(self.places[folder])}/{name}"

    def change(self, verb: str, changes: dict[Entry, int | None]) -> None:
        text = f"{verb} {' -> '.join(map(self.path, changes))}"
        for entry, file in changes.items():
            if file is None:
                del self.entries[entry]
            else:
                self.entries[entry] = file
                self.places[file] = entry
        self.recording.events.append(Names(changes, text))


def _parsed(log: Path, root: int) -> Recording:
    data = log.read_bytes()
    used, _, lost = _HEADER.unpack_from(data)
    if lost:
        raise RuntimeError(f"the log has no room for {lost} calls")
    parser = _Parser(Recording(), {root: ROOT})
    numbers, events = parser.numbers, parser.recording.events
    at = 0
    while at < used:
        begin = _HEADER_BYTES + at
        kind, *lengths, folder, into, inode, number = _RECORD.unpack_from(data, begin)
        name, other, rest = _split(data, begin + _RECORD.size, lengths)
        match kind:
            case _ if kind == _CREATE:
                file = parser.create(inode, chr(number))
                if rest:
                    parser.recording.targets[file] = os.fsdecode(rest)
                parser.change("create", {(numbers[folder], os.fsdecode(name)): file})
            case _ if kind == _LINK:
                parser.change("link", {(numbers[into], os.fsdecode(other)): numbers[inode]})
            case _ if kind == _UNLINK:
                parser.change("remove", {(numbers[folder], os.fsdecode(name)): None})
            case _ if kind in (_RENAME, _EXCHANGE):
                one, two = (numbers[folder], os.fsdecode(name)), (numbers[into], os.fsdecode(other))
                was = parser.entries.get(two) if kind == _EXCHANGE else None
                parser.change("exchange" if was is not None else "rename", {one: was, two: numbers[inode]})
            case _ if kind == _WRITE:
                events.append(Write(numbers[inode], number, rest))
            case _ if kind == _SIZE:
                events.append(Size(numbers[inode], number))
            case _ if kind == _SYNC:
                parser.syncs[at] = len(events)
                events.append(Sync(numbers[inode] if inode else None))
            case _ if kind == _SYNCED:
                events.append(Synced(parser.syncs[number]))
            case _ if kind == _MARK:
                what, step = name.decode().split()
                events.append(Mark(int(step), what == "done"))
            case _:
                raise RuntimeError(f"the model does not know the call {name.decode()}")
        at += _RECORD.size + sum(lengths)
    return parser.recording


def _split(data: bytes, at: int, lengths: Sequence[int]) -> list[bytes]:
    parts = []
    for length in lengths:
        parts.append(data[at : at + length])
        at += length
    return parts


def has_compiler() -> bool:
    """Return whether the library can be built."""
    return shutil.which("cc") is not None and sys.platform == "linux"
