"""How a message crosses the socket: pickled by the plain pickler.

``Connection.send`` would make a pickler that knows closures for every message, at 0.3 ms each, in every save.
What a user's own function needs to travel can be pickled by ``multiprocess`` into a field of a message.
"""

from __future__ import annotations

import pickle
from typing import Any

from multiprocess.connection import Connection


def send(connection: Connection, message: object) -> None:
    """Send one message of ``messages.py``. Raises ``OSError`` when nobody is at the other end."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Wait for the next message. Raises ``EOFError`` or ``OSError`` when the other end is gone."""
    return pickle.loads(connection.recv_bytes())
