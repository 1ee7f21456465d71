"""How the image of a save travels from the worker that holds it to another process, on whatever host.

A worker lets others read under a lease (``server.py``). Who reads (``peer.py``) is a worker that keeps a copy of what
another holds, or a trainer that loads. Neither knows how the bytes move: that is a kind's, behind ``transport.py``.
"""
