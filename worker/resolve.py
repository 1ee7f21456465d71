"""How a save has ended, found out on storage by whoever is not told in time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from asyncckpt.errors import SaveTimeoutError, StorageError
from asyncckpt.worker.messages import WriteRequest
from asyncckpt.worker.storage import storage_for


def resolve(request: WriteRequest, timeout: float, inode: int | None = None) -> bool:
    """Whether a save is finalized; if it is not, it never will be.

    For a rank that has written its part and cannot learn the outcome, or whose part nobody is writing any more, because
    its worker is dead.

    Args:
        request: The save.
        timeout: How many seconds storage may take.
        inode: Of a single file, what it was written to (see ``OpenAttempt``).

    Returns:
        The answer, which is the same for all ranks and does not change any more.

    Raises:
        SaveTimeoutError: Storage fails, or does not answer in time. Then, and only then, nobody can say.
    """
    storage = storage_for(request.path)
    outcome: Future[bool] = Future()

    def find_out() -> None:
        try:
            is_finalized, leftover = storage.resolve(request.path, request.attempt, request.existing, inode)
        except StorageError as error:
            outcome.set_exception(error)
            return
        outcome.set_result(is_finalized)
        storage.remove(leftover)

    begun = time.monotonic()
    thread = threading.Thread(target=find_out, name="asyncckpt-resolve", daemon=True)
    thread.start()
    try:
        is_finalized = outcome.result(timeout)
    except (FutureTimeoutError, StorageError) as error:
        why = f"fails ({error})" if isinstance(error, StorageError) else f"has not answered for {timeout:g} s"
        raise SaveTimeoutError(
            f"storage {why}, and nobody can say whether this was saved",
            path=request.path,
            rank=request.rank,
            step=request.step,
        ) from error
    thread.join(max(0.0, begun + timeout - time.monotonic()))  # so that what was revoked takes no more space
    return is_finalized
