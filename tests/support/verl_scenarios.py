"""Scenarios of verl's workers, each played by a process that finds one release of verl."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from support.peers import python
from support.verl_workers import crew

Scenario = Callable[..., None]
"""A function of a test file that is given the ``Crew``, and more texts; it raises what is wrong."""

_TESTS = Path(__file__).parents[1]


def play(scenario: Scenario, release: str, hosts: list[str], *more: str) -> None:
    """Have a process play the ``scenario``, which ends with an error if one is there.

    ``hosts``: those of the fixture ``two_hosts``.
    """
    file = Path(inspect.getfile(scenario))
    path = [str(file.parent), str(_TESTS)]
    code = f"import sys; sys.path[:0] = {path!r}; from support.verl_scenarios import main; main()"
    python(code, release, arguments=(file.stem, scenario.__name__, *hosts, *more))


def main() -> None:
    """In that process."""
    module, name, here, there, *more = sys.argv[1:]
    scenario: Scenario = getattr(importlib.import_module(module), name)
    with crew([here, there]) as workers:
        scenario(workers, *more)
