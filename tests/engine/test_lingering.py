"""Test a worker that outlives its trainer: its lifetime, its access rights, and its cleanup."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.checkpoints import verify
from support.recovery import empty, has_left, source, train

from asyncckpt import Checkpointer
from asyncckpt.link.endpoint import Endpoint, connect, endpoint_name

pytestmark = pytest.mark.usefixtures("forkserver")


def test_it_lingers_and_leaves_without_a_trace(root: Path, runtime: Path) -> None:
    worker = train(root, 1, linger=0.5)
    assert worker is None or has_left(worker)
    assert not list(runtime.iterdir())
    with Checkpointer(root) as checkpointer:
        checkpointer.load(empty())
        assert source(checkpointer) == "storage"


def test_sigterm_sends_it_away_once_it_only_lingers(root: Path, tmp_path: Path, runtime: Path) -> None:
    worker = train(root, 1)
    assert worker is not None
    deadline = time.monotonic() + 30
    while not has_left(worker, 0.05) and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):  # the worker has just left
            worker.terminate()
    assert not list(runtime.iterdir())
    assert not verify(str(root / "step-00000001")).damages


def test_one_that_closes_leaves_nothing(root: Path, runtime: Path) -> None:
    train(root, 1, "close")
    assert not list(runtime.iterdir())


def test_the_endpoint_is_for_this_user(root: Path, runtime: Path) -> None:
    train(root, 1)
    assert runtime.stat().st_mode & 0o777 == 0o700
    name = endpoint_name(f"{os.path.realpath(root)}\n", 0)
    assert (runtime / f"{name}.lock").stat().st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        return
    # The worker refuses other users even if the folder's permissions let them in.
    runtime.chmod(0o777)
    ours = Path(tempfile.gettempdir())
    for parent in [parent for parent in runtime.parents if ours in parent.parents]:
        parent.chmod(0o755)
    code = f"""
import os, socket
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
folder = os.open({str(runtime)!r}, os.O_RDONLY)
try:
    client.connect(f"/proc/self/fd/{{folder}}/{name}.sock")
    client.settimeout(10)
    print("kept out" if client.recv(1) == b"" else "let in")
except PermissionError:
    print("kept out")
"""
    stranger = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert stranger.stdout == "kept out\n"
    assert connect(name) is None  # a folder that others may write to is not trusted either
    runtime.chmod(0o700)


def test_without_a_runtime_folder_it_saves_all_the_same(
    root: Path, runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.mkdir(mode=0o755)
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, empty()).result(60)
    assert "will not find the worker" in caplog.text and str(runtime) in caplog.text
    runtime.chmod(0o700)


def test_a_worker_without_a_runtime_folder_leaves_with_its_trainer(root: Path, runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    worker = train(root, 1)
    assert worker is None or has_left(worker)
    runtime.chmod(0o700)


def test_the_error_for_a_runtime_folder_without_locks_names_the_folder(runtime: Path) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(
            OSError, match=r"set \$ASYNC_CKPT_RUNTIME_DIR to a folder on a file system with locks"
        ) as caught:
            Endpoint(endpoint_name("job", 0), os.getpid())
    assert (caught.value.errno, caught.value.filename) == (errno.ENOLCK, str(runtime))
