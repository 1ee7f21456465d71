"""Scenarios of verl's workers. Each one runs in a process that has one release of verl on its path."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from support.peers import python
from support.verl_workers import crew

Scenario = Callable[..., None]
"""A function of a test file. It takes a ``Crew`` and more strings, and raises if a check fails."""

_TESTS = Path(__file__).parents[1]


def play(scenario: Scenario, release: str, hosts: list[str], *more: str) -> None:
    """Run ``scenario`` in a process. Fail the test if the scenario raises. ``hosts``: the fixture ``two_hosts``."""
    file = Path(inspect.getfile(scenario))
    path = [str(file.parent), str(_TESTS)]
    code = f"import sys; sys.path[:0] = {path!r}; from support.verl_scenarios import main; main()"
    python(code, release, arguments=(file.stem, scenario.__name__, *hosts, *more))


def main() -> None:
    """Run a scenario in this process. ``play`` starts the process."""
    module, name, here, there, *more = sys.argv[1:]
    scenario: Scenario = getattr(importlib.import_module(module), name)
    with crew([here, there]) as workers:
        scenario(workers, *more)
