"""A real vLLM engine on a CPU: the version of each token, the state after errors, and no leaked lease."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import vllm_engine

from asyncckpt.errors import CheckpointError, MismatchError, SaveTimeoutError, UnsavableStateError, WeightsTimeoutError
from asyncckpt.integrations import vllm as ours
from asyncckpt.link.endpoint import FOLDER_VARIABLE
from asyncckpt.weights import WeightPublisher, WeightSubscriber


@vllm_engine.there
@pytest.mark.slow
@pytest.mark.usefixtures("forkserver")
def test_an_engine_in_one_process(tmp_path: Path) -> None:
    vllm_engine.run(__file__, "in_one_process", tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0")


# The code below runs in a process that can import vLLM.


def in_one_process(folder: Path) -> None:
    """Run all scenarios in one engine, because its start takes most of the time."""
    from vllm import LLM

    llm = LLM(**vllm_engine.arguments(folder / "model"))  # the engine finds our backend by itself
    assert ours.register() and ours.register()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    for scenario in (
        _each_version_is_loaded_and_nothing_stays_leased,
        _a_model_that_keeps_what_it_is_given,
        _a_model_that_changes_what_it_is_given,
        _no_weights_leave_the_engine_as_it_was,
        _weights_that_do_not_fit,
        _a_trainer_that_is_killed,
        _a_trainer_that_drives_the_engine,
        _a_trainer_that_is_interrupted,
        _a_trainer_on_another_host,
    ):
        scenario(llm, worker, scenario.__name__)
        print(f"{scenario.__name__}: done", flush=True)


def _said(llm: Any) -> tuple[set[int], list[str]]:
    """Return the versions that an answer's tokens reveal, and the versions that vLLM reports."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)[0].outputs[0]
    of_tokens = {version for token in answer.token_ids for version in vllm_engine.versions_of(token)}
    return of_tokens, [span.version for span in answer.weight_versions]


def _publisher(address: str) -> WeightPublisher:
    """Return a publisher with the fewest slots. A leaked lease soon makes it skip a version."""
    return WeightPublisher(address, slots=2)


def _each_version_is_loaded_and_nothing_stays_leased(llm: Any, worker: Any, address: str) -> None:
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    with _publisher(address) as publisher, EngineUpdater(llm, address) as updater:
        for version in range(1, 11):
            assert not publisher.publish(vllm_engine.weights(version), version).skipped
            assert updater.update(version) == updater.update() == updater.version == version
            assert _said(llm) == ({version}, [str(version)])
            assert llm.collective_rpc("loaded_version") == [version] and llm.get_weight_version() == str(version)
        parameters = dict(worker.get_model().named_parameters())
        for name in ("qkv_proj", "gate_up_proj"):
            part = next(tensor for full, tensor in parameters.items() if name in full)
            assert torch.equal(part.float(), torch.full_like(part, 10 / vllm_engine.VERSIONS).float())


def _a_model_that_keeps_what_it_is_given(llm: Any, worker: Any, address: str) -> None:
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    model = worker.get_model()
    # vLLM does not move a parameter of this name while it loads.
    model.bias = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def keep(loaded: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        model.bias.data = loaded["lm_head.weight"]
        return iter(loaded.items())

    with _loading(model, keep), _publisher(address) as publisher, EngineUpdater(llm, address) as updater:
        for version in range(1, 5):
            assert not publisher.publish(vllm_engine.weights(version), version).skipped
            updater.update()
            assert _said(llm)[0] == {version}
            assert torch.equal(model.bias, vllm_engine.weights(version)["lm_head.weight"])
    del model.bias


def _a_model_that_changes_what_it_is_given(llm: Any, worker: Any, address: str) -> None:
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    def change(loaded: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        for name, tensor in loaded.items():
            yield name, tensor.mul_(2)

    with (
        _loading(worker.get_model(), change),
        _publisher(address) as publisher,
        EngineUpdater(llm, address) as updater,
        WeightSubscriber(address) as other,
    ):
        for version in range(1, 5):
            expected = vllm_engine.weights(version)
            assert not publisher.publish(expected, version).skipped
            updater.update()
            with other.acquire(version=version) as seen:
                assert all(torch.equal(seen[name], tensor) for name, tensor in expected.items())
            assert _said(llm)[0] == {version}


class _loading:
    """Within the context, ``model`` loads the tensors that ``given`` makes from the new weights."""

    def __init__(self, model: Any, given: Callable[[dict[str, torch.Tensor]], Iterator[tuple[str, torch.Tensor]]]):
        self._model = model
        self._given = given

    def __enter__(self) -> None:
        load = self._model.load_weights
        self._model.load_weights = lambda pairs: load(self._given(dict(pairs)))

    def __exit__(self, *_: object) -> None:
        del self._model.load_weights


def _no_weights_leave_the_engine_as_it_was(llm: Any, worker: Any, address: str) -> None:
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    with _publisher(address) as publisher, EngineUpdater(llm, address) as updater:
        with pytest.raises(WeightsTimeoutError):
            updater.update(timeout=0.1)
        publisher.publish(vllm_engine.weights(7), 7)
        updater.update()
        with pytest.raises(WeightsTimeoutError, match=r"no weights of version 8 or later at .*: 7"):
            updater.update(8, timeout=0.1)
        # The same by vLLM's own calls.
        for wanted in ({"version": 9, "timeout": 0.1}, {"min_version": 9, "timeout": 0.1}, {"address": "none"}):
            llm.start_weight_update()
            with pytest.raises(WeightsTimeoutError):
                llm.update_weights({"update_info": {"timeout": 0.1} | wanted})
        with pytest.raises(ValueError, match="exclude each other"):
            llm.start_weight_update()
            llm.update_weights({"update_info": {"version": 7, "min_version": 7}})
        with EngineUpdater(llm, address) as other:
            broken_off = mock.patch.object(llm, "update_weights", side_effect=KeyboardInterrupt)
            with broken_off, pytest.raises(KeyboardInterrupt):
                other.update()
            assert other.update() == 7  # works after the interrupted update
        assert _said(llm) == ({7}, ["7"]) and llm.collective_rpc("loaded_version") == [7]
        publisher.publish(vllm_engine.weights(8), 8)
        llm.start_weight_update()
        llm.update_weights({"update_info": {}})
        llm.finish_weight_update()
        assert _said(llm)[0] == {8} and llm.collective_rpc("loaded_version") == [8]


def _weights_that_do_not_fit(llm: Any, worker: Any, address: str) -> None:
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    with _publisher(address) as publisher, EngineUpdater(llm, address) as updater:
        for version, wrong in ((1, {"model.unknown.weight": torch.ones(3)}), (3, {"lm_head.weight": torch.ones(2, 3)})):
            publisher.publish(vllm_engine.weights(version) | wrong, version)
            with pytest.raises(MismatchError, match="it must not serve before an update has worked"):
                updater.update()
            assert updater.version is None and llm.collective_rpc("loaded_version") == [None]
            assert not publisher.publish(vllm_engine.weights(version + 1), version + 1).skipped
            assert updater.update() == version + 1
            assert _said(llm)[0] == {version + 1}


def _a_trainer_that_is_killed(llm: Any, worker: Any, address: str) -> None:
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    code = f"from support import vllm_engine; vllm_engine.publish_until_killed({address!r}, 20)"
    there = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=there, timeout=60, check=False).returncode == -9
    with EngineUpdater(llm, address) as updater:
        assert updater.update() == 20 and _said(llm) == ({20}, ["20"])
        llm.start_weight_update()  # simulate an updater that dies within an update
        engine = _trainer_engine(llm, address, vllm_engine.weights(21))
        engine.send_weights()
        assert engine.version == 21 and _said(llm) == ({21}, ["21"])
        engine.shutdown()
        assert _said(llm) == ({21}, ["21"])


def _trainer_engine(llm: Any, address: str, source: Any, **info: Any) -> Any:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from asyncckpt.integrations.vllm.trainer import SharedMemoryTrainerInfo

    info = {"rank": 0, "timeout": 0.5} | info
    return WeightTransferTrainerFactory.trainer_init(
        SharedMemoryTrainerInfo(address, **info), client=vllm_engine.InProcessClient(llm), source=source
    )


def _a_trainer_that_drives_the_engine(llm: Any, worker: Any, address: str) -> None:
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]  # vLLM has no types here
        """A source that makes the weights one by one, in one buffer."""

        version = 0
        held: set[str] | None = None

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in vllm_engine.weights(1).items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            buffer = torch.empty(1 << 20, dtype=torch.bfloat16)
            for name, tensor in vllm_engine.weights(self.version).items():
                yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

        def held_names(self) -> set[str] | None:
            return self.held

    source = Source()
    engine = _trainer_engine(llm, address, source)
    for source.version, sent in ((1, None), (2, None), (8, 8), (9, None)):
        publication = engine.send_weights(sent)
        assert publication.version == engine.version == source.version and publication.timings["plan_s"] < 0.01
        assert _said(llm) == ({source.version}, [str(source.version)])
    source.version = 5
    engine.send_weights(5, roll_back=True)
    assert _said(llm) == ({5}, ["5"])
    assert _trainer_engine(llm, address, source, rank=1).send_weights() is None  # rank 1 only iterates
    engine.shutdown()
    state = vllm_engine.weights(1)
    engine = _trainer_engine(llm, f"{address} in the background", state, background=True)
    for version in (1, 2, 3):
        for name, tensor in vllm_engine.weights(version).items():
            state[name].copy_(tensor)
        engine.send_weights()
    engine.wait()
    assert _said(llm) == ({3}, ["3"])
    llm.shutdown_weight_transfer_engine()  # the trainer leaves, and another one starts
    engine.client.update_weights = None
    engine.send_weights()
    with pytest.raises(CheckpointError, match="has not done 'update_weights'"):
        engine.wait()
    engine.shutdown()
    source.held = {"lm_head.weight"}
    with pytest.raises(UnsavableStateError, match="a part of the model"):
        _trainer_engine(llm, address, source)
    with pytest.raises(ValueError, match="the weights to send are missing"):
        _trainer_engine(llm, address, None)


def _a_trainer_that_is_interrupted(llm: Any, worker: Any, address: str) -> None:
    """An interrupted trainer leaves no rank waiting in a gather, and no open update in the engine."""
    made: list[str] = []

    class State(dict[str, torch.Tensor]):
        def items(self) -> Any:
            for name, tensor in super().items():
                made.append(name)
                yield name, tensor

    engine = _trainer_engine(llm, address, State(vllm_engine.weights(1)))
    made.clear()
    too_late = mock.patch.object(WeightSubscriber, "versions", side_effect=SaveTimeoutError("as the test wants"))
    gathers = mock.patch.object(torch.distributed, "is_initialized", return_value=True)
    with too_late, gathers, pytest.raises(SaveTimeoutError, match="as the test wants"):
        engine.send_weights()
    assert len(made) == len(vllm_engine.weights(1))
    with mock.patch.object(llm, "update_weights", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.send_weights()
    llm.start_weight_update()  # would raise within an open update
    llm.finish_weight_update()
    engine.shutdown()


def _a_trainer_on_another_host(llm: Any, worker: Any, address: str) -> None:
    """Simulate another host. This process does not find the publication in its own folder."""
    from asyncckpt.integrations.vllm.updater import EngineUpdater

    here = os.environ[FOLDER_VARIABLE]
    os.environ[FOLDER_VARIABLE] = f"{here}-other"
    with _publisher(address) as publisher:
        locator = publisher.serve("127.0.0.1")
        os.environ[FOLDER_VARIABLE] = here
        with EngineUpdater(llm, address, locator=locator) as updater:
            for version in (1, 2, 3):
                assert not publisher.publish(vllm_engine.weights(version), version).skipped
                assert updater.update(version) == version
                assert _said(llm) == ({version}, [str(version)])


# The tests below need no vLLM.


def _modules(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Install a fake vLLM that has only these modules."""
    for name in ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer"]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for short, content in modules.items():
        name = f"vllm.distributed.weight_transfer.{short}"
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Older:
        def __init__(self, config: object, parallel_config: object) -> None: ...

    class Named:
        init_transfer_engine = start_weight_update = update_weights = receive_weights = finish_weight_update = None

        def __init__(self, config: object, parallel_config: object) -> None: ...

    factories = {"WeightTransferEngineFactory": object, "WeightTransferTrainerFactory": object}
    base = dict.fromkeys(("TrainerInitInfo", "TrainerWeightTransferEngine", "WeightSource"), object)
    for modules, said in (
        ({}, "there is no vllm.distributed.weight_transfer.factory"),
        ({"factory": {"WeightTransferEngineFactory": object}}, "there is no WeightTransferTrainerFactory in"),
        ({"factory": factories, "base": base | {"WeightTransferEngine": Older}}, "has no finish_weight_update"),
        (
            {"factory": factories, "base": base | {"WeightTransferEngine": Named}},
            "is made from config",
        ),
    ):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "asyncckpt.integrations.vllm"):
            _modules(patch, **modules)
            assert not ours.register()
        (record,) = caplog.records
        assert said in record.getMessage() and "docs/vllm.md" in record.getMessage()


def test_importing_it_imports_no_vllm() -> None:
    code = "import sys, asyncckpt.integrations.vllm.updater; assert not any(n.startswith('vllm') for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
