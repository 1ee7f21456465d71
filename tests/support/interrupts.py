"""Exceptions at any instruction of a call, as from signal handlers."""

from __future__ import annotations

import ctypes
import dis
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType


class Interrupted(Exception):
    """Raised as if by a signal handler."""


class Restarted(BaseException):
    """Raised by another thread."""


def interrupted_once(call: Callable[[], object], seconds: float) -> None:
    """Repeat ``call`` until, after ``seconds``, another thread raises ``Restarted`` in this thread."""
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raised = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Restarted)
    timer = threading.Timer(seconds, set_exception, raised)
    try:
        timer.start()
        while True:
            call()
    except Restarted:
        pass
    finally:
        timer.join()


def interrupted_everywhere(
    call: Callable[[], object], part: str, *, every: int = 1, error: type[BaseException] = Interrupted
) -> Iterator[None]:
    """Repeat ``call``, and interrupt each one ``every`` instructions later than the last. Yield after each call.

    Stop after the first call that ends without an interrupt.

    Args:
        call: The function to interrupt.
        part: Count only instructions of files with this text in their path.
        every: The number of instructions between two interrupts.
        error: The exception that interrupts the call.
    """
    for instruction in itertools.count(1, every):
        seen = itertools.count(1)

        def trace(
            frame: FrameType, event: str, argument: object, instruction: int = instruction, seen: Iterator[int] = seen
        ) -> object:
            # Lines stay traced, too. Otherwise Python 3.13 misses the instructions of the first call.
            frame.f_trace_opcodes = part in frame.f_code.co_filename
            if event == "opcode" and not _leaves_a_block(frame) and next(seen) == instruction:
                raise error
            return trace

        before = sys.gettrace()
        # From Python 3.12 on, instructions are traced only after a frame has asked for it.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            call()
        except error:
            pass
        finally:
            sys.settrace(before)
        yield
        if next(seen) <= instruction:
            return


def _leaves_a_block(frame: FrameType) -> bool:
    """Return whether the next instruction belongs to the exit of a ``with`` block.

    No signal handler runs between these instructions, and no exception of another thread is raised. Python checks for
    them after calls, at backward jumps, and at the start of functions.
    """
    return frame.f_lasti in _leaving(frame.f_code)


@functools.cache
def _leaving(code: CodeType) -> frozenset[int]:
    found: set[int] = set()
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL")]
    for at in range(1, len(steps) - 3):
        before, *three, call = steps[at - 1 : at + 4]
        if call.opname == "CALL" and all(each.opname == "LOAD_CONST" and each.argval is None for each in three):
            found.update(range(three[0].offset, call.offset + 1))
            if before.opname in ("SWAP", "NOP"):
                found.add(before.offset)
    return frozenset(found)
