"""The machines of the saves, under every order of events that some thousand seeds make."""

from __future__ import annotations

from types import ModuleType

import pytest

from asyncckpt.protocol import commit, saves
from simulation.mutations import COMMIT, IMAGE, mutated
from simulation.saves import History, Violation

HISTORIES = 8_000
MUTATION_HISTORIES = 6_000


def test_no_history_breaks_a_promise() -> None:
    for seed in range(HISTORIES):
        try:
            History(seed).run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}; print it with: scripts/simulate --seed {seed}")


@pytest.mark.parametrize(("module", "what"), [*((commit, what) for what in COMMIT), *((saves, what) for what in IMAGE)])
def test_the_simulator_notices(module: ModuleType, what: str) -> None:
    machines = mutated(module, *(COMMIT if module is commit else IMAGE)[what])
    for seed in range(MUTATION_HISTORIES):
        try:
            History(seed, machines).run()
        except Exception:  # a violation, or a machine that fails
            return
    pytest.fail("no history has noticed it")
