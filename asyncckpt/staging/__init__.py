"""Staging: copy the trainer's tensors into shared memory. The training waits for this copy."""
