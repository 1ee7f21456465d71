"""Checkpoints of verl's engines, trainers and drivers, beside verl's own managers."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peers import MEGATRON, TORCHTITAN, VERL, python
from support.ranks import fsdp2_on_cpu
from support.workers import wait_for, wait_reached

pytestmark = [pytest.mark.usefixtures("forkserver"), fsdp2_on_cpu]

ROOT = Path(__file__).parents[2]
HERE = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "scripts")]
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.mark.slow
@pytest.mark.parametrize("release", VERL)
@pytest.mark.parametrize(("engine", "more"), [("fsdp2", ()), ("veomni", ()), ("megatron", (MEGATRON,))])
def test_as_the_trainers_do(release: str, engine: str, more: tuple[str, ...], tmp_path: Path) -> None:
    _run(release, engine, more, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info < (3, 11) or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="torchtitan 0.3 needs this Python, and a torch of the same age",
)
@pytest.mark.parametrize("release", VERL)
def test_torchtitan_as_the_trainers_do(release: str, tmp_path: Path) -> None:
    _run(release, "torchtitan", TORCHTITAN, tmp_path)


def _run(release: str, engine: str, more: tuple[str, ...], folder: Path) -> None:
    code = f"import sys; sys.path[:0] = {HERE!r}; import test_verl_engines; test_verl_engines.main({release!r})"
    python(code, release, *more, arguments=(str(folder), engine))


def main(release: str) -> None:
    """Run the scenarios in a process that can import verl."""
    folder, engine, *chosen = sys.argv[1:]
    from support import verl_stand_ins

    verl_stand_ins.install()
    os.environ |= {"ASYNC_CKPT_TIMEOUT": "20", "ASYNC_CKPT_COMMIT_TIMEOUT": "20"}
    verl_stand_ins.import_external("asyncckpt.integrations.verl_engines")  # before verl's own modules, as verl does
    from support import verl_training

    parts: list[Callable[[Any, Path], None]] = [
        saves_and_resumes,
        killed_while_writing,
        killed_and_not_started_again,
        a_failing_one_keeps_the_older,
    ]
    if engine == "fsdp2":
        parts += [
            other_numbers_of_ranks,
            named_when_durable,
            what_killed_workers_left,
            stock_checkpoints,
            small_files,
            adapters_alone,
            bad_input,
            callers_of_their_own,
            weights_out_of_the_image,
        ]
    else:
        module: Any = importlib.import_module(f"support.verl_{engine}")
        verl_training.engine_class, verl_training.strategy = module.Engine, engine
        parts += [other_numbers_of_ranks] if engine == "torchtitan" else [stock_checkpoints]
    if engine == "megatron":
        verl_training.async_save = True
        # Without the distributed optimizer, verl 0.9 does not load from its own checkpoints either.
        module.distributed_optimizer = release.startswith("verl-0.9")
    for part in parts:
        if chosen and part.__name__ not in chosen:
            continue
        print(part.__name__, flush=True)
        (own := Path(folder) / part.__name__).mkdir()
        part(verl_training, own)


# All code below runs in that process.


def latest(folder: Path) -> int | None:
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else None


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(("__", ".", "asyncckpt_"))}


def saves_and_resumes(verl: Any, folder: Path) -> None:
    """A resumed job on the same number of ranks continues bit for bit like an uninterrupted job."""
    for kind in verl.trainers:
        place = folder / kind.__name__
        with verl.group(2, folder) as actor, verl.group(2, folder, seed=5) as critic:
            trainer = verl.driver(kind, place, actor, critic, keep=1, steps=4)
            for step in (2, 4):
                actor.call("train", 2), critic.call("train", 2)
                verl.save(trainer, step)
            # The trainer waits for the last save.
            assert latest(place) == 4
            assert trainer.config.actor_rollout_ref.actor.checkpoint.async_save is verl.async_save
            assert all(trainer.told)
            assert files_in(place / "global_step_4") == {"actor", "critic", "data.pt"}
            assert files_in(place / "global_step_2") == {"data.pt"}
            states = [each.call("state") for each in (actor, critic)]
            after = [(each.call("random"), each.call("train", 2), each.call("state")) for each in (actor, critic)]
        with verl.group(2, folder, seed=7) as actor, verl.group(2, folder, seed=8) as critic:
            trainer = verl.driver(kind, place, actor, critic)
            trainer._load_checkpoint()
            assert (trainer.global_steps, trainer.train_dataloader.position) == (4, 4)
            verl.check_same([each.call("state") for each in (actor, critic)], states)
            found = [(each.call("random"), each.call("train", 2), each.call("state")) for each in (actor, critic)]
            verl.check_same(found, after)


def other_numbers_of_ranks(verl: Any, folder: Path) -> None:
    for before, now in ((2, 1), (1, 2)):
        place = folder / f"from-{before}" / "global_step_1" / "actor"
        with verl.group(before, folder) as actor:
            actor.call("train", 2)
            actor.save_checkpoint(str(place), None, 1)
            state, *_ = actor.call("state")
            random, loss = actor.call("random"), actor.call("train")
        with verl.group(now, folder, seed=9) as actor:
            actor.load_checkpoint(str(place))
            for each in actor.call("state"):
                verl.check_same(each, state)
            assert actor.call("random")[0] == random[0]
            assert abs(actor.call("train")[0] - loss[0]) < 1e-5


def named_when_durable(verl: Any, folder: Path) -> None:
    """The tracker moves when both actor and critic are durable. Older checkpoints are removed after that."""
    gate = folder / "gate"
    slow = {"fault": "finalize:hold:2", "environment": {"ASYNCCKPT_TEST_GATE": str(gate)}}
    with verl.group(1, folder) as actor, verl.group(1, folder, seed=5, **slow) as critic:
        trainer = verl.driver(verl.trainers[-1], folder, actor, critic, keep=1)
        for each in (actor, critic):
            each.call("train")
        verl.save(trainer, 1)
        verl.settle(trainer)
        assert latest(folder) == 1
        verl.save(trainer, 2)  # returns while the critic's save is held
        wait_reached(gate)
        actor.call("wait")
        assert files_in(folder / "global_step_2") == {"actor", "data.pt"}
        assert files_in(folder / "global_step_1") == {"actor", "critic", "data.pt"}
        assert latest(folder) == 1
        gate.touch()
        verl.settle(trainer)
        assert latest(folder) == 2
        assert files_in(folder / "global_step_2") == {"actor", "critic", "data.pt"}
        verl.save(trainer, 3)
        assert files_in(folder / "global_step_1") == {"data.pt"}
        verl.settle(trainer)
        assert latest(folder) == 3
        # A second save of a step replaces the first before ``save`` returns.
        before = (folder / "global_step_3" / "actor" / "asyncckpt.json").read_bytes()
        inode = (folder / TRACKER).stat().st_ino
        verl.save(trainer, 3)
        assert (folder / TRACKER).stat().st_ino != inode  # replaced in one step, so that no reader sees half a file
        assert (folder / "global_step_3" / "actor" / "asyncckpt.json").read_bytes() != before
        assert files_in(folder / "global_step_3") == {"actor", "critic", "data.pt"}


def killed_while_writing(verl: Any, folder: Path) -> None:
    """Kill all ranks while step 2 is written. Step 1 is the latest until the workers finish."""
    gate = folder / "gate"
    slow = {"fault": "finalize:hold:2", "environment": {"ASYNCCKPT_TEST_GATE": str(gate)}}
    actor = verl.Group(2, folder, **slow)
    trainer = verl.driver(verl.trainers[0], folder, actor, keep=1)
    states = []
    for step in (1, 2):
        actor.call("train")
        states.append(actor.call("state"))
        verl.save(trainer, step)
        if step == 1:
            verl.settle(trainer)
    wait_reached(gate)
    actor.kill()
    assert latest(folder) == 1
    with verl.group(2, folder, seed=9) as actor:
        actor.load_checkpoint(str(folder / "global_step_1" / "actor"))
        verl.check_same(actor.call("state"), states[0])
        gate.touch()
        trainer = verl.driver(verl.trainers[0], folder, actor)
        trainer._load_checkpoint()
        assert trainer.global_steps == latest(folder) == 2
        verl.check_same(actor.call("state"), states[1])
    assert files_in(folder / "global_step_2") == {"actor", "data.pt"}


def killed_and_not_started_again(verl: Any, folder: Path) -> None:
    """The workers of a killed job advance the tracker when both actor and critic are durable."""
    gate = folder / "gate"
    slow = {"fault": "finalize:hold:2", "environment": {"ASYNCCKPT_TEST_GATE": str(gate)}}
    with contextlib.ExitStack() as killed:
        actor, critic = verl.Group(1, folder), verl.Group(1, folder, seed=5, **slow)
        killed.callback(critic.kill)
        killed.callback(actor.kill)
        trainer = verl.driver(verl.trainers[0], folder, actor, critic, keep=1)
        for step in (1, 2):
            actor.call("train"), critic.call("train")
            verl.save(trainer, step)
            if step == 1:
                verl.settle(trainer)
        wait_reached(gate)
        actor.call("wait")
        assert latest(folder) == 1
    assert latest(folder) == 1 and (folder / "global_step_2" / "actor").exists()
    gate.touch()
    wait_for(lambda: latest(folder) == 2)
    assert (folder / "global_step_2" / "critic" / "asyncckpt.json").exists()
    # If the driver dies before it writes its parts file, no process names the step.
    (folder / "global_step_2" / "asyncckpt_parts.json").unlink()
    os.utime(folder / TRACKER)
    (folder / TRACKER).write_text("1")
    with verl.group(1, folder, seed=9) as actor, verl.group(1, folder, seed=9) as critic:
        trainer = verl.driver(verl.trainers[0], folder, actor, critic)
        trainer._load_checkpoint()
        assert trainer.global_steps == latest(folder) == 1


def what_killed_workers_left(verl: Any, folder: Path) -> None:
    """Old leftovers are removed, even in the folder of a step that is never saved again."""
    old, new = (folder / f"global_step_{step}" / ".actor.0123456789ab-7.partial" for step in (4, 6))
    for attempt in (old, new):
        attempt.mkdir(parents=True)
        (attempt / "__0_0.distcp").touch()

    def age(attempt: Path) -> None:
        for path in (attempt / "__0_0.distcp", attempt):
            os.utime(path, (0, 0))

    age(old)
    with verl.group(1, folder) as actor:
        trainer = verl.driver(verl.trainers[0], folder, actor)
        trainer._load_checkpoint()
        assert list((folder / "global_step_4").iterdir()) == [] and new.exists()
        age(new)
        for step in (7, 8):
            verl.save(trainer, step)
            verl.settle(trainer)
            assert list((folder / "global_step_6").iterdir()) == []


def a_failing_one_keeps_the_older(verl: Any, folder: Path) -> None:
    with verl.group(1, folder, fault="finalize:enospc:2") as actor:
        trainer = verl.driver(verl.trainers[0], folder, actor, keep=1)
        actor.call("train")
        verl.save(trainer, 1)
        verl.settle(trainer)
        verl.save(trainer, 2)
        actor.call("until_failed")
        with pytest.raises(Exception, match="No space left"):
            verl.save(trainer, 3)
        assert latest(folder) == 1
        assert files_in(folder / "global_step_1") == {"actor", "data.pt"}
        verl.save(trainer, 4)
        verl.settle(trainer)
        assert latest(folder) == 4
        assert not (folder / "global_step_2" / "actor").exists()


def stock_checkpoints(verl: Any, folder: Path) -> None:
    """Checkpoints of verl's own manager still load."""
    place = folder / "global_step_1" / "actor"
    with verl.group(2, folder) as actor:
        actor.call("stock")
        actor.call("train", 2)
        trainer = verl.driver(verl.trainers[0], folder, actor)
        verl.save(trainer, 1)  # no wait for workers without asyncckpt
        verl.settle(trainer)
        assert latest(folder) == 1
        state = actor.call("state")
    with verl.group(2, folder, seed=9) as actor:
        actor.load_checkpoint(str(place))
        verl.check_same(actor.call("state"), state)


def small_files(verl: Any, folder: Path) -> None:
    """Small files equal verl's byte for byte. Weights for Hugging Face are among them, with equal values."""
    contents = ("model", "optimizer", "extra", "hf_model")
    with verl.group(2, folder, contents) as actor:
        actor.call("train")
        actor.save_checkpoint(str(folder / "ours"), None, 1)
        actor.call("stock")
        actor.save_checkpoint(str(folder / "stock"), None, 1)
    ours, stock = (
        {str(file.relative_to(place)): file.read_bytes() for file in sorted(place.rglob("*")) if file.is_file()}
        for place in (folder / "ours", folder / "stock")
    )
    common = ours.keys() & stock.keys()
    assert {name for name in stock if "_rank_" not in name} <= common
    assert "huggingface/model.safetensors" in common
    assert "huggingface/tokenizer.json" in common
    assert "fsdp_config.json" in common
    for name in common:
        if "_rank_" not in name and not name.endswith(".safetensors"):
            assert ours[name] == stock[name], name
    from safetensors.torch import load

    weights = "huggingface/model.safetensors"
    verl.check_same(load(ours[weights]), load(stock[weights]))


def adapters_alone(verl: Any, folder: Path) -> None:
    if not hasattr(verl._config.CheckpointConfig(), "save_lora_only"):
        return  # verl 0.8 has no adapter-only checkpoints
    place = folder / "global_step_1" / "actor"
    with verl.group(2, folder, lora=True) as actor:
        actor.call("train", 2)
        actor.save_checkpoint(str(place), None, 1)
        state, *_ = actor.call("state")
    assert "lora_train_meta.json" in files_in(place)
    with verl.group(1, folder, lora=True) as actor:
        actor.load_checkpoint(str(place))
        verl.check_same(actor.call("state")[0], state)
    with verl.group(1, folder) as actor, pytest.raises(Exception, match="adapters that the model has not"):
        actor.load_checkpoint(str(place))


def bad_input(verl: Any, folder: Path) -> None:
    with verl.group(1, folder) as actor:
        actor.load_checkpoint(None)
        actor.save_checkpoint(None)
        with pytest.raises(Exception, match=r"model_world_size_1_rank_0\.pt"):  # verl's own error
            actor.load_checkpoint(str(folder / "nothing"))
        actor.call("train")
        whole = str(folder / "whole")
        actor.save_checkpoint(whole, None, 1)
        for part in ("model", "optimizer"):
            for method, what in (("load_checkpoint", "load"), ("save_checkpoint", "save")):
                with pytest.raises(AssertionError, match=f"{part} must be provided when checkpoint_contents.{what}"):
                    actor.call("use", part, None, method, whole)
        actor.call("use", "checkpoint_save_contents", ["extra"], "save_checkpoint", str(folder / "extra"), None, 1)
        actor.call("use", "checkpoint_load_contents", ["extra"], "load_checkpoint", str(folder / "extra"))
        with pytest.raises(Exception, match="no state dict, but a set of files"):
            actor.load_checkpoint(str(folder / "extra"))
    with verl.group(1, folder) as actor:
        place = folder / "damaged"
        actor.call("train")
        actor.save_checkpoint(str(place), None, 1)
        data = place / "__0_0.distcp"
        damaged = bytearray(data.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        data.write_bytes(damaged)
        with pytest.raises(Exception, match="damaged"):
            actor.load_checkpoint(str(place))


def callers_of_their_own(verl: Any, folder: Path) -> None:
    """``save`` returns when the step is durable, because verl's handler for supervised training then names the step."""
    with verl.group(2, folder) as actor:
        for step in (1, 2):
            actor.call("train")
            actor.call("handle", str(folder), "save_checkpoint", step)
            assert latest(folder) == step
            assert (folder / f"global_step_{step}" / "asyncckpt.json").exists()
            assert (folder / f"global_step_{step}" / "data_1.pt").exists()
        state = actor.call("state")
        actor.call("handle", str(folder), "save_checkpoint", 3)
        assert not (folder / "global_step_1").exists()
    with verl.group(2, folder, seed=9) as actor:
        assert actor.call("handle", str(folder), "load_checkpoint") == [(3, 3), (3, 3)]
        verl.check_same(actor.call("state"), state)


def weights_out_of_the_image(verl: Any, folder: Path) -> None:
    """Readers get a checkpoint's weights as soon as they are staged, without another copy."""
    from asyncckpt.weights import WeightSubscriber

    held: Any = None
    gate = folder / "gate"
    environment = {"ASYNCCKPT_TEST_GATE": str(gate), "ASYNC_CKPT_VERL_PUBLISH": "1"}
    with (
        verl.group(2, folder, fault="finalize:hold:1", environment=environment) as actor,
        verl.group(1, folder, seed=5, environment=environment) as critic,
        WeightSubscriber.of_checkpoints(folder, prefix="model.") as subscriber,
    ):
        trainer = verl.driver(verl.trainers[0], folder, actor, critic)
        models = {}
        for step in range(1, 5):
            actor.call("train"), critic.call("train")
            models[step] = actor.call("state")[0]["model"]
            verl.save(trainer, step)
            assert subscriber.versions() == [1 if step < 4 else 4]  # one slot is always reserved for saves
            if step == 1:
                held = subscriber.acquire()
                assert not (folder / "global_step_1" / "actor").exists()  # not durable yet
                gate.touch()
            if step == 3:
                held.release()
            if step == 4:
                held = subscriber.acquire(4)
            if step != 3:
                verl.check_same(dict(sorted(held.items())), dict(sorted(models[held.version].items())))
            verl.settle(trainer)
        held.release()
        # If the training goes back to an older step, its readers follow.
        actor.load_checkpoint(str(folder / "global_step_2" / "actor"))
        verl.save(trainer, 2)
        with subscriber.acquire() as weights:
            assert weights.version == 2
            verl.check_same(dict(weights.items()), models[2])
    assert latest(folder) == 2
    for step in (3, 4):
        with verl.group(1, folder, seed=9) as actor:
            actor.load_checkpoint(str(folder / f"global_step_{step}" / "actor"))
            verl.check_same(actor.call("state")[0]["model"], models[step])
