"""Options for saves and loads: one frozen dataclass, set in code, from the command line or from the environment."""

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
import re
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
    """All options. Raises ``ValueError`` if a value is invalid, ``TypeError`` if it has another type.

    Every field except ``keep`` can also be set by an environment variable, such as ``ASYNC_CKPT_SLOTS`` for ``slots``.
    Three variables have the names of Megatron-LM's options: ``CKPT_ASSUME_CONSTANT_STRUCTURE``,
    ``ASYNC_CKPT_CPU_PRIORITY`` (``nice``) and ``ASYNC_CKPT_IO_PRIORITY`` (``io_class``).
    """

    slots: int | None = None
    """Number of slots in shared memory. Each slot holds one image of the state, and is as large as the state. With two
    slots, a save can be staged while the previous save is written. None: one slot, and a second one while saves
    overlap, if there is enough memory."""

    when_busy: WhenBusy = "wait"
    """What a save does if every slot holds a save that is not committed. ``wait``: wait for a free slot. ``skip``: skip
    this save. ``latest``: replace the newest save that is staged and not yet being written, or wait if there is
    none."""

    overlap: bool = False
    """Return from ``save`` before the tensors are copied. The tensors must not change until ``Save.wait_staged`` or
    ``Save.synchronize_staging`` returns. ``synchronize_staging`` makes the streams of devices wait instead of the host.
    ``Checkpointer.guard(optimizer)`` calls it before each optimizer step. This is too late for tensors that a forward
    pass changes, such as the running statistics of a batch norm."""

    keep_last: int | None = None
    """Number of checkpoints of this training to keep in a root. Older checkpoints are removed when a newer one is
    durable, so that the storage needs room for one more. None: keep all."""

    keep_every: int | None = None
    """Never remove the checkpoint of a step that is a multiple of this number."""

    keep: Callable[[int], bool] | None = None
    """Like ``keep_every``, for any rule. Called on the first rank with the step of each save. If it returns True, the
    checkpoint is never removed."""

    link_unchanged: bool = True
    """Do not write a file again if its content has not changed since the last durable save. The new checkpoint gets the
    same file by a hard link. On an object store, the store makes a copy. Only whole files are linked, so that frozen
    parameters, and tensors that match ``assume_unchanged``, have a data file of their own. Every checkpoint is still
    complete, and can be removed alone. If a shared file is damaged, all checkpoints with that file are damaged."""

    rewrite_unchanged_every: int = 100
    """Maximum number of saves in a row that link a file. The next save writes the file again, changed or not."""

    assume_unchanged: Sequence[str] = ()
    """Patterns of tensor names (``fnmatch``, such as "base_model.*"). In the environment they are separated by commas.
    The matching tensors are expected to stay the same, and have a data file of their own. The file is linked while none
    of its tensors changes, and is written again if one does. Frozen parameters need no pattern if the state contains
    their module. They need one if the state contains a dict from ``state_dict()`` or DCP's ``get_model_state_dict``,
    because such a dict has lost ``requires_grad``."""

    parties: Sequence[str] = ()
    """Names of processes that are no ranks, and add their parts to each step of a ``Checkpointer``
    (``asyncckpt.join``). A step is complete when all ranks and parties have written their parts. In the environment the
    names are separated by commas. Not with ``local_root``, because the hosts of all parties must see the checkpoint."""

    local_root: str | None = None
    """A folder on fast disks. A ``Checkpointer`` saves to a subfolder of it, and uploads steps to its root in the
    background. All ranks must see the folder, so that this works for jobs of one host, and for fast disks that hosts
    share."""

    local_keep_last: int = 2
    """Number of checkpoints to keep in the local folder. ``keep_last``, ``keep_every`` and ``keep`` are for the
    root."""

    upload_every: int | None = None
    """With ``local_root``: upload the steps that are a multiple of this number, and the steps that ``keep_every`` or
    ``keep`` keeps. None: upload all steps, if the root keeps up."""

    failure: Failure = "raise"
    """What happens if a save fails. ``raise``: the next call does its work, and then raises the failure if it was not
    reported yet. ``warn``: the failure is logged and counted, and the training goes on. ``save`` itself then raises
    only ``ClosedError``; for other errors it returns the handle of a failed save."""

    linger: float = 600.0
    """Seconds for which the worker of a dead trainer stays, with the newest states in memory, for the trainer that is
    started next. 0: the worker exits when all is written."""

    job_id: str | None = None
    """Name of the job of this trainer. A root belongs to the first job that saves to it. Any other job gets
    ``JobTakenError`` there when it saves or loads. None: the name is not checked. In any case, only one job at a time
    saves to a root."""

    progress: bool = True
    """Show a progress bar for loads that take longer than a few seconds: on stderr of the first rank, if that is a
    terminal."""

    timeout: float = 600.0
    """Maximum seconds to wait for the worker, as for memory or for its exit. A longer wait raises an error."""

    commit_timeout: float = 1800.0
    """Maximum seconds until a save is committed. A slower save fails on all ranks, and the error names the ranks that
    did not finish. A save waits about as long for a free slot."""

    assume_constant_structure: bool = False
    """Promise that the structure of a state never changes once it is saved. The ranks of a job then do not ask each
    other before a save whether all still have that structure. If a rank finds another structure, it raises an error,
    and the save fails on all ranks. A job with one rank has no other ranks to ask, and makes a new plan."""

    differing_replicas: DifferingReplicas = "warn"
    """What happens if ranks have different values under one name, and one of these values is saved for all ranks.
    ``warn``: log a warning, once for each name. ``raise``: fail the save on all ranks, and commit nothing. The first
    saves compare a sample of each value, and later every tenth save compares some values. The running statistics of
    BatchNorm may differ legitimately."""

    host: str | None = None
    """Name or address of the first rank's host, for the workers of other ranks. None: ``$MASTER_ADDR`` (set by
    torchrun), or else the name that the host has for itself."""

    address: str | None = None
    """Name or address of this host, for the workers of other hosts. None: ``$ASYNC_CKPT_ADDRESS``, or else the address
    from which this host reaches the first rank's host."""

    port_range: str | None = None
    """TCP ports at which workers listen for other hosts, such as "20000-20099". A host needs one port for each of its
    ranks, and the first rank's host one more. A worker takes the first free port. ``nixl`` has its own ports
    (``UCX_TCP_PORT_RANGE``). None: any free port."""

    transport: Transport = "sockets"
    """Transport of images between hosts. ``sockets``: authenticated by the job's key, and not encrypted. ``nixl``:
    RDMA, EFA or TCP; needs pip install 'asyncckpt[nixl]' on all hosts. ``nixl`` has no authentication, and is only for
    a trusted fabric: restrict it to that fabric with ``UCX_NET_DEVICES``."""

    replicas: int = 0
    """Number of other hosts that get a copy of each image in memory. The copies are made in the background, while the
    image is written. Then this number of hosts may be lost with their memory (see ``Save.wait_replicated``). Each host
    holds copies for this number of other hosts, and needs memory for two images of each. ``Checkpointer.prepare``
    raises an error if there is too little memory."""

    replica_rate: float | None = None
    """Maximum bytes per second that a worker fetches for copies. None: no limit."""

    domain: str | None = None
    """Failure domain of this host, such as the name of its rack. All hosts of a domain may be lost at once, so that
    copies go to another domain. None: ``$ASYNC_CKPT_DOMAIN``, or else this machine with all its containers."""

    start_timeout: float = 60.0
    """Maximum seconds for the start of the worker process. On an idle machine the start takes 0.1 seconds."""

    worker_restarts: int = 5
    """Number of restarts of a worker in a row, with no save committed in between. If the worker dies again after that,
    no other is started."""

    restart_pause: float = 1.0
    """Seconds after the second death of a worker in a row during which no worker is started. Each further death doubles
    this pause. A save during the pause fails at once."""

    direct_io: bool = True
    """Bypass the page cache (``O_DIRECT``) if the file system allows it."""

    io_threads: int = 2
    """Number of threads with which the worker writes and computes checksums. More threads help on file systems that
    spread a file over several servers."""

    nice: int = 10
    """Niceness of the worker, 0 to 19. With a higher value the worker leaves more of the cores to the training."""

    io_class: str = "best-effort"
    """I/O scheduling class of the worker: ``none`` (that of the trainer), ``best-effort`` (its lowest level) or
    ``idle``."""

    on_event: Callable[[Any], object] | str | Sequence[Callable[[Any], object] | str] = ()
    """Listeners for events of saves and loads: a function that takes an ``asyncckpt.events.Event``, or a sequence of
    functions. The adapters of ``asyncckpt.telemetry`` are such functions. Each listener is called on a thread of its
    own. A listener cannot make a save fail, and cannot block it. A listener may be given by its name:
    "module:function", or "module:Class" for an instance of a class. In the environment such names are separated by
    commas."""

    metrics_folder: str | None = None
    """A folder in which the worker maintains a file of Prometheus metrics, for node_exporter's textfile collector. The
    file stays if the trainer has died."""

    def __post_init__(self) -> None:
        for field in fields(self):
            kind, *others = str(field.type).split(" | ")
            value = getattr(self, field.name)
            if kind in _KINDS and not (value is None and others):
                wanted, plain, words = _KINDS[kind]
                if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
                    raise TypeError(f"Config.{field.name} is {words}, not {value!r}")
                object.__setattr__(self, field.name, plain(value))  # numpy's numbers cannot be serialized
        checks = {
            "slots": self.slots is None or 1 <= self.slots <= 16,
            "when_busy": self.when_busy in get_args(WhenBusy),
            "keep_last": self.keep_last is None or self.keep_last >= 1,
            "keep_every": self.keep_every is None or self.keep_every >= 1,
            "local_root": self.local_root is None or ("://" not in self.local_root and self.local_root != ""),
            "port_range": self.port_range is None or _is_port_range(self.port_range),
            "replicas": self.replicas >= 0,
            "replica_rate": self.replica_rate is None or self.replica_rate > 0,
            "rewrite_unchanged_every": self.rewrite_unchanged_every >= 1,
            "assume_unchanged": not isinstance(self.assume_unchanged, str)
            and all(isinstance(each, str) for each in self.assume_unchanged),
            "parties": are_parties(self.parties),
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
        """Return all listeners for events."""
        given = (self.on_event,) if callable(self.on_event) or isinstance(self.on_event, str) else self.on_event
        return tuple(_named(each) if isinstance(each, str) else each for each in given)

    @property
    def ports(self) -> tuple[int, int]:
        """Return the first and the last port of ``port_range``; (0, 0): any free port."""
        first, _, last = (self.port_range or "0-0").partition("-")
        return int(first), int(last)

    @classmethod
    def given(cls, config: Config | None) -> Config:
        """Return ``config``, or the configuration of the environment if ``config`` is None.

        Raises ``TypeError`` if ``config`` has another type, and ``ValueError`` as ``from_env`` does.
        """
        if not isinstance(config, Config | None):
            raise TypeError(f"config is a Config, not a {type(config).__name__}: Config(keep_last=3), say")
        return cls.from_env() if config is None else config

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """Return the configuration of the environment variables. Raises ``ValueError``, which names the variable."""
        return cls.from_args(argparse.Namespace(), environment)

    @classmethod
    def from_args(cls, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Config:
        """Return the configuration of ``args``; for missing options, of the environment, or else the defaults.

        ``args`` comes from a parser with ``add_arguments``, or is Megatron-LM's own. Raises ``ValueError``.
        """
        for variable in environment:
            if variable.startswith(_PREFIX):
                _warn_unless_known(variable)
        found = {name: option.find(args, environment) for name, option in _OPTIONS.items()}
        return cls(**{name: value for name, value in found.items() if value is not None})


def is_switched_on(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``--async-ckpt-use-cpu-shm`` or ``$ASYNC_CKPT_USE_CPU_SHM`` is set. Raises ``ValueError``."""
    return bool(_SWITCH.find(args, environment))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this package to ``parser``, for ``Config.from_args`` and ``wrap_save``.

    Options that the parser has already are left alone. Options that Megatron-LM has, too, have the same names.
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
        with contextlib.suppress(argparse.ArgumentError):  # Megatron-LM's parser has this option already
            group.add_argument(option.flag, default=None, help=option.help, **kind)


@functools.cache  # once a process
def _warn_unless_known(variable: str) -> None:
    """Warn about an environment variable that is not known: its name is probably misspelled."""
    known = [option.variable for option in (_SWITCH, *_OPTIONS.values())] + list(_OTHER_VARIABLES)
    if variable in known:
        return
    near = difflib.get_close_matches(variable, known, 1)
    logger.warning(
        "the environment variable %s is unknown to asyncckpt%s, and is ignored",
        variable,
        f" (is {near[0]} meant?)" if near else "",
    )


@functools.cache  # all engines share one instance of an adapter
def _named(name: str) -> Any:
    """Return the listener of that name. Raises ``ValueError``."""
    module, _, attribute = name.strip().partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"Config.on_event cannot be {name!r}, a name of the form module:function: {error}") from error
    return found() if isinstance(found, type) else found


def _is_port_range(text: str) -> bool:
    first, _, last = text.partition("-")
    return first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16


def are_parties(names: Sequence[str]) -> bool:
    """Return whether ``names`` are different names that parties can have."""
    is_valid = not isinstance(names, str) and all(isinstance(name, str) and _PARTY.fullmatch(name) for name in names)
    return is_valid and TRAINER not in names and len({*names}) == len(names)


def _truth(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("say yes or no")
    return words[text.lower()]


def _io_class(text: str) -> str:
    """Return the I/O class from its name, or its number as for ``ionice`` and Megatron-LM. Real time is best effort."""
    numbers = {"0": "none", "1": "best-effort", "2": "best-effort", "3": "idle"}
    return numbers.get(text, text)


@dataclass(frozen=True)
class _Option:
    """An option: an environment variable, and also a command line flag of the same name if there is a ``help``."""

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

# Fields with an environment variable, but without a command line flag. Each has a function that parses it.
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
        (
            "differing_replicas",
            "job_id",
            "host",
            "address",
            "transport",
            "domain",
            "port_range",
            "local_root",
            "metrics_folder",
        ),
        str,
    ),
    **dict.fromkeys(("progress", "direct_io", "link_unchanged"), _truth),
    **dict.fromkeys(("on_event", "assume_unchanged", "parties"), lambda names: tuple(names.split(","))),
}

TRAINER = "trainer"
"""The name of the ranks, among the parties of a checkpoint."""
# The name of a party is the name of a folder.
_PARTY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PREFIX = "ASYNC_CKPT_"
_OTHER_VARIABLES = ("ASYNC_CKPT_COPY_MANY", "ASYNC_CKPT_RUNTIME_DIR", "ASYNC_CKPT_VERL_PUBLISH")
"""Variables of the package that set no field of ``Config``."""

# For each type of a field: the accepted type, the function that converts the value, and the type in words.
_KINDS: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "int": (numbers.Integral, int, "a whole number"),
    "float": (numbers.Real, float, "a number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "a text"),
}
# Options by the names of their fields in ``Config``.
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
