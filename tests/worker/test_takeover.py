"""Whose worker it is that is found at an endpoint."""

from __future__ import annotations

import os
import subprocess

import pytest
from multiprocess.connection import Connection

from asyncckpt.worker import messages, takeover
from asyncckpt.worker.endpoint import Endpoint, endpoint_name
from asyncckpt.worker.takeover import Takeover


def test_one_that_is_too_busy_to_notice_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer is dead: it is nobody else's, however long it takes to say so."""
    monkeypatch.setattr(takeover, "_NOTICE_S", 0.0)
    with subprocess.Popen(["true"]) as trainer:
        pass
    answers = iter([messages.TrainerAlive(os.getpid(), trainer.pid)] * 3)

    def answer(connection: Connection) -> None:
        messages.receive(connection)
        messages.send(connection, next(answers, None) or messages.Inventory(os.getpid(), False, (), (), ()))
        messages.receive(connection)

    name = endpoint_name("job", 0)
    endpoint = Endpoint(name, trainer.pid)
    endpoint.listen(answer)
    try:
        found = Takeover.find(name, 30)
        assert found is not None and next(answers, None) is None
        found.close()
    finally:
        endpoint.close()
