"""Shared memory: segments, the header page with the slot states, and the memory budget. Imports no torch."""
