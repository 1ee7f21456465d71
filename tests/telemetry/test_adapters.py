"""Each telemetry adapter with its library, fed by real saves, loads and deaths of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.ranks import script
from support.workers import wait_for

from asyncckpt import Checkpointer, Config
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from asyncckpt.events import Event
from asyncckpt.telemetry.otel import NVRX_SPANS, OpenTelemetry
from asyncckpt.telemetry.prometheus import PrometheusMetrics
from asyncckpt.telemetry.scalars import TensorBoard
from asyncckpt.worker.metrics_file import MetricsFile

STATE = {"w": torch.arange(100_000)}
RANK = {"training": "", "rank": "0"}


def train(root: Path, *listeners: Any) -> None:
    """Make two saves, a refused save, loads, and a save after the worker's death."""
    with Checkpointer(root, Config(linger=0, on_event=listeners)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE).result(60)
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(2, STATE)
        checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load({}, step=9)
        assert checkpointer._engine.worker is not None
        checkpointer._engine.worker.kill()
        checkpointer.save(3, STATE).result(60)


def test_prometheus(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    train(tmp_path, PrometheusMetrics(registry))
    value = registry.get_sample_value
    assert value("asyncckpt_saves_total", {**RANK, "outcome": "committed"}) == 3
    assert value("asyncckpt_saves_total", {**RANK, "outcome": "failed"}) == 1
    assert value("asyncckpt_slots_busy", RANK) == 0
    assert value("asyncckpt_last_durable_step", RANK) == 3
    assert value("asyncckpt_worker_restarts_total", RANK) == 1
    assert value("asyncckpt_load_seconds_count", {**RANK, "source": "storage"}) == 1
    assert value("asyncckpt_load_seconds_count", {**RANK, "source": "failed"}) == 1
    for name in ("save_stall", "staging", "write", "commit", "durable_lag"):
        # A refused call stalls the training too.
        assert value(f"asyncckpt_{name}_seconds_count", RANK) == (4 if name == "save_stall" else 3), name
        assert (value(f"asyncckpt_{name}_seconds_sum", RANK) or 0) > 0, name
    assert (value("asyncckpt_written_bytes_total", RANK) or 0) > 3 * STATE["w"].nbytes
    assert (value("asyncckpt_write_bytes_per_second", RANK) or 0) > 0
    stored = max(path.stat().st_mtime for path in tmp_path.rglob("asyncckpt.json"))
    assert abs((value("asyncckpt_last_durable_timestamp_seconds", RANK) or 0) - stored) < 30


def test_prometheus_counts_saves_under_way() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    busy = []
    for phase, path, nbytes in (
        *(("planned", "a", 1), ("planned", "b", 1), ("failed", "b", None)),  # refused, because b is in progress
        *(("committed", "a", 1), ("failed", "c", None), ("failed", "b", 1)),
    ):
        metrics(Event(phase=phase, rank=0, path=path, nbytes=nbytes))  # type: ignore[arg-type]
        busy.append(registry.get_sample_value("asyncckpt_slots_busy", RANK))
    assert busy == [1, 2, 2, 1, 1, 0]


def test_opentelemetry(tmp_path: Path) -> None:
    reader, exporter, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    train(tmp_path, OpenTelemetry(MeterProvider([reader]), tracers))
    found: Any = reader.get_metrics_data()
    metrics = {each.name: each for each in found.resource_metrics[0].scope_metrics[0].metrics}
    saves = {point.attributes["asyncckpt.outcome"]: point.count for point in metrics["asyncckpt.save"].data.data_points}
    assert saves == {"committed": 3, "failed": 1}
    for name in ("save", "save.stall", "save.staging", "save.write", "save.commit", "load"):
        assert metrics[f"asyncckpt.{name}"].unit == "s"
    assert metrics["asyncckpt.save.written"].unit == "By"
    spans = exporter.get_finished_spans()
    whole = [span for span in spans if span.name == "asyncckpt.save"]
    assert [(span.attributes or {}).get("asyncckpt.outcome") for span in whole] == ["committed"] * 2 + [
        "failed",
        "committed",
    ]
    assert not whole[2].status.is_ok and "CheckpointExistsError" in str(whole[2].status.description)
    assert whole[0].context is not None
    parts = [span for span in spans if span.parent is not None and span.parent.span_id == whole[0].context.span_id]
    assert [span.name for span in parts] == [f"asyncckpt.save.{name}" for name in ("staging", "write", "commit")]
    for span in parts:
        assert (whole[0].start_time or 0) <= (span.start_time or 0) <= (span.end_time or 0)
        assert (span.end_time or 0) <= (whole[0].end_time or 0) + 20_000_000  # from clocks of two processes
    loads = [dict(span.attributes or {}) for span in spans if span.name == "asyncckpt.load"]
    assert [load["asyncckpt.outcome"] for load in loads] == ["loaded", "load failed"]


def test_opentelemetry_by_names_of_nvrx(tmp_path: Path) -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    with Checkpointer(tmp_path, Config(linger=0, on_event=OpenTelemetry(None, tracers, NVRX_SPANS))) as checkpointer:
        checkpointer.save(1, STATE)
    says = {span.name: (span.attributes or {}).get("is_goodput_span") for span in exporter.get_finished_spans()}
    assert says["nvrx.checkpoint.save.request"] is True and says["nvrx.checkpoint.save.write"] is False
    assert "asyncckpt.save" not in says and "asyncckpt.save.commit" in says


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "log")) as writer:
        train(tmp_path / "root", TensorBoard(writer))
    read = EventAccumulator(str(tmp_path / "log"))
    read.Reload()
    scalars = {name: read.Scalars(name) for name in read.Tags()["scalars"]}
    assert [each.step for each in scalars["asyncckpt/stall_s"]] == [1, 2, 3]
    assert all(each.value > 0 for name in ("stall_s", "durable_s") for each in scalars[f"asyncckpt/{name}"])
    assert all(each.value > 0 for each in scalars["asyncckpt/write_bytes_per_s"])
    assert [(each.step, each.value) for each in scalars["asyncckpt/failures"]] == [(2, 1.0)]
    assert len(scalars["asyncckpt/load_s"]) == 1


# A wandb run starts a service that stays alive, so the run gets its own process.
_LOGS_TO_WANDB = """
import json, sys, torch, wandb
from asyncckpt import Checkpointer, Config
from asyncckpt.telemetry.scalars import WandB
run = wandb.init(project="test", dir=sys.argv[1], mode="offline")
steps = []
with Checkpointer(sys.argv[1] + "/root", Config(linger=0, on_event=WandB(run))) as checkpointer:
    for step in range(3):
        checkpointer.save(10 * step, {"w": torch.arange(100_000)}).result(60)
        run.log({"loss": 1.0}, step=step)
        steps.append(run.step)
run.log({"loss": 1.0}, step=3)
summary = {name: run.summary[name] for name in run.summary.keys() if "/" in name}
run.finish()
print(json.dumps({"summary": summary, "steps": steps}))
"""


def test_wandb(tmp_path: Path) -> None:
    environment = {**os.environ, "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", _LOGS_TO_WANDB, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == [0, 1, 2]  # the training's own step count, the same as without asyncckpt
    assert found["summary"]["asyncckpt/step"] == 20
    assert all(found["summary"][f"asyncckpt/{name}"] > 0 for name in ("stall_s", "durable_s", "write_bytes_per_s"))


# The metrics file of the worker.


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "metrics"
    folder.mkdir()
    yield folder


def samples(folder: Path) -> dict[str, float]:
    """Return the samples of the only file, by name and outcome."""
    (file,) = folder.glob("*.prom")
    return {
        " ".join([sample.name, *filter(None, [sample.labels.get("outcome")])]): sample.value
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    }


def test_the_worker_keeps_a_file_which_goes_at_an_orderly_end(tmp_path: Path, folder: Path) -> None:
    config = Config(linger=0, metrics_folder=str(folder), local_root=str(tmp_path / "local"))
    with Checkpointer(tmp_path / "root", config) as checkpointer:
        for step in (1, 2):  # a newer upload replaces a waiting one
            checkpointer.save(step, STATE)
            checkpointer.wait_uploads(60)
        wait_for(
            lambda: len([*folder.glob("*.prom")]) == 1 and samples(folder).get("asyncckpt_uploads_total done") == 2
        )
        found = samples(folder)
        assert found["asyncckpt_saves_total committed"] == 2 and found["asyncckpt_last_durable_step"] == 2
        assert found["asyncckpt_save_stall_seconds_count"] == 2 and found["asyncckpt_save_stall_seconds_sum"] > 0
    assert not [*folder.iterdir()]


_DIES = """
import os, signal, sys, torch
from asyncckpt import Checkpointer, Config
checkpointer = Checkpointer(sys.argv[1], Config(linger=30, metrics_folder=sys.argv[2]))
checkpointer.save(5, {"w": torch.arange(100_000)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("forkserver")
def test_the_file_outlives_a_trainer_that_dies(tmp_path: Path, folder: Path) -> None:
    assert script(_DIES, str(tmp_path / "root"), str(folder)) == -signal.SIGKILL
    wait_for(lambda: any(folder.glob("*.prom")) and samples(folder).get("asyncckpt_last_durable_step") == 5)
    with Checkpointer(tmp_path / "root", Config(linger=0, metrics_folder=str(folder))) as checkpointer:
        checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        checkpointer.save(6, STATE).result(60)
        wait_for(lambda: samples(folder)["asyncckpt_last_durable_step"] == 6)  # the same file
    assert not [*folder.iterdir()]


@pytest.mark.usefixtures("forkserver")
def test_what_was_durable_is_known_where_the_next_worker_commits_nothing(tmp_path: Path, folder: Path) -> None:
    assert script(_DIES, str(tmp_path / "root"), str(folder)) == -signal.SIGKILL
    with Checkpointer(tmp_path / "root", Config(linger=0, metrics_folder=str(folder))) as checkpointer:
        checkpointer.load({"w": torch.zeros(100_000, dtype=torch.int64)})
        (tmp_path / "root").joinpath("step-00000006").touch()  # appears during the save
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(6, STATE).result(60)
        checkpointer.prepare(STATE)
        wait_for(lambda: samples(folder).get("asyncckpt_save_stall_seconds_count") is None)
        found = samples(folder)
        assert found["asyncckpt_last_durable_step"] == 5 and found["asyncckpt_started_timestamp_seconds"] > 0
        assert found["asyncckpt_saves_total failed"] == found["asyncckpt_saves_total committed"] == 0


def test_two_trainings_have_files_and_labels_of_their_own(tmp_path: Path, folder: Path) -> None:
    config = Config(linger=0, metrics_folder=str(folder))
    with Checkpointer(tmp_path / "a", config) as one, Checkpointer(tmp_path / "b", config) as other:
        for checkpointer in (one, other):
            checkpointer.save(1, STATE).result(60)
        wait_for(lambda: len([*folder.glob("*.prom")]) == 2)
        text = "".join(file.read_text() for file in folder.glob("*.prom"))
    assert all(f'training="{tmp_path / name}"' in text for name in "ab")


def test_a_folder_that_cannot_be_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with Checkpointer(tmp_path, Config(linger=0, metrics_folder=str(tmp_path / "file/folder"))) as checkpointer:
        checkpointer.save(1, STATE).result(60)
        checkpointer.save(2, STATE).result(60)
    assert caplog.text.count("Config.metrics_folder: ") == 1 and "Not a directory" in caplog.text


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Config(linger=0, metrics_folder=str(tmp_path / "a/b"))) as checkpointer:
        checkpointer.save(1, STATE).result(60)
        wait_for(lambda: any(tmp_path.glob("a/b/*.prom")))
        assert "asyncckpt_worker_restarts_total" not in samples(tmp_path / "a/b")


def test_without_the_library_the_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"asyncckpt\[prometheus\]"):
        Config(metrics_folder="/somewhere")


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads(Path(__file__).parents[2].joinpath("examples/grafana.json").read_text())
    file = MetricsFile("/nowhere", "training", 0)  # has one more metric
    registry = file.registry
    known = {sample for family in registry.collect() for sample in _names(family.name, family.type)}
    asked = {
        word
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for word in target["expr"].replace("(", " ").replace("{", " ").replace("[", " ").replace(")", " ").split()
        if word.startswith("asyncckpt_")
    }
    assert len(asked) >= 10 and asked <= known


def _names(family: str, kind: str) -> list[str]:
    match kind:
        case "counter":
            return [f"{family}_total"]
        case "histogram":
            return [f"{family}_{part}" for part in ("bucket", "count", "sum")]
        case _:
            return [family]
