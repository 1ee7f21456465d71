"""Have a rollout process load a trainer's publications into its vLLM engine; the trainer needs no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Literal

from asyncckpt.weights import Weights, WeightSubscriber


class _Updater:
    """The common part of both updaters."""

    def __init__(self, engine: Any, address: str, *, prefix: str = "", locator: str | None = None) -> None:
        """Keep the arguments. ``update`` loads the first version.

        Args:
            engine: vLLM's engine, made with ``weight_transfer_config={"backend": "asyncckpt"}``.
            address: Address of the ``WeightPublisher``.
            prefix: Load only tensors with this prefix in their names, and remove the prefix.
            locator: Locator of a publisher on another host, as for ``WeightSubscriber``.
        """
        self._engine = engine
        self._subscriber = WeightSubscriber(address, prefix=prefix, locator=locator)
        self._init = {"init_info": {"address": address, "prefix": prefix, "locator": locator}}
        self._is_ready = False
        self._loaded: tuple[int, int] | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine has; None if the engine has no version of the publisher."""
        return None if self._loaded is None else self._loaded[0]

    def close(self) -> None:
        """Stop reading versions. The engine keeps its weights. Safe to call twice."""
        self._subscriber.close()

    def _is_new(self, weights: Weights) -> bool:
        return self._loaded != (weights.version, weights.epoch)


class EngineUpdater(_Updater):
    """Has an ``LLM`` load versions, each on all of its workers. Call ``close`` at the end, or use a ``with`` block."""

    def update(
        self,
        min_version: int | None = None,
        *,
        version: int | None = None,
        roll_back: bool = False,
        timeout: float = 60.0,
    ) -> int:
        """Load the newest version, unless the engine has it already, and reset the prefix cache.

        The version is leased until the engine has it, so it cannot disappear before a worker loads it. vLLM returns the
        version from the engine's ``get_weight_version``, and with each output.

        Args:
            min_version, version, roll_back, timeout: As for ``WeightSubscriber.acquire``.

        Returns:
            The version that the engine has now.

        Raises:
            CheckpointError: As ``WeightSubscriber.acquire`` raises; the engine is unchanged.
            Exception: An error in a worker, in vLLM's form. The text says whether the engine may serve.
        """
        wanted: dict[str, Any] = {"version": version, "roll_back": roll_back, "timeout": timeout, "readonly": True}
        with self._subscriber.acquire(min_version, **wanted) as weights:
            if self._is_new(weights):
                self._loaded = None  # after a failure half-way the engine has no version
                self._load(weights.version, timeout)
                self._loaded = weights.version, weights.epoch
        return weights.version

    def _load(self, version: int, timeout: float) -> None:
        if not self._is_ready:
            self._engine.init_weight_transfer_engine(self._init)
            self._is_ready = True
        self._engine.start_weight_update()
        try:
            self._engine.update_weights({"update_info": {"version": version, "timeout": timeout}})
        except BaseException:  # also for an interrupt, because otherwise vLLM begins no other update
            with contextlib.suppress(Exception):  # see ``SharedMemoryWeightTransferEngine.update_weights``
                self._engine.finish_weight_update()
            raise
        self._engine.finish_weight_update(str(version))
        self._engine.reset_prefix_cache()

    def __enter__(self) -> EngineUpdater:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncEngineUpdater(_Updater):
    """Has an ``AsyncLLM`` load versions while it serves. Call ``close`` at the end."""

    async def update(
        self,
        min_version: int | None = None,
        *,
        version: int | None = None,
        roll_back: bool = False,
        timeout: float = 60.0,
        requests: Literal["wait", "abort", "keep"] = "wait",
    ) -> int:
        """Load the newest version as ``EngineUpdater.update`` does, with the engine paused meanwhile.

        After an error while the engine is paused, the engine stays paused. Call ``await engine.resume_generation()``
        once the engine may serve. An error of ``WeightSubscriber.acquire`` comes before the pause.

        Args:
            min_version, version, roll_back, timeout: As for ``WeightSubscriber.acquire``.
            requests: The handling of requests under way. "wait": first finish them with the old weights. "abort": abort
                them. "keep": continue them with the new weights from the next token on.

        Returns:
            The version that the engine has now.
        """
        wanted: dict[str, Any] = {"version": version, "roll_back": roll_back, "timeout": timeout, "readonly": True}
        with await asyncio.to_thread(self._subscriber.acquire, min_version, **wanted) as weights:
            if self._is_new(weights):
                self._loaded = None
                await self._engine.pause_generation(mode=requests)
                await self._load(weights.version, timeout)
                await self._engine.resume_generation()
                self._loaded = weights.version, weights.epoch
        return weights.version

    async def _load(self, version: int, timeout: float) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        if not self._is_ready:
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(**self._init))
            self._is_ready = True
        await self._engine.start_weight_update()
        update = WeightTransferUpdateRequest(update_info={"version": version, "timeout": timeout})
        try:
            await self._engine.update_weights(update)
        except BaseException:  # also if the task is cancelled, because otherwise vLLM begins no other update
            with contextlib.suppress(Exception):  # see ``SharedMemoryWeightTransferEngine.update_weights``
                await self._engine.finish_weight_update()
            raise
        await self._engine.finish_weight_update(str(version))
        await self._engine.reset_prefix_cache()
