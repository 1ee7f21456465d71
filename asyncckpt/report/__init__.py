"""What the command line shows of checkpoints and of workers.

What we have written is looked at without torch, and without reading a pickle.
"""
