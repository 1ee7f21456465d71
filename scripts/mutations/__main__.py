"""``python scripts/mutations``, from anywhere, also in a checkout that is not installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put this folder on the path. Copy and change the asyncckpt of this checkout.
    scripts = Path(__file__).resolve().parent.parent
    sys.path[:1] = [str(scripts.parent), str(scripts)]
    sys.exit(importlib.import_module("mutations.cli").main())
