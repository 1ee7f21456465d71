"""Test ``asyncckpt doctor``: each planted trouble is named, on this host and around it."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.abilities import need_command
from support.cgroups import MIB, enter, memory_cgroup
from support.checkpoints import step_folder
from support.devices import TYPE, MadeUpDevices
from support.seccomp import need_seccomp, refuse
from support.states import small_state
from support.surroundings import mounted, nameless
from support.workers import wait_for

from asyncckpt import Checkpointer, cli
from asyncckpt.config import Config
from asyncckpt.doctor import diagnosis, host, place
from asyncckpt.link import process as worker_process
from asyncckpt.link.api import Claim
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.link.root_lock import RootLock
from asyncckpt.storage.local import LocalStorage

LIMIT_S = 60.0
Found = dict[tuple[str, str], str]
"""The text of each finding, by its level and its subject."""


def _doctor(
    root: Path | str,
    *arguments: str,
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    in_child: Callable[[], object] | None = None,
) -> Found:
    """Run the command in another process. ``before``: a command prefix."""
    command = [*before, sys.executable, "-m", "asyncckpt", "doctor", str(root), "--json", *arguments]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env={**os.environ, **found, **(environment or {})},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=in_child,
    )
    assert done.stdout, done.stderr
    findings = _by_subject(json.loads(done.stdout))
    assert done.returncode == (2 if any(level == "fails" for level, _ in findings) else 0), done.stderr
    return findings


def _by_subject(findings: Sequence[Mapping[str, str]]) -> Found:
    return {(each["level"], each["subject"]): f"{each['text']}; {each['advice']}" for each in findings}


def _here(root: Path, *, nbytes: int | None = None, **options: Any) -> Found:
    """Make the diagnosis in this process."""
    with Checkpointer(root, Config(**options)) as checkpointer:
        found = checkpointer.check(nbytes)
    assert str(found).count("\n") == len(found.findings) - 1
    return _by_subject([each._asdict() for each in found.findings])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_MOST_S", 0.01)


def test_a_healthy_place(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing fails, nothing is left behind, and a save works afterwards."""
    assert cli.main(["doctor", str(root), "--size", "1MB"]) == 0
    said = capsys.readouterr().out
    assert not root.exists()
    for subject in ("save", "speed", "link", "lock", "space", "memory", "worker", "runtime folder", "trainer dies"):
        assert any(line.split(maxsplit=1)[1].startswith(subject) for line in said.splitlines()), said
    assert "\nfails" not in said and not said.startswith("fails")
    with Checkpointer(root) as checkpointer:
        assert checkpointer.check(1 << 20).level != "fails"
        checkpointer.save(1, small_state()).result(LIMIT_S)
        assert checkpointer.check(1 << 20).level != "fails"
        assert sorted(os.listdir(root)) == ["asyncckpt.lock", "step-00000001"]
        assert checkpointer.load(small_state()) == 1


MOUNTS = {
    "full": (
        "mount -t tmpfs -o size=64k tmpfs {0} && {{ cat /dev/zero > {0}/all || true; }}",
        "fails",
        "save",
        "No space left",
    ),
    "inodes": ("mount -t tmpfs -o size=1g,nr_inodes=200 tmpfs {}", "fails", "files", "more files can be made"),
    "memory": ("mount -t tmpfs -o size=1g tmpfs {}", "risk", "medium", "in memory"),
    "read-only": ("mount --bind {0} {0} && mount -o remount,ro,bind {0}", "fails", "save", "read-only"),
    "container": (
        "mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work && mount -t overlay"
        " -o lowerdir={0},upperdir=/mnt/upper,workdir=/mnt/work overlay {0}",
        "risk",
        "medium",
        "ends with its container",
    ),
    "barriers": (
        "truncate -s 32M {0}.disk && mkfs.ext4 -q {0}.disk && mount -o loop,barrier=0 {0}.disk {0}",
        "risk",
        "medium",
        "may lose what it has confirmed",
    ),
}


@pytest.mark.parametrize("trouble", MOUNTS)
def test_mounts(root: Path, trouble: str) -> None:
    commands, level, subject, text = MOUNTS[trouble]
    root.mkdir()
    found = _doctor(root, before=mounted(root, *commands.format(root).split(" && ")))
    assert text in found[level, subject], found


def test_another_user(root: Path) -> None:
    root.mkdir()
    found = _doctor(root / "sub", before=nameless(root))
    assert "Permission denied" in found["fails", "save"] and "check the permissions" in found["fails", "save"]


def test_a_file_in_the_path(root: Path) -> None:
    root.write_text("a file")
    assert "part of the path is a file" in _doctor(root / "sub")["fails", "save"]


def test_limits_of_processes(root: Path) -> None:
    def limit() -> None:
        for kind, most in (
            (resource.RLIMIT_NOFILE, 100),
            (resource.RLIMIT_NPROC, 40),
            (resource.RLIMIT_FSIZE, 1 << 20),
            (resource.RLIMIT_AS, 1 << 36),
        ):
            resource.setrlimit(kind, (most, most))

    found = _doctor(root, "--size", "20GB", in_child=limit)
    assert "ulimit -f" in found["fails", "save"]
    for option in "nufv":
        assert "raise that limit" in found["fails", f"ulimit -{option}"]


def test_options_and_this_host(root: Path, tmp_path: Path) -> None:
    """One processor, a runtime folder that others may open, and options of the environment."""
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    options = {"ASYNC_CKPT_DIRECT_IO": "0", "ASYNC_CKPT_LINGER": "0", "SLURM_STEP_ID": "0"}
    found = _doctor(root, before=("taskset", "-c", "0"), environment={**options, FOLDER_VARIABLE: str(shared)})
    assert "page cache" in found["slow", "speed"] and "direct_io" in found["slow", "speed"]
    assert "one core" in found["slow", "cores"]
    assert FOLDER_VARIABLE in found["risk", "runtime folder"]
    assert "linger" in found["risk", "trainer dies"]
    assert "asyncckpt worker" in found["risk", "job step ends"] and "replicas" in found["risk", "host dies"]


def test_a_worker_of_the_platform_outlives_a_container(root: Path) -> None:
    before = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    need_command(*before, "true")
    assert "asyncckpt worker" in _doctor(root, before=before)["risk", "container dies"]
    command = [sys.executable, "-m", "asyncckpt", "worker", "--root", str(root)]
    with subprocess.Popen([*before, *command]) as worker:
        try:

            def is_kept() -> bool:
                return ("ok", "container dies") in _doctor(root, before=before)

            wait_for(is_kept)
        finally:
            worker.kill()


def test_a_cgroup_that_dies_as_a_group(root: Path) -> None:
    marks = "mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
    marks += "echo 1 > /sys/fs/cgroup/memory.oom.group && echo 1 > /sys/fs/cgroup/memory/memory.oom.group"
    found = _doctor(root, before=mounted(root, *marks.split(" && ")))
    assert "asyncckpt worker" in found["risk", "out of memory"]


def test_too_little_memory_in_a_cgroup(root: Path) -> None:
    with memory_cgroup() as (folder, limit):
        (folder / limit).write_text(str(2048 * MIB))
        found = _doctor(root, "--size", "4GB", in_child=lambda: enter(folder))
        assert "one image takes 4 GB" in found["fails", "memory"]
        found = _doctor(root, "--size", "1GB", in_child=lambda: enter(folder))
        assert "no second one" in found["slow", "memory"]


def test_too_little_space(root: Path) -> None:
    space = os.statvfs(root.parent)
    free = space.f_bavail * space.f_frsize
    assert "the file system has" in _doctor(root, "--size", "900TB")["fails", "save"]
    found = _doctor(root, "--size", str(free // 3), environment={"ASYNC_CKPT_KEEP_LAST": "5"})
    assert "lower the number of checkpoints" in found["fails", "space"]


def test_another_job(root: Path) -> None:
    """The folder is of another job, and that job is saving there."""
    with Checkpointer(root, Config(job_id="theirs")) as theirs:
        theirs.save(1, small_state()).result(LIMIT_S)
        assert "saves to this folder" in _doctor(root)["fails", "root"]
    assert "of job 'theirs'" in _doctor(root, environment={"ASYNC_CKPT_JOB_ID": "mine"})["fails", "root"]


def test_a_dead_trainer_whose_worker_still_writes_is_no_other_job(root: Path, tmp_path: Path) -> None:
    trainer = subprocess.Popen(["sleep", "600"])
    root.mkdir()
    lock = RootLock.take(Claim(str(root), None), trainer.pid)
    assert isinstance(lock, RootLock)
    assert "saves to this folder" in _here(root)["fails", "root"]
    trainer.kill()
    trainer.wait()
    assert ("fails", "root") not in _here(root)
    lock.release()


def test_a_full_set_of_checkpoints_needs_room_for_one_more(root: Path) -> None:
    """Retention removes the oldest one."""
    with Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, small_state()).result(LIMIT_S)
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    assert "beside 3" in _here(root, nbytes=free // 2, keep_last=3)["ok", "space"]
    assert "beside 3" in _here(root, nbytes=free // 2, keep_last=9)["fails", "space"]


def test_odd_mounts(root: Path) -> None:
    """A mount without a source, and a mount point with letters beyond ASCII and a space."""
    place_ = root / "donn\u00e9es \\ x"
    place_.mkdir(parents=True)
    above = root / "odd"
    above.mkdir()
    before = mounted(root, f"mount -t tmpfs '' {above}", f"mount -t tmpfs tmpfs '{place_}'")
    assert str(place_) in _doctor(place_, before=before)["risk", "medium"]


def test_a_checkpoint_is_no_root(root: Path) -> None:
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state()).result(LIMIT_S)
    assert "this is a checkpoint" in _doctor(step_folder(str(root), 1))["fails", "root"]


def test_the_clock_of_the_file_system(root: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert "+3600 s off" in _here(root)["risk", "clock"]


@pytest.mark.usefixtures("quick")
def test_storage_without_links_and_locks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr("fcntl.flock", refused)
    found = _here(root)
    assert "written again" in found["slow", "link"] and "no locks" in found["risk", "lock"]


@pytest.mark.usefixtures("quick")
def test_a_stale_listing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "names_in", lambda *_: [])
    assert "not in a listing" in _here(root)["risk", "listing"]


def test_storage_that_does_not_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(LocalStorage, "begin_checkpoint", lambda *_, **__: answers.wait())
    monkeypatch.setattr(diagnosis, "ANSWER_S", 0.1)
    found = _here(root)
    answers.set()
    assert "has not answered for 0.1 s" in found["fails", "save"]


@pytest.mark.usefixtures("quick")
def test_a_worker_that_does_not_start(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "command", lambda: ["false"])
    assert "ended with status 1 while it started" in _here(root)["fails", "worker"]


@pytest.mark.usefixtures("quick")
def test_shared_memory_and_huge_pages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "only_private", lambda: True)
    assert "shmem_enabled" in _here(root)["slow", "huge pages"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert "ulimit -f" in _here(root)["fails", "shared memory"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_memory_files_that_are_refused(root: Path) -> None:
    """There is /dev/shm, which may be too small."""
    need_seccomp()
    in_child = partial(refuse, "memfd_create", errno.EPERM)
    found = _doctor(root, in_child=in_child)
    assert "medium: Memory" in found["risk", "shared memory"]
    found = _doctor(root, "--size", "1TB", in_child=in_child)
    assert "memfd_create is refused" in found["fails", "shared memory"]


def test_a_driver_that_registers_no_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        limit, already_registered = 1 << 30, 712

        def register(self, *_: int) -> int:
            return 2

        def unregister(self, *_: int) -> int:
            return 2

    kind = MadeUpDevices()
    kind.pinner = Refusing()
    kind.install(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(TYPE))
    module = SimpleNamespace(current_device=lambda: 0, is_available=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert "RLIMIT_MEMLOCK" in _here(root)["slow", "pinned memory"]


def test_versions_that_were_not_tried(root: Path, tmp_path: Path) -> None:
    for name, version in (("verl", "0.1.0"), ("deepspeed", "1.2")):
        (folder := tmp_path / f"{name}-{version}.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sys.path.append(str(tmp_path))
    try:
        said = [f"{each.text}" for each in host.examine_host(None, None, 60.0) if each.level == "risk"]
    finally:
        sys.path.remove(str(tmp_path))
    assert any("verl 0.1.0 has not been tried: 0.8 to 0.9" in text for text in said)
    assert any("deepspeed 1.2 has not been tried" in text for text in said)


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    environment = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    assert "s3://bucket/run" in _doctor("s3://bucket/run", environment=environment)["fails", "save"]
