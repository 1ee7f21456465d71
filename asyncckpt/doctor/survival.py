"""Tell what survives the death of the trainer, its container, its job step, its cgroup and its host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncckpt.doctor.finding import Finding
from asyncckpt.link.endpoint import connect, peer_pid
from asyncckpt.shm.budget import cgroup_folders

# The first PID namespace of a machine, see PROC_PID_INIT_INO in linux/proc_ns.h.
_FIRST_NAMESPACE = "pid:[4026531836]"
_MARKS = Path("/.dockerenv"), Path("/run/.containerenv")
_ADVICE = "run `asyncckpt worker` outside of it, see docs/launchers.md"


def examine_survival(
    linger: float, replicas: int, environment: Mapping[str, str], *, is_outside: bool
) -> Iterator[Finding]:
    """Yield one finding for each thing that may die.

    Args:
        linger: ``Config.linger``.
        replicas: ``Config.replicas``.
        environment: The environment of this process.
        is_outside: See ``has_worker_outside``.
    """
    if linger == 0:
        text = "the staged save is written, and a restart reads from storage (Config.linger is 0)"
        yield Finding("trainer dies", "risk", text, "set Config.linger")
    else:
        yield Finding("trainer dies", "ok", "the staged save is written, and a restart reads from memory")
    yield Finding("worker dies", "ok", "the save under way fails, and another worker starts")
    kept = "the platform's worker writes the staged save, and a restart reads from memory"
    lost = "the worker dies, too: the staged save is lost, and a restart reads the last durable checkpoint"
    for name, applies in (
        ("container dies", _is_in_container(environment)),
        ("job step ends", "SLURM_STEP_ID" in environment),
        ("out of memory", _dies_as_group()),
    ):
        if applies:
            yield Finding(name, "ok", kept) if is_outside else Finding(name, "risk", lost, _ADVICE)
    if replicas:
        yield Finding("host dies", "ok", f"other hosts have copies, so that {replicas} may die")
    else:
        text = "staged saves are lost, and a restart reads the last durable checkpoint"
        yield Finding("host dies", "risk", text, "Config.replicas=1 keeps copies on another host")


def has_worker_outside(endpoint: str) -> bool:
    """Return whether a worker listens that is in another container or cgroup than this process."""
    if (connection := connect(endpoint)) is None:
        return False
    with connection:
        pid = peer_pid(connection)
    return pid == 0 or _cgroups_of(pid) != _cgroups_of(os.getpid())


def _cgroups_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cgroup").read_text()
    return ""


def _is_in_container(environment: Mapping[str, str]) -> bool:
    if "KUBERNETES_SERVICE_HOST" in environment or any(mark.exists() for mark in _MARKS):
        return True
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE
    return False


def _dies_as_group() -> bool:
    """Return whether the kernel kills all processes of a cgroup of this process when memory runs out there."""
    for folder, _, _ in cgroup_folders():
        with contextlib.suppress(OSError):
            if (folder / "memory.oom.group").read_text().strip() == "1":
                return True
    return False
