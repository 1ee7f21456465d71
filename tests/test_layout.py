"""The shape of the house: rooms, one-way imports, what the worker loads, what installs."""

from __future__ import annotations

import ast
import configparser
import os
import subprocess
import sys
from pathlib import Path

import asyncckpt

HERE = Path(__file__).parent.parent
ROOMS = {"shm": HERE / "shm", "worker": HERE / "worker", "asyncckpt": HERE / "asyncckpt"}
# Folders within a room.
SUITES: dict[str, set[str]] = {"shm": set(), "worker": set(), "asyncckpt": {"nvrx", "weights"}}
LOWER = {"shm": set(), "worker": {"shm"}, "asyncckpt": {"shm", "worker"}}


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def _modules(room: str) -> dict[str, set[str]]:
    folder = ROOMS[room]
    prefix = "asyncckpt" if room == "asyncckpt" else f"asyncckpt.{room}"
    files = [*folder.glob("*.py"), *(file for name in SUITES[room] for file in (folder / name).glob("*.py"))]
    return {".".join([prefix, *file.relative_to(folder).with_suffix("").parts]): _imports(file) for file in files}


def test_imports_go_one_way() -> None:
    for room, allowed in LOWER.items():
        for module, names in _modules(room).items():
            for name in names:
                for other in ("shm", "worker"):
                    if name.startswith(f"asyncckpt.{other}") and other != room:
                        assert other in allowed, f"{module} imports {name}"
                if room != "asyncckpt" and name.startswith("asyncckpt.") and name.split(".")[1] not in ROOMS:
                    assert name.startswith("asyncckpt.errors"), f"{module} imports {name}"


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for room in ROOMS:
        for module, names in _modules(room).items():
            graph[module] = names
    graph.pop("asyncckpt.__init__")  # whose imports for type checkers and lazy ones are no cycle
    visiting: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        assert module not in visiting, f"cycle: {' -> '.join([*visiting, module])}"
        if module in done:
            return
        visiting.append(module)
        for name in graph.get(module, set()):
            if name in graph and name != module:
                visit(name)
        done.add(visiting.pop())

    for module in graph:
        visit(module)


def test_lower_rooms_know_no_torch() -> None:
    for room in ("shm", "worker"):
        for module, names in _modules(room).items():
            if module == "asyncckpt.worker.rounds":
                continue  # inside its functions, which a job of one process never calls
            assert not any(name.split(".")[0] == "torch" for name in names), module


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


def test_the_worker_loads_no_torch() -> None:
    loaded = _loaded_by("import asyncckpt.worker.__main__")
    assert "torch" not in loaded
    assert "numpy" not in loaded


def test_the_command_line_loads_no_torch() -> None:
    assert "torch" not in _loaded_by("import asyncckpt.cli")


def test_no_module_is_called_worker_or_shm() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", "import worker"], capture_output=True, cwd="/", env=environment)
    assert done.returncode != 0
    loaded = _loaded_by("import asyncckpt.worker.server, asyncckpt.checkpointer")
    assert "worker" not in loaded and "shm" not in loaded


def test_packages_are_the_folders() -> None:
    config = configparser.ConfigParser()
    config.read(HERE / "setup.cfg")
    packages = set(config["options"]["packages"].split())
    assert packages == {"asyncckpt", "asyncckpt.nvrx", "asyncckpt.shm", "asyncckpt.weights", "asyncckpt.worker"}
    for name, room in ROOMS.items():
        folders = {path.name for path in room.iterdir() if path.is_dir() and not path.is_symlink()}
        assert {folder for folder in folders if folder[0] != "_"} == SUITES[name]
    assert (HERE / "asyncckpt/worker").resolve() == HERE / "worker"
    assert (HERE / "asyncckpt/shm").resolve() == HERE / "shm"


def test_the_facade_is_small_and_whole() -> None:
    assert len(asyncckpt.__all__) <= 10
    for name in asyncckpt.__all__:
        assert getattr(asyncckpt, name) is not None
