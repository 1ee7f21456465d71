"""A vLLM engine with two workers on CPUs, updated while it serves. Each token comes from one version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support import vllm_engine

from asyncckpt.weights import WeightPublisher


@vllm_engine.there
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forkserver")
def test_two_workers_that_serve(tmp_path: Path) -> None:
    vllm_engine.run(__file__, "two_workers_that_serve", tmp_path)


# The code below runs in a process that can import vLLM.


def two_workers_that_serve(folder: Path) -> None:
    """Run two tensor-parallel worker processes that generate all the time."""
    asyncio.run(asyncio.wait_for(_serve(folder), 500))  # takes 130 s beside other tests


async def _serve(folder: Path) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from asyncckpt.integrations.vllm.updater import AsyncEngineUpdater

    split = vllm_engine.arguments(folder / "model", tensor_parallel_size=2)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**split))
    updater = AsyncEngineUpdater(engine, "served")
    try:
        with WeightPublisher("served", slots=2) as publisher:
            publisher.publish(vllm_engine.weights(1), 1)
            assert await updater.update() == 1
            await _updates_while_it_generates(engine, updater, publisher)
            await _requests_that_go_on(engine, updater, publisher)
            await _all_workers_take_the_same(engine, publisher)
            await _errors_leave_it_in_step(engine, updater, publisher)
    finally:
        updater.close()
        engine.shutdown()


async def _answer(
    engine: Any, number: int, tokens: int = 2, begun: asyncio.Event | None = None
) -> tuple[list[set[int]], list[Any]]:
    """Return the versions of each token, and vLLM's own version spans. The first output sets ``begun``."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answer = None
    async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, sampling, str(number)):
        answer = output.outputs[0]
        if begun is not None:
            begun.set()
    assert answer is not None
    return [vllm_engine.versions_of(token) for token in answer.token_ids], answer.weight_versions


async def _updates_while_it_generates(engine: Any, updater: Any, publisher: WeightPublisher) -> None:
    answers = []
    done = asyncio.Event()

    async def generate(first: int) -> None:
        number = first
        while not done.is_set():
            answers.append(await _answer(engine, number))
            number += 2

    tasks = [asyncio.create_task(generate(first)) for first in (1, 2)]
    for version in range(2, 52):
        assert not publisher.publish(vllm_engine.weights(version), version).skipped
        assert await updater.update() == version
    done.set()
    await asyncio.gather(*tasks)
    seen = set()
    for tokens, spans in answers:
        (version,) = set.union(*tokens)
        assert [span.version for span in spans] == [str(version)]
        seen.add(version)
    assert len(seen) > 10 and await engine.get_weight_version() == "51"
    print(f"{len(answers)} answers of {len(seen)} versions", flush=True)


async def _requests_that_go_on(engine: Any, updater: Any, publisher: WeightPublisher) -> None:
    spans: list[Any] = []
    for version in range(52, 62):
        begun = asyncio.Event()
        answer = asyncio.create_task(_answer(engine, 10_000 + version, tokens=100, begun=begun))
        await begun.wait()
        assert not publisher.publish(vllm_engine.weights(version), version).skipped
        await updater.update(requests="keep")
        tokens, spans = await answer
        for span in spans:
            # The embedding and the head of a token come from the same version.
            assert all(tokens[at] == {int(span.version)} for at in range(span.start, span.end))
        if len(spans) == 2:  # otherwise the answer was complete before the pause
            assert [span.version for span in spans] == [str(version - 1), str(version)]
            break
    assert len(spans) == 2


async def _all_workers_take_the_same(engine: Any, publisher: WeightPublisher) -> None:
    """Update to the newest version while the publisher keeps publishing."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    states = [vllm_engine.weights(version) for version in (1, 2)]
    stop = asyncio.Event()

    def publish() -> None:
        version = 100
        while not stop.is_set():
            publisher.publish(states[version % 2], version)
            version += 1

    publishing = asyncio.create_task(asyncio.to_thread(publish))
    try:
        loaded = []
        for wanted in [{"min_version": 100}, *[{}] * 19]:
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest(update_info=wanted))
            await engine.finish_weight_update()
            loaded.append(await engine.collective_rpc("loaded_version"))
    finally:
        stop.set()
        await publishing
    assert all(len(set(each)) == 1 and each[0] >= 100 for each in loaded) and len({each[0] for each in loaded}) > 10


async def _errors_leave_it_in_step(engine: Any, updater: Any, publisher: WeightPublisher) -> None:
    """The engine answers as before after an error on all workers."""
    publisher.publish(vllm_engine.weights(3) | {"model.unknown.weight": torch.ones(3)}, 3_000_000)
    with pytest.raises(Exception, match="must not serve before an update has worked"):
        await updater.update()
    assert await engine.collective_rpc("loaded_version") == [None, None] and await engine.is_paused()
    await engine.resume_generation()
    publisher.publish(vllm_engine.weights(4), 3_000_001)
    assert await updater.update() == 3_000_001
    assert await engine.collective_rpc("loaded_version") == [3_000_001] * 2
    tokens, spans = await _answer(engine, 20_000)
    assert set.union(*tokens) == {4} and [span.version for span in spans] == ["3000001"]
