"""Save by accelerate's ``Accelerator.save_state`` in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedType

from asyncckpt.config import Config
from asyncckpt.errors import StorageError
from asyncckpt.extension import Rotation, Save, engines, storage_for
from asyncckpt.integrations.capture import (
    begin_save,
    capturing,
    lock_for_worker,
    replaced,
    told_to_all,
    wait_for_dead_trainer,
)

logger = logging.getLogger(__name__)

_KINDS_WITH_FILES_OF_THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
# All ranks write files with these names, each over the other ranks' files. Only the first rank's files are saved.
_OF_ALL_RANKS = re.compile(r"scaler\.pt|dl_state_dict(_\d+)?\.bin")


def enable_accelerator(accelerator: Accelerator, config: Config | None = None) -> None:
    """Have ``accelerator.save_state`` save in the background from now on. A second call changes nothing.

    ``save_state`` returns when all tensors are staged. A failure is raised by the next ``save_state``, by
    ``load_state`` or by ``end_training``. The last two wait until all saves have ended. Checkpoints beyond
    ``total_limit`` are removed when the new checkpoint is durable.

    Args:
        accelerator: The accelerator. With DeepSpeed, Megatron-LM, XLA or ``save_on_each_node`` the accelerator keeps
            saving by itself, with a warning.
        config: Config of the job's engine, if this is its first save; None: from the environment.
    """
    if not isinstance(getattr(accelerator.save_state, "__self__", None), _AcceleratorSaves):
        _AcceleratorSaves(accelerator, config)


class _AcceleratorSaves:
    """The saves of one accelerator. The public methods replace the accelerator's own."""

    def __init__(self, accelerator: Any, config: Config | None) -> None:
        self._accelerator, self._config = accelerator, config
        self._stock_save, self._stock_load = accelerator.save_state, accelerator.load_state
        self._stock_end = accelerator.end_training
        self._warned = False
        self._under_way: list[Save] = []  # saves with automatic names
        accelerator.save_state, accelerator.load_state = self.save_state, self.load_state
        accelerator.end_training = self.end_training

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Call the accelerator's own method, and return the folder when all tensors are staged."""
        accelerator = self._accelerator
        project = accelerator.project_configuration
        is_many = project.save_on_each_node and accelerator.num_processes > 1
        if accelerator.distributed_type in _KINDS_WITH_FILES_OF_THEIR_OWN or is_many:
            if not self._warned:
                logger.warning("accelerate saves checkpoints of this kind itself, and the training waits")
            self._warned = True
            return self._stock_save(output_dir, safe_serialization, **options)
        root = None
        if project.automatic_checkpoint_naming:
            root = os.path.join(accelerator.project_dir, "checkpoints")
            output_dir = os.path.join(root, f"checkpoint_{accelerator.save_iteration}")
            if os.path.exists(output_dir):
                raise ValueError(f"{output_dir} is there already; set project_configuration.iteration")
        place = os.path.abspath(output_dir)
        if os.path.islink(place):
            place = os.path.realpath(place)  # accelerate also writes to the link's target
        if not _is_ours_to_take(place):
            logger.warning("%s has other files: accelerate saves there itself, and the training waits", place)
            return self._stock_save(output_dir, safe_serialization, **options)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        lock_for_worker(os.path.dirname(place), self._config)
        with (
            told_to_all(place, None, self._config),
            capturing(os.path.basename(place)) as capture,
            replaced(project, "automatic_checkpoint_naming", False),  # so that accelerate saves to the given folder
        ):
            self._stock_save(str(capture.folder), safe_serialization, **options)
        if not accelerator.is_main_process:
            for name in filter(_OF_ALL_RANKS.fullmatch, list(capture.files.contents)):
                del capture.files.contents[name]
        rotation = None
        self._under_way = [each for each in self._under_way if not each.done()]
        if root is not None and project.total_limit is not None and accelerator.is_main_process:
            # Keep the newest, whatever its number, because accelerate counts from the beginning after a restart.
            others = {*_numbered(root), *(each.path for each in self._under_way)} - {place}
            rotation = Rotation(tuple(sorted(others, key=_number)), max(project.total_limit, 1) - 1)
        save = begin_save(place, capture, None, self._config, rotation=rotation)
        if root is not None:
            self._under_way.append(save)
        return Path(output_dir)

    def load_state(self, input_dir: Any = None, *args: Any, **options: Any) -> Any:
        """Wait until all saves have ended, then call the accelerator's own method."""
        self._wait()
        accelerator = self._accelerator
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            # Choose the folder here, because accelerate might choose the remains of a killed save.
            root = os.path.join(accelerator.project_dir, "checkpoints")
            wait_for_dead_trainer(root, self._config)
            input_dir = max(_numbered(root), key=_number, default=None)
        return self._stock_load(input_dir, *args, **options)

    def end_training(self) -> None:
        """Wait until all saves have ended, then call the accelerator's own method."""
        self._wait()
        self._stock_end()

    def _wait(self) -> None:
        engines.get(config=self._config).wait()


def _is_ours_to_take(place: str) -> bool:
    """Return whether ``place`` is free or holds only a checkpoint of ours, so that one step can replace it."""
    with contextlib.suppress(StorageError):  # the save raises the same error on all ranks
        return storage_for(place).may_put(place, "replace")
    return True


def _numbered(root: str) -> list[str]:
    """Return the numbered checkpoint folders in ``root``."""
    names = os.listdir(root) if os.path.isdir(root) else []
    return [os.path.join(root, name) for name in names if re.fullmatch(r"checkpoint_\d+", name)]


def _number(path: str) -> int:
    return int(path.rpartition("_")[2])
