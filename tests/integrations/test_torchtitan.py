"""The manager for torchtitan, in torchtitan's ``Trainer`` and alone, compared with torchtitan's own manager."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_ranks import on_ranks
from support.peers import TORCHTITAN, python
from support.ranks import faulty
from support.workers import wait_for, wait_reached
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from asyncckpt.errors import StorageError, UnsavableStateError
from asyncckpt.staging.slot_copy import SlotStager

pytestmark = [
    pytest.mark.usefixtures("forkserver"),
    pytest.mark.skipif(
        sys.version_info < (3, 11) or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
        reason="torchtitan 0.3 is for Python 3.11, and a torch of its time",
    ),
]

HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.mark.parametrize("scenario", ["the_trainer", "killed_while_writing", "one_rank"])
def test_as_the_trainer_does(scenario: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {HERE!r}; import test_torchtitan; test_torchtitan.main()"
    python(code, *TORCHTITAN, arguments=(scenario, str(tmp_path)))


def main() -> None:
    """Run the scenario in a process that can import torchtitan."""
    globals()[sys.argv[1]](Path(sys.argv[2]))


# All code below runs in that process.


def the_trainer(folder: Path) -> None:
    """Train by torchtitan's ``Trainer`` and command line on two ranks with FSDP2.

    Our manager resumes from stock's checkpoint, and stock's manager from ours.
    """
    from support import torchtitan_trainer as titan

    stock, ours = (
        ("support.torchtitan_trainer", "debug"),
        ("asyncckpt.integrations.torchtitan", f"{titan.__name__}.debug"),
    )
    checkpoints = folder / "mixed" / "checkpoint"

    def train(place: str, manager: tuple[str, str], steps: int) -> None:
        os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        dist.barrier()  # wait until the other rank has joined this group too
        dist.destroy_process_group()  # the Trainer creates and destroys its own group
        module, config = manager
        there = f"--dump_folder={folder / place}"
        titan.main(f"--module={module}", f"--config={config}", there, f"--training.steps={steps}")

    def free_port() -> int:
        port = torch.zeros((), dtype=torch.int64)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port += free.getsockname()[1]
        dist.broadcast(port, 0)
        return int(port)

    runs = [("whole", stock, 6), ("mixed", ours, 4), ("mixed", stock, 5), ("mixed", ours, 6)]
    for run in runs:
        on_ranks(2, train, *run, folder=folder)
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-5", "step-6"]
    for place in ("whole", "mixed"):
        dcp_to_torch_save(folder / place / "checkpoint" / "step-6", folder / f"{place}.pt")
    whole, mixed = (torch.load(folder / f"{place}.pt", weights_only=True) for place in ("whole", "mixed"))
    assert same(flat(mixed), flat(whole))


def killed_while_writing(folder: Path) -> None:
    """Kill both ranks while step 4 is written.

    Our manager loads step 4 from memory. Stock's manager finds step 4 when durable.
    """
    from support import torchtitan_training as titan

    gate = folder / "gate"
    os.environ["ASYNCCKPT_TEST_GATE"] = str(gate)

    def begin() -> None:
        faulty("finalize:hold:2")
        titan.Training(titan.ours(), folder).train(4, last=False)
        wait_reached(gate)
        # No barrier here: a rank whose peer is dead would wait in the barrier for a minute.
        (folder / f"there-{dist.get_rank()}").touch()
        while len(list(folder.glob("there-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        losses = titan.Training(titan.ours(enable=False), folder).run(8)
        training = titan.Training(titan.ours(), folder)
        with titan.heard("asyncckpt") as heard:
            found = training.train(5, last=False)
        assert found == {5: losses[5]}
        assert "step 4 was loaded from memory" in heard.getvalue()
        assert "not asked for" not in heard.getvalue()  # no warning about states of other ranks' data loaders
        assert titan.steps_in(folder) == [2]
        dist.barrier()
        gate.touch()
        assert training.go_on(6, last=False) == {6: losses[6]}
        training.checkpointer.close()
        assert titan.steps_in(folder) == [2, 4, 6]
        assert titan.Training(titan.stock(), folder).train(7, last=False) == {7: losses[7]}

    on_ranks(2, begin, folder=folder, codes={-signal.SIGKILL})
    on_ranks(2, go_on, folder=folder)


def one_rank(folder: Path) -> None:
    from support import torchtitan_training as titan

    parts: list[Callable[[Any, Path], None]] = [
        modes,
        old_ones_go,
        a_failing_one_keeps_the_older,
        staging_is_waited_for,
        last_ones,
        what_is_loaded,
        an_error_ends_it,
        is_refused,
        registry,
    ]

    def run() -> None:
        for part in parts:
            print(part.__name__, flush=True)
            (own := folder / part.__name__).mkdir()
            part(titan, own)

    on_ranks(1, run, folder=folder)


def modes(titan: Any, folder: Path) -> None:
    """Check for each mode whether the save is copied or durable when ``save`` returns."""
    training = titan.Training(titan.ours(async_mode="disabled"), folder)
    training.train(2, last=False)
    assert titan.steps_in(folder) == [2]
    assert training.checkpointer.save_future is None
    training.checkpointer.close()
    training = titan.Training(titan.ours(async_mode="async"), folder)
    training.train(4, last=False)
    assert training.checkpointer._saves[-1].staged()
    training.checkpointer.maybe_wait_for_saving()
    assert training.checkpointer.save_future is None
    assert titan.steps_in(folder) == [2, 4]
    training.checkpointer.close()
    training.checkpointer.close()


def old_ones_go(titan: Any, folder: Path) -> None:
    options = {"interval": 1, "keep_latest_k": 2, "enable_first_step_checkpoint": True}
    titan.Training(titan.stock(interval=3), folder).train(3, last=False)
    (folder / "checkpoint" / "step-1").mkdir()  # a leftover folder
    training = titan.Training(titan.ours(**options), folder)
    assert list(training.train(6, last=False)) == [4, 5, 6]
    training.checkpointer.close()
    assert titan.steps_in(folder) == [5, 6]
    # After going back, a new save replaces the old step, and sets aside a folder that holds other files. Later steps
    # stay.
    titan.Training(titan.ours(**options), folder).run(9, last=False)
    (notes := folder / "checkpoint" / "step-8" / "notes.txt").write_text("of somebody")
    training = titan.Training(titan.ours(load_step=8, **options | {"interval": 4}), folder)
    before = (folder / "checkpoint" / "step-9").stat().st_ino
    training.train(8, last=False)
    assert training.checkpointer.save(8)
    assert training.checkpointer.save(9, last_step=True)
    training.checkpointer.close()
    assert titan.steps_in(folder) == [8, 9]
    assert before != (folder / "checkpoint" / "step-9").stat().st_ino
    assert not notes.exists()
    assert (folder / "checkpoint" / "step-8.abandoned-1" / "notes.txt").read_text() == "of somebody"


def a_failing_one_keeps_the_older(titan: Any, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncckpt.link.process.command", worker_command())
        faulty("finalize:eio:3")
        training = titan.Training(titan.ours(interval=1, keep_latest_k=2), folder)
        with pytest.raises(StorageError, match="step-3"):
            training.train(3, last=False)
            training.checkpointer.close()
        assert titan.steps_in(folder) == [1, 2]
        training.checkpointer.close()
    training = titan.Training(titan.ours(interval=1, keep_latest_k=2), folder)
    assert list(training.train(4, last=False)) == [3, 4]
    training.checkpointer.close()
    assert titan.steps_in(folder) == [3, 4]


def worker_command() -> Any:
    from asyncckpt.link import process

    return process.command


def staging_is_waited_for(titan: Any, folder: Path) -> None:
    """The save returns before the copy. The optimizer step, which changes the tensors, waits for the copy."""
    training = titan.Training(titan.ours(), folder)
    training.train(1, last=False)
    may_copy, real = threading.Event(), SlotStager.copy

    def copy(*args: Any, **options: Any) -> Any:
        may_copy.wait(20)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotStager, "copy", copy)
        training.go_on(2, last=False)
        before = training.values()
        assert not training.checkpointer._saves[-1].staged()
        threading.Timer(0.3, may_copy.set).start()
        begun = time.monotonic()
        training.go_on(3, last=False)
        assert time.monotonic() - begun > 0.2
        assert training.checkpointer._saves[-1].staged()
    training.checkpointer.close()
    loaded = titan.Training(titan.stock(), folder)
    loaded.checkpointer.load()
    assert same(loaded.values(), before)


def last_ones(titan: Any, folder: Path) -> None:
    training = titan.Training(titan.ours(last_save_model_only=True, export_dtype="bfloat16"), folder)
    training.train(3)
    saved: dict[str, Any] = FileSystemReader(folder / "checkpoint" / "step-3").read_metadata().state_dict_metadata
    assert set(saved) == titan.MODEL_KEYS  # and the save is durable
    assert {each.properties.dtype for each in saved.values()} == {torch.bfloat16}
    training.checkpointer.close()
    # ``keep_latest_k`` does not count the model-only save, as in torchtitan.
    for name, make in (("stock", titan.stock), ("ours", titan.ours)):
        training = titan.Training(make(keep_latest_k=2, last_save_model_only=True), folder / name)
        training.run(7)
    wait_for(lambda: titan.steps_in(folder / "stock") == titan.steps_in(folder / "ours") == [4, 6, 7])
    # torchtitan itself writes the Hugging Face format.
    adapter = types.SimpleNamespace(to_hf=lambda state: state, fqn_to_index_mapping=None)
    options = {"last_save_model_only": True, "last_save_in_hf": True}
    training = titan.Training(titan.ours(folder="hf", **options), folder, adapter)
    with titan.heard("asyncckpt") as heard:
        training.train(3)
    training.checkpointer.close()
    assert "torchtitan itself writes" in heard.getvalue()
    assert list((folder / "hf" / "step-3").glob("*.safetensors"))


def what_is_loaded(titan: Any, folder: Path) -> None:
    first = titan.Training(titan.ours(enable_first_step_checkpoint=True), folder)
    first.run(4)
    assert titan.steps_in(folder) == [1, 2, 4]
    begun = titan.Training(titan.ours(load_step=2), folder)
    assert begun.checkpointer.load(2)
    assert begun.step == 2
    # From another folder, only the model is loaded.
    initial = str(folder / "checkpoint" / "step-4")
    fresh = titan.Training(titan.ours(folder="other", initial_load_path=initial), folder)
    assert fresh.checkpointer.load()
    assert fresh.step == 0
    assert same(fresh.model.state_dict(), first.model.state_dict())
    fresh.checkpointer.close()
    part = titan.Training(titan.ours(exclude_from_loading=["lr_scheduler", "dataloader"], load_only=True), folder)
    part.run(6)  # ``load_only`` saves nothing
    assert part.loader.state_dict() != first.loader.state_dict()
    assert titan.steps_in(folder) == [1, 2, 4]
    seed = titan.Training(titan.ours(folder="seed"), folder)  # as with create_seed_checkpoint
    assert seed.checkpointer.save(0, last_step=True)
    begun.checkpointer.folder = seed.checkpointer.folder
    assert begun.checkpointer.load()
    assert begun.step == 2  # step 0 loads only the model
    assert same(begun.model.state_dict(), seed.model.state_dict())
    with pytest.raises(FileNotFoundError, match="load_step=3"):
        titan.Training(titan.ours(), folder).checkpointer.load(3)


def an_error_ends_it(titan: Any, folder: Path) -> None:
    """End with an error, as in torchtitan's ``main``. The restarted job loads the state from memory."""
    training = titan.Training(titan.ours(), folder)
    try:
        training.train(2, last=False)
        raise ValueError("the loss is not finite")
    except ValueError:
        training.checkpointer.close()
    again = titan.Training(titan.ours(), folder)
    with titan.heard("asyncckpt") as heard:
        assert again.checkpointer.load()
    assert "step 2 was loaded from memory" in heard.getvalue()
    assert same(again.values(), training.values())
    again.checkpointer.close()


def is_refused(titan: Any, folder: Path) -> None:
    with pytest.raises(StorageError, match="mount it"):
        titan.Training(titan.ours(folder="s3://bucket/run"), folder)
    training = titan.Training(titan.ours(), folder)
    training.checkpointer.states["odd"] = threading.Lock()
    with pytest.raises(UnsavableStateError):
        training.train(2, last=False)
    training.checkpointer.close()
    assert titan.steps_in(folder) == []
    assert not titan.Training(titan.ours(enable=False), folder).checkpointer.save(2)


def registry(titan: Any, folder: Path) -> None:
    """``--module`` and ``--config`` select our manager, and command-line options change its configuration."""
    from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
    from torchtitan.config import ConfigManager

    from asyncckpt.integrations.torchtitan import AsyncckptManager, switch

    fields = [("checkpoint", BaseCheckpointManager.Config), ("hf_assets_path", str)]
    of_trainer = dataclasses.make_dataclass("OfTrainer", fields)
    module: Any = types.ModuleType("of_the_user")
    module.debug = lambda: of_trainer(CheckpointManager.Config(interval=7, keep_latest_k=3), str(folder))
    sys.modules["of_the_user"] = module
    named = ["--module", "asyncckpt.integrations.torchtitan", "--config", "of_the_user.debug"]
    config = ConfigManager().parse_args([*named, "--checkpoint.enable", "--checkpoint.keep_latest_k=4"])
    assert type(config.checkpoint) is AsyncckptManager.Config
    assert config.checkpoint.enable
    assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (7, 4)
    assert config.checkpoint.async_mode == "async_with_pinned_mem"
    assert ConfigManager().parse_args([*named, "--checkpoint.async_mode=disabled"]).checkpoint.async_mode == "disabled"
    with pytest.raises(TypeError, match=r"AsyncckptManager\.Config"):
        switch(config)
    with pytest.raises(ValueError, match="not found"):
        ConfigManager().parse_args([*named[:3], "debug"])


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{inner}": value
        for name, part in state.items()
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )
