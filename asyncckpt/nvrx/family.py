"""Which implementation serves: the installed nvrx, where it can stage in CPU shared memory, or ours.

Seen by signatures, never by versions: releases, branches and vendors' builds differ in more than a number.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncckpt.nvrx import calls, reader, writer

logger = logging.getLogger(__name__)

_PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"
_HOMES = {
    "AsyncCallsQueue": "core",
    "AsyncRequest": "core",
    "FileSystemWriterAsync": "filesystem_async",
    "save_state_dict_async_plan": "state_dict_saver",
    "save_state_dict_async_finalize": "state_dict_saver",
    "CachedMetadataFileSystemReader": "cached_metadata_filesystem_reader",
}
# Where the mode is switched on, and by which parameter.
_QUEUE_PARAMETER = "cpu_shm_mode"
_WRITER_PARAMETER = "use_cpu_shm_for_gpu_tensors"

_warned = False


@dataclass(frozen=True)
class Family:
    """Classes and functions that belong together. ``queue``, ``warm_up`` and ``writer`` make use of the mode."""

    native: bool
    """Whether they are the installed nvrx's own."""
    cpu_shm: bool
    """Whether tensors are staged in CPU shared memory."""
    AsyncCallsQueue: Any
    AsyncRequest: Any
    FileSystemWriterAsync: Any
    CachedMetadataFileSystemReader: Any
    save_state_dict_async_plan: Callable[..., Any]
    save_state_dict_async_finalize: Callable[..., None]

    def queue(self, **options: Any) -> Any:
        """An ``AsyncCallsQueue``."""
        return self.AsyncCallsQueue(**options, **self._mode(_QUEUE_PARAMETER))

    def warm_up(self, rank: int, **options: Any) -> None:
        """Start this rank's worker before it is needed, where the queue knows how."""
        if hasattr(self.AsyncCallsQueue, "warmup_persistent_caller"):
            self.AsyncCallsQueue.warmup_persistent_caller(rank, **options, **self._mode(_QUEUE_PARAMETER))

    def writer(self, path: Any, **options: Any) -> Any:
        """A ``FileSystemWriterAsync``."""
        return self.FileSystemWriterAsync(path, **options, **self._mode(_WRITER_PARAMETER))

    def _mode(self, parameter: str) -> dict[str, Any]:
        return {parameter: True} if self.cpu_shm else {}


def family(use_cpu_shm: bool | None = True) -> Family:
    """The implementation that serves ``--async-ckpt-use-cpu-shm``.

    True: the installed nvrx's own, its parameters set, where it has them; else ours, with a warning, once. None: the
    same without a warning, for code that has not been asked. False: the installed nvrx, as it is; raises
    ``ImportError`` where there is none.
    """
    installed = _installed()
    if use_cpu_shm is False:
        if installed is None:
            raise ImportError(
                "nvidia-resiliency-ext is not installed, or not as this module knows it: pip install"
                " 'asyncckpt[nvrx]', or switch on --async-ckpt-use-cpu-shm, which asyncckpt provides by itself"
            )
        return Family(native=True, cpu_shm=False, **installed)
    if installed is not None and _can(installed):
        return Family(native=True, cpu_shm=True, **installed)
    if use_cpu_shm and installed is not None:
        _warn_once()
    ours = {
        name: getattr(module, name) for module in (calls, writer, reader) for name in _HOMES if hasattr(module, name)
    }
    return Family(native=False, cpu_shm=True, **ours)


def _installed() -> dict[str, Any] | None:
    """nvrx's own, by name; None where it is not installed."""
    try:
        return {name: getattr(importlib.import_module(f"{_PACKAGE}.{home}"), name) for name, home in _HOMES.items()}
    except (ImportError, AttributeError) as error:
        logger.debug("no nvrx here: %s", error)
        return None


def _can(installed: dict[str, Any]) -> bool:
    """Whether it has the mode, in all the places where it has to be switched on."""
    queue, written = installed["AsyncCallsQueue"], installed["FileSystemWriterAsync"]
    warm_up = getattr(queue, "warmup_persistent_caller", None)
    return (
        _has(queue.__init__, _QUEUE_PARAMETER)
        and (warm_up is None or _has(warm_up, _QUEUE_PARAMETER))
        and _has(written.__init__, _WRITER_PARAMETER)
    )


def _has(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "the installed nvidia-resiliency-ext cannot stage in CPU shared memory (no %s, no %s):"
            " asyncckpt does it in its place",
            _QUEUE_PARAMETER,
            _WRITER_PARAMETER,
        )
