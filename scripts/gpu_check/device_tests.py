"""The part ``tests``: the tests of the mark "device", and what of all tests names a device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from gpu_check.device import Device
from gpu_check.figures import Figure

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 500.0


def measure(device: Device, scale: float) -> Iterator[Figure]:
    """Run them in a process of their own. What fails is named."""
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as folder:
        report = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider"]
        environment = os.environ | {"ASYNCCKPT_TEST_DEVICE": device.type}
        subprocess.run([*command, f"--junitxml={report}"], cwd=_ROOT, env=environment, timeout=_LIMIT_S, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = [
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    yield Figure("tests passed", len(cases) - skipped - len(failed), at_least=40)
    yield Figure("tests skipped", skipped)
    yield Figure("tests failed", len(failed), at_most=0)
    for name in failed:
        yield Figure("failed", name)
