"""A pytest plugin that writes a line of JSON for each test when the test ends."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from file_systems.suite import CHECKOUT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _record(item, call, report)
    return report


def _is_another(error: BaseException | None) -> bool:
    """Return whether a test expected one error of asyncckpt and got a refusal."""
    return "Regex pattern did not match" in str(error) and _is_refusal(getattr(error, "__context__", None))


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether the error is one of asyncckpt that does not call a checkpoint lost or damaged."""
    return isinstance(error, CheckpointError) and not isinstance(
        error, CheckpointNotFoundError | DamagedCheckpointError
    )


def _is_own_look(call: pytest.CallInfo[None]) -> bool:
    """Return whether the test itself read a file by a stale handle, outside of asyncckpt."""
    if call.excinfo is None or getattr(call.excinfo.value, "errno", None) != errno.ESTALE:
        return False
    product = tuple(str(CHECKOUT / room) for room in ("asyncckpt", "worker", "shm"))
    return not any(str(Path(entry.path).resolve()).startswith(product) for entry in call.excinfo.traceback)


def _record(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    error = call.excinfo.value if call.excinfo is not None else None
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {
        "test": item.nodeid + (" (end)" if report.when == "teardown" else ""),
        "outcome": "skipped" if _is_own_look(call) else report.outcome,
        "is_ours": _is_refusal(error) or _is_another(error),
        "error": "" if error is None else f"{type(error).__name__}: {error}"[:600],
        "where": "" if crash is None else f"{crash.path}:{crash.lineno}",
    }
    with open(os.environ["FILE_SYSTEMS_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
