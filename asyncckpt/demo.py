"""``asyncckpt demo``: kill a training, resume it, compare it with a training that was not killed, and time its saves.

The training is of a small byte-level transformer. SIGKILL ends it while a checkpoint is being written. A new process
resumes. Its losses and its last state must equal those of a training that was not killed, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from asyncckpt.budgets import LONG_S

_SEED, _TEXT_BYTES = 1234, 4_000_000
# Width, layers and heads of the model; pieces of text in a batch, and the bytes of each piece.
_SIZES = {"small": (64, 2, 2, 4, 64), "default": (256, 4, 4, 2, 64)}
OURS, DCP = "asyncckpt", "torch.distributed.checkpoint.save"


class Training:
    """A model, its optimizer and its batches, which are the same on every start."""

    def __init__(self, size: str) -> None:
        """Build the model, and run step 0, so that the optimizer has its state. ``size``: a key of ``_SIZES``."""
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without this, CUDA's matrix products vary
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        torch.manual_seed(_SEED)
        width, layers, heads, self.batch, self.context = _SIZES[size]
        has_accelerator = torch.accelerator.is_available()
        self.device = (torch.accelerator.current_accelerator() if has_accelerator else None) or torch.device("cpu")
        layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        last = torch.nn.Linear(width, 256)
        self.model = torch.nn.Sequential(torch.nn.Embedding(256, width), encoder, last).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        source = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        self.text = torch.frombuffer(bytearray(source[:_TEXT_BYTES]), dtype=torch.uint8)
        self.step = -1
        self.train()

    def train(self) -> float:
        """Run the next step, on a batch that depends on its number alone. Return the loss."""
        import torch

        self.step += 1
        generator = torch.Generator().manual_seed(_SEED * 1_000_003 + self.step)
        begins = torch.randint(len(self.text) - self.context - 1, (self.batch, 1), generator=generator)
        batch = self.text[begins + torch.arange(self.context + 1)].long().to(self.device)
        scores = self.model(batch[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(scores, batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return the state dict of everything that a resumed training needs."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def digest(self) -> str:
        """Return a checksum of all bits of the model and of the optimizer."""
        import xxhash

        digest = xxhash.xxh3_128()
        moments = [moment for state in self.optimizer.state.values() for moment in state.values()]
        for tensor in [*self.model.parameters(), *moments]:
            digest.update(tensor.detach().cpu().contiguous().numpy())
        return digest.hexdigest()


def _train(args: argparse.Namespace, root: str, last: int, is_killed: bool, reports: Connection) -> None:
    """Train from the newest checkpoint in ``root`` to step ``last``. Send one report. ``is_killed``: die after that."""
    import asyncckpt

    os.setsid()  # Ctrl-C is for the parent, and the parent ends this process
    training = Training(args.size)
    losses: dict[int, float] = {}
    report: dict[str, Any] = {"losses": losses, "state_bytes": 3 * sum(p.nbytes for p in training.model.parameters())}
    with asyncckpt.Checkpointer(root, asyncckpt.Config(keep_last=3, linger=60)) as checkpointer:
        if checkpointer.latest() is not None:
            state = training.state()
            checkpointer.load(state)
            training.model.load_state_dict(state["model"])
            training.optimizer.load_state_dict(state["optimizer"])
            training.step = state["step"]
            if (loaded := checkpointer.loaded) is not None:
                report |= {"from": loaded.step, "source": loaded.source, "resume_s": loaded.seconds}
        while training.step < last:
            losses[training.step] = training.train()
            if training.step % args.every == 0:
                save = checkpointer.save(training.step, training.state())
        if is_killed:
            reports.send(report | {"writing": not save.done()})
            os.kill(os.getpid(), signal.SIGKILL)
        report["state"] = training.digest()
        checkpointer.wait()
        if not report.get("source"):
            report["costs"] = _costs(training, checkpointer, args.saves, os.path.join(root, "dcp"))
    reports.send(report)


def _costs(training: Training, checkpointer: Any, saves: int, folder: str) -> dict[str, dict[str, float]]:
    """Return the median seconds of the call, and until the save is durable, for each way to save."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

    def save_with_dcp() -> Callable[[], object]:
        save_by_dcp(training.state(), checkpoint_id=os.path.join(folder, str(training.step)), no_dist=True)
        return lambda: None

    saving = {OURS: lambda: checkpointer.save(training.step, training.state()).result, DCP: save_with_dcp}
    warnings.simplefilter("ignore")  # DCP warns that there is only one process
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in saving}
    for _ in range(saves + 1):  # the first save of each way plans and allocates, and is dropped
        for name, save in saving.items():
            training.train()
            begun = time.perf_counter()
            wait, called = save(), time.perf_counter()
            wait()
            seconds[name].append((called - begun, time.perf_counter() - begun))
    shutil.rmtree(folder)
    keys = "call_s", "durable_s"
    return {name: dict(zip(keys, map(median, zip(*pairs[1:])))) for name, pairs in seconds.items()}  # noqa: B905


def _child(*arguments: Any, exit_status: int = 0) -> dict[str, Any]:
    """Run ``_train`` in a process of its own. Return its report. Exit if it ends with another status."""
    context = multiprocessing.get_context("fork")
    reports, theirs = context.Pipe()
    process = context.Process(target=_train, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    report: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        report = reports.recv() if reports.poll(LONG_S) else report
    process.join(LONG_S)
    if not report or process.exitcode != exit_status:  # the kernel, too, kills by SIGKILL
        process.kill()
        sys.exit(f"asyncckpt demo: a training process ended with status {process.exitcode}")
    return report


def _demonstrate(args: argparse.Namespace, root: str) -> dict[str, Any]:
    killed_in, whole_in = os.path.join(root, "killed"), os.path.join(root, "whole")
    print(f"Checkpoints go to {root}.\n1. A training saves, and is killed (SIGKILL) ...", flush=True)
    killed = _child(args, killed_in, args.steps // 2, True, exit_status=-signal.SIGKILL)
    writing = "was still writing" if killed["writing"] else "had just written"
    print(f"   Its worker {writing} the checkpoint of the last save, {killed['state_bytes'] / 1e6:.0f} MB.")
    print("2. A new process resumes; afterwards the same training runs without a kill ...", flush=True)
    resumed = _child(args, killed_in, args.steps, False)
    print(f"   Step {resumed['from']} came from {resumed['source']} in {resumed['resume_s']:.2f} s.", flush=True)
    whole = _child(args, whole_in, args.steps, False)
    ok = killed["losses"] | resumed["losses"] == whole["losses"] and resumed["state"] == whole["state"]
    print(f"   {args.steps} losses and the last state, equal bit for bit: {ok}\n3. Medians of {args.saves} saves:")
    for name, cost in whole["costs"].items():
        print(f"   {name:34} call {cost['call_s'] * 1e3:6.1f} ms, durable {cost['durable_s'] * 1e3:6.1f} ms")
    return {"ok": ok, "losses": whole["losses"], "resumed": resumed, "costs": whole["costs"]}


def main(argv: Sequence[str]) -> int:
    """Run the demo. Return 0, or 1 if the trainings differ. Exit with 1 if one fails, with 2 after a wrong call."""
    parser = argparse.ArgumentParser(prog="asyncckpt demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="steps of the training (default: 24)")
    parser.add_argument("--every", type=int, default=4, help="steps from save to save (default: 4)")
    parser.add_argument("--saves", type=int, default=10, help="saves to time (default: 10)")
    parser.add_argument("--size", choices=[*_SIZES], default="default", help="size of the model")
    parser.add_argument("--folder", help="empty folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; progress goes to stderr")
    args = parser.parse_args(argv)
    if args.every < 1 or args.steps < 2 * args.every or args.steps % 2 or args.saves < 1:
        parser.error("--every and --saves are 1 or more, --steps is even, and twice --every or more")
    folder = os.path.abspath(args.folder or tempfile.mkdtemp(prefix="asyncckpt-demo-"))
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        sys.exit(f"asyncckpt demo: the folder is not empty: {folder}")
    try:
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            summary = _demonstrate(args, folder)
        if args.json:
            print(json.dumps(summary, indent=1))
        return 0 if summary["ok"] else 1
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
