"""From the trainer's tensors into shared memory: the copy that training waits for."""
