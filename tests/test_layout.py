"""Test the architecture: rooms, one-way imports, unique names, loaded modules, installed packages."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import asyncckpt
from asyncckpt import extension

HERE = Path(__file__).parent.parent
FOLDERS = {"asyncckpt": HERE / "asyncckpt", "asyncckpt.worker": HERE / "worker", "asyncckpt.shm": HERE / "shm"}

# The import line: a room imports only from earlier lines. Every file and folder directly in ``asyncckpt/`` is a room.
LINE = (
    ("budgets", "errors", "config"),
    ("events", "interval", "threads"),
    ("format", "telemetry"),
    ("shm",),
    ("protocol",),
    ("storage",),
    ("link",),
    ("save_handle", "publication", "ranks", "supervisor", "devices"),
    ("transfer",),
    ("worker",),
    ("planning",),
    ("staging", "loading"),
    ("engine", "weights", "exporting", "doctor"),
    ("checkpointer", "party", "report"),
    ("extension",),
    ("integrations",),
    ("__init__",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
WITHOUT_TORCH = ("format", "shm", "protocol", "storage", "link", "transfer", "worker")
FLOOR = {room: floor for floor, rooms in enumerate(LINE) for room in rooms}


def _modules() -> dict[str, Path]:
    """Return the files of all modules of the three packages, by module name. Links are resolved."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            if any(part in ("worker", "shm") for part in file.relative_to(folder).parts[:1]) and package == "asyncckpt":
                continue
            found[".".join([package, *file.relative_to(folder).with_suffix("").parts])] = file
    return found


MODULES = _modules()
TREES = {module: ast.parse(file.read_text()) for module, file in MODULES.items()}


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield our modules that ``tree`` imports, also inside functions or for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "asyncckpt":
                yield _module_of(name)


def _module_of(name: str) -> str:
    """Return the module with this name, or the module that defines it."""
    while name not in MODULES:
        if f"{name}.__init__" in MODULES:
            return f"{name}.__init__"
        name = name.rpartition(".")[0]
    return name


def _room(module: str) -> str:
    return module.split(".")[1]


def test_every_file_and_folder_is_in_the_import_line() -> None:
    assert {_room(module) for module in MODULES} == set(FLOOR)


def test_imports_go_one_way() -> None:
    for module, tree in TREES.items():
        if module == "asyncckpt.__init__":
            continue  # loads its names on first use
        for other in _imported(tree):
            if _room(other) != _room(module):
                assert FLOOR[_room(other)] < FLOOR[_room(module)], f"{module} imports {other}"


def test_configuration_and_errors_import_nothing_of_ours() -> None:
    for module in ("asyncckpt.errors", "asyncckpt.config"):
        assert not list(_imported(TREES[module])), module


def test_there_are_no_cycles() -> None:
    visiting: list[str] = []
    done = {"asyncckpt.__init__"}  # lazy imports and imports for type checkers make no cycle

    def look_at(module: str) -> None:
        assert module not in visiting, f"cycle: {' -> '.join([*visiting, module])}"
        if module in done:
            return
        visiting.append(module)
        for other in set(_imported(TREES[module])) - {module}:
            look_at(other)
        done.add(visiting.pop())

    for module in MODULES:
        look_at(module)


def test_integrations_import_public_names_only() -> None:
    public = ("asyncckpt", *(f"asyncckpt.{name}" for name in ("config", "errors", "events", "weights", "extension")))
    for module, tree in TREES.items():
        for node in ast.walk(tree) if _room(module) == "integrations" else ():
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("asyncckpt.") for name in node.names), module
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "asyncckpt":
                room = _room(f"{node.module}.")
                assert node.module in public or room in ("telemetry", "integrations"), f"{module}: {node.module}"


def test_the_page_on_the_extension_has_its_names() -> None:
    page = (HERE / "docs/reference/extension.md").read_text()
    rows = [line for line in page[page.index("## The names") : page.index("## Saving")].splitlines() if "| `" in line]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert sorted(extension.__all__) == sorted(named) and len(extension.__all__) < 40
    assert all(hasattr(extension, name) for name in extension.__all__)


def test_integrations_know_each_other_only_where_one_stands_on_another() -> None:
    stands_on = {
        "wrap": {"dcp", "torch_file", "megatron", "nvrx"},
        "megatron": {"nvrx"},
        "nvrx": {"torch_file"},
        "huggingface": {"capture"},
        "verl_engines": {"capture"},
    }
    for module, tree in TREES.items():
        if _room(module) == "integrations":
            own = module.split(".")[2]
            for other in _imported(tree):
                if _room(other) == "integrations":
                    assert other.split(".")[2] in {own, *stands_on.get(own, ())}, f"{module} imports {other}"


def test_no_name_is_used_for_two_public_things() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(module)
            elif alias := _alias(node):
                places[alias].add(module)
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1 and not name.startswith("_")}
    assert not twice


def _alias(node: ast.stmt) -> str | None:
    """Return the name of an alias of a type, with or without an annotation."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
        target: ast.expr = node.targets[0]
    elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        target = node.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def test_no_private_attribute_of_another_file_is_touched() -> None:
    """Compare by name: attributes with one leading underscore that the file does not define itself."""
    reaches = []
    for module, tree in TREES.items():
        own = {name for node in ast.walk(tree) for name in _private_names(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if node.attr not in own | OTHERS_PRIVATE:
                reaches.append(f"{MODULES[module].relative_to(HERE)}:{node.lineno}: {ast.unparse(node)}")
    assert not reaches


# Private names of Python, torch, and frameworks that have no public alternative.
OTHERS_PRIVATE = frozenset(
    {
        *("_asdict", "_replace"),  # public in a NamedTuple
        *(
            "_exit",
            "_C",
            "_cuda_hasPrimaryContext",
            "_construct_storage_from_data_pointer",
            "_set_conj",
            "_set_neg",
            "_foreach_copy_",
            "_serialization_tls",
            "_version",
        ),
        "_condition",  # of a Future: its lock
        "_is_owned",  # of an RLock: tells whether this thread has it
        *(
            "_save_checkpoint",
            "_load_checkpoint",
            "_finalize_training",
            "_load_rng_state",
            "_get_output_dir",
            "_push_from_checkpoint",
        ),  # of a Trainer
        "_register_atexit",  # of threading: called before threads are joined
        "_option_string_actions",  # of an ArgumentParser: its options
        *("_link_checkpoint", "_save_distributed_checkpoint", "_state_dict_type"),  # of Lightning
        *("_create_checkpoint_id", "_flattened_model_states_sd", "_load_config"),  # of torchtitan
        *("_save_last_step", "_should_save", "_states_to_load"),
        *("_metadata_manager", "_schema"),  # of a CheckpointManager of torch_checkpointing
        *("_cdata", "_untyped_storage", "_size", "_pickle_storage_type"),  # of storages
        *(
            "_utils",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
            "_dtype_to_storage_type_map",
        ),  # named in stored tensors
    }
)


def _private_names(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a file defines itself: functions, methods, attributes of self, fields."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        if isinstance(node.ctx, ast.Store):
            yield node.attr
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id


def test_torch_is_imported_above_the_worker_only() -> None:
    for module, tree in TREES.items():
        if _room(module) not in WITHOUT_TORCH:
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
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
    loaded = _loaded_by("import asyncckpt.worker.session, asyncckpt.checkpointer")
    assert "worker" not in loaded and "shm" not in loaded


def test_a_folder_of_that_name_hides_no_editable_install(tmp_path: Path) -> None:
    (tmp_path / "asyncckpt").mkdir()  # like the folder above a clone
    done = subprocess.run([sys.executable, "-c", "import asyncckpt; asyncckpt.Checkpointer"], cwd=tmp_path)
    assert done.returncode == 0


def test_packages_are_the_folders() -> None:
    config = configparser.ConfigParser()
    config.read(HERE / "setup.cfg")
    packages = set(config["options"]["packages"].split())
    assert packages == {module.removesuffix(".__init__") for module in MODULES if module.endswith(".__init__")}
    assert packages == {module.rpartition(".")[0] for module in MODULES}
    assert (HERE / "asyncckpt/worker").resolve() == HERE / "worker"
    assert (HERE / "asyncckpt/shm").resolve() == HERE / "shm"


def test_the_facade_is_small_and_whole() -> None:
    assert len(asyncckpt.__all__) <= 17
    for name in asyncckpt.__all__:
        assert getattr(asyncckpt, name) is not None


_OPTIONAL = ("cryptography", "dill", "isal", "multiprocess", "tabulate", "tqdm")
_BLOCKED = f"""
import sys
class _Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {_OPTIONAL}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, _Blocked())
"""
_SAVES = """
import sys, torch, asyncckpt
state = {"w": torch.arange(9.0), "n": 1}
with asyncckpt.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, state).result(60)
    checkpointer.load(state)
asyncckpt.torch_save(state, sys.argv[1] + ".pt").result(60)
from asyncckpt import cli
sys.exit(cli.main(["ls", sys.argv[1]]))
"""


def test_a_save_on_one_host_imports_hard_dependencies_alone(tmp_path: Path) -> None:
    """This holds in the trainer, in the worker, which inherits the environment, and on the command line."""
    (tmp_path / "sitecustomize.py").write_text(_BLOCKED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE)])}
    command = [sys.executable, "-c", _SAVES, str(tmp_path / "root")]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "step-00000001" in done.stdout, done.stderr
