"""verl's checkpoint engine without Ray: verl's own manager and worker classes, with plain processes as workers.

``load`` imports the real ``verl.checkpoint_engine.base`` from an unpacked wheel. Stand-in modules provide the few other
names of verl and Ray that this module imports. ``ray.get`` waits for the answers of the plain processes.
``tests/support/verl_ray.py`` runs the same with the real verl and Ray, if they are installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncckpt.link.endpoint import FOLDER_VARIABLE
from support.states import same

LIMIT_S = 110.0

_context = multiprocessing.get_context("fork")  # forks a process that has imported torch, but not used it


def load() -> types.ModuleType:
    """Return the module with verl's real classes. verl has to be on the path, but not its dependencies."""
    base = "verl.checkpoint_engine.base"
    if base not in sys.modules:
        folder = Path(next(path for path in sys.path if (Path(path) / "verl").is_dir())) / "verl"
        for name in ("", ".checkpoint_engine", ".utils", ".workers", ".single_controller"):
            _module(f"verl{name}").__path__ = [str(folder.joinpath(*name.split(".")))]
        _module("ray", get=_get, remote=lambda kind: kind, is_initialized=lambda: False)
        _module("verl.single_controller.base", Worker=object).__path__ = []
        _module("verl.single_controller.base.decorator", Dispatch=_Dispatch, register=lambda **_: lambda method: method)
        _module("verl.single_controller.ray", RayClassWithInitArgs=dict, RayWorkerGroup=_joined)
        _module("verl.utils.distributed", initialize_global_process_group_ray=lambda **_: None)
        _module("verl.workers.config", CheckpointEngineConfig=object, HFModelConfig=object, RolloutConfig=object)
        names = dict.fromkeys(("BaseRollout", "RolloutReplica", "get_rollout_class"), object)
        _module("verl.workers.rollout", **names).__path__ = []
        _module("verl.workers.rollout.utils", ensure_async_iterator=None)
    return importlib.import_module(base)


def _module(name: str, **names: Any) -> Any:
    module = types.ModuleType(name)
    module.__dict__.update(names, __spec__=ModuleSpec(name, None))
    sys.modules[name] = module
    return module


class _Dispatch(enum.Enum):
    ONE_TO_ALL = 0
    DP_COMPUTE = 1


class Pending:
    """The future answer of a worker."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._number = number

    def result(self) -> Any:
        """Return the answer. Raise the worker's error, or ``EOFError`` if the worker is dead."""
        return self._worker.answer(self._number)


def _get(pending: Any) -> Any:
    """Wait for all answers as ``ray.get`` does. Then return the results, or raise the first error."""
    if isinstance(pending, Pending):
        return pending.result()
    results, errors = [], []
    for each in pending:
        try:
            results.append(each.result())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


class Worker:
    """A process with a checkpoint engine, like verl's actors and rollouts. It runs one call after the other."""

    def __init__(self, role: str, runtime: str, engine_kwargs: dict[str, Any]) -> None:
        """``role``: "master" (the first actor), "actor" or "rollout". ``runtime``: the runtime folder of its host."""
        self._pipe, theirs = _context.Pipe()
        self._answers: dict[int, tuple[str, Any]] = {}
        self._asked = 0
        environment = {FOLDER_VARIABLE: runtime}
        self.process = _context.Process(target=_work, args=(theirs, role, environment, engine_kwargs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call ``method`` of the worker class in the process. Return the pending answer."""
        self._asked += 1
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send((method, args, kwargs))
        return Pending(self, self._asked)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``method`` in the process, and wait for its result."""
        return self.ask(method, *args, **kwargs).result()

    def answer(self, number: int) -> Any:
        while number not in self._answers:
            if not self._pipe.poll(LIMIT_S):
                raise TimeoutError(f"a worker does not answer within {LIMIT_S:g} s")
            answered, kind, value = self._pipe.recv()
            self._answers[answered] = kind, value
        kind, value = self._answers.pop(number)
        if kind == "error":
            raise value
        return value

    def end(self) -> None:
        """End the process. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self.process.join(LIMIT_S)
        self.process.kill()
        self._pipe.close()


class Crew:
    """The workers of a test on simulated hosts. Each host has its own runtime folder."""

    def __init__(self, hosts: list[str]) -> None:
        self.workers: list[Worker] = []
        self._hosts = hosts

    def master(self, **engine_kwargs: Any) -> Worker:
        """Start the first actor, on the first host."""
        return self._new("master", 0, engine_kwargs)

    def actor(self, host: int = 0, **engine_kwargs: Any) -> Worker:
        return self._new("actor", host, engine_kwargs)

    def rollout(self, host: int, **engine_kwargs: Any) -> Worker:
        return self._new("rollout", host, engine_kwargs)

    def _new(self, role: str, host: int, engine_kwargs: dict[str, Any]) -> Worker:
        self.workers.append(Worker(role, self._hosts[host], {"host": "127.0.0.1", "timeout": 60} | engine_kwargs))
        return self.workers[-1]


@contextlib.contextmanager
def crew(hosts: list[str]) -> Iterator[Crew]:
    """Yield a crew. End its workers afterwards."""
    workers = Crew(hosts)
    try:
        yield workers
    finally:
        for worker in workers.workers:
            worker.end()


class WorkerGroup:
    """The counterpart of ``RayWorkerGroup``. A list argument has one element for each worker."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.world_size = len(workers)

    def execute_checkpoint_engine(self, method: list[str], **kwargs: list[Any]) -> list[Pending]:
        return [
            worker.ask("execute_checkpoint_engine", method[at], **{name: each[at] for name, each in kwargs.items()})
            for at, worker in enumerate(self.workers)
        ]

    def update_weights(self, **kwargs: Any) -> list[Pending]:
        return [worker.ask("update_weights", **kwargs) for worker in self.workers]


def _joined(worker_handles: list[Worker], ray_cls_with_init: Any) -> WorkerGroup:
    return WorkerGroup(worker_handles)


class Replica:
    """A rollout replica with one worker, which records the calls to its server."""

    def __init__(self, worker: Worker) -> None:
        self.workers = [worker]
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def note(**_: Any) -> None:
            self.asked.append(name)

        return note


def manager(actors: list[Worker], rollouts: list[Worker]) -> Any:
    """Return verl's own ``CheckpointEngineManager`` for these workers."""
    config = types.SimpleNamespace(backend="asyncckpt", custom_backend_module="asyncckpt.integrations.verl")
    return load().CheckpointEngineManager(config, WorkerGroup(actors), [Replica(rollout) for rollout in rollouts])


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights: an odd number of two-byte values before four-byte values, no values, one value, and 3 MiB."""
    torch.manual_seed(version)
    yield "odd", torch.randn(7).bfloat16()
    yield "weight", torch.randn(33, 17)
    yield "none", torch.zeros(0, 4)
    yield "count", torch.tensor(version)
    yield "embedding", torch.randn(768, 1024)
    yield "last", torch.randn(5).half()


def is_version(got: dict[str, torch.Tensor], version: int) -> bool:
    """Return whether ``got`` has the weights of ``version``, to the bit, in any order."""
    return same(dict(sorted(got.items())), dict(sorted(weights(version))))


def _work(pipe: Connection, role: str, environment: dict[str, str], engine_kwargs: dict[str, Any]) -> None:
    os.environ.update(environment)
    worker = _rollout(engine_kwargs) if role == "rollout" else _Actor(role == "master", engine_kwargs)
    number = 0
    while (task := pipe.recv()) is not None:
        number += 1
        method, args, kwargs = task
        try:
            found = getattr(worker, method)(*args, **kwargs)
            pipe.send((number, "result", asyncio.run(found) if asyncio.iscoroutine(found) else found))
        except Exception as error:
            traceback.print_exc()
            pipe.send((number, "error", error))
    worker.checkpoint_engine.close()


_BUCKET_MB = 1


class _Actor:
    """The checkpoint-engine part of verl's ``ActorRolloutRefWorker``, which itself needs a model."""

    def __init__(self, is_master: bool, engine_kwargs: dict[str, Any]) -> None:
        registry = load().CheckpointEngineRegistry
        importlib.import_module("asyncckpt.integrations.verl")
        self.checkpoint_engine = registry.new(
            "asyncckpt", is_master=is_master, bucket_size=_BUCKET_MB << 20, **engine_kwargs
        )
        self._made = 0
        self._fails_at: str | None = None
        self._killed_at: str | None = None

    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        metrics = await self.checkpoint_engine.send_weights(self._weights(global_steps), global_steps=global_steps)
        return metrics or {}

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def fail_at(self, name: str | None) -> None:
        self._fails_at = name

    def kill_at(self, name: str) -> None:
        self._killed_at = name

    def kill_worker(self) -> None:
        """Kill the worker process of this actor's publisher, and wait until the publisher knows."""
        client = self.checkpoint_engine.local._publisher.worker
        os.kill(client.pid, signal.SIGKILL)
        while client.alive:
            time.sleep(0.01)

    def how_many(self) -> int:
        """Return the number of weights that the last sync has asked for."""
        return self._made

    def _weights(self, version: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        self._made = 0
        for name, tensor in weights(version or 0):
            if name == self._fails_at:
                raise ValueError("no such weight")
            if name == self._killed_at:
                _kill()
            self._made += 1
            yield name, tensor


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _rollout(engine_kwargs: dict[str, Any]) -> Any:
    """Return verl's own rollout worker with a server that records the weights."""
    base = load()

    class Server:
        def __init__(self) -> None:
            self.got: dict[str, torch.Tensor] = {}
            self.options: dict[str, Any] = {}
            self.kill_at: str | None = None

        async def update_weights(self, weights: Any, **options: Any) -> None:
            self.got, self.options = {}, options
            async for name, tensor in weights:
                if name == self.kill_at:
                    _kill()
                self.got[name] = tensor  # kept after the end of the weights, as in an engine with buckets

    class Rollout(base.CheckpointEngineWorker):  # type: ignore[misc, name-defined]
        def got(self) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in self.server_adapter.got.items()}

        def forms(self) -> dict[str, Any]:
            got = self.server_adapter.got
            return {name: (each.device.type, tuple(each.shape), each.dtype) for name, each in got.items()}

        def let_go(self) -> None:
            """Release the received weights."""
            self.server_adapter.got = {}

        def options(self) -> Any:
            return self.server_adapter.options

        def version(self) -> Any:
            return self.checkpoint_engine.version

        def kill_at(self, name: str) -> None:
            self.server_adapter.kill_at = name

        async def pull_weights(self, **which: Any) -> Any:
            """Pull weights, as a rollout does between its requests."""
            engine = self.checkpoint_engine
            await self.server_adapter.update_weights(engine.get_weights(**which), wire_format=engine.wire_format)
            return engine.version

        async def pull_checkpoint(self, folder: str, **which: Any) -> Any:
            """Pull weights from the image of a checkpoint."""
            engine = self.checkpoint_engine
            await self.server_adapter.update_weights(
                engine.get_checkpoint_weights(folder, **which), wire_format=engine.wire_format
            )
            return engine.version

    config = types.SimpleNamespace(
        backend="asyncckpt",
        update_weights_bucket_megabytes=_BUCKET_MB,
        engine_kwargs={"asyncckpt": engine_kwargs},
        custom_backend_module="asyncckpt.integrations.verl",
    )
    return Rollout(types.SimpleNamespace(checkpoint_engine=config, name="none"), None, Server())
