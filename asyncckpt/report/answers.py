"""What a command has to say, as JSON or as lines, and the status that it ends with."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tabulate import tabulate

from asyncckpt.errors import CheckpointError, DamagedCheckpointError

GOOD, DAMAGED, UNUSABLE = 0, 1, 2


class Answers:
    """What a command has to say, as JSON or as lines, and how it ends."""

    def __init__(self, as_json: bool) -> None:
        self.status = GOOD
        self.is_json = as_json
        self._facts: list[dict[str, Any]] = []
        self._rows: list[tuple[object, ...]] = []
        self._headers: Sequence[str] = ()

    def line(self, text: str) -> None:
        """Say something beside the table, now."""
        if not self.is_json:
            print(text)

    def say(self, text: str) -> None:
        """Say on stderr what is wrong, or is left out."""
        print(f"asyncckpt: {text}", file=sys.stderr)

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
                print(f"asyncckpt: {error}", file=sys.stderr)

    def fail(self, status: int) -> None:
        """End with that status, or a worse one."""
        self.status = max(self.status, status)

    def show_table(self) -> None:
        """Print the table, and begin another."""
        if self._rows and not self.is_json:
            print(tabulate(self._rows, headers=self._headers))
        self._rows = []

    def show(self) -> None:
        """Print what is left to be said."""
        self.show_table()
        if self.is_json:
            print(json.dumps(self._facts, indent=1))
