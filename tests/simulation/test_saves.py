"""The machines of the saves, under every order of events that some thousand seeds make."""

from __future__ import annotations

from types import ModuleType

import pytest

from asyncckpt.protocol import commit, replication, saves, trainer
from simulation.mutations import COMMIT, IMAGE, REPLICATION, TRAINER, mutated
from simulation.saves import History, Violation

HISTORIES = 8_000
MUTATION_HISTORIES = 9_000


def test_no_history_breaks_a_promise() -> None:
    for seed in range(HISTORIES):
        try:
            History(seed).run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}; print it with: scripts/simulate --seed {seed}")


MUTATIONS = {commit: COMMIT, replication: REPLICATION, saves: IMAGE, trainer: TRAINER}


@pytest.mark.parametrize(
    ("module", "what"), [(module, what) for module, all_of in MUTATIONS.items() for what in all_of]
)
def test_the_simulator_notices(module: ModuleType, what: str) -> None:
    machines = mutated(module, *MUTATIONS[module][what])
    for seed in range(MUTATION_HISTORIES):
        try:
            History(seed, machines).run()
        except Exception:  # a violation, or a machine that fails
            return
    pytest.fail("no history has noticed it")
