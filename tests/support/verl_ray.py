"""A job with verl's real ``CheckpointEngineManager`` and Ray: two actor ranks and two rollouts.

    python tests/support/verl_ray.py FOLDER

The job needs all packages that verl needs. ``tests/integrations/verl/test_engine.py`` runs it if they are installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from support.verl_workers import is_version, weights


class Actor(Worker):  # type: ignore[misc]
    """The checkpoint-engine part of verl's ``ActorRolloutRefWorker``, without its model and device."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=self.rank == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        metrics = await self.checkpoint_engine.send_weights(weights(global_steps or 0), global_steps=global_steps)
        return metrics or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Server:
    """An inference engine that takes weights."""

    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.global_steps: int | None = None

    async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "") -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"weights as {wire_format!r}")
        self.got = {name: tensor async for name, tensor in weights}
        self.global_steps = global_steps


class Rollout(CheckpointEngineWorker):  # type: ignore[misc]
    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, None, Server())

    async def got(self) -> tuple[int | None, dict[str, torch.Tensor]]:
        return self.server_adapter.global_steps, {name: each.clone() for name, each in self.server_adapter.got.items()}

    async def pull_weights(self) -> None:
        engine = self.checkpoint_engine
        await self.server_adapter.update_weights(engine.get_weights(), -1, engine.wire_format)


class Replica:
    """A server with one worker and no requests."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def _nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = _nothing


def main(folder: str) -> None:
    """Run two syncs with a simulated second host, a late joiner, and a sync after the death of a rollout."""
    os.environ["ASYNC_CKPT_RUNTIME_DIR"] = os.path.join(folder, "runtime")
    here = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parents[2])))
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        _temp_dir=os.path.join(folder, "ray"),
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": here, "ASYNC_CKPT_RUNTIME_DIR": os.environ["ASYNC_CKPT_RUNTIME_DIR"]}},
    )
    try:
        _syncs({"ASYNC_CKPT_RUNTIME_DIR": os.path.join(folder, "other")})
    finally:
        ray.shutdown()


def _syncs(elsewhere: dict[str, str]) -> None:
    config = CheckpointEngineConfig(
        backend="asyncckpt",
        update_weights_bucket_megabytes=1,
        custom_backend_module="asyncckpt.integrations.verl",
        engine_kwargs={"asyncckpt": {"timeout": 60}},
    )
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    actors = _group(Actor, 2, config)
    rollouts = [_group(Rollout, 1, rollout_config), _group(Rollout, 1, rollout_config, elsewhere)]
    manager = CheckpointEngineManager(config, actors, [Replica(group.workers[0]) for group in rollouts])
    for version in (1, 2):
        metrics = manager.update_weights(global_steps=version)
        if metrics["checkpoint_engine/version"] != version:
            raise SystemExit(f"version {version} was to be sent, and the metrics are {metrics}")
        for rollout in rollouts:
            _check(rollout, version, version)
    late = _group(Rollout, 1, rollout_config)
    ray.get(late.workers[0].pull_weights.remote())
    _check(late, -1, 2)
    ray.kill(rollouts[0].workers[0])
    manager.replicas = [Replica(rollouts[1].workers[0]), Replica(late.workers[0])]
    manager.update_weights(global_steps=3)
    for rollout in (rollouts[1], late):
        _check(rollout, 3, 3)
    print("all weights are as they were sent")


def _group(kind: type, size: int, config: Any, environment: dict[str, str] | None = None) -> Any:
    pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
    start = RayClassWithInitArgs(ray.remote(kind), config)
    return RayWorkerGroup(pool, start, device_name="cpu", use_gpu=False, worker_env=environment or {})


def _check(rollout: Any, global_steps: int, version: int) -> None:
    steps, got = ray.get(rollout.workers[0].got.remote())
    if steps != global_steps or not is_version(got, version):
        raise SystemExit(f"a rollout has other weights than those of version {version}")


if __name__ == "__main__":
    main(sys.argv[1])
