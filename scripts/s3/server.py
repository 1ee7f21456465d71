"""S3 served by moto, in a process of its own on loopback, and the environment variables of its users."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 60.0


@contextlib.contextmanager
def served(folder: Path, bucket: str) -> Iterator[str]:
    """Serve a bucket, set the environment of this process and its children, and yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    # By default moto keeps objects above 5 MiB in files, and reads the whole file for each range.
    environment = os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 30)}
    with (
        open(folder / "store.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as server,
    ):
        try:
            deadline, endpoint = time.monotonic() + LIMIT_S, f"http://127.0.0.1:{port}"
            while not _listens(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"moto does not serve: {(folder / 'store.log').read_text()[-500:]}")
                time.sleep(0.1)
            set_environment(endpoint)
            import boto3  # a requirement of moto

            boto3.client("s3").create_bucket(Bucket=bucket)
            yield endpoint
        finally:
            _replace_environment(before)
            ended = server.poll()
            server.kill()
            if ended is not None:
                raise RuntimeError(f"moto has ended by itself, with {ended}")


def set_environment(endpoint: str) -> None:
    """Set the environment variables of a user with a store at ``endpoint``."""
    found = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    _replace_environment(found | {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"})


def _replace_environment(variables: dict[str, str]) -> None:
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(variables)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
