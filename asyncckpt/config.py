"""How checkpoints are made: one frozen dataclass, filled in code, from the command line or from the environment."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import importlib.util
import logging
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

logger = logging.getLogger(__name__)

WhenBusy = Literal["wait", "skip", "latest"]
Failure = Literal["raise", "warn"]
DifferingReplicas = Literal["warn", "raise"]
Transport = Literal["sockets", "nixl"]
IOClass = Literal["none", "best-effort", "idle"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """All there is to choose. Raises ``ValueError`` for what makes no sense.

    Every field but ``keep`` can also be set by an environment variable, ``ASYNC_CKPT_SLOTS`` for
    ``slots`` and so on. Three are called as Megatron-LM calls its options: ``CKPT_ASSUME_CONSTANT_STRUCTURE``,
    ``ASYNC_CKPT_CPU_PRIORITY`` (``nice``) and ``ASYNC_CKPT_IO_PRIORITY`` (``io_class``).
    """

    slots: int | None = None
    """Images of the state held in shared memory, each as large as the state. With two, one save can be staged while
    the one before is being written. None: one, and another while saves overlap, if there is memory for it."""

    when_busy: WhenBusy = "wait"
    """If all slots have a save that is not committed: ``wait`` for one, ``skip`` this save, or take the place of the
    newest that is staged but not yet being written (``latest``; where there is none it waits)."""

    overlap: bool = False
    """Return from ``save`` before the tensors are copied. They must then stay as they are until ``Save.wait_staged``
    returns, or ``Save.synchronize_staging``, which has devices' streams wait instead of the host, and which
    ``Checkpointer.guard(optimizer)`` calls before each optimizer step. What a forward pass changes (the running
    statistics of a batch norm) it changes before that."""

    keep_last: int | None = None
    """Checkpoints of this training to keep in a root: older ones are removed once a newer is durable, so that there has
    to be room for one more. None: all."""

    keep_every: int | None = None
    """Of the older ones, keep those of a step that is a multiple of this for good."""

    keep: Callable[[int], bool] | None = None
    """The same for any choice: called on the first rank with the step of each save, whether to keep it for good."""

    link_unchanged: bool = True
    """What has not changed since the last durable save is not written again: the new checkpoint has the same file, by a
    hard link (on an object store, by a copy that the store makes). Whole files are linked. Frozen parameters, and what
    ``assume_unchanged`` names, have a file of their own. Each checkpoint is whole all the same, and can be removed by
    itself; a damaged file is damaged in all that share it."""

    rewrite_unchanged_every: int = 100
    """After so many saves in a row that took a file by link it is written again, changed or not."""

    assume_unchanged: Sequence[str] = ()
    """Patterns of names (``fnmatch``: "base_model.*", say), in the environment with commas between them. The tensors
    that they match are likely to stay the same, and go to a data file of their own, which is linked while no tensor in
    it changes. If one changes, the file is written again. Frozen parameters of a module that stands in the state itself
    need no pattern. A dict that ``state_dict()`` or DCP's ``get_model_state_dict`` made has lost ``requires_grad``."""

    local_root: str | None = None
    """A folder on fast disks: a ``Checkpointer`` saves there, in a folder of its own, and uploads steps to its root in
    the background. All ranks have to see it: this is for jobs of one host, or for fast disks that hosts share."""

    local_keep_last: int = 2
    """Checkpoints to keep in the local folder; ``keep_last``, ``keep_every`` and ``keep`` are about the root."""

    upload_every: int | None = None
    """With ``local_root``: those of a step that is a multiple of this are uploaded. None: all, if the root keeps up."""

    failure: Failure = "raise"
    """What happens when a save fails: the next call does its work and raises the failure, if nobody was told of it
    (``raise``), or it is logged and counted, and the training goes on (``warn``); then ``save`` itself raises nothing
    but ``ClosedError`` either, and returns a handle of a save that has failed."""

    linger: float = 600.0
    """Seconds for which the worker of a trainer that has died stays, with the newest states in its memory, for a
    trainer that is started in its place. 0: it leaves when all is written."""

    job_id: str | None = None
    """Of which job this trainer is. A root is of the first job that saves to it; another one is refused there
    (``JobTakenError``), to save and to load. None: of any. One job at a time saves to a root in any case."""

    progress: bool = True
    """Show how far a load is that takes longer than some seconds: a bar on stderr, on the first rank, if that is a
    terminal."""

    timeout: float = 600.0
    """Seconds after which a wait for the worker (for memory, for its end) gives up with an error."""

    commit_timeout: float = 1800.0
    """Seconds a save may take until it is committed. Then it fails, on all ranks, naming those that did not finish. A
    save that waits for a free slot waits for as long."""

    assume_constant_structure: bool = False
    """Promise that a structure, once saved, never changes: then the ranks of a job do not ask each other before a save
    whether they all still have it. A rank that finds it changed raises, and that save fails on all ranks. One that is
    alone has nobody to ask, and plans anew."""

    differing_replicas: DifferingReplicas = "warn"
    """What happens when ranks have different values under one name, of which one is saved for all: a warning, once a
    name, or that save fails on all ranks and nothing is committed (``raise``). The first saves compare a sample of
    each value, and every tenth save compares some. Running statistics of BatchNorm may differ by right."""

    host: str | None = None
    """Name or address of the first rank's host, for the other ranks' workers. None: ``$MASTER_ADDR``, as torchrun sets
    it, or what the host calls itself."""

    address: str | None = None
    """Name or address of this host, for the workers of other hosts. None: what ``$ASYNC_CKPT_ADDRESS`` says, or else
    the address by which it reaches the first rank's."""

    transport: Transport = "sockets"
    """How images travel between hosts: ``sockets``, sealed with the job's key; or ``nixl`` (RDMA, EFA, TCP; pip install
    'asyncckpt[nixl]', on all hosts), which authenticates nobody and is for a trusted fabric alone: bind it to that with
    ``UCX_NET_DEVICES``."""

    replicas: int = 0
    """On how many other hosts each image is copied in the background while it is written, so that as many hosts may be
    lost together with their memory (see ``Save.wait_replicated``). Each host has memory for two images more of as many
    others. ``Checkpointer.prepare`` refuses what does not fit."""

    replica_rate: float | None = None
    """Bytes a second that a worker fetches at most for copies. None: as many as come."""

    domain: str | None = None
    """What this host shares with others so that all of that may be lost at once (a rack, say): copies go to another.
    None: what ``$ASYNC_CKPT_DOMAIN`` says, or else this machine, with all containers on it."""

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

    on_event: Callable[[Any], object] | str | Sequence[Callable[[Any], object] | str] = ()
    """Who is told what becomes of saves and loads: a function of an ``asyncckpt.events.Event``, or several; the
    adapters of ``asyncckpt.telemetry`` are such. Each is called on a thread of its own: none can have a save fail, or
    hold it up. A text names one, as "module:function", or "module:Class" for an object of that; in the environment,
    some such texts with commas between."""

    metrics_folder: str | None = None
    """A folder in which the worker keeps a file of Prometheus metrics up to date, for node_exporter's textfile
    collector. It stays when the trainer has died."""

    def __post_init__(self) -> None:
        for field in fields(self):
            kind, *others = str(field.type).split(" | ")
            value = getattr(self, field.name)
            if kind in _KINDS and not (value is None and others):
                wanted, plain, words = _KINDS[kind]
                if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
                    raise TypeError(f"Config.{field.name} is {words}, not {value!r}")
                object.__setattr__(self, field.name, plain(value))  # a number of numpy's cannot be written down
        checks = {
            "slots": self.slots is None or 1 <= self.slots <= 16,
            "when_busy": self.when_busy in get_args(WhenBusy),
            "keep_last": self.keep_last is None or self.keep_last >= 1,
            "keep_every": self.keep_every is None or self.keep_every >= 1,
            "local_root": self.local_root is None or ("://" not in self.local_root and self.local_root != ""),
            "replicas": self.replicas >= 0,
            "replica_rate": self.replica_rate is None or self.replica_rate > 0,
            "rewrite_unchanged_every": self.rewrite_unchanged_every >= 1,
            "assume_unchanged": not isinstance(self.assume_unchanged, str)
            and all(isinstance(each, str) for each in self.assume_unchanged),
            "local_keep_last": self.local_keep_last >= 1,
            "upload_every": self.upload_every is None or (self.upload_every >= 1 and self.local_root is not None),
            "failure": self.failure in get_args(Failure),
            "differing_replicas": self.differing_replicas in get_args(DifferingReplicas),
            "linger": self.linger >= 0,
            "worker_restarts": self.worker_restarts >= 0,
            "restart_pause": self.restart_pause >= 0,
            "timeout": self.timeout > 0,
            "commit_timeout": self.commit_timeout > 0,
            "start_timeout": self.start_timeout > 0,
            "io_threads": 1 <= self.io_threads <= 64,
            "nice": 0 <= self.nice <= 19,
            "io_class": self.io_class in get_args(IOClass),
            "transport": self.transport in get_args(Transport),
        }
        if not all(map(callable, self.listeners)):
            raise TypeError(f"Config.on_event is a function of an event, or a sequence of such, not {self.on_event!r}")
        if self.metrics_folder is not None and importlib.util.find_spec("prometheus_client") is None:
            raise ValueError("Config.metrics_folder needs prometheus_client: pip install 'asyncckpt[prometheus]'")
        if self.transport == "nixl" and not any(map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13"))):
            raise ValueError("Config.transport='nixl' needs NIXL: pip install 'asyncckpt[nixl]'")
        for name, good in checks.items():
            if not good:
                about = _OPTIONS[name].help if name in _OPTIONS else ""
                raise ValueError(
                    f"Config.{name} cannot be {getattr(self, name)!r}; it is: {about or 'see help(Config)'}"
                )

    @property
    def listeners(self) -> tuple[Callable[[Any], object], ...]:
        """All who are told of events."""
        given = (self.on_event,) if callable(self.on_event) or isinstance(self.on_event, str) else self.on_event
        return tuple(_named(each) if isinstance(each, str) else each for each in given)

    @classmethod
    def given(cls, config: Config | None) -> Config:
        """``config``, or, where that is None, what the environment says. Raises ``TypeError`` where it is no such
        thing, ``ValueError`` as ``from_env``.
        """
        if not isinstance(config, Config | None):
            raise TypeError(f"config is a Config, not a {type(config).__name__}: Config(keep_last=3), say")
        return cls.from_env() if config is None else config

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """What the environment variables say. Raises ``ValueError``, naming the variable."""
        return cls.from_args(argparse.Namespace(), environment)

    @classmethod
    def from_args(cls, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Config:
        """What stands in ``args``, else in the environment, else the defaults.

        ``args`` is what a parser with ``add_arguments`` has made, or Megatron-LM's own. Raises ``ValueError``.
        """
        for variable in environment:
            if variable.startswith(_PREFIX):
                _warn_unless_known(variable)
        found = {name: option.find(args, environment) for name, option in _OPTIONS.items()}
        return cls(**{name: value for name, value in found.items() if value is not None})


def is_switched_on(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``--async-ckpt-use-cpu-shm`` was given, or ``$ASYNC_CKPT_USE_CPU_SHM`` says so. Raises ``ValueError``."""
    return bool(_SWITCH.find(args, environment))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the options of this package that it has not yet, for ``Config.from_args`` and ``wrap_save``.

    What Megatron-LM has is called as there.
    """
    group = parser.add_argument_group("asyncckpt", "checkpoints staged in CPU shared memory")
    for option in (_SWITCH, *_OPTIONS.values()):
        if option.help is None:
            continue
        kind: dict[str, Any] = {"type": option.parse, "metavar": "X"}
        if option.parse is _truth:
            kind = {"action": argparse.BooleanOptionalAction}
        if option.choices:
            kind = {"choices": option.choices}
        with contextlib.suppress(argparse.ArgumentError):  # it is there: this is Megatron-LM's parser
            group.add_argument(option.flag, default=None, help=option.help, **kind)


@functools.cache  # once a process
def _warn_unless_known(variable: str) -> None:
    """Warn of a variable of the environment that nobody reads: its name is probably misspelled."""
    known = [option.variable for option in (_SWITCH, *_OPTIONS.values())] + list(_OTHER_VARIABLES)
    if variable in known:
        return
    near = difflib.get_close_matches(variable, known, 1)
    logger.warning(
        "the environment has %s, which asyncckpt does not know%s: it is ignored",
        variable,
        f" (is {near[0]} meant?)" if near else "",
    )


@functools.cache  # an adapter is there once, whatever number of engines tells it
def _named(name: str) -> Any:
    """Who listens by that name. Raises ``ValueError``."""
    module, _, attribute = name.strip().partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"Config.on_event cannot be {name!r}, a name of the form module:function: {error}") from error
    return found() if isinstance(found, type) else found


def _truth(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("say yes or no")
    return words[text.lower()]


def _io_class(text: str) -> str:
    """By its name, or by its number, as ``ionice`` and Megatron-LM have it. Of real time we make our best effort."""
    numbers = {"0": "none", "1": "best-effort", "2": "best-effort", "3": "idle"}
    return numbers.get(text, text)


@dataclass(frozen=True)
class _Option:
    """One thing to choose: on the command line, if it has a ``help``, and by the variable of the same name."""

    flag: str
    parse: Callable[[str], Any]
    help: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return self.flag.lstrip("-").replace("-", "_").upper()

    def find(self, args: argparse.Namespace, environment: Mapping[str, str]) -> Any:
        value = getattr(args, self.variable.lower(), None)
        if value is not None:
            return self.parse(str(value))
        if self.variable not in environment:
            return None
        try:
            return self.parse(environment[self.variable])
        except ValueError as error:
            raise ValueError(f"{self.variable}={environment[self.variable]!r}: {error}") from error


_SWITCH = _Option(
    "--async-ckpt-use-cpu-shm",
    _truth,
    "stage checkpoints in CPU shared memory and write them in another process, so that a save stops the training for"
    " no longer than a copy and no handle of the device leaves the trainer; best together with"
    " --ckpt-assume-constant-structure, as a first save of a structure (planning, taking memory) costs many times a"
    " later one",
)

# What has a variable and no option.
_VARIABLES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        (
            *("replicas", "keep_every", "local_keep_last", "upload_every", "worker_restarts", "io_threads"),
            "rewrite_unchanged_every",
        ),
        int,
    ),
    **dict.fromkeys(("linger", "timeout", "commit_timeout", "start_timeout", "restart_pause", "replica_rate"), float),
    **dict.fromkeys(
        ("differing_replicas", "job_id", "host", "address", "transport", "domain", "local_root", "metrics_folder"), str
    ),
    **dict.fromkeys(("progress", "direct_io", "link_unchanged"), _truth),
    **dict.fromkeys(("on_event", "assume_unchanged"), lambda names: tuple(names.split(","))),
}

_PREFIX = "ASYNC_CKPT_"
_OTHER_VARIABLES = ("ASYNC_CKPT_COPY_MANY", "ASYNC_CKPT_RUNTIME_DIR", "ASYNC_CKPT_VERL_PUBLISH")
"""Variables of the package that set no field of ``Config``."""

# What fields of a type take, what is kept of that, and in words.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "int": (numbers.Integral, int, "a whole number"),
    "float": (numbers.Real, float, "a number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "a text"),
}
# By their names in ``Config``.
_OPTIONS = {
    "assume_constant_structure": _Option(
        "--ckpt-assume-constant-structure",
        _truth,
        "the state keeps its structure from save to save: what was planned and taken for the first one is used for all,"
        " and the ranks do not compare notes before each (default: no)",
    ),
    "slots": _Option("--async-ckpt-slots", int, "images of the state in memory (default: 1, or 2 while saves overlap)"),
    "when_busy": _Option(
        "--async-ckpt-when-busy",
        str,
        "what a save does when all slots are being written (default: wait)",
        get_args(WhenBusy),
    ),
    "overlap": _Option("--async-ckpt-overlap", _truth, "return before the tensors are copied (default: no)"),
    "keep_last": _Option("--async-ckpt-keep-last", int, "checkpoints to keep (default: all)"),
    "failure": _Option(
        "--async-ckpt-failure",
        str,
        "when a save fails: raise at the next call, or warn and train on (default: raise)",
        get_args(Failure),
    ),
    "differing_replicas": _Option(
        "--async-ckpt-differing-replicas",
        str,
        "when ranks have different values under one name: warn, or raise, and save nothing (default: warn)",
        get_args(DifferingReplicas),
    ),
    "nice": _Option("--async-ckpt-cpu-priority", int, "niceness of the worker, 0 to 19 (default: 10)"),
    "io_class": _Option(
        "--async-ckpt-io-priority",
        _io_class,
        "I/O class of the worker: 0 or none, 2 or best-effort, 3 or idle (default: best-effort)",
    ),
    **{name: _Option(f"--async-ckpt-{name.replace('_', '-')}", parse) for name, parse in _VARIABLES.items()},
}
