"""Slurm on one node: its daemons, an allocation, and job steps in it. Needs root, and Debian's ``slurm-wlm``."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.threads import wait_until
from torture.tally import LIMIT_S

# Seconds between SIGTERM and SIGKILL when a step is cancelled.
KILL_WAIT_S = 2


class NoSlurmError(Exception):
    """Slurm is not installed, or does not start here."""


class Allocation:
    """A job that holds the node until the end of the ``with`` block of ``one_node``."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._job = self._run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 100000").strip()
        if not wait_until(lambda: "RUNNING" in self._run("squeue", "-h", "-o", "%T", f"--job={self._job}"), LIMIT_S):
            raise NoSlurmError("its job does not begin")

    def step(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a job step beside others of the job. It has no standard output."""
        step = ("srun", f"--jobid={self._job}", "--overlap", "--ntasks=1", "--output=/dev/null", "--error=/dev/null")
        environment = self._environment | {FOLDER_VARIABLE: os.environ[FOLDER_VARIABLE]}
        said = subprocess.DEVNULL  # it tells of each process that is killed
        return subprocess.Popen([*step, *command], env=environment, stderr=said, start_new_session=True)

    def cancel(self, step: str) -> None:
        """Cancel a step: SIGTERM, and SIGKILL for all processes of its cgroup."""
        self._run("scancel", f"{self._job}.{step}")

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise NoSlurmError(f"{command[0]}: {done.stderr.strip()}")
        return done.stdout


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[Allocation]:
    """Run the daemons of Slurm, with all their files in ``folder``. Raises ``NoSlurmError``."""
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(name) is None:
            raise NoSlurmError(f"{name} is not installed")
    if os.geteuid() != 0:
        raise NoSlurmError("its daemons need root")
    for name in ("controller", "node", "munge"):
        (folder / name).mkdir(parents=True)
    (key := folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(_configuration(folder))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nConstrainCores=no\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    for name in [name for name in environment if name.startswith(("SLURM_", "SRUN_")) and name != "SLURM_CONF"]:
        del environment[name]
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket"]
    munge += [f"--{name}-file={folder}/munge/{name}" for name in ("log", "pid", "seed")]
    with contextlib.ExitStack() as held:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"]):
            with open(folder / f"{command[0]}.out", "wb") as out:
                daemon = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
            held.callback(_end, daemon)
        look = ["sinfo", "-h", "-o", "%T"]
        asked = partial(subprocess.run, look, env=environment, capture_output=True, text=True, check=False)
        if not wait_until(lambda: "idle" in asked().stdout, LIMIT_S, 0.2):
            raise NoSlurmError("its node does not come up")
        yield Allocation(environment)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _configuration(folder: Path) -> str:
    cores = os.cpu_count() or 1
    settings = {
        "ClusterName": "torture",
        "SlurmctldHost": "localhost",
        "SlurmctldPort": _free_port(),
        "SlurmdPort": _free_port(),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket",
        "StateSaveLocation": folder / "controller",
        "SlurmdSpoolDir": folder / "node",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "ProctrackType": "proctrack/cgroup",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "KillWait": KILL_WAIT_S,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(f"NodeName=localhost CPUs={cores} State=UNKNOWN")
    lines.append("PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
