"""Folders that cannot be written or are not there, and users without a name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.surroundings import Trainings, Trial, mounted, nameless, refused, trained, was_refused, went_well

from asyncckpt.link.endpoint import FOLDER_VARIABLE


def test_a_read_only_root(root: Path) -> None:
    """Only the folder above the checkpoints can be written. Temporary files go there, or nowhere."""
    its = mounted(root, *(f"{{ ! mountpoint -q {each} || mount -o remount,bind,ro {each}; }}" for each in _WRITABLE))
    environment = {FOLDER_VARIABLE: None, "TMPDIR": str(root.parent)}  # torch needs one when it is imported
    trials: list[Trial] = [{"name": "there"}, {"name": "nowhere", "variables": {"TMPDIR": "/"}}]
    root.mkdir()
    trainings = Trainings.start(root, *its, environment=environment, trials=trials)
    there, nowhere = trainings.end()
    went_well(trainings.plans[0], there)
    was_refused(trainings.plans[1], nowhere, "No usable temporary directory")


_WRITABLE = ("/", "/tmp", "/var/tmp", "/dev/shm")


def test_a_read_only_folder_for_checkpoints(root: Path) -> None:
    root.mkdir()
    its = mounted(root, f"mount --bind {root} {root} && mount -o remount,bind,ro {root}")
    refused(root, *its, text="Read-only file system", single=False)


# These may be in /tmp themselves.
_PROGRAMS = sys.prefix, str(Path(__file__).parents[2])


def test_no_programs_in_tmp_and_no_shared_memory(root: Path) -> None:
    """``/dev/shm`` is full, ``/sys`` is empty, ``$TMPDIR`` is read-only, and ``$HOME`` is not there."""
    its = mounted(
        root,
        "mount --bind /tmp /tmp && mount -o remount,bind,noexec /tmp",
        *(f"mount --bind {each} {each} && mount -o remount,bind,exec {each}" for each in _PROGRAMS if "/tmp/" in each),
        "mount -t tmpfs -o ro tmpfs /mnt && mount -t tmpfs tmpfs /sys && mount -t tmpfs -o size=4k tmpfs /dev/shm",
        "head -c 4096 /dev/zero > /dev/shm/full",
    )
    trained(root, *its, environment={FOLDER_VARIABLE: None, "TMPDIR": "/mnt", "HOME": "/nonexistent"})


def test_a_user_without_a_name(root: Path) -> None:
    """And without any variable in the environment, such as ``$HOME``."""
    trained(root, *nameless(root), environment=dict.fromkeys(os.environ) | {FOLDER_VARIABLE: None})


def test_no_proc(root: Path) -> None:
    refused(root, *mounted(root, "mount -t tmpfs tmpfs /proc"), text="the free memory of this host is not known")
