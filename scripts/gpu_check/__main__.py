"""``python scripts/gpu_check``, from anywhere, also in a checkout that is not installed."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put this folder there. What is checked is the asyncckpt of this checkout.
    scripts = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(scripts.parent), str(scripts), str(scripts.parent / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    sys.exit(importlib.import_module("gpu_check.cli").main())
