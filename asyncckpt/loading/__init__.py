"""Load a state dict from storage, or from the memory of a worker."""
