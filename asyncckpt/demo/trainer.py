"""The demo's training process: a small byte-level transformer on the source of Python's standard library.

Text, model, optimizer and batches are the same on every start, and a batch depends on its step alone. ``run.py`` starts
this with a job, in JSON. Progress goes to stderr; at the end, what was measured goes to stdout, in JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import sysconfig
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import Config
from asyncckpt.save_handle import Save

_KEEP = 3
_TEXT_BYTES = 4_000_000
_SEED = 1234


# Width, layers and heads of the model; a batch is so many pieces of text of so many bytes.
_SIZES = {"small": (64, 2, 2, 4, 64), "default": (320, 8, 5, 8, 128)}


class _Transformer(nn.Module):
    """Bytes in, ``(batch, context)``; scores for each next byte out, ``(batch, context, 256)``."""

    def __init__(self, width: int, nlayers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, nlayers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.places), device=tokens.device)
        scores: Tensor = self.scores(self.layers(self.bytes(tokens) + self.places, mask, is_causal=True))
        return scores


def _text() -> Tensor:
    """The ``*.py`` of the standard library in the order of their names, up to some megabytes, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(text) < 10_000:
        raise FileNotFoundError(f"the source of the standard library, the demo's text, is not in {folder}")
    return torch.frombuffer(bytearray(text[:_TEXT_BYTES]), dtype=torch.uint8)


class _Training:
    """The model, its optimizer, and one step of the one with the other; the same on every start."""

    def __init__(self, size: str, threads: int) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or CUDA's matrix products differ each time
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(threads)
        torch.manual_seed(_SEED)
        width, nlayers, heads, self.batch, self.context = _SIZES[size]
        has_accelerator = torch.accelerator.is_available()
        self.device = (torch.accelerator.current_accelerator() if has_accelerator else None) or torch.device("cpu")
        self.text = _text()
        self.model = _Transformer(width, nlayers, heads, self.context).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = -1
        self.train()  # step 0: AdamW makes its state, so that a state dict always has the same structure

    def train(self) -> float:
        """The next step. Returns its loss."""
        self.step += 1
        generator = torch.Generator().manual_seed(_SEED * 1_000_003 + self.step)
        begins = torch.randint(len(self.text) - self.context - 1, (self.batch, 1), generator=generator)
        batch = self.text[begins + torch.arange(self.context + 1)].long().to(self.device)
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """The state dict of everything that goes on from here."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def resume(self, checkpointer: Checkpointer) -> None:
        """Go on from the newest checkpoint, which the worker of a killed trainer may still hold."""
        begun = time.perf_counter()
        checkpointer.load(state := self.state())
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        source = checkpointer.loaded.source if checkpointer.loaded is not None else ""
        _say(f"resumed at step {self.step} from {source}, loaded and checked in {time.perf_counter() - begun:.2f} s")


def main(job: dict[str, Any]) -> None:
    """Train to the end, or to the save after which this process is to be killed."""
    training = _Training(job["size"], job["threads"])
    parameters = list(training.model.parameters())
    nbytes = 3 * sum(parameter.nbytes for parameter in parameters)  # AdamW has two moments of each
    checkpointer = Checkpointer(job["folder"], Config(keep_last=_KEEP)) if job["saves"] == "asyncckpt" else None
    if checkpointer is not None and job["resume"]:
        training.resume(checkpointer)
    begun = time.perf_counter()
    if checkpointer is not None:
        checkpointer.prepare(training.state())
    prepare_s = time.perf_counter() - begun
    warnings.filterwarnings("ignore", "torch.distributed is")  # DCP's, that there is one process only
    losses: dict[int, float] = {}
    steps_s, waits_s = [], []
    under_way: deque[Save] = deque()
    while training.step < job["steps"] and training.step != job["kill_at"]:
        _show_durable(under_way, losses, nbytes)
        begun = time.perf_counter()
        loss = training.train()
        trained = time.perf_counter()
        losses[training.step] = loss
        steps_s.append(trained - begun)
        if training.step % job["every"] == 0 and job["saves"] != "none":
            if checkpointer is not None:
                under_way.append(checkpointer.save(training.step, training.state()))
            else:
                save_by_dcp(training.state(), checkpoint_id=f"{job['folder']}/step-{training.step:08d}")
            waits_s.append(time.perf_counter() - trained)
            if checkpointer is None:
                for old in sorted(Path(job["folder"]).iterdir())[:-_KEEP]:
                    shutil.rmtree(old)
        if len(losses) == job["warm_up"]:
            steps_s, waits_s = [], []
    measured = {"losses": losses, "steps_s": steps_s, "waits_s": waits_s, "prepare_s": prepare_s}
    measured |= {"parameters": sum(each.numel() for each in parameters), "state_bytes": nbytes}
    measured |= {"device": str(training.device), "is_writing": not all(save.done() for save in under_way)}
    print(json.dumps(measured), flush=True)
    if training.step == job["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if checkpointer is not None:
        checkpointer.close()
    _show_durable(under_way, losses, nbytes)


def _show_durable(under_way: deque[Save], losses: dict[int, float], nbytes: int) -> None:
    """Show the saves that have become durable, which are taken from those ``under_way``."""
    while under_way and under_way[0].done():
        save = under_way.popleft()
        save.result()  # raises what went wrong
        seconds = save.timings
        _say(
            f"step {save.step:>4}  loss {losses[save.step or 0]:.4f}  trainer waited {seconds['stall_s'] * 1e3:6.1f} ms"
            f"  durable after {seconds['durable_s']:.2f} s  written at {nbytes / seconds['write_s'] / 1e9:.2f} GB/s"
        )


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
