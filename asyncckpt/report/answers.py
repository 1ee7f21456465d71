"""What a command has to say, as JSON or as lines, and the status that it ends with."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from asyncckpt.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

GOOD, DAMAGED, UNUSABLE = 0, 1, 2
DIFFERENT = 1  # of diff, for which what is damaged is unusable
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Answers:
    """What a command has to say, as JSON or as lines, and how it ends."""

    def __init__(self, as_json: bool) -> None:
        self.status = GOOD
        self.is_json = as_json
        self._facts: list[dict[str, Any]] = []
        self._rows: list[tuple[object, ...]] = []
        self._headers: Sequence[str] = ()
        self._unwritten: OSError | None = None

    def print(self, text: str) -> None:
        """Write to stdout, as it is. Raises ``OSError``, which is not taken for what is wrong with a checkpoint."""
        try:
            print(text)
        except OSError as error:
            self._unwritten = error
            raise

    def line(self, text: str) -> None:
        """Say something beside the table, now."""
        if not self.is_json:
            self.print("\n".join(map(_plain, text.split("\n"))))

    def say(self, text: str) -> None:
        """Say on stderr what is wrong, or is left out."""
        print(f"asyncckpt: {_plain(text)}", file=sys.stderr)

    def add(self, facts: dict[str, Any]) -> None:
        """For JSON."""
        self._facts.append(facts)

    def row(self, headers: Sequence[str], *cells: object) -> None:
        """A line of the table."""
        self._headers = headers
        self._rows.append(cells)

    @contextlib.contextmanager
    def about(self, what: str | int, kind: str = "path") -> Iterator[None]:
        """What goes wrong with ``what`` is said, and does not keep the others from being looked at."""
        try:
            yield
        except CheckpointError as error:
            self.fail(DAMAGED if isinstance(error, DamagedCheckpointError) else UNUSABLE)
            self.add({kind: error.path or what, "error": error.message})
            if not self.is_json:
                self.say(str(error))
        except Exception as error:  # what is odd enough fails in ways that nobody has thought of
            if error is self._unwritten:
                raise
            logger.debug("this is not expected", exc_info=True)
            self.fail(UNUSABLE)
            message = f"this cannot be looked at: {type(error).__name__}: {error}"
            self.add({kind: what, "error": message})
            if not self.is_json:
                self.say(f"{what}: {message}")

    def fail(self, status: int) -> None:
        """End with that status, or a worse one."""
        self.status = max(self.status, status)

    def show_table(self) -> None:
        """Print the table, and begin another."""
        if self._rows and not self.is_json:
            # A name may look like a number, as "1.10": it is shown as it is.
            right = [all(map(_is_number, column)) for column in zip(*self._rows, strict=True)]
            rows = [["" if cell is None else _plain(str(cell)) for cell in row] for row in self._rows]
            self.print(table(self._headers, rows, right))
        self._rows = []

    def show(self) -> None:
        """Print what is left to be said."""
        self.show_table()
        if self.is_json:
            self.print(json.dumps(_finite(self._facts), indent=1, allow_nan=False))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a table as text; ``right``: which columns stand on the right side, as numbers do."""
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
    """The same, for a terminal: what would control that is shown as Python writes it."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _finite(facts: Any) -> Any:
    """The same, with None for what JSON has no number for."""
    if isinstance(facts, float):
        return facts if math.isfinite(facts) else None
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    return [_finite(each) for each in facts] if isinstance(facts, list | tuple) else facts
