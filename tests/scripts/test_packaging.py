"""Test the built packages: complete sources, and a wheel that works without a checkout."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support.pages import DOCS, HERE, first_steps, run

from asyncckpt.shm.memcpy import IS_COMPILED

VERSION = re.compile(r"\b\d+\.\d+\.\d+\b")


def _version() -> str:
    config = configparser.ConfigParser()
    config.read(HERE / "setup.cfg")
    return config["metadata"]["version"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a source archive, and a wheel that was built from this archive."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(HERE)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the ``bin`` folder of an environment with the wheel and its dependencies, but without the checkout."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]  # also if a checkout is in $PYTHONPATH
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, timeout=120)
    # Add the folder alone. Python then ignores the start-up files that an editable install has put there.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def test_the_wheel_has_one_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"asyncckpt", f"asyncckpt-{_version()}.dist-info"}
    folders = (HERE / "worker", HERE / "shm")
    modules = {f"asyncckpt/{file.relative_to(HERE)}" for folder in folders for file in folder.rglob("*.py")}
    modules |= {str(file.relative_to(HERE)) for file in (HERE / "asyncckpt").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "asyncckpt/py.typed" in names


@pytest.mark.parametrize("compiler", ["cc", "none"])
def test_it_is_built_without_a_compiler_too(built: Path, tmp_path: Path, compiler: str) -> None:
    if compiler == "cc" and shutil.which("cc") is None:
        pytest.skip("there is no compiler")
    (archive,) = built.glob("*.tar.gz")
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tmp_path)], check=True, timeout=60)
    (sources,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(sources)]
    environ = os.environ | ({"CC": "/nowhere/cc"} if compiler == "none" else {})
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=tmp_path, env=environ, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    file = zipfile.ZipFile(wheel)
    assert len([name for name in file.namelist() if name.endswith(".so")]) == (2 if compiler == "cc" else 0)
    file.extractall(unpacked := tmp_path / "unpacked")
    code = first_steps(DOCS / "quickstart.md") + "\nfrom asyncckpt.shm import memcpy\nprint(memcpy.IS_COMPILED)\n"
    (folder := tmp_path / "run").mkdir()
    assert run(code, "quickstart", folder, PYTHONPATH=str(unpacked)).strip() == str(compiler == "cc")


def test_what_these_tests_run_with_is_compiled() -> None:
    assert IS_COMPILED or shutil.which("cc") is None


def test_the_sources_are_complete(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    top = f"asyncckpt-{_version()}"
    with tarfile.open(archive) as file:
        names = {name.removeprefix(f"{top}/") for name in file.getnames()}
    folders = ("worker", "shm", "tests", "scripts", "examples", "docs")
    wanted = {str(path.relative_to(HERE)) for each in folders for path in (HERE / each).rglob("*") if path.is_file()}
    wanted |= {path.name for path in HERE.glob("*") if path.is_file() and not path.name.startswith(".")}
    assert {"scripts/docs", "LICENSE"} <= wanted  # also names without a dot
    made = ("__pycache__", ".egg-info", ".so")
    assert {name for name in wanted - names if not any(each in name for each in made)} == set()


def test_the_quickstart_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    code = first_steps(DOCS / "quickstart.md") + "\nimport asyncckpt.worker\nprint(asyncckpt.worker.__file__)\n"
    printed = run(code, "quickstart", tmp_path, python=str(installed / "python"), PYTHONPATH="")
    assert Path(printed.strip()).is_relative_to(installed.parent)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert (tmp_path / "checkpoints/step-00000200/asyncckpt.json").exists()


def test_the_command_says_its_version(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "asyncckpt"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env={}, timeout=60)
    assert done.stdout == f"asyncckpt {_version()}\n"


def test_nothing_else_is_installed_by_the_names_of_its_folders(installed: Path, tmp_path: Path) -> None:
    for name in ("worker", "shm", "tests", "scripts"):
        code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert run(code, name, tmp_path, python=str(installed / "python"), PYTHONPATH="") == "None\n"


def test_the_version_stands_in_one_place() -> None:
    version = _version()
    assert VERSION.fullmatch(version)
    files = [file for folder in ("asyncckpt", "worker", "shm") for file in (HERE / folder).rglob("*.py")]
    files += [HERE / "pyproject.toml", HERE / "mkdocs.yml"]
    assert not [file for file in files if re.search(rf"\b{re.escape(version)}\b", file.read_text())]
    changes = (HERE / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+?),? ", changes, re.MULTILINE)
    assert newest is not None and newest[1] == version
