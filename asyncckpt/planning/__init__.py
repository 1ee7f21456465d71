"""What of a state dict goes where, found out once for a structure."""
