"""Test the documentation: public names have entries, examples run, and imports and quoted messages exist."""

from __future__ import annotations

import ast
import builtins
import functools
import os
import re
import subprocess
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import docs_pictures
import griffe
import pytest
from support.pages import DOCS, HERE, TRAINING, Block, blocks, first_steps, pages, run_forked, script

REFERENCE = sorted((DOCS / "reference").glob("*.md"))
_ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_INTEGRATIONS = "asyncckpt.integrations"


@functools.cache
def _package() -> griffe.Object | griffe.Alias:
    """Return asyncckpt, parsed from its sources. Nothing is imported, so optional packages may be missing."""
    return griffe.load("asyncckpt", search_paths=[HERE], resolve_aliases=True)


def _found(name: str) -> griffe.Object | griffe.Alias:
    """Return the object with this name. Raise ``KeyError`` if it does not exist."""
    found = _package()
    for part in name.split(".")[1:]:
        found = found[part]
    found = found.final_target if isinstance(found, griffe.Alias) else found
    # griffe returns the module if a package exports a name from a module of the same name.
    return found[part] if found.is_module and name.count(".") == 3 and part in found.members else found


def _exported(package: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield the names in a package's ``__all__``, and its imports such as ``import X as X``."""
    tree = ast.parse(Path(str(package.filepath)).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{package.path}.{each.name}" for each in node.names if each.asname == each.name)
        elif isinstance(node, ast.Assign) and ast.unparse(node).startswith("__all__ = ["):
            yield from (f"{package.path}.{name}" for name in ast.literal_eval(node.value))


def _imported(block: Block) -> Iterator[str]:
    """Yield the names of asyncckpt that a block of Python imports."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "asyncckpt":
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "asyncckpt")


@functools.cache
def _public() -> dict[str, griffe.Object | griffe.Alias]:
    """Return all public objects by the path of their definition."""
    packages = [
        _package(),
        _found("asyncckpt.weights"),
        _found("asyncckpt.extension"),
        *_found(_INTEGRATIONS).modules.values(),
    ]
    names = {name for package in packages for name in _exported(package)}
    names |= {each.path for each in _found("asyncckpt.errors").classes.values()}
    # Add the names that a page tells users to import.
    names |= {name for page in pages() for block in _python(page) for name in _imported(block)}
    found = [_found(name) for name in names]
    return {each.path: each for each in found if each.is_class or each.is_function}


def _python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def test_much_is_public() -> None:
    expected = ("checkpointer.Checkpointer", "errors.ClosedError", "weights.weights.Weights", "integrations.dcp.load")
    assert {f"asyncckpt.{name}" for name in expected} <= set(_public()) and len(_public()) > 60


def test_every_public_name_has_its_entry() -> None:
    entries = {_found(name).path for page in REFERENCE for name in _ENTRY.findall(page.read_text())}
    assert set(_public()) - entries == set()
    unknown = entries - set(_public())
    # Objects that are returned, or made by a framework, and never imported.
    of_verl = {f"Asyncckpt{engine}Manager" for engine in ("FSDP", "Megatron", "TorchTitan", "VeOmni")}
    assert {name.rpartition(".")[2] for name in unknown} == {"Exported", *of_verl}


def test_every_entry_has_an_example() -> None:
    for page in REFERENCE:
        code = "\n".join(block.text for block in blocks(page))
        for name in _ENTRY.findall(page.read_text()):
            last = name.rpartition(".")[2]
            assert re.search(rf"\b{last}\b", code) or last == "Exported", f"{page.name}: {name} has no example"


def _methods(found: griffe.Object | griffe.Alias) -> list[griffe.Object | griffe.Alias]:
    """Return the public methods and properties of a class, unless it replaces a framework's documented class."""
    own = found.members.values() if found.is_class and _own_bases(found) else []
    called = [each for each in own if each.is_function or (each.is_attribute and "property" in each.labels)]
    return [each for each in called if not each.name.startswith("_")]


def test_every_public_name_and_method_has_a_docstring() -> None:
    bare = [each.path for found in _public().values() for each in (found, *_methods(found)) if not each.has_docstring]
    assert not bare


def test_every_argument_is_told_of() -> None:
    untold = []
    for found in _public().values():
        for each in [each for each in (found, *_methods(found)) if each.is_function]:
            parameters = getattr(each, "parameters", [])
            names = [one.name for one in parameters if one.name not in ("self", "cls") and "var" not in one.kind.value]
            text = each.docstring.value if each.docstring else ""
            untold += [
                f"{each.path}({name})" for name in names if name[0] != "_" and not re.search(rf"\b{name}\b", text)
            ]
    # DCP's ``Stateful`` defines these.
    assert [each for each in untold if ".load_state_dict(" not in each] == []


def _own_bases(found: griffe.Object | griffe.Alias) -> bool:
    """Return whether a class derives only from our classes and Python's, as far as its module shows."""
    bases = [str(getattr(base, "canonical_path", base)) for base in getattr(found, "bases", [])]
    tops = {base.split(".")[0] for base in bases if "." in base}
    return tops <= {"asyncckpt", *sys.stdlib_module_names}


def test_what_pages_import_is_there() -> None:
    for block in [block for page in pages() for block in _python(page)]:
        compile(block.text, f"{block.page}:{block.line}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for name in _imported(block):
            _found(name)


# The pages show fragments. Names that a page uses without a definition are of any type.
_GIVEN = "import json, os, torch, asyncckpt; from typing import Any; from asyncckpt import Checkpointer, Config"
_LOOSE = (
    "# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators,"
    ' no-warn-unreachable, disable-error-code="no-redef,has-type,used-before-def,union-attr,func-returns-value,misc"'
)


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that a block of Python uses."""
    for symbol in table.get_symbols():
        if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _used(child)


def _module(page: Path) -> str:
    """Return the Python of a page as a module for mypy, with the line numbers of the page."""
    code = script(page, all_blocks=True)
    top = symtable.symtable(code, str(page), "exec")
    known = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    known |= {*dir(builtins), "json", "os", "torch", "asyncckpt", "Checkpointer", "Config"}
    kinds = {"ckpt": "Checkpointer", "checkpointer": "Checkpointer"}
    declared = [f"{name}: {kinds.get(name, 'Any')}" for name in sorted({*_used(top)} - known)]
    first = "; ".join([_GIVEN, *declared])
    return f"{first}{code}\n{_LOOSE}\n"


def test_the_types_of_the_examples_fit(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for page in pages():
        if any(_python(page)) and page.stem != "tutorial":  # its scripts are in examples/
            name = "_".join(page.relative_to(HERE).with_suffix("").parts).replace("-", "_")
            (tmp_path / f"{name}.py").write_text(_module(page))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(tmp_path)]
    found = subprocess.run(command, cwd=HERE, env=os.environ | {"MYPYPATH": ""}, capture_output=True, text=True)
    # torch has no __all__ in the package of DCP.
    wrong = [line for line in found.stdout.splitlines() if "does not explicitly export" not in line]
    assert not wrong and not found.stderr, "\n".join([*wrong, found.stderr])


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("page", [page for page in REFERENCE if script(page)], ids=lambda page: page.stem)
def test_the_examples_of_the_reference_run(page: Path, tmp_path: Path) -> None:
    printed = run_forked(script(page), str(page), tmp_path)
    if page.stem == "errors":
        shown = re.findall(r"except (\w+) as error:[^\n]*\n +print\(repr\(error\)\)", script(page))
        assert len(shown) > 12
        raised = re.findall(r"^(\w+)\(", printed, re.MULTILINE)
        # On a busy machine, the save may be durable before the example waits with a timeout of zero.
        optional = {"SaveTimeoutError"} - set(raised)
        assert raised == [name for name in shown if name not in optional]


@pytest.mark.usefixtures("forkserver")
@pytest.mark.parametrize("page", [HERE / "README.md", DOCS / "quickstart.md"], ids=lambda page: page.stem)
def test_the_first_steps_run_and_resume(page: Path, tmp_path: Path) -> None:
    code = first_steps(page) + "\nprint(ckpt.steps(), first)\n"
    assert run_forked(code + code, str(page), tmp_path) == "[0, 100, 200] 0\n[0, 100, 200] 201\n"


@pytest.mark.usefixtures("forkserver")
def test_what_to_change_runs(tmp_path: Path) -> None:
    page = DOCS / "coming-from.md"
    prelude = TRAINING.splitlines()
    code = "\n".join([*prelude, *script(page).splitlines()[len(prelude) :]])  # keeps the line numbers
    run_forked(code, str(page), tmp_path)
    assert sorted(path.name for path in (tmp_path / "run-2").glob("step-*")) == ["step-00000002", "step-00000003"]


def test_what_troubleshooting_quotes_is_said() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    assert len(quoted) > 90 and len(quoted) == len(set(quoted)) == text.count("\n| `")
    said = [*_texts()]
    assert [each for each in quoted if not _is_said(each, said)] == []


def test_what_one_message_says_is_quoted_in_its_order() -> None:
    assert _is_said("its size … is wrong", ["other", "its size\0 is wrong"])
    assert not _is_said("is wrong … its size", ["its size\0 is wrong"])
    assert not _is_said("its size … is wrong", ["its size", "is wrong"])


def _is_said(quoted: str, said: list[str]) -> bool:
    """Return whether a message contains the parts between "…" in their order."""
    parts = re.compile(".*".join(re.escape(part.strip()) for part in quoted.split("…")), re.DOTALL)
    return any(map(parts.search, said))


def _texts() -> Iterator[str]:
    """Yield all strings in the sources, as Python joins them. NULs replace the variable parts of f-strings."""
    for folder in ("asyncckpt", "worker", "shm"):
        for file in (HERE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_links_and_pictures_are_there() -> None:
    """Check that every relative link names an existing file. mkdocs does this too, but only where the site is built."""
    names = subprocess.check_output(["git", "ls-files"], cwd=HERE, text=True).splitlines()
    known = {(HERE / name).resolve() for name in names}
    known |= {folder for path in known for folder in path.parents}
    lost = [
        f"{page.relative_to(HERE)}: {link}"
        for page in pages()
        for link in _LINK.findall(_CODE.sub("", page.read_text()))
        if "://" not in link and (page.parent / link).resolve() not in known
    ]
    assert not lost


def test_pictures_are_as_the_script_draws_them() -> None:
    drawn = {f"{name}.svg": draw().svg() for name, draw in docs_pictures.PICTURES.items()}
    assert drawn == {path.name: path.read_text() for path in docs_pictures.FOLDER.iterdir()}
    shown = "".join(page.read_text() for page in pages())
    assert [name for name in drawn if f"pictures/{name}" not in shown] == []


def test_what_builds_the_site_says_how_it_is_used() -> None:
    """``.ci/run`` checks that the site can be built without torch."""
    shown = subprocess.run([HERE / "scripts/docs", "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert "scripts/docs serve" in shown.stdout
