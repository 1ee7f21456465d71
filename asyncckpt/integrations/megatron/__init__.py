"""Megatron-LM saves through asyncckpt, without a change to its source.

    python -m asyncckpt.integrations.megatron pretrain_gpt.py \\
        --async-save --use-persistent-ckpt-worker --async-ckpt-use-cpu-shm ...

or, before anything of Megatron-LM is imported, ``asyncckpt.integrations.megatron.install()``.
"""

from asyncckpt.integrations.megatron.wiring import MegatronSave as MegatronSave
from asyncckpt.integrations.megatron.wiring import MegatronWiringError as MegatronWiringError
from asyncckpt.integrations.megatron.wiring import install as install
