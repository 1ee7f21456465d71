"""Planning: compute the place of each value of a state dict, once for each structure."""
