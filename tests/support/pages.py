"""The pages of the documentation: their code blocks, and the blocks that run as scripts."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.ranks import alone

HERE = Path(__file__).parents[2]
DOCS = HERE / "docs"
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
_FENCE = re.compile(r"( *)```(\w*)")

# The names that the examples of a training loop use without a definition.
TRAINING = """\
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
class Loader:
    state_dict, load_state_dict = (lambda self: {"at": 1}), (lambda self, state: None)
loader = Loader()
def train(model, optimizer, *others):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Block:
    """A code block of a page. ``line``: the number of its first line, counted from 1."""

    page: Path
    line: int
    language: str
    text: str
    runs: bool


def pages() -> list[Path]:
    """Return all pages of the documentation and of the root of the checkout."""
    return sorted([*DOCS.rglob("*.md"), *HERE.glob("*.md")])


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    lines = page.read_text().splitlines()
    begin, language, indent, marked = 0, "", "", False
    for number, line in enumerate(lines, 1):
        fence = _FENCE.fullmatch(line)
        if fence and not begin:
            begin, indent, language = number + 1, fence[1], fence[2]
        elif fence:
            text = "\n".join(each.removeprefix(indent) for each in lines[begin - 1 : number - 1])
            yield Block(page, begin, language, text, runs=not marked)
            begin, marked = 0, False
        elif line and not begin:
            marked = bool(NOT_RUN.fullmatch(line))


def script(page: Path, *, all_blocks: bool = False) -> str:
    """Return the Python blocks of a page that run, or ``all_blocks``. Each block keeps its line numbers."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and (block.runs or all_blocks):
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines)


def first_steps(page: Path) -> str:
    """Return the training loop of a page with a small model and fewer steps. It sets ``ckpt`` and ``first``."""
    loop = next(block.text for block in blocks(page) if "first, steps = 0, 10_000" in block.text)
    return TRAINING + loop.replace("10_000", "201")


def run_forked(code: str, name: str, folder: Path) -> str:
    """Run ``code`` as ``run`` does, but in a fork of the forkserver, which has imported torch already. It is faster."""
    printed = folder.with_name(f"{folder.name}.out")
    code_of_end, _ = alone(_print_to, printed, code, name, folder)
    assert code_of_end == 0, printed.read_text()
    return printed.read_text()


def _print_to(printed: Path, code: str, name: str, folder: Path) -> None:
    os.chdir(folder)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        try:
            exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)
        except BaseException:
            traceback.print_exc(file=file)
            raise
        finally:
            atexit._run_exitfuncs()  # a fork ends without these calls


def run(code: str, name: str, folder: Path, python: str = sys.executable, **environment: str) -> str:
    """Run ``code`` as a script in ``folder``, and return its output. Errors name the lines of the page ``name``."""
    start = f"import sys; exec(compile(sys.stdin.read(), {name!r}, 'exec', dont_inherit=True))"
    done = subprocess.run(
        [python, "-c", start],
        input=code,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
