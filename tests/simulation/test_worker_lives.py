"""The life of a worker in every order of events; and each mutation of it is noticed."""

from __future__ import annotations

import pytest

from simulation.mutations import LIFE, mutated_life
from simulation.schedule import Violation
from simulation.worker_lives import explore


def test_in_every_order_of_events_one_trainer_is_served_at_a_time() -> None:
    assert explore(peers=3) > 3000


@pytest.mark.parametrize("mutation", LIFE)
def test_each_mutation_is_noticed(mutation: str) -> None:
    with pytest.raises(Violation):
        explore(2, mutated_life(mutation))
