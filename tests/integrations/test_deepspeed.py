"""DeepSpeed saves with our engine: the same files as stock DeepSpeed, committed in one step, ``latest`` last."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import read_manifest, verify
from support.forked_ranks import on_ranks
from support.peers import DEEPSPEED, python
from support.ranks import faulty
from support.states import same
from support.workers import wait_for, wait_reached

from asyncckpt.engine import shared as engines
from asyncckpt.errors import CheckpointError, StorageError, UnsavableStateError
from asyncckpt.link import process

pytestmark = pytest.mark.usefixtures("forkserver")

HERE = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.mark.parametrize("scenario", ["as_deepspeed_does", "killed_while_writing", "one_rank"])
def test_as_deepspeed_does(scenario: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {HERE!r}; import test_deepspeed; test_deepspeed.main()"
    python(code, *DEEPSPEED, arguments=(scenario, str(tmp_path)))


def main() -> None:
    """Run the scenario in a process that can import DeepSpeed."""
    globals()[sys.argv[1]](Path(sys.argv[2]))


# All code below runs in that process.


def files_in(folder: Path) -> set[str]:
    """Return the files of the training, without our own."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not name.endswith((".index.json", "asyncckpt.json"))}


def as_deepspeed_does(folder: Path) -> None:
    """Two ranks save the same files as stock, at each ZeRO stage, and stock and ours load each other's checkpoints."""
    from support.deepspeed_training import Training

    def compare(stage: int) -> None:
        stock, ours = folder / f"stock-{stage}", folder / f"ours-{stage}"
        losses = Training(stage, ours=False).run(6, (2, 4), stock)
        training = Training(stage, ours=True)
        assert training.run(4, (2, 4), ours) == {step: losses[step] for step in range(1, 5)}
        path, client_state = training.engine.load_checkpoint(ours)  # waits for the save
        assert Path(path).parent == ours / "global_step4" and client_state["note"] == [4]
        dist.barrier()
        assert files_in(stock) == files_in(ours)
        for name in files_in(ours):
            if name.endswith(".pt"):
                one, two = (torch.load(place / name, weights_only=False) for place in (stock, ours))
                assert same(one, two), name
        assert (ours / "latest").read_text() == "global_step4"
        assert {*read_manifest(str(ours / "global_step4")).files} >= {
            name.removeprefix("global_step4/") for name in files_in(ours) if name.startswith("global_step4/")
        }
        assert not verify(str(ours / "global_step4")).damages
        for place, is_ours in ((ours, False), (stock, True)):
            goes_on = Training(stage, ours=is_ours)
            goes_on.engine.load_checkpoint(place)
            assert goes_on.run(6) == {step: losses[step] for step in (5, 6)}
        engines.shared.close()

    for stage in (1, 3):
        on_ranks(2, compare, stage, folder=folder)


def killed_while_writing(folder: Path) -> None:
    """Kill both ranks. ``latest`` names the durable step, and stock DeepSpeed resumes from that step."""
    from support.deepspeed_training import Training

    gate = folder / "gate"
    os.environ["ASYNCCKPT_TEST_GATE"] = str(gate)

    def begin() -> None:
        faulty("finalize:hold:2")
        training = Training(2, ours=True)
        training.run(2, (2,), folder)
        engines.shared.get().wait()
        training.run(4, (4,), folder)
        wait_reached(gate)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        assert (folder / "latest").read_text() == "global_step2" and not (folder / "global_step4").exists()
        losses = Training(2, ours=False).run(4)
        training = Training(2, ours=False)
        training.engine.load_checkpoint(folder)
        assert training.run(4) == {step: losses[step] for step in (3, 4)}
        dist.barrier()
        gate.touch()
        # The workers write it, because no trainer is alive.
        wait_for(lambda: (folder / "latest").read_text() == "global_step4")
        assert training.engine.load_checkpoint(folder, "global_step4")[0] is not None

    on_ranks(2, begin, folder=folder, codes={-signal.SIGKILL})
    on_ranks(2, go_on, folder=folder)


def one_rank(folder: Path) -> None:
    from support import deepspeed_training as module

    def run() -> None:
        for part in (a_failure_leaves_the_older, what_is_there, is_deepspeeds_own, two_in_turns, others_files):
            print(part.__name__, flush=True)
            (own := folder / part.__name__).mkdir()
            part(module.Training, own)
            engines.shared.close()

    on_ranks(1, run, folder=folder)


def a_failure_leaves_the_older(training: Any, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "command", process.command)
        faulty("finalize:eio:2")
        first = training(1, ours=True)
        first.run(2, (1, 2), folder)
        with pytest.raises(StorageError, match="global_step2"):
            first.engine.load_checkpoint(folder)
        assert (folder / "latest").read_text() == "global_step1" and not (folder / "global_step2").exists()
        assert first.engine.load_checkpoint(folder)[0] is not None  # the error is raised only once
        with pytest.raises(UnsavableStateError, match="lambda"):
            first.engine.save_checkpoint(folder, client_state={"it": lambda: None})
    (folder / ".latest.new").mkdir()  # blocks the update of ``latest``
    for how in ("load", "save"):
        first.engine.save_checkpoint(folder, how)
        with pytest.raises(CheckpointError, match="not named as the newest.*latest"):
            first.engine.load_checkpoint(folder) if how == "load" else save_again(first.engine, folder)
        assert (folder / "latest").read_text() == "global_step1"
    (folder / ".latest.new").rmdir()
    first.engine.save_checkpoint(folder, "good")
    assert Path(first.engine.load_checkpoint(folder)[0]).parent.name == "good"


def save_again(engine: Any, folder: Path) -> None:
    engines.shared.get().wait()
    engine.save_checkpoint(folder, "again")


def what_is_there(training: Any, folder: Path) -> None:
    """Save a tag again, save a tag that ``latest`` must not name, and replace a tag that DeepSpeed wrote."""
    training(1, ours=False).run(1, (1,), folder)
    (folder / "global_step1" / "notes.txt").write_text("of somebody")
    its = training(1, ours=True)
    its.run(1, (1,), folder)
    engines.shared.get().wait()
    assert (folder / "global_step1.abandoned-1" / "notes.txt").exists()
    inode = (folder / "global_step1").stat().st_ino
    its.engine.save_checkpoint(folder)
    its.engine.save_checkpoint(folder, "best", save_latest=False)
    its.engine.load_checkpoint(folder, "best")
    assert (folder / "global_step1").stat().st_ino != inode
    assert (folder / "latest").read_text() == "global_step1"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "best",
        "global_step1",
        "global_step1.abandoned-1",
    ]


def is_deepspeeds_own(training: Any, folder: Path) -> None:
    its = training(1, ours=True, checkpoint={"use_node_local_storage": True})
    its.run(1, (1,), folder)
    assert (folder / "latest").read_text() == "global_step1"
    assert not (folder / "global_step1" / "asyncckpt.json").exists()


def two_in_turns(training: Any, folder: Path) -> None:
    """Save an actor and a critic with equal file names in turns. Each is planned only once."""
    both = [training(1, ours=True, width=width) for width in (20_000, 30_000)]
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3):
            for name, its in zip("ab", both, strict=True):
                its.engine.save_checkpoint(folder / name, str(number))
            patch.setattr("asyncckpt.engine.plan_selection.make_plan", None)  # any later plan would fail
    engines.shared.get().wait()
    assert (folder / "a" / "latest").read_text() == (folder / "b" / "latest").read_text() == "2"


def others_files(training: Any, folder: Path) -> None:
    """DeepSpeed itself writes files outside the tag's folder."""
    from asyncckpt.integrations.deepspeed import _CollectingEngine

    its = training(1, ours=True)
    assert its.engine.save_16bit_model(folder, "model.bin")
    assert "layers.0.weight" in torch.load(folder / "model.bin")
    collecting = _CollectingEngine(its.engine.checkpoint_engine, str(folder / "tag"), "")
    for path in ("tag/in", "tag", "else"):
        collecting.makedirs(folder / path)
    collecting.save({"w": 1}, folder / "else" / "it.pt")
    collecting.save({"w": 2}, folder / "tag" / "in" / "it.pt")
    assert collecting.load(folder / "else" / "it.pt") == {"w": 1} and not (folder / "tag").exists()
    assert list(collecting.files.contents) == ["in/it.pt"]
