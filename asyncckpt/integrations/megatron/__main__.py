"""``python -m asyncckpt.integrations.megatron SCRIPT [ARGUMENTS]``: run a script with asyncckpt installed."""

from __future__ import annotations

import os
import runpy
import sys

from asyncckpt.integrations.megatron.wiring import install


def main(arguments: list[str]) -> None:
    """Install asyncckpt, and run the script ``arguments[0]`` with the other arguments."""
    if not arguments:
        sys.exit("usage: python -m asyncckpt.integrations.megatron SCRIPT [ARGUMENTS]")
    # Set argv and the path as Python does for a script.
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    install()
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
