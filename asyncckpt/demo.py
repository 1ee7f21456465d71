"""``asyncckpt demo``: kill a training, resume it, compare it with a training that was not killed, and time its saves.

The model is a small byte-level transformer. SIGKILL ends the training while a checkpoint is being written, and a new
process resumes. All losses and the last state must equal those of a training that was not killed, bit for bit.
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

import psutil

from asyncckpt.budgets import LONG_S

_SEED, _TEXT_BYTES, _EVERY = 1234, 4_000_000, 4  # a save every 4 steps
_SIZES = {"small": (64, 2, 2, 4, 64), "default": (256, 4, 4, 2, 64)}  # width, layers, heads, batch, bytes of a text
OURS, SAVE, ASYNC_SAVE = "asyncckpt", "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"


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
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step = -1
        self.train()

    def train(self) -> float:
        """Run the next step, on a batch that depends on its number alone. Return the loss."""
        import torch

        self.step += 1
        generator = torch.Generator().manual_seed(_SEED * 1_000_003 + self.step)
        begins = torch.randint(len(self.text) - self.context - 1, (self.batch, 1), generator=generator)
        batch = self.text[begins + torch.arange(self.context + 1)].long().to(self.device)
        loss = torch.nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def digest(self) -> str:
        """Return a checksum of all bits of the model and of the optimizer."""
        import xxhash

        moments = [moment for state in self.optimizer.state.values() for moment in state.values()]
        tensors = [tensor.detach().cpu().contiguous().numpy() for tensor in (*self.model.parameters(), *moments)]
        return xxhash.xxh3_128_hexdigest(b"".join(tensors))


def _train(args: argparse.Namespace, root: str, last: int, is_killed: bool, messages: Connection) -> None:
    """Train from the newest checkpoint in ``root`` to step ``last``. Send text, then a report. Die if ``is_killed``."""
    import asyncckpt

    os.setsid()  # Ctrl-C is for the parent, and the parent ends this process
    training = Training(args.size)
    report: dict[str, Any] = {"losses": {}, "nbytes": 3 * sum(p.nbytes for p in training.model.parameters())}
    with asyncckpt.Checkpointer(root, asyncckpt.Config(keep_last=3, linger=60)) as checkpointer:
        if checkpointer.latest() is not None:
            training.step = checkpointer.load(training.state)
            if (loaded := checkpointer.loaded) is not None:
                report |= {"from": loaded.step, "source": loaded.source}
                messages.send(f"   Process {os.getpid()} resumes: it loaded step {loaded.step} from {loaded.source}.\n")
        while training.step < last:
            loss = report["losses"][training.step] = training.train()
            if training.step % _EVERY == 0:
                save = checkpointer.save(training.step, training.state)
                messages.send(f"   Step {training.step} of {args.steps}: the loss is {loss:.4f}, the state is saved.\n")
        if is_killed:
            what = "had just written" if save.done() else "was still writing"
            messages.send(
                f"   SIGKILL ended process {os.getpid()} after its save of step {last}, which its worker {what}.\n"
            )
            messages.send(report)
            os.kill(os.getpid(), signal.SIGKILL)
        report["state"] = training.digest()
        if "source" not in report:
            checkpointer.wait()
            report["costs"] = _costs(training, checkpointer, args.saves, f"{root}/dcp", messages)
    messages.send(report)


def _costs(training: Training, checkpointer: Any, saves: int, folder: str, messages: Connection) -> dict[str, Any]:
    """Return the median seconds of each way to save: of the call, until the save is durable, and of CPU."""
    from torch.distributed.checkpoint import state_dict_saver as dcp

    warnings.simplefilter("ignore")  # DCP warns that there is only one process
    ways: dict[str, Callable[[], Any]] = {
        OURS: lambda: checkpointer.save(training.step, training.state),
        SAVE: lambda: dcp.save(training.state, checkpoint_id=f"{folder}/save-{training.step}"),
        ASYNC_SAVE: lambda: dcp.async_save(training.state, checkpoint_id=f"{folder}/async-{training.step}"),
    }
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    used = [0.0, 0.0]  # the worker's CPU after the first and the last turn; the kernel counts it in steps of 10 ms
    for turn in range(saves + 1):  # the first save of each way plans and allocates, and is dropped
        training.train()
        for name, save in ways.items():
            begun, cpu = time.perf_counter(), time.process_time()
            handle, called = save(), time.perf_counter()
            _ = name == SAVE or handle.result(LONG_S)
            seconds[name].append((called - begun, time.perf_counter() - begun, time.process_time() - cpu))
        used[turn > 0] = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())
        messages.send(f"{turn} " if turn else "   Turn ")
    medians = {name: [*map(median, zip(*rows[1:], strict=True))] for name, rows in seconds.items()}
    medians[OURS][2] += (used[1] - used[0]) / saves
    shutil.rmtree(folder)
    return {name: dict(zip(("call_s", "durable_s", "cpu_s"), row, strict=True)) for name, row in medians.items()}


def _child(*arguments: Any, exit_status: int = 0) -> dict[str, Any]:
    """Run ``_train`` in a process of its own, and print its text. Return its report. Exit if its status is another."""
    context = multiprocessing.get_context("fork")
    messages, theirs = context.Pipe()
    process = context.Process(target=_train, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    message: str | dict[str, Any] = ""
    with contextlib.suppress(EOFError):
        while isinstance(message, str) and messages.poll(LONG_S):
            message = messages.recv()
            print(message if isinstance(message, str) else "", end="", flush=True)
    process.join(LONG_S)
    if isinstance(message, str) or process.exitcode != exit_status:  # the kernel, too, kills by SIGKILL
        process.kill()
        sys.exit(f"asyncckpt demo: a training process ended with status {process.exitcode}")
    return message


def _demonstrate(args: argparse.Namespace, root: str) -> dict[str, Any]:
    print(f"Checkpoints go to {root}.\n1. A training saves. Its worker, another process, writes the files.", flush=True)
    killed = _child(args, f"{root}/killed", args.steps // 2, True, exit_status=-signal.SIGKILL)
    print("2. A new process resumes from the worker's memory, or else from the files.", flush=True)
    resumed = _child(args, f"{root}/killed", args.steps, False)
    print("3. The same training runs without a kill. Then asyncckpt and PyTorch's DCP save in turns.", flush=True)
    whole = _child(args, f"{root}/whole", args.steps, False)
    ok = killed["losses"] | resumed["losses"] == whole["losses"] and resumed["state"] == whole["state"]
    print(f"\n   {args.steps} losses and the last state, with and without the kill, are equal bit for bit: {ok}.")
    title = f"4. Medians of {args.saves} saves of {whole['nbytes'] / 1e6:.0f} MB, in ms"
    print(f"{title:42}{'call':>9}{'durable':>9}{'CPU':>9}")
    for name, cost in whole["costs"].items():
        print(f"   {name:39}" + "".join(f"{max(1e3 * seconds, 0.1):9.1f}" for seconds in cost.values()))
    print("   call: the training waits. durable: the files are on disk. CPU: of the training process and the worker.")
    calls = [f"{max(1e3 * cost['call_s'], 0.1):.1f} ms" for cost in whole["costs"].values()]
    print("   A save held the training for {}; DCP's save for {}, DCP's async_save for {}.".format(*calls))
    return {"ok": ok, "losses": whole["losses"], "resumed": resumed, "costs": whole["costs"]}


def main(argv: Sequence[str]) -> int:
    """Run the demo. Return 0, or 1 if the trainings differ. Exit with 1 if one fails, with 2 after a wrong call."""
    parser = argparse.ArgumentParser(prog="asyncckpt demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=16, help=f"steps, a multiple of {2 * _EVERY} (default: 16)")
    parser.add_argument("--saves", type=int, default=10, help="saves to time (default: 10)")
    parser.add_argument("--size", choices=[*_SIZES], default="default", help="size of the model")
    parser.add_argument("--folder", help="empty folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON; progress goes to stderr")
    args = parser.parse_args(argv)
    if min(args.steps, args.saves) < 1 or args.steps % (2 * _EVERY):
        parser.error(f"--steps is a multiple of {2 * _EVERY}, and --saves is 1 or more")
    with tempfile.TemporaryDirectory(prefix="asyncckpt-demo-", ignore_cleanup_errors=True) as temporary:
        folder = os.path.abspath(args.folder or temporary)
        if os.path.exists(folder) and os.listdir(folder):
            sys.exit(f"asyncckpt demo: the folder is not empty: {folder}")
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            summary = _demonstrate(args, folder)
    if args.json:
        print(json.dumps(summary, indent=1))
    return 0 if summary["ok"] else 1
