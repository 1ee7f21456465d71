"""A pause of Python's garbage collector, for what makes many objects and no garbage."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def without_gc(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, while which no garbage is collected.

    Planning makes some ten objects for each tensor, none of them garbage. To look for it among them takes longer than
    all else: of the 62 us that the first rank spent on each shard of another, 41. Not for what waits beside a training,
    which may make garbage meanwhile (a load is before one).

    No context manager: an exception out of a signal handler (Ctrl-C) may come before the first line of what ends one.
    """

    @functools.wraps(function)
    def pausing(*args: P.args, **named: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        try:
            try:
                gc.disable()
                return function(*args, **named)
            finally:
                if was_enabled:
                    gc.enable()
        finally:  # such an exception may have cut the first short
            if was_enabled:
                gc.enable()

    return pausing
