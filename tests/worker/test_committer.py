"""The committer of a job of one rank: what it says of a save, and when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest
from support.attempts import checkpoint_attempt

from asyncckpt.errors import StorageError
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.worker.committer import Committer
from asyncckpt.worker.messages import Committed, Failed


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_whose_end_is_told_is_no_longer_being_written(tmp_path: Path, fails: bool) -> None:
    """Who has just been told may look at once, by ``asyncckpt workers``."""
    told: SimpleQueue[tuple[type, tuple[str, ...]]] = SimpleQueue()
    with Segment.create("test", 4 * PAGE) as segment, ThreadPoolExecutor(2) as pool:
        attempt = checkpoint_attempt(tmp_path, segment)
        with closing(Committer(lambda outcome: told.put((type(outcome), committer.paths())))) as committer:
            committer.expect(attempt.request)
            assert committer.paths() == (attempt.request.path,)
            attempt.write(pool)
            if fails:
                committer.failed(attempt.request, StorageError("as the test wants"), attempt)
            else:
                committer.written(attempt, attempt.seal())
        assert told.get(timeout=60) == (Failed if fails else Committed, ())
