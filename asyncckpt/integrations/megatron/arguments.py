"""The flags of newer Megatron-LM trees, for parsers of older ones, which would stop at them.

Megatron-LM makes its parser anew in each call of its ``parse_args``, which any of its modules may have taken by name.
So the flags are added where all parsers pass: in ``argparse``, when arguments are parsed, and only to a parser that has
``--async-save``, as Megatron-LM's has. What such a parser has itself stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

_OF_MEGATRON = "--async-save"


class _Priority(argparse.Action):
    """Keeps the value also for the queue, to which such a tree does not give it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        _priorities[self.dest.removeprefix("async_ckpt_")] = values


_FLAGS: dict[str, dict[str, Any]] = {
    "--async-ckpt-use-cpu-shm": {
        "action": "store_true",
        "help": "stage asynchronous checkpoints in CPU shared memory, as asyncckpt always does",
    },
    "--async-ckpt-cpu-priority": {
        "action": _Priority,
        "type": int,
        "default": 10,
        "help": "niceness of the process that writes checkpoints, 0 to 19",
    },
    "--async-ckpt-io-priority": {
        "action": _Priority,
        "type": int,
        "choices": range(4),
        "help": "class of ionice of the process that writes checkpoints: 1 and 2 best-effort, 3 idle, 0 none",
    },
}
_priorities: dict[str, int] = {}
_parse_known_args = argparse.ArgumentParser.parse_known_args  # what parse_args calls, too


def offer_flags() -> None:
    """Have Megatron-LM's parsers know the flags that they lack, from now on. Safe to call twice."""
    argparse.ArgumentParser.parse_known_args = _parse_with_flags  # type: ignore[assignment,method-assign]


def given_priorities() -> dict[str, Any]:
    """Arguments of ``AsyncCallsQueue``: the priorities that were typed where the tree has no flags for them."""
    return dict(_priorities)


def _parse_with_flags(parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
    known = parser._option_string_actions
    if _OF_MEGATRON in known and (lacking := [flag for flag in _FLAGS if flag not in known]):
        group = parser.add_argument_group("asyncckpt")
        for flag in lacking:
            group.add_argument(flag, **_FLAGS[flag])
    return _parse_known_args(parser, args, namespace)
