"""Reports of the command line about checkpoints and workers.

Checkpoints of this library are inspected without torch, and without reading a pickle.
"""
