"""Checkpoints of a training run: a folder with one checkpoint a step."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asyncckpt import catalog
from asyncckpt.config import Config
from asyncckpt.engine import Engine
from asyncckpt.errors import CheckpointNotFoundError, ClosedError, StorageError
from asyncckpt.handle import Save
from asyncckpt.plan import StateDict
from asyncckpt.reader import from_first, load
from asyncckpt.worker.steps import complete_steps, step_folder

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Checkpointer:
    """Saves and loads the checkpoints ``root/step-00000100``.

    Make one at the start of a run and close it at the end, or use it as a context manager. The methods are for one
    thread at a time. A state dict is what ``torch.distributed.checkpoint`` takes: nested dicts and lists with tensors,
    and whatever pickles; values with ``state_dict()`` and ``load_state_dict()`` are asked for their state.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: Config | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """``root`` is made if it is missing. Raises ``StorageError`` where that cannot be.

        In a job of many ranks every rank makes one, with the same ``root`` on a file system they share, and all make
        the same calls in the same order. ``process_group``: those that save together; None: the whole job.
        """
        self.root = os.path.abspath(os.fspath(root))
        try:
            os.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise StorageError(f"making the folder for checkpoints failed: {error.strerror}", path=self.root) from error
        self._engine = Engine(config, process_group)
        self._process_group = process_group
        self._hooks: list[Any] = []
        self._newest: Save | None = None
        self._closed = False

    @property
    def config(self) -> Config:
        """As it was given."""
        return self._engine.config

    def prepare(self, state_dict: StateDict) -> None:
        """Do now what the first save would have to: start the worker, plan, take and touch the memory.

        Best called before the first training step. Raises as ``save`` does.
        """
        self._engine.prepare(state_dict)

    def save(self, step: int, state_dict: StateDict) -> Save:
        """Save ``state_dict`` as the checkpoint of ``step``.

        Returns when its tensors are copied: the checkpoint will hold their values of this moment, and the caller may go
        on and change them. (With ``Config.overlap``: see ``guard``.) Writing goes on in the worker; the handle tells
        how it went, and so do ``wait`` and ``close``, for failures that no handle was asked about.

        Raises ``CheckpointExistsError`` if that step is saved already, ``UnsavableStateError``, ``OutOfMemoryError``,
        ``WorkerDiedError``, ``SaveTimeoutError``, ``ClosedError``; then nothing was saved, and the next save may work.
        """
        if step < 0:
            raise ValueError(f"a step is 0 or more, not {step}")
        path = step_folder(self.root, step)
        self._newest = self._engine.save(path, state_dict, step=step, keep_last=self.config.keep_last)
        return self._newest

    def load(self, state_dict: dict[str, Any], step: int | None = None, *, verify: bool = True) -> int:
        """Load the checkpoint of ``step`` (None: the newest) into ``state_dict``, in place. Returns its step.

        It may have been saved by any number of ranks, and in any placement. All ranks load the same one, each what its
        part of the state needs; what goes wrong on one is raised on all.

        Waits first, up to ``Config.timeout`` seconds, for saves under way in this root, be it by this run or by the
        worker of one that was killed. Every byte is checked before it is used, unless ``verify`` is false.

        Raises ``CheckpointNotFoundError`` if there is none, ``DamagedCheckpointError``, ``MismatchError``.
        """
        if self._closed:
            raise ClosedError("this checkpointer is closed; make a new one", path=self.root)
        found = from_first(lambda: self._find(step), self._process_group)
        load(state_dict, step_folder(self.root, found), verify=verify, process_group=self._process_group)
        return found

    def _find(self, step: int | None) -> int:
        """``step``, or the newest, if there is a checkpoint of it."""
        if step is None:
            catalog.settle(self.root, self.config.timeout)
            step = catalog.latest(self.root)
            if step is None:
                raise CheckpointNotFoundError("there is no checkpoint here yet", path=self.root)
        if step not in self.steps():
            known = ", ".join(map(str, self.steps()[-5:])) or "none"
            raise CheckpointNotFoundError(
                f"there is no such checkpoint; the newest are: {known}", path=step_folder(self.root, step), step=step
            )
        return step

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, ascending."""
        return complete_steps(self.root)

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return catalog.latest(self.root)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended. Raises the first failure nobody was told of, or ``SaveTimeoutError``."""
        self._engine.wait(timeout)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """For ``Config.overlap``: have ``optimizer`` wait, before each step, until the newest save has its copy."""

        def wait_staged(*_: object) -> None:
            if self._newest is not None:
                self._newest.wait_staged(self.config.timeout)

        self._hooks.append(optimizer.register_step_pre_hook(wait_staged))

    def close(self) -> None:
        """Wait for all saves, end the worker, give the memory back; safe to call twice.

        Raises the first failure nobody was told of, or ``SaveTimeoutError`` if the worker is still writing after
        ``Config.timeout`` seconds; then it goes on alone.
        """
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._engine.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
