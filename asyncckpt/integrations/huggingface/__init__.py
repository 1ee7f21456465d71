"""Save checkpoints of Hugging Face's Trainer, and of accelerate, in the background: one line to switch.

    huggingface.enable(trainer)  # then trainer.train() as ever
    huggingface.enable_accelerator(accelerator)  # then accelerator.save_state(folder) as ever

Both functions use ``capture.py``, which captures the files that these frameworks write.
"""

from __future__ import annotations

from asyncckpt.integrations.huggingface.accelerator import enable_accelerator
from asyncckpt.integrations.huggingface.trainer import enable

__all__ = ["enable", "enable_accelerator"]
