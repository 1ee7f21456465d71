"""Print the peers that tests may use: scripts/needed_peers.py [pytest's arguments]

``scripts/test`` lets ``scripts/peers.sh`` unpack these alone. A test may use a peer if its file has the name of the
peer, or that of the peer's group in ``tests/support/peers.py``. A file of ``tests/support`` counts as part of each
file that contains its name. Tests in ``tests/scripts`` may use all peers, because they run programs.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests/support"
GROUPS = SUPPORT / "peers.py"


class _Paths:
    """A plugin that keeps the paths that pytest would collect, and ends pytest."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        """Keep the paths."""
        self.paths = [config.invocation_params.dir / each.split("::")[0] for each in config.args]
        return 0


def declared() -> set[str]:
    """Return the names of all peers."""
    return set(re.findall(r"^ *asyncckpt_peer\w* ([\w.-]+) ", (ROOT / "scripts/peers.sh").read_text(), re.MULTILINE))


def groups() -> dict[str, set[str]]:
    """Return the peers of each group."""
    assigned = [node for node in ast.parse(GROUPS.read_text()).body if isinstance(node, ast.Assign)]
    return {ast.unparse(node.targets[0]): set(re.findall(r"'([^']+)'", ast.unparse(node.value))) for node in assigned}


def needed(paths: list[Path]) -> set[str]:
    """Return the peers that the tests in ``paths`` may use."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]) if file.is_file()]
    if any(file.resolve().is_relative_to(ROOT / "tests/scripts") for file in files):
        return declared()
    modules = {file.stem: file for file in SUPPORT.rglob("*.py") if file != GROUPS}
    names: set[str] = set()
    while files:
        text = files.pop().read_text()
        words = set(re.findall(r"\w+", text))
        files += [modules.pop(word) for word in words & modules.keys()]
        names |= {name for name in declared() if name in text}
        names |= {name for group, peers in groups().items() if group in words for name in peers & declared()}
    return names


if __name__ == "__main__":
    plugin = _Paths()
    if status := pytest.main(["--noconftest", *sys.argv[1:]], plugins=[plugin]):
        sys.exit(status)
    print(*sorted(needed(plugin.paths)))
