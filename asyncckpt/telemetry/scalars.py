"""Events as scalars beside those of the training: in TensorBoard, and in Weights & Biases.

Each committed save of a step, and each load, is a few numbers: ``asyncckpt/stall_s``, ``asyncckpt/durable_s``,
``asyncckpt/write_bytes_per_s``, ``asyncckpt/load_s``, and ``asyncckpt/failures``, how many saves have failed so far.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from asyncckpt.events import Event

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Adds scalars by the writer that the training has. Give it to ``Config.on_event``, on the rank with the writer."""

    def __init__(self, writer: SummaryWriter) -> None:
        """``writer`` is used from a thread, as it may be. It stays the caller's: close it after the checkpointer."""
        self._writer = writer
        self._scalars = _Scalars()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        for name, value in self._scalars.of(event).items():
            self._writer.add_scalar(name, value, event.step, event.at)


class WandB:
    """Logs to the run that the training has. Give it to ``Config.on_event``, on the rank with the run.

    The numbers go out with what the training logs next: so its own count of steps stays as it is. Of two saves before
    that the last one counts.
    """

    def __init__(self, run: wandb.Run) -> None:
        """``run`` is used from a thread. It stays the caller's: finish it after the checkpointer is closed."""
        self._run = run
        self._scalars = _Scalars()
        for steps in ("asyncckpt/step", "asyncckpt/loaded_step"):
            run.define_metric(steps, hidden=True)
        run.define_metric("asyncckpt/*", step_metric="asyncckpt/step")
        run.define_metric("asyncckpt/load_s", step_metric="asyncckpt/loaded_step")

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if scalars := self._scalars.of(event):
            steps = "asyncckpt/loaded_step" if event.phase == "loaded" else "asyncckpt/step"
            self._run.log({**scalars, steps: event.step}, commit=False)


class _Scalars:
    """What there is to log of an event."""

    def __init__(self) -> None:
        self._failures = 0
        self._lock = threading.Lock()

    def of(self, event: Event) -> dict[str, float]:
        """By their names; none of most events, and of those without a step, which have no place among others."""
        if event.step is None:
            return {}
        match event.phase:
            case "committed":
                found = {"stall_s": event.timings.get("stall_s", 0.0), "durable_s": event.seconds or 0.0}
                if (write_s := event.timings.get("write_s", 0.0)) > 0 and event.nbytes is not None:
                    found["write_bytes_per_s"] = event.nbytes / write_s
            case "failed":
                with self._lock:
                    self._failures += 1
                    found = {"failures": float(self._failures)}
            case "loaded":
                found = {"load_s": event.seconds or 0.0}
            case _:
                return {}
        return {f"asyncckpt/{name}": value for name, value in found.items()}
