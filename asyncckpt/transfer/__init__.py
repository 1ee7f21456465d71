"""Transfer: how images of saves, and published weights, travel from the worker that holds them to another process.

A worker lets other processes read under a lease (``server.py``). The reader (``holder.py``) is a worker that keeps a
copy, or a trainer that loads, on any host. On both sides, ``transport.py`` hides how the bytes move.
"""
