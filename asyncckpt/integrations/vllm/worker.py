"""What runs in each worker of a vLLM engine: it maps the version asked for, and loads it into the worker's model.

vLLM calls it by RPCs to all workers of an engine:

1. ``init_transfer_engine``, once: where the weights are published.
2. For each update ``start_weight_update``, ``update_weights`` and ``finish_weight_update``. All of the work is done in
   the second: first the version is leased, on all workers or on none, and only then the model is touched. So an update
   that finds no weights leaves the engine as it was, and one whose trainer dies between two calls, too. vLLM answers an
   RPC between two steps of the model, so no step sees a part of an update.
3. ``shutdown``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from asyncckpt.errors import CheckpointNotFoundError, MismatchError
from asyncckpt.integrations.vllm.agreement import acquire_together, is_last, raise_together
from asyncckpt.weights import Weights, WeightSubscriber

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """Where the weights are: the argument of ``init_weight_transfer_engine``.

    ``address``, ``prefix`` and ``locator`` are those of ``WeightSubscriber``; ``timeout``: seconds that an update waits
    for weights.
    """

    address: str
    prefix: str = ""
    timeout: float = 60.0
    locator: str | None = None


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to load: the argument of ``update_weights``. With nothing in it, the newest version.

    ``version``, ``min_version`` and ``roll_back`` are those of ``WeightSubscriber.acquire``. ``timeout``, ``address``
    and ``prefix`` stand in the place of those that the engine was initialized with: a draft model may have an address
    or a prefix of its own.
    """

    version: int | None = None
    min_version: int | None = None
    roll_back: bool = False
    timeout: float | None = None
    address: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None and self.min_version is not None:
            raise ValueError("update to the version, or to the newest from min_version on; not both")


class SharedMemoryWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's contract for a worker, ``WeightTransferEngine``; the module says who calls what."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version: int | None = None
        """That which the model has; None: not one of ours."""
        self.draft_version: int | None = None
        """That of the draft model."""
        self._main_model = model  # while ``model`` may be the draft model
        self._info: SharedMemoryInitInfo | None = None
        self._subscribers: dict[tuple[str, str, str | None], WeightSubscriber] = {}

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Keep where the weights are. Nothing is waited for: the trainer may come later."""
        self._info = init_info

    def start_weight_update(self) -> None:
        """Nothing: the model stays as it is until its new weights are leased."""

    def finish_weight_update(self) -> None:
        """Nothing: the update is complete when ``update_weights`` returns."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what ``SharedMemoryUpdateInfo`` says, on all workers of this engine the same version.

        Whatever goes wrong on one of them is raised by the last one alone: vLLM reads the answers of the workers in
        turn, leaves those after an error where they are, and takes them for answers to its next call. It also makes
        ``finish_weight_update`` necessary after an error, which the last one then refuses.

        Raises:
            CheckpointError: As ``WeightSubscriber.acquire`` does; the model is as it was.
            MismatchError: The model cannot load these weights. It has some of its layers from them, and must not
                serve before an update has worked.
        """
        groups = _groups()
        try:
            self._update(self.parse_update_info(update_info), groups)
        except Exception:
            if is_last(groups):
                raise

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """As ``update_weights``, but an error is raised by all workers."""
        self._update(update_info, _groups())

    def shutdown(self) -> None:
        """Let go of the trainer's memory; the model keeps its weights."""
        while self._subscribers:
            self._subscribers.popitem()[1].close()

    def _subscriber(self, address: str, prefix: str, locator: str | None) -> WeightSubscriber:
        key = address, prefix, locator
        if key not in self._subscribers:
            self._subscribers[key] = WeightSubscriber(address, prefix=prefix, locator=locator)
        return self._subscribers[key]

    def _update(self, wanted: SharedMemoryUpdateInfo, groups: Sequence[ProcessGroup]) -> None:
        if self._info is None:
            raise CheckpointNotFoundError("where are the weights? call init_weight_transfer_engine first")
        begun = time.perf_counter()
        address = self._info.address if wanted.address is None else wanted.address
        weights = acquire_together(
            self._subscriber(
                address, self._info.prefix if wanted.prefix is None else wanted.prefix, self._info.locator
            ),
            groups,
            min_version=wanted.min_version,
            version=wanted.version,
            roll_back=wanted.roll_back,
            timeout=self._info.timeout if wanted.timeout is None else wanted.timeout,
        )
        with weights:
            self._note(None)
            raise_together(self._load(weights, address), groups)
            self._note(weights.version)
        seconds = time.perf_counter() - begun
        logger.info("version %d of the weights at %r is loaded, in %.3f s", weights.version, address, seconds)

    def _note(self, version: int | None) -> None:
        if self.model is self._main_model:
            self.version = version
        else:
            self.draft_version = version

    def _load(self, weights: Weights, address: str) -> MismatchError | None:
        """Have the model load ``weights``, or return why it cannot."""
        try:
            initialize_layerwise_reload(self.model)
            with disable_mtp_completeness_check():
                self.model.load_weights(weights.items())
            finalize_layerwise_reload(self.model, self.model_config)
            _wait_for(self.device)  # the copies that are queued read from what is leased
        except Exception as error:
            logger.exception("version %d of the weights at %r is not loaded", weights.version, address)
            _leave_half_loaded(self.model, self.model_config)
            return MismatchError(
                f"the model cannot load version {weights.version} of the weights at {address!r}, and has some of its"
                f" layers from it: it must not serve before an update has worked ({type(error).__name__}: {error})"
            )
        _own(self.model, weights)
        return None


def _groups() -> list[ProcessGroup]:
    """Those by which the workers of this engine are split, innermost first; not those of other replicas of it."""
    groups = get_tp_group(), get_pcp_group(), get_pp_group()
    return [group.cpu_group for group in groups if group.world_size > 1]


def _leave_half_loaded(model: torch.nn.Module, model_config: Any) -> None:
    """Give each layer that is not loaded its old weights, and let go of the new ones, so that another update can begin.

    vLLM keeps with each layer what has arrived for it, and would take it for a part of the next update.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    try:
        finalize_layerwise_reload(model, model_config)
    except Exception:
        logger.exception("a model that is half loaded could not be left in a state from which it can be loaded again")


def _own(model: torch.nn.Module, weights: Weights) -> None:
    """Copy what ``model`` has kept of what is leased: it would keep the memory from the trainer for good."""
    leased = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    for kept in (*model.parameters(), *model.buffers()):
        if kept.is_cpu and kept.numel() and kept.untyped_storage().data_ptr() in leased:
            kept.data = kept.data.clone()


class LoadedVersion:
    """For ``LLM(worker_extension_cls="asyncckpt.integrations.vllm.worker.LoadedVersion")``."""

    weight_transfer_engine: SharedMemoryWeightTransferEngine

    def loaded_version(self) -> int | None:
        """The version that this worker's model has: ``llm.collective_rpc("loaded_version")`` asks all of them."""
        return self.weight_transfer_engine.version


def _wait_for(device: torch.device) -> None:
    """Wait until ``device`` has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
