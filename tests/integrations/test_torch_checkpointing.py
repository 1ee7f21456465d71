"""torch_checkpointing's manager on our engine: the same files, loaded by both managers, and committed in one step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import verify
from support.forked_ranks import on_ranks
from support.peers import TORCH_CHECKPOINTING, needs_torch_checkpointing, python
from support.ranks import faulty
from support.states import same
from support.workers import wait_for, wait_reached

from asyncckpt import Config
from asyncckpt.engine import shared as engines
from asyncckpt.errors import DamagedCheckpointError, StorageError, UnsavableStateError
from asyncckpt.link import process

pytestmark = [pytest.mark.usefixtures("forkserver"), needs_torch_checkpointing]

HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.mark.parametrize(
    "scenario", ["round_trips", "formats", "killed_while_writing", "resumed_from_memory", "one_rank"]
)
def test_as_torch_checkpointing_does(scenario: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {HERE!r}; import {Path(__file__).stem} as here; here.main()"
    python(code, TORCH_CHECKPOINTING, arguments=(scenario, str(tmp_path)))


def main() -> None:
    """Run the scenario in a process that can import torch_checkpointing."""
    globals()[sys.argv[1]](Path(sys.argv[2]))


# All code below runs in that process.


def manager(*, ours: bool, **options: Any) -> Any:
    from support.torch_checkpointing_training import manager as made

    return made(ours=ours, **options)


def state(seed: int) -> dict[str, Any]:
    """Return items of all kinds: sharded tensors, tensors of many dtypes, and a number."""
    torch.manual_seed(seed)
    model: dict[str, Any] = {"bias": torch.randn(17), "scale": torch.randn(8).bfloat16()}
    if dist.is_initialized():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for dim in (0, 1):
            model[f"sharded-{dim}"] = distribute_tensor(torch.randn(12, 20), mesh, [Shard(dim)])
        model["uneven"] = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
        if dist.get_world_size() == 4:  # as FSDP2 with tensor parallelism
            grid = init_device_mesh("cpu", (2, 2))
            model["grid"] = distribute_tensor(torch.randn(8, 12), grid, [Shard(0), Shard(1)])
    kinds = torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64
    others = {str(each): torch.randint(0, 2, (3, 5)).to(each) for each in kinds}
    return {"model": model, "optimizer": {"state": {0: others}, "groups": [{"lr": 0.1 * seed}]}, "step": seed}


def whole(value: Any) -> Any:
    """Return ``value`` with whole tensors in place of sharded tensors."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def formats(folder: Path) -> None:
    for ranks in (1, 2):
        (own := folder / str(ranks)).mkdir()
        on_ranks(ranks, formats_of_items, own, folder=own)


def round_trips(folder: Path) -> None:
    """Each manager loads the checkpoints of the other one, on 1, 2 and 4 ranks, and on another number of ranks."""

    def save(ranks: int) -> None:
        for ours in (True, False):
            place = folder / f"{ranks}-{ours}"
            saver = manager(ours=ours)
            for step in (1, 2):
                written = saver.save(str(place / f"step_{step}"), state(step))
                with saver.lock():
                    written.result(60)
            saver.close()
            load(place, True)
            load(place, False)
        dist.barrier()
        stock, mine = ({each.name for each in (folder / f"{ranks}-{ours}/step_2").iterdir()} for ours in (False, True))
        assert {name for name in mine if not name.endswith(".json")} == stock
        assert not verify(str(folder / f"{ranks}-True/step_2")).damages
        engines.shared.close()

    def load(place: Path, ours: bool) -> None:
        loader, into = manager(ours=ours), state(0)
        loaded = loader.load(str(place / "step_2"), into={**into, "step": None})
        assert same(whole(dict(loaded)), whole(state(2))), (place, ours)
        loader.close()

    def load_model(ours: bool) -> None:
        """Load the sharded items of a checkpoint that another number of ranks has saved."""
        loader, into = manager(ours=ours), state(0)
        loaded = loader.load(str(folder / "4-True/step_2"), into={"model": into["model"]})
        assert same(whole(loaded["model"]), whole(state(2)["model"]))
        loader.close()

    for ranks in (1, 2, 4):
        on_ranks(ranks, save, ranks, folder=folder)
    for ours in (True, False):
        on_ranks(2, load_model, ours, folder=folder)


def killed_while_writing(folder: Path) -> None:
    """Kill both ranks. Their workers finish the checkpoint, and the next manager waits for it."""
    gate, place = folder / "gate", folder / "root/step_1"
    os.environ["ASYNCCKPT_TEST_GATE"] = str(gate)

    def begin() -> None:
        faulty("finalize:hold")
        saver = manager(ours=True)
        saver.save(str(place), state(1))
        wait_reached(gate)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        assert not place.exists()
        dist.barrier()
        gate.touch()
        loader = manager(ours=True)
        loaded = loader.load(str(place), into={**state(0), "step": None})
        assert same(whole(dict(loaded)), whole(state(1)))

    on_ranks(2, begin, folder=folder, codes={-signal.SIGKILL})
    on_ranks(2, go_on, folder=folder)


def resumed_from_memory(folder: Path) -> None:
    """A manager loads from the memory of dead ranks' workers, and so does not see that the files are damaged."""
    place = folder / "root/step_1"

    def large(seed: float) -> dict[str, Any]:
        weights = torch.full((1 << 19,), seed + dist.get_rank())
        return {"model": {"b": torch.ones(1)}, "w": {"w": weights}, "step": int(seed)}

    def load(loader: Any) -> dict[str, Any]:
        return dict(loader.load(str(place), into={**large(0), "step": None}))

    def save() -> None:
        manager(ours=True).save(str(place), large(5)).result(60)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def load_from_memory() -> None:
        loader = manager(ours=True)
        assert same(load(loader), large(5))
        loader.save(str(place), large(6)).result(60)  # in the same memory
        assert same(load(loader), large(6))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def load_from_storage() -> None:
        loader = manager(ours=True)
        found = engines.shared.get(config=Config.from_env(), job="\nresumed").held()
        assert found is not None
        for image in found.images:
            at = image.layout.data(image.request.slot, image.layout.files[0]).offset
            found.segments[image.request.segment].view[at + (1 << 19)] ^= 1
        assert same(load(loader), large(6))

    def fail(file: str) -> None:
        with pytest.raises(DamagedCheckpointError, match=f"{file}_{dist.get_rank()}.pt"):
            load(manager(ours=True))

    def damage(name: str) -> None:
        for file in place.glob(f"{name}_*.pt"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)

    os.environ["ASYNC_CKPT_JOB_ID"] = "resumed"
    on_ranks(2, save, folder=folder, codes={-signal.SIGKILL})
    damage("w")
    on_ranks(2, load_from_memory, folder=folder, codes={-signal.SIGKILL})
    on_ranks(2, load_from_storage, folder=folder)
    del os.environ["ASYNC_CKPT_JOB_ID"]  # the load does not look for the worker
    for name in ("w", "step"):
        damage(name)
        on_ranks(2, fail, name, folder=folder)
        damage(name)


def one_rank(folder: Path) -> None:
    def run() -> None:
        for part in (
            a_failure_is_raised,
            callbacks,
            a_synchronous_save,
            an_overlapping_save,
            what_is_left_to_them,
        ):
            print(part.__name__, flush=True)
            (own := folder / part.__name__).mkdir()
            part(own)
            engines.shared.close()

    on_ranks(1, run, folder=folder)


def formats_of_items(folder: Path) -> None:
    import torch_checkpointing as theirs
    from torch_checkpointing import checkpoint_layout as layouts

    def spec(name: str, form: Any) -> Any:
        return theirs.ItemSpec(layout=layouts.LayoutInfo(name, form))

    items = {
        "tensors": spec("tensors_{rank}.safetensors", layouts.SafetensorsSerialization({"made": "here"})),
        "config": spec("deep/config.json", layouts.JsonSerialization()),  # the same file on all ranks
        "raw": spec("raw.bin", layouts.RawSerialization()),
    }
    value = {"tensors": {"a": {"b": torch.arange(4.0)}}, "config": {"width": [1, 2]}, "raw": b"\0\1", "rest": [None]}
    saver = manager(ours=True, items=items)
    saver.prewarm_staging(value)
    saver.save(str(folder / "one"), value).result(60)
    for ours in (True, False):
        loader = manager(ours=ours, items=items)
        assert same(dict(loader.load(str(folder / "one"), into=value)), value)
    with pytest.raises(UnsavableStateError, match="'raw', a int"):
        saver.save(str(folder / "two"), {**value, "raw": 5})
    assert not (folder / "two").exists()
    engines.shared.close()


def a_failure_is_raised(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "command", process.command)
        faulty("finalize:eio:1")
        saver = manager(ours=True)
        with pytest.raises(StorageError, match="one"):
            saver.save(str(folder / "one"), state(1)).result(60)
    for seed in (2, 3):
        saver.save(str(folder / "one"), state(seed)).result(60)
        loaded = saver.load(str(folder / "one"), into={**state(0), "step": None})
        assert same(whole(dict(loaded)), whole(state(seed)))


def callbacks(folder: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def note(given: Any) -> None:
        seen.append((given.path, given.storage.exists(Path(given.path))))
        if given.path.endswith("two"):
            raise LookupError("as the test wants")

    saver = manager(ours=True, finalize_callback=note)
    saver.save(str(folder / "one"), state(1)).result(60)
    assert seen == [(str(folder / "one"), True)]
    with pytest.raises(LookupError):
        saver.save(str(folder / "two"), state(1)).result(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "command", process.command)
        engines.shared.close()
        faulty("finalize:eio:1")
        unread = saver.save(str(folder / "three"), state(1))
        wait_for(unread.done)
        with pytest.raises(StorageError, match="three"):
            saver.save(str(folder / "four"), state(1))


def a_synchronous_save(folder: Path) -> None:
    saver = manager(ours=True, save=synchronous())
    assert saver.save(str(folder / "one"), state(1)) is None
    assert not verify(str(folder / "one")).damages
    saver.close()
    with pytest.raises(RuntimeError, match="closed"):
        saver.save(str(folder / "two"), {})
    with pytest.raises(RuntimeError, match="closed"):
        saver.prewarm_staging({})


def an_overlapping_save(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNC_CKPT_OVERLAP", "1")
        saver, weights = manager(ours=True), torch.ones(1 << 24)
        for step in range(1, 4):
            guard = saver.lock()
            written = saver.save(str(folder / str(step)), {"model": {"w": weights}})
            with guard:
                weights += 1
            written.result(60)
            loaded = saver.load(str(folder / str(step)), into={"model": {"w": torch.zeros(1 << 24)}})
            assert loaded["model"]["w"].unique().tolist() == [step]
        engines.shared.close()


def what_is_left_to_them(folder: Path) -> None:
    called: list[Any] = []
    saver = manager(ours=True, save=synchronous(), pre_finalize_callback=called.append)
    saver.save(str(folder / "one"), state(1))
    wait_for(lambda: (folder / "one").exists())
    assert called and not (folder / "one/asyncckpt.json").exists()
    with saver.lock():
        saver.close()


def synchronous() -> Any:
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    return SyncCheckpointSaverConfig()
