"""Exceptions as signal handlers raise them: at any instant of a call."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(Exception):
    """Out of a signal handler."""


def interrupted_everywhere(call: Callable[[], object], part: str) -> Iterator[None]:
    """Make ``call`` again and again, interrupted before the first instruction of a file whose path holds ``part``, the
    second, and so on, until it comes to its end; and go on after each of them.
    """
    for instruction in itertools.count(1):
        seen = itertools.count(1)

        def trace(
            frame: FrameType, event: str, argument: object, instruction: int = instruction, seen: Iterator[int] = seen
        ) -> object:
            # Lines stay traced, too: where they are not, Python 3.13 misses the instructions of the first call.
            frame.f_trace_opcodes = part in frame.f_code.co_filename
            if event == "opcode" and next(seen) == instruction:
                raise Interrupted
            return trace

        before = sys.gettrace()
        # From Python 3.12 on instructions are traced only where some frame has asked for that before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            call()
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
        yield
        if next(seen) <= instruction:
            return
