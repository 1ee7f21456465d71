"""A receiver maps the buffers of the source, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from support.broadcasts import BUCKET

from asyncckpt.weights.broadcast.transport import Buffers


def test_what_is_not_the_sources_memory_is_not_attached(tmp_path: Path) -> None:
    """Its process id may mean another process here, which may have anything by that number."""
    shared = Buffers.shared(BUCKET)
    offer = shared.offer()
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert Buffers.attach(offer, BUCKET) is not None
        assert Buffers.attach(offer | {"token": "00"}, BUCKET) is None
        assert Buffers.attach(offer, 2 * BUCKET) is None
        assert Buffers.attach(offer | {"fd": 1 << 20}, BUCKET) is None
        assert Buffers.attach(offer | {"fd": pipe}, BUCKET) is None
    finally:
        os.close(pipe)
        shared.close()
