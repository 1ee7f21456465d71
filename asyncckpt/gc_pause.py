"""A pause of Python's garbage collector, for what makes many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_pause() -> Iterator[None]:
    """Collect nothing meanwhile.

    Planning makes some ten objects for each tensor, none of them garbage. To look for it among them takes longer than
    all else: of the 62 us that the first rank spent on each shard of another, 41. Not for what waits: other threads of
    the trainer may make garbage.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
