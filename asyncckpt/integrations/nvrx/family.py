"""Choose the implementation: the installed nvrx, if it can stage in CPU shared memory, or ours.

The choice depends on signatures, never on version numbers, because branches and vendors' builds of one version may
differ.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncckpt.integrations.nvrx import filesystem, queue

logger = logging.getLogger(__name__)

PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"
MODULES = {
    "AsyncCallsQueue": "core",
    "AsyncRequest": "core",
    "FileSystemWriterAsync": "filesystem_async",
    "save_state_dict_async_plan": "state_dict_saver",
    "save_state_dict_async_finalize": "state_dict_saver",
    "CachedMetadataFileSystemReader": "cached_metadata_filesystem_reader",
}
"""The names of a ``Family``, each with its module in nvrx's package."""
# The parameters that switch on staging in CPU shared memory.
_QUEUE_PARAMETER = "cpu_shm_mode"
_WRITER_PARAMETER = "use_cpu_shm_for_gpu_tensors"


@dataclass(frozen=True)
class Family:
    """The classes and functions of one implementation. The methods switch on staging in CPU shared memory."""

    native: bool
    """Whether the implementation is the installed nvrx's own."""
    cpu_shm: bool
    """Whether tensors are staged in CPU shared memory."""
    AsyncCallsQueue: Any
    AsyncRequest: Any
    FileSystemWriterAsync: Any
    CachedMetadataFileSystemReader: Any
    save_state_dict_async_plan: Callable[..., Any]
    save_state_dict_async_finalize: Callable[..., None]

    def queue(self, **options: Any) -> Any:
        """Return an ``AsyncCallsQueue``."""
        return self.AsyncCallsQueue(**options, **self._switch(_QUEUE_PARAMETER))

    def warm_up(self, rank: int, **options: Any) -> None:
        """Start this rank's worker in advance, if the queue can do that."""
        if hasattr(self.AsyncCallsQueue, "warmup_persistent_caller"):
            self.AsyncCallsQueue.warmup_persistent_caller(rank, **options, **self._switch(_QUEUE_PARAMETER))

    def writer(self, path: Any, **options: Any) -> Any:
        """Return a ``FileSystemWriterAsync`` for ``path``."""
        return self.FileSystemWriterAsync(path, **options, **self._switch(_WRITER_PARAMETER))

    def _switch(self, parameter: str) -> dict[str, Any]:
        return {parameter: True} if self.cpu_shm else {}


def family(use_cpu_shm: bool | None = True) -> Family:
    """Return the implementation that serves ``--async-ckpt-use-cpu-shm``.

    Args:
        use_cpu_shm: If True, return the installed nvrx's implementation with staging switched on, if nvrx has staging.
            Otherwise return ours, and warn once if nvrx is installed. If None, do the same without a warning, for code
            without that flag. If False, return the installed nvrx's implementation unchanged.

    Raises:
        ImportError: ``use_cpu_shm`` is False, and nvrx is not installed.
    """
    installed = _installed()
    if use_cpu_shm is False:
        if installed is None:
            raise ImportError(
                "nvidia-resiliency-ext is not installed, or not as this module knows it: pip install"
                " 'asyncckpt[nvrx]', or switch on --async-ckpt-use-cpu-shm, which asyncckpt provides by itself"
            )
        return Family(native=True, cpu_shm=False, **installed)
    if installed is not None and _can_stage(installed):
        return Family(native=True, cpu_shm=True, **installed)
    if use_cpu_shm and installed is not None:
        _warn_once()
    ours = {name: getattr(queue if module == "core" else filesystem, name) for name, module in MODULES.items()}
    return Family(native=False, cpu_shm=True, **ours)


def _installed() -> dict[str, Any] | None:
    """Return the installed nvrx's classes and functions, by name; None if nvrx is not installed or lacks a name."""
    try:
        return {name: getattr(importlib.import_module(f"{PACKAGE}.{module}"), name) for name, module in MODULES.items()}
    except (ImportError, AttributeError) as error:
        logger.debug("nvrx is not here: %s", error)
        return None


def _can_stage(installed: dict[str, Any]) -> bool:
    """Return whether nvrx can stage in shared memory: each function that needs a switch has its parameter."""
    calls = installed["AsyncCallsQueue"]
    places = [(calls.__init__, _QUEUE_PARAMETER), (installed["FileSystemWriterAsync"].__init__, _WRITER_PARAMETER)]
    if hasattr(calls, "warmup_persistent_caller"):
        places.append((calls.warmup_persistent_caller, _QUEUE_PARAMETER))
    return all(parameter in inspect.signature(function).parameters for function, parameter in places)


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "the installed nvidia-resiliency-ext cannot stage in CPU shared memory (no %s, no %s):"
        " asyncckpt does it in its place",
        _QUEUE_PARAMETER,
        _WRITER_PARAMETER,
    )
