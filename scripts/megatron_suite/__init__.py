"""Run Megatron-LM's own tests of its checkpoints on CPUs, with its own writer and with asyncckpt."""
