"""In the place of Megatron-LM's ``conftest.py`` files, which want its containers: what the tests take from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest


@pytest.fixture(scope="class")
def tmp_dir_per_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this rank's own."""
    return tmp_path_factory.mktemp("class")


@pytest.fixture(scope="session")
def tmp_path_dist_ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all ranks share."""
    folder = tmp_path_factory.getbasetemp().parent / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_file_a_rank() -> Iterator[None]:
    """The default strategy writes one file for each rank, and multi-storage-client has no part in it."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy
    from megatron.core.msc_utils import MultiStorageClientFeature

    MultiStorageClientFeature.disable()

    def strategy() -> object:
        return get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1)

    with mock.patch.object(serialization, "get_default_save_sharded_strategy", strategy):
        yield
