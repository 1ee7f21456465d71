"""Build the library of the simulated device, once for each version of torch and of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-Wall"]
_LIMIT_S = 400.0


def compiler() -> str | None:
    """Return the path of the compiler, or None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """Build the library, unless it exists. One process builds, and other processes wait.

    Raises:
        RuntimeError: The compiler fails. The error has its output.
    """
    folder = _cache()
    library = folder / f"simulated-{_version()}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = folder / f"{library.name}.{os.getpid()}"
            _compile(made)
            os.replace(made, library)
    return library


def _cache() -> Path:
    """Return the folder for libraries. It is outside the tree, so that all checkouts of this user share it."""
    at = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(at) / "asyncckpt-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _HERE / "build"  # git ignores this folder
    return folder


def _version() -> str:
    parts = [torch.__version__, str(compiler()), *_FLAGS]
    parts += [file.read_text() for file in sorted(_HERE.iterdir()) if file.suffix in (".cpp", ".h")]
    return f"{torch.__version__}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _compile(library: Path) -> None:
    found = Path(torch.__file__).parent
    include = found / "include"
    command = [
        *(str(compiler()), *_FLAGS, "-shared", "-pthread"),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{_HERE}", "-x", "c++", "-"),
        *(f"-L{found / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{found / 'lib'}", "-o", str(library)),
    ]
    # Compile all files as one source, because torch's headers take most of the time and are then read once.
    source = "".join(f'#include "{file.name}"\n' for file in sorted(_HERE.glob("*.cpp")))
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"the simulated device cannot be built:\n{done.stderr[-8000:]}")
