"""The trainer's half of vLLM's weight transfer: each ``send_weights`` publishes once, and has the engine load that.

    info = SharedMemoryTrainerInfo("policy", rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    engine.send_weights()

``client`` is one of vLLM's, or anything with those four methods. To import this module makes the backend known to
vLLM, whose plugins are loaded in engines alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    materialize_full_tensor,
)

from asyncckpt.errors import CheckpointError, UnsavableStateError, WeightsTimeoutError
from asyncckpt.integrations.vllm import BACKEND, register
from asyncckpt.weights import Publication, WeightPublisher, WeightSubscriber

logger = logging.getLogger(__name__)


@dataclass
class SharedMemoryTrainerInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """The argument of ``trainer_init``, on each rank with its ``rank``.

    ``address``: any text, by which the engine finds the weights. ``dtype``, of ``WeightPublisher.publish``, and
    ``slots``, of ``WeightPublisher``. ``timeout``: seconds that an engine waits for weights. ``background``:
    ``send_weights`` returns when the weights are published, and the engine is told by a thread; the next call raises
    what came of that. ``host``: name or address of this host, for engines on others; None: they are all here.
    """

    backend: ClassVar[str] = BACKEND
    address: str
    dtype: torch.dtype | None = None
    slots: int = 3
    timeout: float = 60.0
    background: bool = False
    host: str | None = None


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """vLLM's contract for a trainer, ``TrainerWeightTransferEngine``. All ranks make the same calls.

    The first rank publishes what its source yields, and talks to the engine; the others only iterate over theirs, for
    gathering a parameter is a collective. The trainer may change its weights when ``send_weights`` returns.
    """

    init_info_cls = SharedMemoryTrainerInfo

    def __init__(self, info: SharedMemoryTrainerInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.version: int | None = None
        """That which was published last, on the sender."""
        self._info = info
        self._publisher: WeightPublisher | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._update: Future[None] | None = None

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInfo, *, client: Any, source: Any = None
    ) -> SharedMemoryTrainerEngine:
        """Tell the engine where the weights will be, and take the memory for them.

        Args:
            init_info: As it says.
            client: vLLM's ``VLLMWeightSyncClient``.
            source: vLLM's ``WeightSource``, or a state dict whose tensors are always the same.

        Raises:
            ValueError: There is no source.
            UnsavableStateError: It holds a part of the model only.
            CheckpointError: As ``WeightPublisher.prepare`` does; or the engine could not be told.
        """
        if source is None:
            raise ValueError("what shall be sent? give a WeightSource, or a state dict")
        if not isinstance(source, Mapping) and source.held_names() is not None:
            raise UnsavableStateError(
                "each rank of this source holds a part of the model, and the first rank alone sends:"
                " publish it from all ranks, by WeightPublisher(process_group=...)"
            )
        engine = cls(init_info, client=client, source=source)
        structure = engine._structure()  # on all ranks: for some sources it is a collective
        if engine.is_sender:
            engine._publisher = WeightPublisher(init_info.address, slots=init_info.slots, when_busy="wait")
            engine._publisher.prepare(structure, dtype=init_info.dtype)
            if init_info.background:
                engine._thread = ThreadPoolExecutor(1, thread_name_prefix="asyncckpt-vllm")
            told: dict[str, Any] = {"address": init_info.address, "timeout": init_info.timeout}
            if init_info.host is not None:
                told["locator"] = engine._publisher.serve(init_info.host)
            engine._told("init_weight_transfer_engine", told)
        return engine

    def send_weights(self, version: int | None = None, *, roll_back: bool = False) -> Publication | None:
        """Publish the weights as they are now, by one copy, and have the engine load them.

        Args:
            version: As of ``WeightPublisher.publish``; None: the next one.
            roll_back: As there.

        Returns:
            What was published; None on ranks that do not send.

        Raises:
            CheckpointError: As ``WeightPublisher.publish`` does, and the engine keeps what it has; or the engine has
                not loaded what is published, and the text says whether it may serve.
        """
        publisher = self._publisher
        if publisher is None:
            for _ in self._pairs():
                pass
            return None
        publication = self._publish(publisher, version, roll_back)
        self.version = publication.version
        self.wait()
        if self._thread is None:
            self._have_loaded(publication.version)
        else:
            self._update = self._thread.submit(self._have_loaded, publication.version)
        return publication

    def wait(self) -> None:
        """Wait until the engine has loaded what was sent last. Raises what came of that, once."""
        update, self._update = self._update, None
        if update is not None:
            update.result()

    def shutdown(self) -> None:
        """Wait for the engine, and give the memory back. The engine keeps its weights."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._publisher is not None:
                self._publisher.close()

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self.source, Mapping):
            for name, tensor in self.source.items():
                yield name, materialize_full_tensor(tensor)
        else:
            yield from self.source

    def _structure(self) -> dict[str, torch.Tensor]:
        """Tensors like those that will be sent, which take no memory."""
        if isinstance(self.source, Mapping):
            shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.source.items()}
        else:
            shapes = {meta.name: (meta.dtype, tuple(meta.shape)) for meta in self.source.metadata()}
        return {name: torch.empty((), dtype=dtype).expand(shape) for name, (dtype, shape) in shapes.items()}

    def _publish(self, publisher: WeightPublisher, version: int | None, roll_back: bool) -> Publication:
        pairs = self._pairs()
        weights: Any = pairs
        # Without process groups there are no sharded parameters: these yield what is there already, and all of it can
        # be copied at once, by several threads.
        if isinstance(self.source, (Mapping, ModuleSource)) and not torch.distributed.is_initialized():
            weights = dict(pairs)
        try:
            version = self._next() if version is None else version
            publication = publisher.publish(weights, version, dtype=self._info.dtype, roll_back=roll_back)
        except Exception:
            for _ in pairs:  # other ranks are about to gather the rest
                pass
            raise
        if publication.skipped:
            raise WeightsTimeoutError(f"version {version} was not published: readers have all slots")
        return publication

    def _next(self) -> int:
        """The version after the last one: also of a trainer before this one, whose worker still has it."""
        if self.version is None:
            with WeightSubscriber(self._info.address) as subscriber:
                return max(subscriber.versions(), default=0) + 1
        return self.version + 1

    def _have_loaded(self, version: int) -> None:
        try:
            self.client.start_weight_update()
        except Exception:
            self._end_update()  # which a trainer before this one had begun when it died
            self._told("start_weight_update")
        try:
            self._told("update_weights", {"version": version, "timeout": self._info.timeout})
        except BaseException:
            self._end_update()
            raise
        self._told("finish_weight_update", str(version))

    def _end_update(self) -> None:
        """Have the engine begin anew. It changes nothing of its weights, and is refused where no update is begun."""
        with contextlib.suppress(Exception):
            self.client.finish_weight_update()

    def _told(self, call: str, *arguments: Any) -> None:
        """Call the engine. What it raises is not ours, and may be anything: a reply of HTTP, or of Ray."""
        try:
            getattr(self.client, call)(*arguments)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the engine has not done {call!r} for the weights at {self._info.address!r}: {error}"
            ) from error


register()
