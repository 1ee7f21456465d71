"""Measure saves in a training by Hugging Face's Trainer, by Lightning, and in torchtitan's loop.

Each trains with its own saves and with asyncckpt's. Each turn is a short training with one save. *Blocked* is the time
of the call. *Lost* is the extra time of the steps from the save on, compared with as many usual steps, until well after
the checkpoint is written. It includes everything that a save takes from the training. *Durable* is the time from the
call until the checkpoint is on storage. The suite syncs the files if nobody else does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import files
from bench.limits import Limits
from bench.states import GIB
from bench.turns import Pace, take

WIDTH = 1024
BEFORE, AFTER = 5, 14
"""The numbers of steps before and after the save. The first step is not counted."""
_STATES = 3  # the parameters and two moments of AdamW


class Stack(torch.nn.Module):
    """Linear layers with so many bytes of state that AdamW's step is most of the work."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        count = max(1, nbytes // (4 * _STATES * WIDTH * WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean(), "logits": x}


@dataclass
class Clock:
    """The times of one training in seconds: begin of each step, call and return of the save, end of the write."""

    steps: list[float] = field(default_factory=list)
    called: float = 0.0
    returned: float = 0.0
    there: float = 0.0

    def step(self) -> None:
        """Note the begin of a step."""
        self.steps.append(time.perf_counter())

    def figures(self, synced_s: float) -> dict[str, float]:
        """Return the figures of the training. ``synced_s``: the seconds of the suite's sync."""
        lengths = [end - begin for begin, end in zip(self.steps[:-1], self.steps[1:], strict=True)]
        usual = statistics.median(lengths[1 : BEFORE - 1])
        since = lengths[BEFORE - 1 :]
        lost = sum(since) - len(since) * usual
        durable = max(self.there, self.returned) - self.called + synced_s
        return {"blocked": self.returned - self.called, "lost": lost, "durable": durable, "step": usual}


def _watched(call: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """Wrap the saving function ``call`` to note its begin and end."""

    def watched(*args: Any, **options: Any) -> Any:
        clock.called = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            clock.returned = time.perf_counter()

    return watched


def _train_hugging_face(nbytes: int, folder: str, clock: Clock, *, ours: bool) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]  # the type is unknown if transformers is not installed
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.step()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == BEFORE
            if ours and clock.returned and not clock.there and os.path.isdir(_checkpoint(folder)):
                clock.there = time.perf_counter()

    data = [{"x": torch.randn(WIDTH), "labels": torch.zeros(1)} for _ in range(8)]
    options: dict[str, Any] = {"max_steps": BEFORE + AFTER, "save_strategy": "no", "logging_strategy": "no"}
    options |= {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(
        Stack(nbytes),
        TrainingArguments(folder, **options),
        train_dataset=data,
        callbacks=[Steps()],
    )
    if ours:
        from asyncckpt.integrations.huggingface import enable

        enable(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer._save_checkpoint = _watched(trainer._save_checkpoint, clock)
    trainer.train()


def _checkpoint(folder: str) -> str:
    return f"{folder}/checkpoint-{BEFORE}"


def _train_lightning(nbytes: int, folder: str, clock: Clock, *, way: str) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(nbytes)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.stack(batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Steps(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            clock.step()

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == BEFORE:
                _watched(trainer.save_checkpoint, clock)(_checkpoint(folder))
            elif way == "ours" and clock.returned and not clock.there and os.path.exists(_checkpoint(folder)):
                clock.there = time.perf_counter()

    class Timed(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **options: Any) -> None:
            super().save_checkpoint(*args, **options)
            clock.there = time.perf_counter()

    if way == "ours":
        from asyncckpt.integrations.lightning import AsyncckptIO

        plugin: Any = AsyncckptIO()
    else:
        plugin = AsyncCheckpointIO(Timed()) if way == "async" else Timed()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=BEFORE + AFTER,
        default_root_dir=folder,
        plugins=[plugin],
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = torch.utils.data.DataLoader(list(torch.randn(2 * (BEFORE + AFTER), WIDTH)), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(Module(), batches)


def _train_torchtitan(nbytes: int, folder: str, clock: Clock, *, ours: bool, mode: Any) -> None:
    """Run the loop of torchtitan's ``Trainer`` with its optimizers and manager. The ``Trainer`` itself needs CUDA."""
    _find_torchtitan()
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

    from asyncckpt.integrations.torchtitan import AsyncckptManager

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        model = Stack(nbytes)
        adamw = replace(default_adamw(lr=1e-3), implementation="for-loop")
        optimizers = OptimizersContainer(adamw, model_parts=[model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
            optimizers=optimizers, training_steps=BEFORE + AFTER
        )
        data: Any = list(torch.randn(2 * (BEFORE + AFTER), WIDTH))
        loader = ParallelAwareDataloader(data, 0, 1, batch_size=2)
        manager = (AsyncckptManager if ours else CheckpointManager).Config(
            enable=True,
            enable_first_step_checkpoint=True,
            interval=BEFORE,
            last_save_model_only=False,
            keep_latest_k=0,
            async_mode=mode,
        )
        checkpointer = manager.build(
            dataloader=loader,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )
        save = _watched(checkpointer.save, clock)
        there = Path(folder, checkpointer.folder, f"step-{BEFORE}", ".metadata")
        for step, batch in enumerate(loader, 1):
            clock.step()
            model(batch)["loss"].backward()
            checkpointer.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            if step == 1:  # the first save of each manager allocates memory
                checkpointer.save(step)
                checkpointer.maybe_wait_for_saving()
            if step == BEFORE:
                save(step)
            if not clock.there and there.exists():
                clock.there = time.perf_counter()
        checkpointer.close()
    finally:
        dist.destroy_process_group()


def _find_torchtitan() -> None:
    """Add torchtitan and its requirements to the path. ``scripts/peers.sh`` unpacked each into a folder of its own."""
    for name in ("torchtitan", "torchdata", "spmd-types", "tyro", "docstring-parser", "typeguard"):
        sys.path.extend(str(each) for each in Path(sys.prefix, "peers").glob(f"{name}-*") if str(each) not in sys.path)


WAYS: Mapping[str, tuple[Callable[..., None], bool]] = {
    "Hugging Face": (partial(_train_hugging_face, ours=False), False),
    "Hugging Face, asyncckpt": (partial(_train_hugging_face, ours=True), True),
    "Lightning": (partial(_train_lightning, way="stock"), False),
    "Lightning, AsyncCheckpointIO": (partial(_train_lightning, way="async"), False),
    "Lightning, asyncckpt": (partial(_train_lightning, way="ours"), True),
    "torchtitan": (partial(_train_torchtitan, ours=False, mode="disabled"), True),
    "torchtitan, async": (partial(_train_torchtitan, ours=False, mode="async"), True),
    "torchtitan, async_with_pinned_mem": (
        partial(_train_torchtitan, ours=False, mode="async_with_pinned_mem"),
        True,
    ),
    "torchtitan, asyncckpt": (partial(_train_torchtitan, ours=True, mode="async"), True),
}
"""Functions that train and save once, and whether they sync their files."""


def _turn(train: Callable[..., None], syncs: bool, nbytes: int, folder: str) -> dict[str, float]:
    with files.working_folder(folder) as within:
        clock = Clock()
        train(nbytes, within, clock)
        begun = time.perf_counter()
        if not syncs:
            files.sync(within)
        return clock.figures(time.perf_counter() - begun)


def measure(gib: float, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure all available ways, and the limits."""
    nbytes = int(gib * GIB)
    with suppress(ImportError):
        import lightning.pytorch.utilities.rank_zero  # noqa: F401  # the import sets up its loggers
    _be_quiet()
    limits = Limits(nbytes, folder)
    turns: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(_turn, train, syncs, nbytes, folder) for name, (train, syncs) in WAYS.items()
    }
    turns |= {name: partial(_limit, call) for name, call in limits.of_saves().items()}
    taken = take(turns, pace, "training")
    results = {name: found for name, found in taken.found.items() if name in WAYS}
    of_limits = {name: [each["durable"] for each in taken.found[name]] for name in limits.of_saves()}
    return {
        "title": f"A model and AdamW of {gib:g} GiB",
        "limits": of_limits,
        "results": results,
        "left_out": taken.left_out,
    }


def _limit(call: Callable[[], float]) -> dict[str, float]:
    return {"durable": call()}


def _be_quiet() -> None:
    import logging

    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "torchtitan", "asyncckpt"):
        logging.getLogger(name).setLevel(logging.ERROR)
