"""Test that a sync loads, syncs and offloads even if a part fails. Test its metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import fields
from functools import partial

import pytest
import torch
from offload import OffloadedParameters
from offload_sync import SyncMetrics, loaded, sync_with_offload
from support.ranks import alone, say
from torch import nn

from asyncckpt.weights import WeightPublisher

pytestmark = pytest.mark.usefixtures("forkserver")


def test_a_phase_that_did_not_take_place_is_zero() -> None:
    metrics = sync_with_offload(None, lambda _: None, None)
    assert metrics.sync_s > 0 and metrics.total_s >= metrics.sync_s
    took_place = {"sync_s", "total_s"}
    for each in fields(SyncMetrics):
        if each.name.endswith("_s") and each.name not in took_place:
            value = getattr(metrics, each.name)
            assert type(value) is float and value == 0.0, each.name


def test_each_phase_has_its_own_time() -> None:
    def sync(metrics: SyncMetrics) -> str:
        for _ in range(2):
            with metrics.measure("stage"):
                time.sleep(0.02)
        with metrics.measure("publish"):
            time.sleep(0.01)
        metrics.version, metrics.bytes_staged = 7, 100
        return "published"

    metrics = sync_with_offload(partial(time.sleep, 0.03), sync, partial(time.sleep, 0.05))
    assert metrics.result == "published"
    assert metrics.load_s >= 0.03 and metrics.stage_s >= 0.04 and metrics.publish_s >= 0.01
    assert metrics.offload_s >= 0.05 and metrics.sync_s >= metrics.stage_s + metrics.publish_s
    assert metrics.total_s >= metrics.load_s + metrics.sync_s + metrics.offload_s
    logged = metrics.as_dict("timing_s/")
    assert logged["timing_s/stage_s"] == metrics.stage_s and logged["timing_s/transfer_s"] == 0.0
    assert logged["timing_s/version"] == 7 and logged["timing_s/bytes_staged"] == 100
    assert all(type(value) in (int, float) for value in logged.values())
    assert "version" not in SyncMetrics().as_dict()


def test_the_body_may_await() -> None:
    async def sync(calls: list[str]) -> None:
        with loaded(partial(calls.append, "load"), partial(calls.append, "offload")) as metrics:
            await asyncio.sleep(0.01)
            calls.append("sync")
        assert metrics.sync_s >= 0.01 and metrics.load_s > 0 and metrics.offload_s > 0

    calls: list[str] = []
    asyncio.run(sync(calls))
    assert calls == ["load", "sync", "offload"]


def test_metrics_start_no_device() -> None:
    code, said = alone(_measure)
    assert code == 0 and said == [False, False]


def _measure() -> None:
    parameters = OffloadedParameters(nn.Linear(3, 3), "cuda")
    moved = sync_with_offload(parameters.load, lambda _: None, parameters.offload).load_s > 1
    say([torch.cuda.is_initialized(), moved])  # type: ignore[no-untyped-call]


def _fail(what: str, *_: object) -> None:
    time.sleep(0.001)
    raise ValueError(what)


@pytest.mark.parametrize("failing", ["load", "sync", "offload"])
def test_offloaded_whatever_fails(failing: str) -> None:
    calls = []

    def step(name: str, *_: object) -> None:
        calls.append(name)
        if name == failing:
            _fail(name)

    metrics = SyncMetrics()
    with pytest.raises(ValueError, match=failing):
        sync_with_offload(partial(step, "load"), partial(step, "sync"), partial(step, "offload"), metrics=metrics)
    assert calls == (["load", "offload"] if failing == "load" else ["load", "sync", "offload"])
    assert metrics.load_s > 0 and metrics.offload_s > 0 and metrics.total_s > 0.001
    assert (metrics.sync_s == 0.0) == (failing == "load")


@pytest.mark.parametrize("first", ["load", "sync"])
def test_of_two_errors_none_is_lost(first: str, caplog: pytest.LogCaptureFixture) -> None:
    load = partial(_fail, "the first") if first == "load" else None
    with pytest.raises(ValueError, match="the first") as caught:
        sync_with_offload(load, partial(_fail, "the first"), partial(_fail, "the second"))
    assert caught.value.__context__ is None
    assert "ValueError: the second" in "".join(getattr(caught.value, "__notes__"))  # noqa: B009
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info is not None
    assert str(record.exc_info[1]) == "the second"


def test_interrupted_is_offloaded() -> None:
    calls: list[str] = []

    def interrupt(_: object) -> None:
        calls.append("sync")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync_with_offload(None, interrupt, partial(calls.append, "offload"))
    assert calls == ["sync", "offload"]


def test_a_publication_counts_what_it_took() -> None:
    model = nn.Linear(30, 40)
    with WeightPublisher("policy") as publisher:

        def sync(metrics: SyncMetrics) -> None:
            metrics.count(publisher.publish(model.state_dict(), 7))

        metrics = sync_with_offload(None, sync, None)
    assert metrics.version == 7 and metrics.bytes_staged >= 4 * (30 * 40 + 40)
    assert metrics.stage_s > 0.0 and metrics.plan_s > 0.0
    assert (metrics.load_s, metrics.offload_s, metrics.transfer_s) == (0.0, 0.0, 0.0)
    assert metrics.plan_s + metrics.wait_s + metrics.stage_s <= metrics.sync_s <= metrics.total_s
