"""What a rollout process calls to have its vLLM engine load what a trainer has published: the trainer needs no vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Literal

from asyncckpt.weights import Weights, WeightSubscriber


class _Updater:
    """What both have."""

    def __init__(self, engine: Any, address: str, *, prefix: str = "", locator: str | None = None) -> None:
        """Nothing is loaded, and nothing waited for, before ``update``.

        Args:
            engine: vLLM's, made with ``weight_transfer_config={"backend": "asyncckpt"}``.
            address: That of the ``WeightPublisher``.
            prefix: Only tensors whose names begin with that, and without it.
            locator: Of a publisher on another host, as of ``WeightSubscriber``.
        """
        self._engine = engine
        self._subscriber = WeightSubscriber(address, prefix=prefix, locator=locator)
        self._init = {"init_info": {"address": address, "prefix": prefix, "locator": locator}}
        self._is_ready = False
        self._loaded: tuple[int, int] | None = None

    @property
    def version(self) -> int | None:
        """The version that the engine has; None: none of these."""
        return None if self._loaded is None else self._loaded[0]

    def close(self) -> None:
        """Ask for no more versions. The engine keeps what it has. Safe to call twice."""
        self._subscriber.close()

    def _is_new(self, weights: Weights) -> bool:
        return self._loaded != (weights.version, weights.epoch)


class EngineUpdater(_Updater):
    """Has an ``LLM`` load versions, each on all of its workers. ``close`` it, or use it as a context manager."""

    def update(
        self,
        min_version: int | None = None,
        *,
        version: int | None = None,
        roll_back: bool = False,
        timeout: float = 60.0,
    ) -> int:
        """Load the newest version, where the engine does not have it yet, and forget prefixes cached with older ones.

        It is leased until the engine has it, so it cannot be gone when a worker comes for it. vLLM is told the version:
        it is the engine's ``get_weight_version``, and that of each output.

        Args:
            min_version: As of ``WeightSubscriber.acquire``.
            version: As there.
            roll_back: As there.
            timeout: As there.

        Returns:
            The version that the engine has now.

        Raises:
            CheckpointError: As of ``WeightSubscriber.acquire``: the engine is as it was.
            Exception: What vLLM makes of an error in a worker, with its text, which says whether the engine may serve.
        """
        wanted: dict[str, Any] = {"version": version, "roll_back": roll_back, "timeout": timeout, "readonly": True}
        with self._subscriber.acquire(min_version, **wanted) as weights:
            if self._is_new(weights):
                self._loaded = None  # should it fail half-way, no version is there
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
        except BaseException:  # a task that is cancelled, too: else vLLM begins no other update
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
    """Has an ``AsyncLLM`` load versions while it serves. ``close`` it when it is not needed any more."""

    async def update(
        self,
        min_version: int | None = None,
        *,
        version: int | None = None,
        roll_back: bool = False,
        timeout: float = 60.0,
        requests: Literal["wait", "abort", "keep"] = "wait",
    ) -> int:
        """As ``EngineUpdater.update``, with the engine paused meanwhile.

        After an error of the engine it stays paused: ``await engine.resume_generation()`` once it may serve.

        Args:
            min_version: As of ``WeightSubscriber.acquire``.
            version: As there.
            roll_back: As there.
            timeout: As there.
            requests: What becomes of requests under way. They are done first, with the old weights ("wait"), or given
                up ("abort"), or go on with the new weights from the next token on ("keep").

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
        except BaseException:  # a task that is cancelled, too: else vLLM begins no other update
            with contextlib.suppress(Exception):  # see ``SharedMemoryWeightTransferEngine.update_weights``
                await self._engine.finish_weight_update()
            raise
        await self._engine.finish_weight_update(str(version))
        await self._engine.reset_prefix_cache()
