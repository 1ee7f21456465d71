"""Older checkpoints are removed as transformers does, but each loses its name before its files."""

from __future__ import annotations

import os

from transformers.trainer_utils import sort_checkpoints

from asyncckpt.storage import remove_old_checkpoint


def rotate(run_dir: str, best: str | None, save_total_limit: int | None = None, use_mtime: bool = False) -> None:
    """Remove what transformers' ``rotate_checkpoints`` would.

    That removes them file by file under their names: who is killed meanwhile leaves a ``checkpoint-N`` with half of its
    files, and as it was changed last the next rotation would take it for the newest.

    Args:
        run_dir: Where the checkpoints are.
        best: The path of the one that stays in any case.
        save_total_limit, use_mtime: As there.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(run_dir, use_mtime=use_mtime)
    # What was set aside has the number of another, and goes first.
    checkpoints.sort(key=lambda path: ".abandoned-" not in os.path.basename(path))
    kept = {*checkpoints[-1:], *([] if best is None else [best])}
    surplus = max(0, len(checkpoints) - max(save_total_limit, len(kept)))
    for path in [each for each in checkpoints if each not in kept][:surplus]:
        remove_old_checkpoint(path)
