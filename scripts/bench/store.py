"""Measure saves to an object store, and loads from the store. moto serves S3 in a process of its own.

All contestants take turns with the limits: a copy of the bytes, and uploads and reads by obstore alone. At the end one
save of asyncckpt goes through a proxy that counts its requests.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from s3.proxy import Asked, StoreProxy
from s3.server import served, set_environment
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from bench.contestants import OURS, close_all, dcp, told
from bench.contestants.contestant import Contestant
from bench.contestants.ours import Ours
from bench.figures import UPLOADS
from bench.files import runtime_folder
from bench.limits import READ_THREADS, Limits
from bench.saves import Series, alone, columns
from bench.states import Made, Request, State, make, tensors_of
from bench.trainer import Trainer
from bench.turns import Pace, Turns, take

BUCKET = "bench"
REGION = "us-east-1"
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 8
RANGE_BYTES = 8 << 20
READ = "ranged read"
# moto reads the whole object for each range. No further round of loads begins after this time in seconds.
LOADS_S = 150.0


class Store:
    """The bucket, accessed through obstore alone."""

    def __init__(self, endpoint: str) -> None:
        from obstore.store import from_url

        options = {"allow_http": True, "timeout": "600s"}
        self.objects: Any = from_url(f"s3://{BUCKET}", endpoint=endpoint, client_options=options)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of all objects below ``prefix``, by key."""
        return {each["path"]: each["size"] for page in self.objects.list(prefix=f"{prefix}/") for each in page}

    def remove(self, path: str) -> None:
        """Delete all objects below the address ``path``."""
        keys = list(self.sizes(path.removeprefix(f"s3://{BUCKET}/")))
        if keys:
            self.objects.delete(keys)


class StoreLimits:
    """Uploads and reads of a state's bytes by obstore alone. The methods return seconds."""

    key = "limit"

    def __init__(self, store: Store, state: State) -> None:
        whole = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors_of(state)])
        self._bytes = whole.numpy().data
        self._objects = store.objects

    def put(self) -> float:
        """Upload the bytes with one request."""
        begun = perf_counter()
        self._objects.put(self.key, self._bytes, use_multipart=False)
        return perf_counter() - begun

    def put_parts(self) -> float:
        """Upload the bytes in parts, without a copy."""
        parts = (self._bytes[begin : begin + PART_BYTES] for begin in range(0, len(self._bytes), PART_BYTES))
        begun = perf_counter()
        self._objects.put(self.key, parts, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
        return perf_counter() - begun

    def read(self) -> float:
        """Read the bytes in ranges, by a few threads."""

        def read(begin: int) -> int:
            length = min(RANGE_BYTES, len(self._bytes) - begin)
            return len(self._objects.get_range(self.key, start=begin, length=length))

        begun = perf_counter()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            nbytes = sum(pool.map(read, range(0, len(self._bytes), RANGE_BYTES)))
        elapsed = perf_counter() - begun
        if nbytes != len(self._bytes):
            raise RuntimeError("some bytes are missing")
        return elapsed


class OnStore(Contestant):
    """A contestant on an object store. ``root`` is an address in the bucket of ``store``."""

    store: Store

    def remove(self, number: int) -> None:
        self.store.remove(self.path(number))


class OursOnStore(OnStore, Ours):
    """``Checkpointer("s3://...")``."""


class ByFsspec(OnStore):
    """DCP with the fsspec writer, which DCP chooses for such an address. fsspec uses s3fs."""

    def __init__(self, root: str, **options: Any) -> None:
        importlib.import_module("s3fs")
        super().__init__(root, **options)

    def where(self, number: int) -> dict[str, Any]:
        return {"checkpoint_id": self.path(number)}


class FsspecSave(ByFsspec, dcp.DcpSave):
    """``save`` through s3fs."""


class FsspecAsync(ByFsspec, dcp.DcpAsync):
    """``async_save`` by a thread, through s3fs."""


class ByConnector(OnStore):
    """DCP with the writer and the reader of s3torchconnector."""

    def __init__(self, root: str, **options: Any) -> None:
        self._connector: Any = importlib.import_module("s3torchconnector")
        self._dcp: Any = importlib.import_module("s3torchconnector.dcp")
        super().__init__(root, **options)

    def where(self, number: int) -> dict[str, Any]:
        return {"storage_writer": self._dcp.S3StorageWriter(**self._place(number))}

    def load(self, number: int, state: State) -> State:
        with dcp.quiet():
            state_dict_loader.load(state, storage_reader=self._dcp.S3StorageReader(**self._place(number)))
        return state

    def _place(self, number: int) -> dict[str, Any]:
        config = self._connector.S3ClientConfig(force_path_style=True)  # the bucket has no host name of its own here
        return {"region": REGION, "path": self.path(number), "s3client_config": config}


class ConnectorSave(ByConnector, dcp.DcpSave):
    """``save`` through s3torchconnector."""


class ConnectorPlanner(DefaultSavePlanner):
    """A planner with its own name. DCP caches plans by class name, and the plans of DCP's writers differ from these."""


class ConnectorAsync(ByConnector, dcp.DcpAsync):
    """``async_save`` by a thread, through s3torchconnector."""

    def __init__(self, root: str, **options: Any) -> None:
        super().__init__(root, **options)
        self._planner = ConnectorPlanner


CONTESTANTS: dict[str, Callable[[str], OnStore]] = {
    OURS: OursOnStore,
    "DCP save, s3fs": FsspecSave,
    "DCP async_save, s3fs": partial(FsspecAsync, process=False),
    "DCP save, S3StorageWriter": ConnectorSave,
    "DCP async_save, S3StorageWriter": partial(ConnectorAsync, process=False),
}
LOADERS = {
    OURS: OURS,
    "DCP load, s3fs": "DCP save, s3fs",
    "DCP load, S3StorageReader": "DCP save, S3StorageWriter",
}
"""Maps each measured load to the contestant that saved the checkpoint. Other contestants load in the same ways."""


def measure(request: Request, pace: Pace, folder: str) -> dict[str, Any]:
    """Measure saves and loads of all available contestants, the limits, and the requests of one asyncckpt save."""
    made = make(request)
    trainer = Trainer(made.state, request.device)
    left_out: dict[str, str] = {}
    with runtime_folder(f"{folder}/runtime"), served(Path(folder), BUCKET) as endpoint:
        store = Store(endpoint)
        there = _make_all(store, made.state, left_out)
        try:
            series = {name: Series(contestant, trainer) for name, contestant in there.items()}
            sent = StoreLimits(store, made.state)
            saved = _save(series, sent, made, pace, folder)
            loaded = _load({name: series[name] for name in series if name in saved.found}, sent, made, pace)
        finally:
            close_all(there, left_out)
        requests = count_requests(made, trainer, endpoint)
    return {
        "state": made.facts(),
        "limits": {name: [row[0] for row in rows[1:]] for name, rows in saved.found.items() if name not in there},
        "read_s": loaded.found.pop(READ)[1:],
        "results": {name: columns(rows) for name, rows in saved.found.items() if name in there},
        "loads": {name: {"load_s": seconds[1:], "first_load_s": seconds[0]} for name, seconds in loaded.found.items()},
        "requests": requests,
        "left_out": left_out | saved.left_out | loaded.left_out,
    }


def _save(series: dict[str, Series], sent: StoreLimits, made: Made, pace: Pace, folder: str) -> Turns[list[float]]:
    uploads = dict(zip(UPLOADS, (sent.put, sent.put_parts), strict=True))
    with Limits(made.nbytes, folder) as limits:
        turns: dict[str, Callable[[], list[float]]] = {
            name: partial(alone, limit) for name, limit in (limits.of_copies() | uploads).items()
        }
        turns |= {name: each.save for name, each in series.items()}
        return take(turns, pace, f"store {made.request.label}")


def _load(series: dict[str, Series], sent: StoreLimits, made: Made, pace: Pace) -> Turns[float]:
    turns: dict[str, Callable[[], float]] = {READ: sent.read}
    turns |= {name: partial(series[saver].check, made) for name, saver in LOADERS.items() if saver in series}
    return take(turns, replace(pace, budget=min(pace.budget, LOADS_S)), f"load from the store {made.request.label}")


def _make_all(store: Store, state: State, left_out: dict[str, str]) -> dict[str, Contestant]:
    """Create and prepare the available contestants. Add the reason for each other one to ``left_out``."""
    made: dict[str, Contestant] = {}
    for number, (name, maker) in enumerate(CONTESTANTS.items()):
        try:
            made[name] = contestant = maker(f"s3://{BUCKET}/{number}")
            contestant.store = store
            contestant.prepare(state)
        except Exception as error:
            left_out[name] = told(error)
            if name in made:
                close_all({name: made.pop(name)}, left_out)
    return made


def count_requests(made: Made, trainer: Trainer, endpoint: str) -> dict[str, Any]:
    """Count the requests of one warm save of asyncckpt by kind, the bytes sent, and the bytes of the image."""
    root = f"s3://{BUCKET}/counted"
    with StoreProxy(endpoint) as proxy:
        set_environment(proxy.endpoint)
        ours = OursOnStore(root)
        try:
            ours.prepare(made.state)
            for number in (1, 2):
                trainer.change()
                before = len(proxy.asked)
                ours.save(number, trainer.state).wait()
        finally:
            ours.close()
            set_environment(endpoint)
    asked = proxy.asked[before:]
    sizes = Store(endpoint).sizes(ours.path(2).removeprefix(f"s3://{BUCKET}/"))
    return {
        "count": len(asked),
        "kinds": dict(Counter(map(_kind, asked)).most_common()),
        "sent": sum(each.nbytes for each in asked),
        "image": max(sizes.values()),
    }


def _kind(asked: Asked) -> str:
    if "partNumber=" in asked.path:
        return "parts"
    return f"{asked.method} (list)" if "list-type=" in asked.path else asked.method
