"""A stand-in for the outer ``conftest.py`` of Megatron-LM's unit tests, which needs Megatron-LM's containers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tmp_path_dist_ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all ranks share."""
    folder = tmp_path_factory.getbasetemp().parent / "shared"
    folder.mkdir(exist_ok=True)
    return folder
