"""``asyncckpt demo``: a training that is killed and resumed, and what its checkpoints cost."""
