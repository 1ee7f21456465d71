"""Run out of disk space during saves."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from tqdm import tqdm

from asyncckpt import Checkpointer
from asyncckpt.errors import StorageError
from torture.jobs import worker_of
from torture.promises import check_root
from torture.tally import CONFIG, LIMIT_S, SIZES, Tally, is_of, state_of


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[bool]:
    """Mount a small file system at ``folder``, if this process may mount. Yield whether it is mounted."""
    folder.mkdir(parents=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill_disks(tally: Tally, folder: Path, fulls: int, choice: random.Random) -> None:
    """Run out of space before a save, or at a random byte of the written data."""
    need = sum(SIZES) * 4
    with small_disk(folder / "disk", 8 * need) as mounted:
        root, ballast = folder / "disk" / "root", folder / "disk" / "ballast"
        with Checkpointer(root, CONFIG) as checkpointer:
            checkpointer.save(1, state_of(1)).result(LIMIT_S)
            process = psutil.Process(worker_of(checkpointer))
            last = 1
            for number in tqdm(range(fulls), desc="full disks", unit="disk", disable=None):
                step = last + 1
                real = mounted and number % 2 == 0
                if real:
                    while (
                        len(list(root.glob("step-*"))) + len(list(root.glob(".*"))) > 3
                    ):  # the worker is removing old steps, which frees space
                        time.sleep(0.01)
                    free = shutil.disk_usage(root).free
                    ballast.write_bytes(bytes(free - choice.randrange(need)))
                    kind = "file systems filled"
                else:
                    limit = choice.randrange(1, need)
                    process.rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                    kind = "writes cut short"
                try:
                    checkpointer.save(step, state_of(step)).result(LIMIT_S)
                    tally.lose(f"a save of {need:,} bytes was said to succeed on a disk without room for it")
                except StorageError:
                    tally.counts[kind] += 1
                if checkpointer.load(into := state_of(0), memory=False) != last or not is_of(into, last):
                    tally.lose(f"the checkpoint before step {step} does not load")
                ballast.unlink(missing_ok=True)
                process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                checkpointer.save(step, state_of(step)).result(LIMIT_S)
                last = step
        check_root(tally, str(root))
