"""``python scripts/file_systems [NAMES]``: run the tests of local storage on each kind of file system."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put this folder on the path.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(importlib.import_module("file_systems.cli").main())
