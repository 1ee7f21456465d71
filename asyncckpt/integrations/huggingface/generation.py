"""The generation buffer of TRL's GRPO and RLOO trainers, as a file of their checkpoints.

The trainers generate for a block of prompts, and train on its slices for several steps. The checkpoints of
TRL have neither the block nor the place in it. A stock resume in the middle of a block generates for other prompts, and
trains on all of that block, so some prompts are used too often and others never.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from asyncckpt.extension import ranks_of

logger = logging.getLogger(__name__)

_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_PLACE, _BLOCK = "_step", "_buffered_inputs"


def has_buffer(trainer: Any) -> bool:
    """Return whether ``trainer`` is TRL's, and generates for blocks of prompts."""
    names = {each.__name__ for each in type(trainer).__mro__ if each.__module__.startswith("trl.trainer.")}
    return not names.isdisjoint(_TRAINERS)


def reset(trainer: Any) -> None:
    """Forget the block of an earlier training of this process."""
    setattr(trainer, _PLACE, 0)
    setattr(trainer, _BLOCK, None)


def save(trainer: Any, folder: Path) -> None:
    """Write this rank's block, and the place in it, to a file in ``folder``. At the end of a block, write the place."""
    step, options = getattr(trainer, _PLACE), _options(trainer)
    is_over = step % (options["steps_per_generation"] * options["num_iterations"]) == 0
    buffer = io.BytesIO()
    torch.save({"step": step, "options": options, "inputs": None if is_over else getattr(trainer, _BLOCK)}, buffer)
    # Not staged as a tensor file, because its size changes with each block.
    (folder / _name_of(trainer)).write_bytes(buffer.getvalue())


def load(trainer: Any, checkpoint: str | None) -> None:
    """Restore this rank's block and the place in it.

    All ranks begin with a new block if the checkpoint lacks the block of a rank, or has other options or another number
    of ranks.
    """
    if checkpoint is None:
        return
    found = _read(trainer, Path(checkpoint, _name_of(trainer)))
    # Ranks at different places would wait for each other in different collectives.
    are_found = ranks_of().gather(found is not None)
    if found is None:
        return
    if not all(are_found):
        logger.warning("the trainer begins with a new block, because another rank loads none from %s", checkpoint)
        return
    device = trainer.args.device
    setattr(trainer, _PLACE, found["step"])
    setattr(trainer, _BLOCK, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), found["inputs"]))


def _read(trainer: Any, path: Path) -> dict[str, Any] | None:
    """Return the contents of a file of ``save``, or None if the trainer cannot use the file."""
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises errors of many types
        logger.warning("%s is not loaded, and the trainer begins with a new block: %s", path, error)
        return None
    if found["options"] != _options(trainer):
        logger.warning("the trainer begins with a new block, because its options differ from those in %s", path)
        return None
    return found


def _options(trainer: Any) -> dict[str, int]:
    """Return the options that a block depends on. They are the same on all ranks."""
    names = "world_size", "per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps"
    return {name: getattr(trainer.args, name) for name in names} | {"num_iterations": trainer.num_iterations}


def _name_of(trainer: Any) -> str:
    return f"generation_{trainer.args.process_index}.pt"
