"""Events as scalars in TensorBoard and in Weights & Biases, beside the scalars of the training.

Each committed save of a step, and each load, records a few numbers: ``asyncckpt/stall_s``, ``asyncckpt/durable_s``,
``asyncckpt/write_bytes_per_s`` and ``asyncckpt/load_s``. ``asyncckpt/failures`` is the number of failed saves so far.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from asyncckpt.events import Event

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Adds scalars to the writer of the training. Give it to ``Config.on_event``, on the rank with the writer."""

    def __init__(self, writer: SummaryWriter) -> None:
        """Use ``writer`` from another thread, which is allowed. The caller closes it, after the checkpointer."""
        self._writer = writer
        self._scalars = _Scalars()

    def __call__(self, event: Event) -> None:
        """Record an event."""
        for name, value in self._scalars.of(event).items():
            self._writer.add_scalar(name, value, event.step, event.at)


class WandB:
    """Logs to the run of the training. Give it to ``Config.on_event``, on the rank with the run.

    The numbers are sent with the next log of the training, so that its own count of steps does not change. If there are
    two saves before the next log, only the last one counts.
    """

    def __init__(self, run: wandb.Run) -> None:
        """Use ``run`` from another thread. The caller finishes it, after the checkpointer is closed."""
        self._run = run
        self._scalars = _Scalars()
        for steps in ("asyncckpt/step", "asyncckpt/loaded_step"):
            run.define_metric(steps, hidden=True)
        run.define_metric("asyncckpt/*", step_metric="asyncckpt/step")
        run.define_metric("asyncckpt/load_s", step_metric="asyncckpt/loaded_step")

    def __call__(self, event: Event) -> None:
        """Record an event."""
        if scalars := self._scalars.of(event):
            steps = "asyncckpt/loaded_step" if event.phase == "loaded" else "asyncckpt/step"
            self._run.log({**scalars, steps: event.step}, commit=False)


class _Scalars:
    """The scalars of events."""

    def __init__(self) -> None:
        self._failures = 0
        self._lock = threading.Lock()

    def of(self, event: Event) -> dict[str, float]:
        """Return the scalars by name. Most events, and events without a step, have none."""
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
