"""Run ``python -m asyncckpt``: the same as the command ``asyncckpt``."""

import sys

from asyncckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
