"""The machines of the saves, under every order of events that some thousand seeds make."""

from __future__ import annotations

from types import ModuleType

import pytest

from asyncckpt.protocol import commit, replication, saves, trainer
from simulation.mutations import COMMIT, IMAGE, PARTIES, REPLICATION, TRAINER, mutated
from simulation.parties import PartiesHistory
from simulation.saves import History
from simulation.schedule import Violation

HISTORIES = 8_000
MUTATION_HISTORIES = 9_000


@pytest.mark.parametrize(("kind", "option"), [(History, ""), (PartiesHistory, "--parties ")], ids=["ranks", "parties"])
def test_no_history_breaks_a_promise(kind: type[History | PartiesHistory], option: str) -> None:
    for seed in range(HISTORIES):
        try:
            kind(seed).run()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}; print it with: scripts/simulate {option}--seed {seed}")


MUTATIONS = {commit: COMMIT, replication: REPLICATION, saves: IMAGE, trainer: TRAINER}


KINDS: tuple[type[History | PartiesHistory], ...] = History, PartiesHistory
CASES = [(KINDS[0], module, what, all_of[what]) for module, all_of in MUTATIONS.items() for what in all_of]
CASES += [(KINDS[1], commit, what, PARTIES[what]) for what in PARTIES]


@pytest.mark.parametrize(("kind", "module", "what", "mutation"), CASES)
def test_the_simulator_notices(
    kind: type[History | PartiesHistory], module: ModuleType, what: str, mutation: tuple[str, ...]
) -> None:
    machines = mutated(module, *mutation)
    for seed in range(MUTATION_HISTORIES):
        try:
            kind(seed, machines).run()
        except Exception:  # a violation, or a machine that fails
            return
    pytest.fail(f"no history has noticed it: {what}")
