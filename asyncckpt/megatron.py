"""Megatron-LM saves through asyncckpt, without a change to its source.

    python -m asyncckpt.megatron pretrain_gpt.py --async-save --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm ...

or, before anything of Megatron-LM is imported, ``asyncckpt.megatron.install()``.

Two ways of wiring are known. Newer trees take nine names from nvidia-resiliency-ext, in ``get_async_strategy``, each
time they are needed: those names are replaced in its modules, or, where it is not installed, there are modules that
have nothing but these. megatron-core 0.16 has code of its own for the same: there the names are replaced where they are
used.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from asyncckpt import nvrx
from asyncckpt.errors import CheckpointError

_NVRX = "nvidia_resiliency_ext"
_ASYNC_CKPT = f"{_NVRX}.checkpointing.async_ckpt"
# What newer trees import, by its module; and the version from which on they take nvrx to be good enough.
_NAMES: dict[str, dict[str, Any]] = {
    "core": {"AsyncCallsQueue": nvrx.AsyncCallsQueue, "AsyncRequest": nvrx.AsyncRequest},
    "cached_metadata_filesystem_reader": {"CachedMetadataFileSystemReader": nvrx.CachedMetadataFileSystemReader},
    "filesystem_async": {
        "FileSystemWriterAsync": nvrx.FileSystemWriterAsync,
        "get_write_results_queue": nvrx.get_write_results_queue,
        "_results_queue": None,
    },
    "state_dict_saver": {
        "CheckpointMetadataCache": nvrx.CheckpointMetadataCache,
        "save_state_dict_async_plan": nvrx.save_state_dict_async_plan,
        "save_state_dict_async_finalize": nvrx.save_state_dict_async_finalize,
    },
}
_GOOD_VERSION = "0.7.0"

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"


class MegatronWiringError(CheckpointError):
    """This Megatron-LM, or this nvidia-resiliency-ext, has a name elsewhere than any that is known."""


def install() -> None:
    """Have Megatron-LM use asyncckpt from now on. Safe to call twice.

    Best called before Megatron-LM is imported. Raises ``MegatronWiringError``, saying which name has moved.
    """
    with _good_enough(_install_in_nvrx()):
        try:
            torch_strategy = importlib.import_module(f"{_STRATEGIES}.torch")
        except ImportError as error:
            if error.name is not None and error.name.split(".")[0] == "megatron":
                raise MegatronWiringError(f"Megatron-LM cannot be imported here: {error}") from error
            raise
    if hasattr(torch_strategy, "get_async_strategy"):
        _check_newer(torch_strategy)
    else:
        _install_in_core(torch_strategy)


def _install_in_nvrx() -> ModuleType:
    """Put the names into nvrx's modules, or into ones that stand for them. Returns the package."""
    package = _importable(_NVRX)
    if package is None:
        package = _stand_in(_NVRX)
        package.__version__ = _GOOD_VERSION  # type: ignore[attr-defined]
        _stand_in(f"{_NVRX}.checkpointing")
        _stand_in(_ASYNC_CKPT)
    for home, names in _NAMES.items():
        name = f"{_ASYNC_CKPT}.{home}"
        module = _importable(name) or (_stand_in(name) if _is_stand_in(package) else None)
        if module is None:
            raise MegatronWiringError(
                f"the installed nvidia-resiliency-ext ({getattr(package, '__version__', 'of unknown version')}) has no"
                f" module {name}, from which Megatron-LM takes {', '.join(names)}"
            )
        for attribute, value in names.items():
            setattr(module, attribute, value)
    return package


def _importable(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _stand_in(name: str) -> ModuleType:
    """A module that is nowhere on disk, under ``name``."""
    module = ModuleType(name, "Stands in for nvidia-resiliency-ext, which is not installed: see asyncckpt.megatron.")
    module.__path__ = []
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
    return module


def _is_stand_in(package: ModuleType) -> bool:
    return package.__spec__ is None


@contextlib.contextmanager
def _good_enough(package: ModuleType) -> Iterator[None]:
    """While they are imported, newer trees look whether nvrx is new enough, for what is not asked of it any more."""
    version = getattr(package, "__version__", None)
    package.__version__ = _GOOD_VERSION  # type: ignore[attr-defined]
    try:
        yield
        helpers = sys.modules.get(f"{_STRATEGIES}.nvrx")
        if helpers is not None and hasattr(helpers, "is_nvrx_min_version"):
            helpers.is_nvrx_min_version = lambda version=_GOOD_VERSION: True  # type: ignore[attr-defined]
    finally:
        package.__version__ = version  # type: ignore[attr-defined]


def _check_newer(torch_strategy: ModuleType) -> None:
    """That ``get_async_strategy`` finds ours."""
    try:
        _, found = torch_strategy.get_async_strategy("nvrx")
    except (ImportError, AttributeError) as error:
        raise MegatronWiringError(
            f"Megatron-LM wants a name of nvidia-resiliency-ext that asyncckpt does not know of: {error}"
        ) from error
    ours = {name: value for names in _NAMES.values() for name, value in names.items()}
    for name, value in found.items():
        if name not in ours or ours[name] is not value:
            raise MegatronWiringError(
                f"Megatron-LM takes {name} from another place than {_ASYNC_CKPT}, where asyncckpt has put its own"
            )


# megatron-core 0.16.

_CORE_NAMES = ("FileSystemWriterAsync", "save_state_dict_async_plan", "save_state_dict_async_finalize")


def _install_in_core(torch_strategy: ModuleType) -> None:
    """Replace what its own strategy for ``torch_dist`` uses, and the queue for its requests."""
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
    torch_strategy.FileSystemWriterAsync = nvrx.FileSystemWriterAsync  # type: ignore[attr-defined]
    torch_strategy.save_state_dict_async_plan = _plan_for_core  # type: ignore[attr-defined]
    torch_strategy.save_state_dict_async_finalize = nvrx.save_state_dict_async_finalize  # type: ignore[attr-defined]
    own_queue = requests.AsyncCallsQueue
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "AsyncCallsQueue", None) is own_queue:
            module.AsyncCallsQueue = nvrx.AsyncCallsQueue  # type: ignore[attr-defined]


def _plan_for_core(
    state_dict: Any,
    storage_writer: nvrx.FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    cached_ckpt_structure: Any = None,
    loaded_all_plans: Any = None,
) -> tuple[Any, None, None, bool, bool]:
    """As megatron-core 0.16 has it: with what the caller keeps for the next save, which needs nothing of that."""
    planned = nvrx.save_state_dict_async_plan(state_dict, storage_writer, process_group, coordinator_rank, planner)
    return planned, None, None, False, False


class MegatronSave:
    """The handle of a save that Megatron-LM has made a request of.

    What it asks of the queue is for all ranks to ask alike. ``failed`` is shared by the handles of one queue: how saves
    have ended that another handle was the first to hear of.
    """

    def __init__(
        self, queue: nvrx.AsyncCallsQueue, request: nvrx.AsyncRequest, failed: dict[int, BaseException]
    ) -> None:
        self._queue = queue
        self._failed = failed
        self._number = queue.schedule_async_request(request)

    def done(self) -> bool:
        """Whether it has ended, on all ranks; if so it is finalized. The same answer on all ranks."""
        self._finalize(blocking=False)
        return self._number not in [request.call_idx for request, _ in self._queue.async_calls]

    def result(self) -> None:
        """Wait until the checkpoint is complete and durable, and finalized; on all ranks.

        Raises DCP's ``CheckpointException`` if it has failed.
        """
        self._finalize(blocking=True)
        if self._number in self._failed:
            raise self._failed[self._number]

    def _finalize(self, *, blocking: bool) -> None:
        _, failed = self._queue.finalize(blocking=blocking)
        self._failed.update(failed)


def main(arguments: list[str]) -> None:
    """Run the script ``arguments[0]`` with the rest of them, asyncckpt installed."""
    if not arguments:
        sys.exit("usage: python -m asyncckpt.megatron SCRIPT [ARGUMENTS]")
    script = arguments[0]
    # As Python does for a script that is run by itself.
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
