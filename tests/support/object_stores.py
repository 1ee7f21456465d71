"""Object stores for tests: an S3 server of moto, with a prefix for each test."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from asyncckpt.storage.objects import objects_at, split_address

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server with a bucket."""
    with pytest.MonkeyPatch.context() as kept:
        # By default moto keeps objects above 5 MiB in files, and reads the whole file for each range request.
        kept.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(1 << 30))
        kept.setattr(S3Response, "put_object", _one_by_one(S3Response.put_object))
        server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        server.start()
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        with pytest.MonkeyPatch.context() as patch:
            set_environment(patch, endpoint)
            boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield endpoint
        server.stop()


def _one_by_one(put: Callable[[S3Response], Any]) -> Callable[[S3Response], Any]:
    """Serialize puts. S3 checks a condition and writes in one step, but in moto two threads can both pass the check."""
    lock = threading.Lock()

    def locked(response: S3Response) -> Any:
        with lock:
            return put(response)

    return locked


@pytest.fixture
def s3_root(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An unused address. This process and its children have the server in their environment."""
    pytest.importorskip("obstore")
    set_environment(monkeypatch, s3_server)
    address = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    yield address
    # The server keeps all objects in memory.
    set_environment(monkeypatch, s3_server)
    objects_at(address).delete(keys_below(address))


def set_environment(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Set the environment of a user with a store at ``endpoint``."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def keys_below(address: str) -> list[str]:
    """Return the keys of all objects below an address."""
    return [each.key for each in objects_at(address).list(split_address(address)[1])]
