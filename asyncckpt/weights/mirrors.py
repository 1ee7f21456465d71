"""Mirrors, for readers: a worker of this host that copies the publication of another host.

The mirror belongs to no process. The first reader starts it, and all other readers of the host find it at the endpoint
of the publication. The mirror stays while somebody reads, and ``Config.linger`` seconds more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, JobTakenError, WorkerDiedError
from asyncckpt.link.client import WorkerClient
from asyncckpt.link.endpoint import endpoint_name
from asyncckpt.link.endpoint_messages import Follow, Followed
from asyncckpt.link.process import WorkerOptions
from asyncckpt.link.takeover import ReaderClient

logger = logging.getLogger(__name__)

# The reader that starts the mirror still needs time to connect.
_LEAST_LINGER_S = 5.0


@dataclass(frozen=True)
class MirrorOptions:
    """The publication that a host's mirror follows (see ``transfer/locator.py``), and the options of the worker."""

    job: str
    locator: str
    config: Config

    def connect(self) -> ReaderClient | None:
        """Connect to the worker that has the publication on this host. Start a worker if there is none.

        Return None if the worker has just left. Raises ``CheckpointError`` if no worker can be started.
        """
        endpoint = endpoint_name(self.job, 0)
        if (client := ReaderClient.connect(endpoint)) is None:
            self._start(endpoint)
            client = ReaderClient.connect(endpoint)
        if client is None:
            return None
        client.timeout = self.config.timeout
        try:
            if (trouble := client.follow(self.locator).trouble) is not None:
                logger.info("the worker of this host follows nobody: %s", trouble)
        except BaseException as error:
            client.close()
            if isinstance(error, (EOFError, OSError)):
                return None
            raise
        return client

    def _start(self, endpoint: str) -> None:
        config = self.config
        options = WorkerOptions(
            nice=config.nice,
            io_class=config.io_class,
            start_timeout=config.start_timeout,
            linger=max(config.linger, _LEAST_LINGER_S),
            endpoint=endpoint,
            job=self.job,
        )
        worker = WorkerClient(options)
        try:
            trouble = worker.ask(Follow(self.locator), Followed, config.timeout, "following a publisher").trouble
            if trouble is not None:
                raise CheckpointError(f"what is published elsewhere cannot be had: {trouble}")
            worker.listen(config.timeout)
        except BaseException as error:
            worker.close(config.timeout)
            if isinstance(error, JobTakenError):  # another reader was faster, or a trainer publishes here
                return
            if isinstance(error, WorkerDiedError):  # it was up before, so the next question starts another
                logger.warning("the mirror of this host was lost as it began: %s", error)
                return
            raise
        worker.detach()
