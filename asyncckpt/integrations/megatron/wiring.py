"""Install our names in Megatron-LM, add newer flags to older trees, and provide the handle of a save.

Megatron-LM makes a new parser in each call of ``parse_args``, and any module may have imported that function by name.
So the flags are added in ``argparse``, when arguments are parsed, and only to a parser that has ``--async-save``, as
Megatron-LM's has. Flags that such a parser already has stay unchanged.

Two kinds of source trees are supported. Newer trees import nine names from nvidia-resiliency-ext (nvrx) at each use, in
``get_async_strategy``. ``install`` replaces these names in nvrx's modules, or makes empty stand-in modules if nvrx is
not installed. megatron-core 0.16 has its own code instead of nvrx. There ``install`` replaces the names in the modules
that use them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from asyncckpt.errors import CheckpointError
from asyncckpt.integrations import nvrx
from asyncckpt.integrations.nvrx.family import MODULES, PACKAGE
from asyncckpt.integrations.nvrx.filesystem import write_exception

_OF_MEGATRON = "--async-save"


class _Priority(argparse.Action):
    """Stores the value also for the queue, because a tree without the flag does not pass the value on."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        _priorities[self.dest.removeprefix("async_ckpt_")] = values


_FLAGS: dict[str, dict[str, Any]] = {
    "--async-ckpt-use-cpu-shm": {
        "action": "store_true",
        "help": "stage asynchronous checkpoints in CPU shared memory, as asyncckpt always does",
    },
    "--async-ckpt-cpu-priority": {
        "action": _Priority,
        "type": int,
        "default": 10,
        "help": "niceness of the process that writes checkpoints, 0 to 19",
    },
    "--async-ckpt-io-priority": {
        "action": _Priority,
        "type": int,
        "choices": range(4),
        "help": "class of ionice of the process that writes checkpoints: 1 and 2 best-effort, 3 idle, 0 none",
    },
}
_priorities: dict[str, int] = {}
_parse_known_args = argparse.ArgumentParser.parse_known_args  # parse_args calls this, too


def offer_flags() -> None:
    """Add the missing flags to Megatron-LM's parsers from now on. Safe to call twice."""
    argparse.ArgumentParser.parse_known_args = _parse_with_flags  # type: ignore[assignment,method-assign]


def given_priorities() -> dict[str, Any]:
    """Return the priorities that our flags have set, as arguments of ``AsyncCallsQueue``."""
    return dict(_priorities)


def _parse_with_flags(parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
    known = parser._option_string_actions
    if _OF_MEGATRON in known and (lacking := [flag for flag in _FLAGS if flag not in known]):
        group = parser.add_argument_group("asyncckpt")
        for flag in lacking:
            group.add_argument(flag, **_FLAGS[flag])
    return _parse_known_args(parser, args, namespace)


_NVRX = PACKAGE.partition(".")[0]
# The names that newer trees import, by their modules in nvrx's package, and the oldest nvrx version that they accept.
_MODULES = MODULES | {
    "CheckpointMetadataCache": "state_dict_saver",
    "get_write_results_queue": "filesystem_async",
    "_results_queue": "filesystem_async",
}
_OURS = {name: getattr(nvrx, name, None) for name in _MODULES}  # asyncckpt has no _results_queue
_GOOD_VERSION = "0.7.0"

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"


class MegatronWiringError(CheckpointError):
    """Raised if ``install`` cannot replace all names in this Megatron-LM or nvidia-resiliency-ext."""


def install() -> None:
    """Make Megatron-LM use asyncckpt from now on. Safe to call twice.

    Call this before Megatron-LM is imported, if possible. Raises ``MegatronWiringError`` with the name that cannot be
    replaced, after restoring nvrx's modules.
    """
    offer_flags()
    with contextlib.ExitStack() as undo:
        with _new_enough(_install_in_nvrx(undo), undo):
            try:
                torch_strategy = importlib.import_module(f"{_STRATEGIES}.torch")
            except ImportError as error:
                if error.name is not None and error.name.split(".")[0] == "megatron":
                    raise MegatronWiringError(f"Megatron-LM cannot be imported here: {error}") from error
                raise
        if hasattr(torch_strategy, "get_async_strategy"):
            _check_newer(torch_strategy)
            _take_synchronous_saves(torch_strategy)
        else:
            _install_in_core(torch_strategy)
        undo.pop_all()


def _install_in_nvrx(undo: contextlib.ExitStack) -> ModuleType:
    """Replace the names in nvrx's modules, or in stand-in modules if nvrx is not installed. Return the package."""
    if find_spec(_NVRX) is None:
        modules = {f"{PACKAGE}.{module}" for module in _MODULES.values()}
        for name in (_NVRX, f"{_NVRX}.checkpointing", PACKAGE, *modules):
            _stand_in(name)
            undo.callback(sys.modules.pop, name, None)
    package = importlib.import_module(_NVRX)
    for attribute, module in _MODULES.items():
        try:
            _replace(importlib.import_module(f"{PACKAGE}.{module}"), attribute, _OURS[attribute], undo)
        except ModuleNotFoundError as error:
            raise MegatronWiringError(
                f"Megatron-LM takes {attribute} from {PACKAGE}.{module}, which cannot be imported from the installed"
                f" nvidia-resiliency-ext ({getattr(package, '__version__', 'of unknown version')}): {error}"
            ) from error
    return package


def _replace(module: ModuleType, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    if hasattr(module, name):
        undo.callback(setattr, module, name, getattr(module, name))
    else:
        undo.callback(delattr, module, name)
    setattr(module, name, value)


def _stand_in(name: str) -> None:
    """Register an empty module ``name`` that reports a version new enough for Megatron-LM."""
    module = ModuleType(
        name, "Stands in for nvidia-resiliency-ext, which is not installed: see asyncckpt.integrations.megatron."
    )
    module.__dict__.update(__path__=[], __spec__=ModuleSpec(name, None), __version__=_GOOD_VERSION)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


@contextlib.contextmanager
def _new_enough(package: ModuleType, undo: contextlib.ExitStack) -> Iterator[None]:
    """Report a new enough version of nvrx while Megatron-LM is imported, because newer trees check the version."""
    version = getattr(package, "__version__", None)
    package.__version__ = _GOOD_VERSION  # type: ignore[attr-defined]
    try:
        yield
        helpers = sys.modules.get(f"{_STRATEGIES}.nvrx")
        if helpers is not None and hasattr(helpers, "is_nvrx_min_version"):
            _replace(helpers, "is_nvrx_min_version", lambda version=_GOOD_VERSION: True, undo)
    finally:
        package.__version__ = version  # type: ignore[attr-defined]


def _check_newer(torch_strategy: ModuleType) -> None:
    """Check that ``get_async_strategy`` finds our names."""
    try:
        _, found = torch_strategy.get_async_strategy("nvrx")
    except (ImportError, AttributeError) as error:
        raise MegatronWiringError(
            f"Megatron-LM wants a name of nvidia-resiliency-ext that asyncckpt does not know of: {error}"
        ) from error
    for name, value in found.items():
        if name not in _OURS or _OURS[name] is not value:
            raise MegatronWiringError(
                f"Megatron-LM takes {name} from another place than {PACKAGE}, where asyncckpt has put its own"
            )


def _take_synchronous_saves(torch_strategy: ModuleType) -> None:
    """Make synchronous saves of newer trees use our names and wait, instead of Megatron-LM's own writer."""
    strategy = getattr(torch_strategy, "TorchDistSaveShardedStrategy", None)
    if strategy is None or "async_strategy" not in inspect.signature(strategy.async_save).parameters:
        raise MegatronWiringError(
            f"this Megatron-LM has no TorchDistSaveShardedStrategy in {_STRATEGIES}.torch whose async_save takes an"
            " async_strategy, as megatron-core 0.17 has: what it saves while it waits would not be asyncckpt's"
        )
    strategy.save = _save_and_wait


def _save_and_wait(self: Any, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
    """Save as ``TorchDistSaveShardedStrategy.save`` of newer trees does, but with our names in nvrx's modules."""
    self.async_save(sharded_state_dict, checkpoint_dir, async_strategy="nvrx").execute_sync()


# megatron-core 0.16.

_CORE_NAMES = ("FileSystemWriterAsync", "save_state_dict_async_plan", "save_state_dict_async_finalize")


def _install_in_core(torch_strategy: ModuleType) -> None:
    """Replace the names that megatron-core's strategy for ``torch_dist`` uses, and its queue of requests."""
    missing = [name for name in _CORE_NAMES if not hasattr(torch_strategy, name)]
    requests = importlib.import_module(f"{_STRATEGIES}.async_utils")
    if missing or not hasattr(requests, "AsyncCallsQueue"):
        raise MegatronWiringError(
            f"this Megatron-LM has no {', '.join(missing) or 'AsyncCallsQueue'} in {_STRATEGIES}, where megatron-core"
            " 0.16 has it, and no get_async_strategy as newer trees have"
        )
    own_plan = torch_strategy.save_state_dict_async_plan
    if own_plan is not _plan_for_core and "cached_ckpt_structure" not in inspect.signature(own_plan).parameters:
        raise MegatronWiringError(
            "save_state_dict_async_plan of this Megatron-LM has no parameter cached_ckpt_structure, as megatron-core"
            " 0.16 has, and so may return something else"
        )
    if requests.AsyncCallsQueue is not _QueueForCore:
        _replace_queues(requests.AsyncCallsQueue)
    for name in _CORE_NAMES:
        setattr(torch_strategy, name, _OURS[name])
    torch_strategy.save_state_dict_async_plan = _plan_for_core  # type: ignore[attr-defined]


def _replace_queues(own_queue: type[Any]) -> None:
    """Replace megatron-core's queue class, and each queue that a module such as ``megatron.training`` made at import.

    Raises ``MegatronWiringError`` if a queue cannot be replaced, because its saves would still use megatron-core's own
    processes.
    """
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    named = [(module, name, value) for module in modules for name, value in list(vars(module).items())]
    queues = [(module, name, value) for module, name, value in named if isinstance(value, own_queue)]
    gc.collect()
    others = [each for each in gc.get_objects() if type(each) is own_queue]
    others = [each for each in others if all(each is not value for _, _, value in queues)]
    if others or any(value.async_calls for _, _, value in queues):
        raise MegatronWiringError(
            "an AsyncCallsQueue of megatron-core was made before asyncckpt.integrations.megatron.install() was called,"
            f" and {'an object holds it' if others else 'it has saves under way'}, so that its saves would not be"
            " asyncckpt's: call install() before anything of Megatron-LM is imported"
        )
    for module, name, value in named:
        if value is own_queue:
            setattr(module, name, _QueueForCore)
    for module, name, value in queues:
        setattr(module, name, _QueueForCore(persistent=value.persistent))


class _QueueForCore(nvrx.AsyncCallsQueue):
    """A queue with the arguments of megatron-core 0.16, which has no priorities."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__(persistent, **given_priorities())


def _plan_for_core(
    state_dict: Any,
    storage_writer: nvrx.FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    cached_ckpt_structure: Any = None,
    loaded_all_plans: Any = None,
) -> tuple[Any, None, None, bool, bool]:
    """Plan with the signature of megatron-core 0.16. The extra results, for the caller's next save, are empty."""
    asks = cached_ckpt_structure is not None
    planned = nvrx.save_state_dict_async_plan(
        state_dict, storage_writer, process_group, coordinator_rank, planner, enable_cache=asks
    )
    return planned, None, None, False, False


class MegatronSave:
    """The handle of a save for which Megatron-LM has made a request. All ranks make the same calls."""

    def __init__(self, queue: nvrx.AsyncCallsQueue, request: nvrx.AsyncRequest) -> None:
        queue.schedule_async_request(request)
        self._queue = queue
        self._call = queue.async_calls[-1]

    def done(self) -> bool:
        """Return whether the save has ended on all ranks, and finalize it if so. All ranks get the same answer."""
        self._finalize(blocking=False)
        return self._call not in self._queue.async_calls

    def result(self) -> None:
        """Wait until the checkpoint is durable and finalized.

        Raises DCP's ``CheckpointException``, or the error of a finalize function of this save.
        """
        self._finalize(blocking=True)
        if failures := self._call.failures():
            raise write_exception(failures)
        if self._call.finalize_error is not None:
            raise self._call.finalize_error

    def _finalize(self, *, blocking: bool) -> None:
        """Finalize the calls in order. The error of a save is raised only by the save's own handle."""
        while calls := list(self._queue.async_calls):
            try:
                self._queue.maybe_finalize_async_calls(blocking=blocking)
            except CheckpointException:
                pass
            except Exception as error:
                if all(call.finalize_error is not error for call in calls):
                    raise
                continue  # later calls are not finalized yet
            return
