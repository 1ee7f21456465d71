"""Drive vLLM's weight transfer from the trainer: each ``send_weights`` publishes once, and makes the engine load it.

    info = SharedMemoryTrainerInfo("policy", rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    engine.send_weights()

``client`` is a client of vLLM, or any object with the same four methods. Importing this module registers the backend
with vLLM, because vLLM loads its plugins in engines only.
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
    """The argument of ``trainer_init``. Each rank passes its own ``rank``.

    ``address``: any text; the engine finds the weights by this text. ``dtype``: as for ``WeightPublisher.publish``.
    ``slots``: as for ``WeightPublisher``. ``timeout``: seconds that an engine waits for weights. ``background``:
    ``send_weights`` returns when the weights are published, and a thread calls the engine. The next call raises the
    thread's error. ``host``: name or address of this host, for engines on other hosts; None if all engines are on this
    host.
    """

    backend: ClassVar[str] = BACKEND
    address: str
    dtype: torch.dtype | None = None
    slots: int = 3
    timeout: float = 60.0
    background: bool = False
    host: str | None = None


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Implements vLLM's ``TrainerWeightTransferEngine``. All ranks make the same calls.

    The first rank publishes the weights of its source, and calls the engine. The other ranks only iterate over their
    source, because gathering a parameter is a collective. The trainer may change its weights when ``send_weights``
    returns.
    """

    init_info_cls = SharedMemoryTrainerInfo

    def __init__(self, info: SharedMemoryTrainerInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.version: int | None = None
        """The version published last, on the sender."""
        self._info = info
        self._publisher: WeightPublisher | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._update: Future[None] | None = None

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemoryTrainerInfo, *, client: Any, source: Any = None
    ) -> SharedMemoryTrainerEngine:
        """Tell the engine the address of the weights, and allocate memory for them.

        Args:
            init_info: The options, see ``SharedMemoryTrainerInfo``.
            client: vLLM's ``VLLMWeightSyncClient``.
            source: vLLM's ``WeightSource``, or a state dict that always has the same tensors.

        Raises:
            ValueError: There is no source.
            UnsavableStateError: The source holds only a part of the model.
            CheckpointError: As ``WeightPublisher.prepare`` raises; or the call to the engine failed.
        """
        if source is None:
            raise ValueError("the weights to send are missing: give a WeightSource, or a state dict")
        if not isinstance(source, Mapping) and source.held_names() is not None:
            raise UnsavableStateError(
                "each rank of this source holds a part of the model, and the first rank alone sends:"
                " publish it from all ranks, by WeightPublisher(process_group=...)"
            )
        engine = cls(init_info, client=client, source=source)
        structure = engine._structure()  # on all ranks, because it is a collective for some sources
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
        """Publish the present weights, by one copy, and make the engine load them.

        Args:
            version: As for ``WeightPublisher.publish``; None: the next version.
            roll_back: As for ``WeightPublisher.publish``.

        Returns:
            The publication; None on ranks that do not send.

        Raises:
            CheckpointError: As ``WeightPublisher.publish`` raises, and the engine keeps its weights; or the engine has
                not loaded the published version, and the text says whether the engine may serve.
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
        """Wait until the engine has loaded the last version. Raise an error of that load, once."""
        update, self._update = self._update, None
        if update is not None:
            update.result()

    def shutdown(self) -> None:
        """Wait for the engine, and free the memory. The engine keeps its weights."""
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
        """Return tensors with the types and shapes of the weights, which take no memory."""
        if isinstance(self.source, Mapping):
            shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.source.items()}
        else:
            shapes = {meta.name: (meta.dtype, tuple(meta.shape)) for meta in self.source.metadata()}
        return {name: torch.empty((), dtype=dtype).expand(shape) for name, (dtype, shape) in shapes.items()}

    def _publish(self, publisher: WeightPublisher, version: int | None, roll_back: bool) -> Publication:
        pairs = self._pairs()
        weights: Any = pairs
        # Without process groups no parameter is sharded. These sources then yield existing tensors, and several
        # threads can copy all of them at once.
        if isinstance(self.source, (Mapping, ModuleSource)) and not torch.distributed.is_initialized():
            weights = dict(pairs)
        try:
            version = self._next() if version is None else version
            publication = publisher.publish(weights, version, dtype=self._info.dtype, roll_back=roll_back)
        except Exception:
            for _ in pairs:  # the other ranks gather the remaining weights, too
                pass
            raise
        if publication.skipped:
            raise WeightsTimeoutError(f"version {version} was not published: readers have all slots")
        return publication

    def _next(self) -> int:
        """Return the version after the last one. An earlier trainer may have published the last version."""
        if self.version is None:
            with WeightSubscriber(self._info.address) as subscriber:
                return max(subscriber.versions(), default=0) + 1
        return self.version + 1

    def _have_loaded(self, version: int) -> None:
        try:
            self.client.start_weight_update()
        except Exception:
            self._end_update()  # a dead trainer may have begun an update
            self._told("start_weight_update")
        try:
            self._told("update_weights", {"version": version, "timeout": self._info.timeout})
        except BaseException:
            self._end_update()
            raise
        self._told("finish_weight_update", str(version))

    def _end_update(self) -> None:
        """End an unfinished update. The engine's weights stay unchanged. The engine raises if no update has begun."""
        with contextlib.suppress(Exception):
            self.client.finish_weight_update()

    def _told(self, call: str, *arguments: Any) -> None:
        """Call the engine. Errors of any type, such as HTTP or Ray errors, become a ``CheckpointError``."""
        try:
            getattr(self.client, call)(*arguments)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the engine has not done {call!r} for the weights at {self._info.address!r}: {error}"
            ) from error


register()
