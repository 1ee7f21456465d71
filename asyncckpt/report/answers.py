"""The output of a command, as JSON or as text lines, and its exit status."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from asyncckpt.format.manifest import METADATA_NAME, Manifest
from asyncckpt.loading.contents import checkpoints_at
from asyncckpt.loading.source import read_manifest, stock_kind
from asyncckpt.storage import storage_for

logger = logging.getLogger(__name__)

GOOD, DAMAGED, UNUSABLE = 0, 1, 2
DIFFERENT = 1  # of diff: for diff a damaged checkpoint is unusable
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Answers:
    """The output of a command, as JSON or as text lines, and its exit status."""

    def __init__(self, as_json: bool) -> None:
        self.status = GOOD
        self.is_json = as_json
        self._facts: list[dict[str, Any]] = []
        self._rows: list[tuple[object, ...]] = []
        self._headers: Sequence[str] = ()
        self._unwritten: OSError | None = None

    def print(self, text: str) -> None:
        """Write to stdout, unchanged.

        Raises ``OSError``, which ``about`` does not report as an error of a checkpoint.
        """
        try:
            print(text)
        except OSError as error:
            self._unwritten = error
            raise

    def line(self, text: str) -> None:
        """Print a line beside the table, at once."""
        if not self.is_json:
            self.print("\n".join(map(_plain, text.split("\n"))))

    def say(self, text: str) -> None:
        """Print an error, or a remark about omitted data, to stderr."""
        print(f"asyncckpt: {_plain(text)}", file=sys.stderr)

    def add(self, facts: dict[str, Any]) -> None:
        """Add an object to the JSON output."""
        self._facts.append(facts)

    def row(self, headers: Sequence[str], *cells: object) -> None:
        """Add a row to the table."""
        self._headers = headers
        self._rows.append(cells)

    @contextlib.contextmanager
    def about(self, what: str | int, kind: str = "path") -> Iterator[None]:
        """Report an error about ``what``, and go on with the other paths."""
        try:
            yield
        except CheckpointError as error:
            self.fail(DAMAGED if isinstance(error, DamagedCheckpointError) else UNUSABLE)
            self.add({kind: error.path or what, "error": error.message})
            if not self.is_json:
                self.say(str(error))
        except Exception as error:  # unusual input fails in unforeseen ways
            if error is self._unwritten:
                raise
            logger.debug("this is not expected", exc_info=True)
            self.fail(UNUSABLE)
            message = f"this cannot be looked at: {type(error).__name__}: {error}"
            self.add({kind: what, "error": message})
            if not self.is_json:
                self.say(f"{what}: {message}")

    def fail(self, status: int) -> None:
        """Set the exit status, unless it is worse already."""
        self.status = max(self.status, status)

    def show_table(self) -> None:
        """Print the table, and begin another one."""
        if self._rows and not self.is_json:
            # Right-align numbers only. A name may look like a number, such as "1.10".
            right = [all(map(_is_number, column)) for column in zip(*self._rows, strict=True)]
            rows = [["" if cell is None else _plain(str(cell)) for cell in row] for row in self._rows]
            self.print(table(self._headers, rows, right))
        self._rows = []

    def show(self) -> None:
        """Print the rest of the output."""
        self.show_table()
        if self.is_json:
            self.print(json.dumps(_finite(self._facts), indent=1, allow_nan=False))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a table as text. ``right``: which columns are right-aligned, as numbers are."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [headers, ["-" * width for width in widths], *rows]
    cells = (
        [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _is_number(cell: object) -> bool:
    return cell is None or cell == "" or isinstance(cell, int)


def _plain(text: str) -> str:
    """Return the text for a terminal, with control characters as Python escapes."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _finite(facts: Any) -> Any:
    """Return the data with None for numbers that JSON does not have."""
    if isinstance(facts, float):
        return facts if math.isfinite(facts) else None
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    return [_finite(each) for each in facts] if isinstance(facts, list | tuple) else facts


_DURATIONS = ((2 * 86400, 86400, "d"), (2 * 3600, 3600, "h"), (120, 60, "min"), (1, 1, "s"))


def number(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shape_of(shape: tuple[int, ...]) -> str:
    """Return the shape of a tensor as text."""
    return "x".join(map(str, shape))


def time_of(seconds: float) -> str:
    """Return a time as text, from seconds since the epoch."""
    try:
        return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):  # the year is out of range
        return f"{seconds:g}"


def size_of(nbytes: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a duration as text, with three digits."""
    for least, unit, name in _DURATIONS:
        if seconds >= least:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds * 1e3)} ms"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


Kind = Literal["asyncckpt", "file set", "dcp", "torch_checkpointing", "huggingface"]
# The other libraries whose checkpoints are read, by the kind of checkpoint.
AUTHORS = {"dcp": "stock DCP", "torch_checkpointing": "torch_checkpointing", "huggingface": "Hugging Face"}


def checkpoint_at(answers: Answers, given: str) -> str | None:
    """Return the checkpoint at ``given``; for a folder of checkpoints, the checkpoint that was created last.

    After going back, the checkpoint created last is not the highest step. Return None if no checkpoint of the folder
    can be read, which has been reported. Raises ``CheckpointNotFoundError``, ``StorageError``.
    """
    paths = checkpoints_at(given)
    if not paths:
        raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
    if paths == [given]:
        return given
    found: list[tuple[float, int, str]] = []
    for number_of, path in enumerate(paths):
        with answers.about(path), still_there(path, ""):
            # Checkpoints of stock DCP have no time of creation, and count as the oldest.
            found.append((-math.inf if stock_kind(path) else read_manifest(path).created, number_of, path))
    if not found:
        return None
    newest = max(found)[2]
    answers.line(f"{given}: {number(len(paths), 'checkpoint')}; {newest} is the newest of them")
    return newest


def kind_of(manifest: Manifest) -> Kind:
    """Return the kind of checkpoint of a manifest."""
    return "asyncckpt" if METADATA_NAME in manifest.files else "file set"


def manifests_at(answers: Answers, given: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the paths and manifests of the checkpoints at ``given``. Report checkpoints that cannot be read."""
    with answers.about(given):
        paths = checkpoints_at(given)
        if paths == [given] and (kind := stock_kind(given)) is not None:
            raise CheckpointNotFoundError(
                f"{AUTHORS[kind]} wrote this: only checkpoints of asyncckpt say how long they took", path=given
            )
        for path in paths:
            with answers.about(path), still_there(path, given):
                yield path, read_manifest(path)


@contextlib.contextmanager
def still_there(path: str, given: str) -> Iterator[None]:
    """Ignore a checkpoint that was listed and removed since, as by retention.

    A path that was ``given`` is not ignored.
    """
    try:
        yield
    except CheckpointError:
        if path == given or storage_for(path).exists(path):
            raise
