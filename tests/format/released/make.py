"""Save the checkpoints of a release, which ``test_released.py`` loads with all later versions. Run this at a release.

python tests/format/released/make.py
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from asyncckpt import Checkpointer, FileSet, PerRank, torch_save

RANKS = 2
_WORK = Path("/tmp/asyncckpt-released")  # the path is in DCP's ``.metadata``


def state() -> dict[str, Any]:
    """Return the state of one rank."""
    moments = [torch.arange(4.0) / 3, torch.tensor([True, False])]
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, "m": moments}


def sharded() -> torch.Tensor:
    """Return the tensor that the ranks save in shards."""
    return torch.arange(10.0).reshape(5, 2)


def _save_on_rank(rank: int, root: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}.meeting", rank=rank, world_size=RANKS)
    shard = distribute_tensor(sharded(), init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": shard, "seed": PerRank(rank + 7), "lr": 0.5})
    dist.destroy_process_group()


def main() -> None:
    """Save to the folder of this release. Raises ``FileExistsError`` if there is one."""
    release = Path(__file__).parent / ".".join(metadata.version("asyncckpt").split(".")[:2])
    if release.exists():
        raise FileExistsError(f"{release} is there: the files of a release never change")
    _WORK.mkdir()
    with Checkpointer(_WORK / "state") as checkpointer:
        checkpointer.save(1, state())
    start_processes(_save_on_rank, (str(_WORK / "ranks"),), nprocs=RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
    files = FileSet()
    files.add_dcp_folder("", {"step": 3, "seen": torch.arange(3)})
    files.add_safetensors("model.safetensors", state()["model"])
    files.add_torch_file("optimizer.pt", {"m": state()["m"]})
    with Checkpointer(_WORK / "set") as checkpointer:
        checkpointer.save(1, files)
    torch_save(state(), _WORK / "model.pt").result(60)
    for made in (*_WORK.glob("*.meeting"), *_WORK.glob("*/asyncckpt.lock")):
        made.unlink()
    shutil.move(_WORK, release)


if __name__ == "__main__":
    main()
