"""The machines of the commit, under every order of events that some thousand seeds make."""

from __future__ import annotations

import pytest

from asyncckpt.protocol import commit
from simulation.commits import History, Violation
from simulation.mutations import COMMIT, mutated

HISTORIES = 10_000
MUTATION_HISTORIES = 6_000


def test_no_history_breaks_a_promise() -> None:
    for seed in range(HISTORIES):
        try:
            History(seed).run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}; print it with: scripts/simulate --seed {seed}")


@pytest.mark.parametrize("what", COMMIT)
def test_the_simulator_notices(what: str) -> None:
    machines = mutated(commit, *COMMIT[what])
    for seed in range(MUTATION_HISTORIES):
        try:
            History(seed, machines).run()
        except Exception:  # a violation, or a machine that fails
            return
    pytest.fail("no history has noticed it")
