"""Weights to other hosts, over a ``torch.distributed`` group."""
