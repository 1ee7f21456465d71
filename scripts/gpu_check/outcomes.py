"""A plugin of pytest that writes the outcome of each test into a file immediately."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that was run or skipped, and a failure also of its set-up and tear-down."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that has started the workers gets all reports
    if report.when == "call" or report.outcome != "passed":
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        with Path(os.environ["ASYNCCKPT_TEST_OUTCOMES"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
