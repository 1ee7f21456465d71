"""Map the requested version in each worker of a vLLM engine, and load it into the worker's model.

vLLM makes these calls by RPC on all workers of an engine:

1. ``init_transfer_engine``, once, with the address of the weights.
2. For each update ``start_weight_update``, ``update_weights`` and ``finish_weight_update``. ``update_weights`` does all
   of the work: all workers or none lease the version, and only then the model is changed. So the engine stays unchanged
   if there are no weights, or if the trainer dies between two calls. vLLM runs an RPC between two steps of the model,
   so no step sees a part of an update.
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
from asyncckpt.extension import wait_for_device
from asyncckpt.integrations.vllm.agreement import acquire_together, is_last, raise_together
from asyncckpt.weights import Weights, WeightSubscriber

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """The address of the weights: the argument of ``init_weight_transfer_engine``.

    ``address``, ``prefix`` and ``locator`` are arguments of ``WeightSubscriber``. ``timeout``: seconds that an update
    waits for weights.
    """

    address: str
    prefix: str = ""
    timeout: float = 60.0
    locator: str | None = None


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to load: the argument of ``update_weights``. An empty argument means the newest version.

    ``version``, ``min_version`` and ``roll_back`` are arguments of ``WeightSubscriber.acquire``. ``timeout``,
    ``address`` and ``prefix`` replace the values of ``SharedMemoryInitInfo``, because a draft model may have its own
    address or prefix.
    """

    version: int | None = None
    min_version: int | None = None
    roll_back: bool = False
    timeout: float | None = None
    address: str | None = None
    prefix: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None and self.min_version is not None:
            raise ValueError("version and min_version exclude each other: give one of them")


class SharedMemoryWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Implements vLLM's ``WeightTransferEngine`` on a worker. The module's docstring lists the calls."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version: int | None = None
        """The model's version; None if the model has no published version."""
        self.draft_version: int | None = None
        """The draft model's version."""
        self._main_model = model  # ``model`` may be the draft model at times
        self._info: SharedMemoryInitInfo | None = None
        self._subscribers: dict[tuple[str, str, str | None], WeightSubscriber] = {}

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Keep the address of the weights. This does not wait for the trainer, which may start later."""
        self._info = init_info

    def start_weight_update(self) -> None:
        """Do nothing: the model is unchanged until its new weights are leased."""

    def finish_weight_update(self) -> None:
        """Do nothing: the update is complete when ``update_weights`` returns."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version of a ``SharedMemoryUpdateInfo``, the same version on all workers of this engine.

        Only the last worker raises an error of any worker. vLLM reads the workers' answers in turn, and leaves the
        answers after an error unread. vLLM would take the unread answers for answers to its next call. After an error
        vLLM also requires a call of ``finish_weight_update``, which the last worker then refuses.

        Raises:
            CheckpointError: As ``WeightSubscriber.acquire`` raises; the model is unchanged.
            MismatchError: The model cannot load these weights. Some layers have the new weights, so the model must not
                serve before another update succeeds.
        """
        groups = _groups()
        try:
            self._update(self.parse_update_info(update_info), groups)
        except Exception:
            if is_last(groups):
                raise

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load as ``update_weights`` does, but raise an error on all workers."""
        self._update(update_info, _groups())

    def shutdown(self) -> None:
        """Release the trainer's memory. The model keeps its weights."""
        while self._subscribers:
            self._subscribers.popitem()[1].close()

    def _subscriber(self, address: str, prefix: str, locator: str | None) -> WeightSubscriber:
        key = address, prefix, locator
        if key not in self._subscribers:
            self._subscribers[key] = WeightSubscriber(address, prefix=prefix, locator=locator)
        return self._subscribers[key]

    def _update(self, wanted: SharedMemoryUpdateInfo, groups: Sequence[ProcessGroup]) -> None:
        if self._info is None:
            raise CheckpointNotFoundError("the weights have no address: call init_weight_transfer_engine first")
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
        """Load ``weights`` into the model. Return an error if the model cannot load them."""
        try:
            initialize_layerwise_reload(self.model)
            with disable_mtp_completeness_check():
                self.model.load_weights(weights.items())
            finalize_layerwise_reload(self.model, self.model_config)
            wait_for_device(self.device)  # queued copies read the leased memory
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
    """Return the groups that split the workers of this engine, innermost first, without the groups of its replicas."""
    groups = get_tp_group(), get_pcp_group(), get_pp_group()
    return [group.cpu_group for group in groups if group.world_size > 1]


def _leave_half_loaded(model: torch.nn.Module, model_config: Any) -> None:
    """Restore the old weights of each unloaded layer, and release the new weights, so that another update can begin.

    vLLM stores the weights that have arrived for a layer in that layer, and would count them for the next update.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    try:
        finalize_layerwise_reload(model, model_config)
    except Exception:
        logger.exception("the layers of a half loaded model could not be reset for another update: please report this")


def _own(model: torch.nn.Module, weights: Weights) -> None:
    """Copy the leased tensors that ``model`` has kept, because they would hold the trainer's memory for good."""
    leased = {tensor.untyped_storage().data_ptr() for tensor in weights.values() if tensor.numel()}
    for kept in (*model.parameters(), *model.buffers()):
        if kept.is_cpu and kept.numel() and kept.untyped_storage().data_ptr() in leased:
            kept.data = kept.data.clone()


class LoadedVersion:
    """Worker extension for ``LLM(worker_extension_cls="asyncckpt.integrations.vllm.worker.LoadedVersion")``."""

    weight_transfer_engine: SharedMemoryWeightTransferEngine

    def loaded_version(self) -> int | None:
        """Return the version of this worker's model. ``llm.collective_rpc("loaded_version")`` asks all workers."""
        return self.weight_transfer_engine.version
