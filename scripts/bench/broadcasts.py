"""What it costs to bring weights from one process to another: each way in turn, beside a copy of the bytes.

Two processes, each with tensors of its own, joined by gloo over loopback. In a turn the first one's values change, both
start, and it ends when the second one has them all in its own tensors, which is looked at after each turn.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncckpt.weights.broadcast.broadcast import broadcast_weights, close_broadcasts
from bench.contestants import told
from bench.limits import Limits
from bench.states import GIB
from bench.turns import Pace

LIMIT_S = 120.0
VERL = "verl-0.9.1"
MEMCPY = "memcpy"
Named = dict[str, torch.Tensor]


class Way(ABC):
    """A way for weights. Both processes make one and then make the same calls in turn: ``send`` the first, ``receive``
    the second."""

    def __init__(self, mine: Named, bucket_bytes: int, folder: str) -> None:
        """``mine``: the tensors to send, or to receive into."""
        self.mine = mine
        self.bucket_bytes = bucket_bytes
        self.folder = folder

    @abstractmethod
    def send(self) -> None: ...

    @abstractmethod
    def receive(self) -> None: ...

    def load(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """What an engine does with a bucket: it copies it into its own."""
        with torch.inference_mode():
            for name, tensor in bucket:
                self.mine[name].copy_(tensor)


class Ours(Way):
    def __init__(self, mine: Named, bucket_bytes: int, folder: str) -> None:
        super().__init__(mine, bucket_bytes, folder)
        self._group = dist.new_group()  # to which belong the connections and buffers that it keeps

    def send(self) -> None:
        broadcast_weights(self.mine, group=self._group, bucket_bytes=self.bucket_bytes, timeout=LIMIT_S)

    def receive(self) -> None:
        broadcast_weights(load=self.load, group=self._group, timeout=LIMIT_S)


class EachTensor(Way):
    """A loop of ``dist.broadcast``, straight from tensor to tensor."""

    def send(self) -> None:
        for tensor in self.mine.values():
            dist.broadcast(tensor, 0)

    receive = send


class PgTransport(Way):
    """torchft's, of which torch has a copy; into tensors that are there, its fastest way."""

    def __init__(self, mine: Named, bucket_bytes: int, folder: str) -> None:
        super().__init__(mine, bucket_bytes, folder)
        from torch.distributed.checkpoint._pg_transport import PGTransport

        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group")
        self._transport = PGTransport(group, timedelta(seconds=LIMIT_S), torch.device("cpu"), lambda: self.mine)

    def send(self) -> None:
        self._transport.send_checkpoint([1], self.mine)

    def receive(self) -> None:
        self._transport.recv_checkpoint(0)


class Verl(Way):
    """verl's buckets in shared memory, with which it updates an engine on the same host."""

    def __init__(self, mine: Named, bucket_bytes: int, folder: str) -> None:
        super().__init__(mine, bucket_bytes, folder)
        self._module = _verl()
        self._mib = max(bucket_bytes, *(tensor.nbytes for tensor in mine.values())) + (1 << 20) - 1 >> 20

    def send(self) -> None:
        import asyncio

        sender = self._module.BucketedWeightSender(f"ipc://{self.folder}/verl", self._mib, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(self.mine.items())))

    def receive(self) -> None:
        device = torch.device("cpu")
        receiver = self._module.BucketedWeightReceiver(f"ipc://{self.folder}/verl", device, use_shm=True)
        receiver.receive_weights(lambda bucket, is_last: self.load(bucket))


def _verl() -> Any:
    """The module alone: all of verl wants a GPU and an engine. Of it, this one wants the name of a device."""
    path = Path(sys.prefix, "peers", VERL, "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py")
    if not path.is_file():
        raise FileNotFoundError(f"it is not in {path.parents[4]}; scripts/peers.sh unpacks it")

    def nothing() -> None:
        return

    async def one_by_one(weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
        for each in weights:
            yield each

    device: Any = types.ModuleType("verl.utils.device")
    device.get_device_id = lambda: 0
    device.get_device_name = lambda: "cpu"
    device.is_support_ipc = lambda: False
    device.get_torch_device = lambda: types.SimpleNamespace(synchronize=nothing, empty_cache=nothing)
    utils: Any = types.ModuleType("verl.workers.rollout.utils")
    utils.ensure_async_iterator = one_by_one
    sys.modules |= {"verl.utils.device": device, "verl.workers.rollout.utils": utils}
    spec = importlib.util.spec_from_file_location("bucketed_weight_transfer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BROADCAST: dict[str, Callable[[Named, int, str], Way]] = {
    "asyncckpt": Ours,
    "dist.broadcast, each tensor": EachTensor,
    "PGTransport of torchft": PgTransport,
    "verl, buckets in shared memory": Verl,
}


def _make(total: int, tensors: int) -> Named:
    elements = max(2, total // tensors // 4)
    return {f"layers.{number}.weight": torch.zeros(elements) for number in range(tensors)}


def _mark(mine: Named, turn: int) -> None:
    for number, tensor in enumerate(mine.values()):
        tensor[0] = tensor[-1] = tensor[len(tensor) // 2] = turn * 10_000 + number


def _check(mine: Named, turn: int) -> None:
    for number, tensor in enumerate(mine.values()):
        if not tensor[0] == tensor[-1] == tensor[len(tensor) // 2] == turn * 10_000 + number:
            raise RuntimeError(f"tensor {number} has other values")


def _agree(mine: Any) -> list[Any]:
    """What both say."""
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine)
    return both


def _rank(rank: int, folder: str, request: dict[str, Any]) -> None:
    # On one host there is nothing to find out about networks.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit)
    mine = _make(request["bytes"], request["tensors"])
    pace = Pace(**request["pace"])
    ways: dict[str, Way] = {}
    left_out: dict[str, str] = {}
    for name in BROADCAST:
        why = None
        try:
            ways[name] = BROADCAST[name](mine, request["bucket_bytes"], folder)
        except Exception as error:
            why = told(error)
        if whys := [each for each in _agree(why) if each is not None]:
            left_out[name] = whys[0]
            ways.pop(name, None)
    found: dict[str, list[float]] = {name: [] for name in (MEMCPY, *ways)}
    dice = random.Random(0)
    with Limits(sum(tensor.nbytes for tensor in mine.values()), folder) as limits:
        for turn in range(1, pace.rounds + 2):
            for name in dice.sample(list(found), len(found)):
                time.sleep(pace.pause)
                if name == MEMCPY:
                    found[name].append(limits.memcpy() if rank == 0 else 0.0)
                    dist.barrier()
                    continue
                if rank == 0:
                    _mark(mine, turn)
                dist.barrier()
                begun = time.perf_counter()
                (ways[name].send if rank == 0 else ways[name].receive)()
                elapsed = time.perf_counter() - begun
                _check(mine, turn)
                # Both read the same clock, and were let go at the same time.
                found[name].append(max(_agree(elapsed)))
                for tensor in mine.values() if rank == 1 else ():
                    tensor[0] = tensor[-1] = -1
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({"found": found, "left_out": left_out}))
    close_broadcasts()
    dist.destroy_process_group()


def measure(gib: float, tensors: int, bucket_mib: int, pace: Pace, where: str) -> dict[str, Any]:
    """Every way of ``BROADCAST``, and a copy of the bytes by one thread. (``pace.patience`` is not looked at: the two
    processes would have to agree.)"""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(dir=where)
    request = {
        "bytes": int(gib * GIB),
        "tensors": tensors,
        "bucket_bytes": bucket_mib << 20,
        "pace": {"rounds": pace.rounds, "pause": pace.pause},
    }
    try:
        ranks = [context.Process(target=_rank, args=(rank, folder, request)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError("one of the two processes failed")
        taken = json.loads(Path(folder, "result.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = taken["found"]
    return {
        "title": f"From one process to another: {gib:g} GiB in {tensors:,} tensors, buckets of {bucket_mib} MiB",
        "limits": {MEMCPY: found.pop(MEMCPY)[1:]},
        "results": {name: {"elapsed_s": seconds[1:], "first_s": seconds[0]} for name, seconds in found.items()},
        "left_out": taken["left_out"],
    }
