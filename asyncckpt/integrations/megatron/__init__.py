"""Save Megatron-LM's checkpoints through asyncckpt, without a change to Megatron-LM's source.

    python -m asyncckpt.integrations.megatron pretrain_gpt.py \\
        --async-save --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm ...

Or call ``asyncckpt.integrations.megatron.install()`` before any module of Megatron-LM is imported.
"""

from asyncckpt.integrations.megatron.wiring import MegatronSave as MegatronSave
from asyncckpt.integrations.megatron.wiring import MegatronWiringError as MegatronWiringError
from asyncckpt.integrations.megatron.wiring import install as install
