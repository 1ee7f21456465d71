"""From storage, or from the memory of a worker, back into a state dict."""
