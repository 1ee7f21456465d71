"""Test flags, and exceptions from signal handlers in any of their calls."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from support.interrupts import interrupted_everywhere

from asyncckpt.threads import Flag


def test_it_is_waited_for() -> None:
    flag, woken = Flag(), SimpleQueue[bool]()
    assert not flag.is_set() and not flag.wait(0) and not flag.wait(0.01)
    waiters = [threading.Thread(target=lambda: woken.put(flag.wait(90))) for _ in range(3)]
    for each in waiters:
        each.start()
    begun = time.monotonic()
    flag.set()
    assert all(woken.get(timeout=60) for _ in waiters) and time.monotonic() - begun < 60
    flag.set()
    assert flag.is_set() and flag.wait(0) and flag.wait()
    for each in waiters:
        each.join()


def test_an_interrupt_leaves_it_usable() -> None:
    """After an interrupt at any point, the flag can still be set, and later waits return at once."""
    flags = [Flag()]
    rounds = 0
    for _ in interrupted_everywhere(lambda: flags[-1].set(), "asyncckpt/threads.py"):
        flags[-1].set()
        assert flags[-1].wait(0) and flags[-1].wait()
        flags.append(Flag())
        rounds += 1
    assert rounds > 5
    rounds = 0
    for _ in interrupted_everywhere(lambda: flags[-1].wait(0.001), "asyncckpt/threads.py"):
        flags[-1].set()
        assert flags[-1].wait(0)
        flags.append(Flag())
        rounds += 1
    assert rounds > 10
    flags[-1].set()
    for _ in interrupted_everywhere(flags[-1].wait, "asyncckpt/threads.py"):
        assert flags[-1].wait(0)


def test_a_waiter_that_is_interrupted_as_it_is_let_in_holds_up_no_other() -> None:
    flag, woken = Flag(), SimpleQueue[bool]()
    other = threading.Thread(target=lambda: woken.put(flag.wait(30)))
    other.start()
    while other.is_alive() and not flag._gate.locked():
        time.sleep(0.001)
    flag._is_set = True  # the state in between, after the waiter that was let in has raised
    assert woken.get(timeout=20)
    other.join()
