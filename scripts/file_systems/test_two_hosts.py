"""Two ranks save and load together. For the file system, each rank is on a host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.abilities import need_lasting_inodes

from asyncckpt import Checkpointer, Config
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from file_systems.quirks import HOST

STEPS = (1, 2, 3, 4)
_LIMIT_S = 60.0


def test_two_hosts_save_and_load(tmp_path: Path) -> None:
    need_lasting_inodes(tmp_path)
    ranks = []
    for rank in range(2):
        host = Path(os.environ.get("RUNTIME_FOLDERS", tmp_path.parent), f"host-{rank}")
        environment = {**os.environ, HOST: str(rank + 1), FOLDER_VARIABLE: str(host)}
        command = [sys.executable, "-m", "file_systems.test_two_hosts", str(rank), str(tmp_path)]
        output = (tmp_path / f"said-{rank}").open("wb")
        ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        output.close()
    try:
        statuses = [rank.wait(200) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert statuses == [0, 0], "\n".join(said)[-3000:]  # noqa: S101
    kept = sorted(path.name for path in (tmp_path / "root").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in STEPS[-2:]]  # noqa: S101


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"both": torch.full((1000,), float(step)), f"of {rank}": torch.full((100_000,), float(step))}


def train(rank: int, folder: Path) -> None:
    # The folder of the report is in memory, not on the tested file system.
    meeting = Path(os.environ.get("FILE_SYSTEMS_REPORT", folder / "report")).with_name("meeting")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    with Checkpointer(folder / "root", Config(keep_last=2)) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state_of(rank, step)).result(_LIMIT_S)
        into = state_of(rank, 0)
        loaded = checkpointer.load(into, memory=False)
        print("loaded", loaded, [(float(tensor.min()), float(tensor.max())) for tensor in into.values()], flush=True)
        if loaded != STEPS[-1] or not all((tensor == loaded).all() for tensor in into.values()):
            raise SystemExit("that is not the newest step")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(int(sys.argv[1]), Path(sys.argv[2]))
