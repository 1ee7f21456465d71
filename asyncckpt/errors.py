"""All errors that a caller can get. Each error is named for a situation.

Errors travel between processes as text (``encode``, ``decode``), which is checked when it arrives. Between processes of
one host they may also be pickled.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


class CheckpointError(Exception):
    """An operation on a checkpoint failed. Base class of all errors of this package."""

    is_logged = False
    """Whether this process has logged the error, so that a later record of it would be its second."""

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        """Make an error. Its text says what happened, where, and what to do. The arguments are attributes, too.

        Args:
            message: Description of the error, and of what to do.
            path: The file or folder.
            rank: The rank in the group that saves together.
            step: The training step.
        """
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.rank = rank
        self.step = step
        where = [f"{name} {value}" for name, value in self._where().items() if value is not None]
        super().__init__(f"{message} [{', '.join(where)}]" if where else message)

    def _where(self) -> dict[str, Any]:
        return {"path": self.path, "rank": self.rank, "step": self.step}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._where())


def _rebuild(kind: type[CheckpointError], message: str, where: dict[str, Any]) -> CheckpointError:
    return kind(message, **where)


class ClosedError(CheckpointError):
    """A method was called on a checkpointer that is closed."""


class UnsavableStateError(CheckpointError):
    """A value of the state dict cannot be saved: it does not pickle, has no data, or two names collide."""


class MismatchError(CheckpointError):
    """The state dict to load into does not fit: a missing key, another shape or kind of number, no memory."""


class CheckpointExistsError(CheckpointError):
    """The path of the checkpoint is taken, or the folder of checkpoints is a checkpoint itself."""


class CheckpointNotFoundError(CheckpointError):
    """There is no complete checkpoint at that path."""


class DamagedCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing, or differ from the bytes that were written."""


class FormatError(CheckpointError):
    """The checkpoint has a format that this version of asyncckpt does not read. The checkpoint is not damaged."""


class UntrustedValueError(CheckpointError):
    """A value of a checkpoint names a class that is not known to be harmless, and ``weights_only`` is set."""


class StorageError(CheckpointError):
    """Storage refused: no space, an I/O error, no permission, a path that is no folder."""


class OutOfMemoryError(CheckpointError):
    """Too little memory is left on this host, or in this container, for the staging buffers."""


class WorkerDiedError(CheckpointError):
    """The worker process did not start, or ended while it was needed."""


class JobTakenError(CheckpointError):
    """Another trainer saves as the same rank of the same job, or another job saves to the same folder."""


class RankFailedError(CheckpointError):
    """Another rank of the job died, left, or made a different call than this rank. ``rank`` is that rank."""


class CutError(CheckpointError):
    """The parts of a checkpoint do not belong together: ranks or parties gave different steps or cuts."""


class StructureChangedError(CheckpointError):
    """The state differs from the planned structure, although ``assume_constant_structure`` is set."""


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A wait has timed out. If a wait raises this, the save itself may still be under way.

    As the outcome of a save this means that the save has failed, unless the text says that the outcome is unknown.
    """


class SaveDroppedError(CheckpointError):
    """The save was dropped because all slots were busy, see ``when_busy``: skipped, or replaced by a newer save."""


class NothingMeasuredError(CheckpointError):
    """Advice was requested before any save was committed, so that the cost of a save is unknown."""


class VersionError(CheckpointError):
    """A version of weights is not newer than the last one without ``roll_back``, or the ranks disagree on it."""


class WeightsTimeoutError(CheckpointError, TimeoutError):
    """No weights that fit the request were published within the timeout."""


def located(
    error: BaseException,
    *,
    path: str | os.PathLike[str] | None = None,
    rank: int | None = None,
    step: int | None = None,
    otherwise: type[CheckpointError] = CheckpointError,
) -> CheckpointError:
    """Return a copy of ``error`` as a ``CheckpointError``, with path, rank and step added if the error lacks them.

    Args:
        error: Any error. An error of another class is named by its type in the text, and becomes the cause.
        path: See ``CheckpointError``.
        rank: See there.
        step: See there.
        otherwise: The class for an error that is no ``CheckpointError``.
    """
    if isinstance(error, CheckpointError):
        return type(error)(
            error.message,
            path=path if error.path is None else error.path,
            rank=rank if error.rank is None else error.rank,
            step=step if error.step is None else error.step,
        )
    found = otherwise(f"{type(error).__name__}: {error}", path=path, rank=rank, step=step)
    found.__cause__ = error
    return found


def is_interrupt(error: BaseException) -> bool:
    """Return whether the caller gets ``error`` unchanged: a signal handler raised it, or it is no ``Exception``."""
    return not isinstance(error, Exception) or _is_of_handler(error)


def _is_of_handler(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if _is_handler(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _is_handler(frame: FrameType) -> bool:
    """Return whether a function is a signal handler. A handler has the interrupted frame among its arguments."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + bool(code.co_flags & inspect.CO_VARARGS)]
    given = [frame.f_locals.get(name) for name in names]
    flat = [each for value in given for each in (value if type(value) is tuple else (value,))]
    return frame.f_back is not None and any(each is frame.f_back for each in flat)


def unless_interrupt(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return the classes for an ``except`` to catch: ``kinds``; none if the exception at hand ``is_interrupt``."""
    error = sys.exc_info()[1]
    return () if error is not None and is_interrupt(error) else kinds


@contextmanager
def interrupts_as_they_are() -> Iterator[None]:
    """Raise the original exception of a signal handler, instead of the ``CheckpointError`` that it has caused."""
    handled = sys.exc_info()[1]  # a caller may save while it handles an exception
    try:
        yield
    except CheckpointError as error:
        cause = error.__cause__ or error.__context__
        while cause is not None and cause is not handled:
            if _is_of_handler(cause):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


def encode(error: CheckpointError) -> bytes:
    """Return ``error`` as one line of JSON. Text from a network is never unpickled."""
    return json.dumps({"kind": type(error).__name__, "message": error.message, **error._where()}).encode()


def decode(text: bytes) -> CheckpointError:
    """Return the error of a text of ``encode``, or a ``RankFailedError`` if the text is invalid."""
    try:
        fields = json.loads(text)
        message, path, rank, step = (fields[name] for name in ("message", "path", "rank", "step"))
        numbers = all(number is None or type(number) is int for number in (rank, step))
        if not (isinstance(message, str) and (path is None or isinstance(path, str)) and numbers):
            raise ValueError("a field is of another type")
        kind: Any = globals().get(str(fields["kind"]))
    except (ValueError, KeyError, TypeError) as error:
        return RankFailedError(f"another rank reported a failure in an unreadable message: {error}")
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)):
        kind = RankFailedError
    found: CheckpointError = kind(message, path=path, rank=rank, step=step)
    return found
