"""Have a function called with a module as soon as that is imported, and import nothing before somebody needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and notes those that somebody waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[Any], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As ``PathFinder``, for the modules that somebody waits for; None for all others."""
        call = self.waiting.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if call is not None else None
        if call is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            call(module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]  # of this module's loader alone
        return spec


_finder = _Finder()


def on_import(name: str, call: Callable[[Any], None]) -> None:
    """Call ``call`` with the module ``name``: now, if it is imported, else at the end of its import.

    Args:
        name: Of the module.
        call: What to call. What it raises the import raises.
    """
    module = sys.modules.get(name)
    # While it is being imported it has not all of its names yet; then its import was what has led here.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        call(module)
        return
    _finder.waiting[name] = call
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
