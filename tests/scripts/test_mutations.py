"""Test that ``scripts/mutations`` fits the current sources."""

from __future__ import annotations

import pytest
from mutations.cli import ROOT, main, mutated
from mutations.device_path import MUTATIONS, Mutation


def test_there_are_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert len({each.what for each in MUTATIONS}) == len(MUTATIONS) >= 15
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTATIONS) + 2


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.what)
def test_each_fits_its_file(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert mutated(mutation, text) != text
    for test in mutation.tests.split():
        file, _, name = test.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text()
