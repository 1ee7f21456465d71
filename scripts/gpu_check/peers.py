"""The part ``peers``: the bench's saves and loads, with tensors on the device, beside those of others."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench import loads, results

from gpu_check.device import Device
from gpu_check.figures import Figure

_SCRIPTS = Path(__file__).parents[1]
_LIMIT_S = 240.0
_OTHERS = "asyncckpt,asyncckpt-overlap,dcp-thread,dcp-process,torch-save"


def measure(device: Device, scale: float) -> Iterator[Figure]:
    """Tensors of 2.68 MB, ours and others taking turns."""
    where = device.type if device.is_real else "cpu"  # the bench knows no others
    common = ["--state", "400", "--gib", f"{4 * scale:g}", "--rounds", "3", "--pause", "0", "--device", where]
    with tempfile.TemporaryDirectory(prefix="asyncckpt-gpu-check-") as folder:
        saves = _bench(folder, ["save", *common, "--contestants", _OTHERS])["results"]
        to_device = _bench(folder, ["load", *common, "--contestants", "asyncckpt"])["results"]
        on_host = _bench(folder, ["load", *common[:-1], "cpu", "--contestants", "asyncckpt"])["results"]
    for name, each in saves.items():
        yield Figure(f"{name}: save holds the caller", median(each["blocked_s"]) * 1e3, "ms")
        yield Figure(f"{name}: durable after", median(each["durable_s"]), "s")
    for other in [name for name in saves if name.startswith("dcp")]:
        for key, what in (("blocked_s", "held"), ("durable_s", "durable")):
            by = median(saves["asyncckpt"][key]) / median(saves[other][key])
            yield Figure(f"{what}, by {other}", by, at_most=1.0)
    for name in loads.OURS:
        speed = median(on_host[name]["load_s"]) / median(to_device[name]["load_s"])
        yield Figure(f"{name}: speed of a load to the device, by one to the host", speed, at_least=0.7)


def _bench(folder: str, arguments: list[str]) -> dict[str, Any]:
    """What one command of the bench has found."""
    out = Path(folder, "out")
    where = ["--folder", f"{folder}/work", "--out", str(out)]
    subprocess.run([sys.executable, str(_SCRIPTS / "bench"), *arguments, *where], check=True, timeout=_LIMIT_S)
    return next(found for found in results.read(out) if found["kind"] == arguments[0])
