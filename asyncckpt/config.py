"""How checkpoints are made: one frozen dataclass, filled in code, from the command line or from the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from asyncckpt.worker.client import WorkerOptions
from asyncckpt.worker.priority import IO_CLASSES

WhenBusy = Literal["wait", "skip", "latest"]
Failure = Literal["raise", "warn"]

_ENVIRONMENT_PREFIX = "ASYNCCKPT_"


@dataclass(frozen=True, kw_only=True)
class Config:
    """All there is to choose. Raises ``ValueError`` for what makes no sense.

    Every field can also be set by an environment variable, ``ASYNCCKPT_SLOTS`` for ``slots``: see ``from_env``.
    """

    slots: int | None = None
    """Images of the state held in shared memory, each as large as the state. With two, one save can be staged while
    the one before is being written. None: two, or one if memory is short."""

    when_busy: WhenBusy = "wait"
    """What a save does when all slots are still being written: ``wait`` for one, ``skip`` this save, or take the place
    of the newest that is staged but not yet being written (``latest``; where there is none it waits)."""

    overlap: bool = False
    """Return from ``save`` before the tensors are copied. They must then stay as they are until ``Save.wait_staged``
    returns, which ``Checkpointer.guard(optimizer)`` calls before each optimizer step."""

    keep_last: int | None = None
    """Checkpoints to keep in a root: older ones are removed once a newer is durable. None: all."""

    keep_every: int | None = None
    """Of the older ones, keep those of a step that is a multiple of this for good."""

    keep: Callable[[int], bool] | None = None
    """The same for any choice: called on the first rank with the step of each save, whether to keep it for good."""

    failure: Failure = "raise"
    """What happens when a save fails: the next call raises that, if nobody was told of it (``raise``), or it is logged
    and counted, and the training goes on (``warn``); then ``save`` itself raises nothing but ``ClosedError`` either,
    and returns a handle of a save that has failed."""

    linger: float = 600.0
    """Seconds for which the worker of a trainer that has died stays, with the newest states in its memory, for a
    trainer that is started in its place. 0: it leaves when all is written."""

    job_id: str | None = None
    """Tells apart jobs that save to the same root and are not the same; a trainer finds what that of its own job has
    left. None: there is one job for a root."""

    timeout: float = 600.0
    """Seconds after which a wait for the worker (for a free slot, for memory, for its end) gives up with an error."""

    commit_timeout: float = 1800.0
    """Seconds a save may take until it is committed. Then it fails, on all ranks, naming those that did not finish."""

    assume_constant_structure: bool = False
    """Promise that a structure, once saved, never changes: then the ranks of a job do not ask each other before a save
    whether they all still have it. A rank that finds it changed raises, and that save fails on all ranks."""

    host: str | None = None
    """Name or address of the first rank's host, for the other ranks' workers. None: ``$MASTER_ADDR``, as torchrun sets
    it, or what the host calls itself."""

    start_timeout: float = 60.0
    """Seconds the worker process may take to start. It takes a tenth of one on an idle machine."""

    worker_restarts: int = 5
    """How many workers may die one after the other, with no save committed in between, until no other is started."""

    restart_pause: float = 1.0
    """Seconds for which no worker is started after the second death in a row; twice that after each further one. A save
    that comes earlier fails at once."""

    direct_io: bool = True
    """Write past the page cache (``O_DIRECT``) where the file system allows."""

    io_threads: int = 2
    """Threads of the worker that write and checksum. More pays off on file systems that spread a file over servers."""

    nice: int = 10
    """How far the worker stands back for the training in the use of cores, 0 to 19."""

    io_class: str = "best-effort"
    """The worker's I/O scheduling class: ``none`` (as the trainer's), ``best-effort`` (its lowest level), ``idle``."""

    def __post_init__(self) -> None:
        checks = {
            "slots": self.slots is None or 1 <= self.slots <= 16,
            "when_busy": self.when_busy in get_args(WhenBusy),
            "keep_last": self.keep_last is None or self.keep_last >= 1,
            "keep_every": self.keep_every is None or self.keep_every >= 1,
            "failure": self.failure in get_args(Failure),
            "linger": self.linger >= 0,
            "worker_restarts": self.worker_restarts >= 0,
            "restart_pause": self.restart_pause >= 0,
            "timeout": self.timeout > 0,
            "commit_timeout": self.commit_timeout > 0,
            "start_timeout": self.start_timeout > 0,
            "io_threads": 1 <= self.io_threads <= 64,
            "nice": 0 <= self.nice <= 19,
            "io_class": self.io_class in IO_CLASSES,
        }
        for name, good in checks.items():
            if not good:
                raise ValueError(f"Config.{name} cannot be {getattr(self, name)!r}; see its description")

    def worker_options(self) -> WorkerOptions:
        """What of this is for the worker process."""
        return WorkerOptions(
            direct_io=self.direct_io,
            io_threads=self.io_threads,
            nice=self.nice,
            io_class=self.io_class,
            start_timeout=self.start_timeout,
            linger=self.linger,
        )

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is one to keep for good."""
        every = self.keep_every is not None and step % self.keep_every == 0
        return every or (self.keep is not None and bool(self.keep(step)))

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """What the environment variables ``ASYNCCKPT_*`` say. Raises ``ValueError``, naming the variable."""
        return cls.from_args(argparse.Namespace(), environment)

    @classmethod
    def from_args(cls, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Config:
        """What ``add_arguments`` has put on the command line, else the environment, else the defaults."""
        chosen = {}
        for name, (_, parse) in _OPTIONS.items():
            value = getattr(args, _destination(name), None)
            variable = _ENVIRONMENT_PREFIX + name.upper()
            if value is None and variable in environment:
                try:
                    value = parse(environment[variable])
                except ValueError as error:
                    raise ValueError(f"{variable}={environment[variable]!r}: {error}") from error
            if value is not None:
                chosen[name] = value
        return cls(**chosen)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options of ``Config``, as ``--ckpt-slots`` and so on, for ``Config.from_args``."""
    group = parser.add_argument_group("asyncckpt", "checkpoints staged in CPU shared memory")
    for name, (text, parse) in _OPTIONS.items():
        flag = "--ckpt-" + name.replace("_", "-")
        # A flag that is just given means yes.
        bare: dict[str, Any] = {"nargs": "?", "const": True} if parse is _truth else {}
        group.add_argument(flag, dest=_destination(name), type=parse, default=None, metavar="X", help=text, **bare)


def _destination(name: str) -> str:
    return f"ckpt_{name}"


def _truth(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("say yes or no")
    return words[text.lower()]


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "slots": ("images of the state in shared memory (default: 2, or 1 if memory is short)", int),
    "when_busy": ("when all slots are being written: wait, skip or latest (default: wait)", str),
    "overlap": ("yes: return before the tensors are copied (default: no)", _truth),
    "keep_last": ("checkpoints to keep (default: all)", int),
    "keep_every": ("keep those of each so many steps for good (default: none)", int),
    "failure": ("when a save fails: raise at the next call, or warn and train on (default: raise)", str),
    "linger": (
        "seconds a worker keeps the state of a trainer that died for another (default: 600)",
        float,
    ),
    "job_id": ("tells apart jobs that save to the same folder", str),
    "timeout": ("seconds any wait may take (default: 600)", float),
    "commit_timeout": ("seconds a save may take until it is committed on all ranks (default: 1800)", float),
    "assume_constant_structure": ("yes: ranks do not compare notes before each save (default: no)", _truth),
    "host": ("address of the first rank's host (default: $MASTER_ADDR, or its own name)", str),
    "start_timeout": ("seconds the worker may take to start (default: 60)", float),
    "worker_restarts": ("workers that may die in a row (default: 5)", int),
    "restart_pause": ("seconds until another is started after the second death in a row (default: 1)", float),
    "direct_io": ("no: write through the page cache (default: yes)", _truth),
    "io_threads": ("threads that write (default: 2)", int),
    "nice": ("niceness of the worker, 0 to 19 (default: 10)", int),
    "io_class": ("I/O class of the worker: none, best-effort or idle (default: best-effort)", str),
}
