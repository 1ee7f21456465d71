"""Copies from devices, as far as they run without one: what is gathered is the same to the bit, in any order."""

from __future__ import annotations

import ast
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import asyncckpt
from asyncckpt import device_copy, gather, pinned
from asyncckpt.device_copy import Part, device_chunks
from asyncckpt.errors import SaveTimeoutError
from asyncckpt.gather import Run, allocate_mirrors, stretches
from asyncckpt.handle import Save
from asyncckpt.host_copy import Many
from asyncckpt.image import Image, TensorSpec
from asyncckpt.pinned import PinnedMemory
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.staging import SlotStager
from asyncckpt.targets import Targets

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def _any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes: numbers that are none, in every pattern, and denormal ones, among them."""
    elements = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(dtype)
    raw = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if elements else torch.empty(shape, dtype=dtype)


def _tensors() -> list[torch.Tensor]:
    """Of all kinds, small and large, among each other."""
    chance = random.Random(7)
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (0,), (5, 7), (64, 33), (1, 1, 17), (1000, 9), (2, 0, 3)]
    found: list[torch.Tensor] = []
    for _ in range(300):
        tensor = _any_bits(chance.choice(DTYPES), chance.choice(shapes))
        if tensor.dim() > 1 and chance.random() < 0.3:
            tensor = tensor.transpose(0, 1)
        found.append(tensor)
    numbers = torch.randn(40, 3, dtype=torch.complex64)
    found += [
        numbers.conj(),
        numbers.conj().imag,
        numbers.t().conj(),
        torch.randn(9, dtype=torch.complex128).conj().imag,
    ]
    found += [torch.zeros(3).neg(), torch._neg_view(torch.randn(5, 3).bfloat16()), torch.randn(50)[::2]]
    for at in (3, 40, 41, 140, 200, 250):  # among them the first of each of the devices below
        found.insert(at, _any_bits(torch.float32, (300, 400)))
    found.insert(100, torch.randn(700, 900).t())
    return found


def _raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


class _Slot:
    """An image of ``tensors`` at a page of a segment, with its envelopes; closed by the test."""

    def __init__(self, tensors: Sequence[torch.Tensor], aliases: dict[int, int] | None = None) -> None:
        aliases = aliases or {}
        specs = [TensorSpec(each.dtype, tuple(each.shape), aliases.get(number)) for number, each in enumerate(tensors)]
        self.image = Image.lay_out(specs, [100])
        self.segment = Segment.create("asyncckpt-test", PAGE + self.image.nbytes)
        for at, data in self.image.constants():
            self.segment.view[PAGE + at : PAGE + at + len(data)] = data

    def own(self) -> tuple[list[int], Targets]:
        """As the stager has it: the tensors that have bytes of their own."""
        mine = [
            number
            for number, (spec, place) in enumerate(zip(self.image.specs, self.image.tensors, strict=True))
            if spec.alias is None and place.payload_bytes
        ]
        specs = [self.image.specs[number] for number in mine]
        places = [self.image.tensors[number] for number in mine]
        return mine, Targets(specs, places, self.segment, PAGE)

    def image_bytes(self) -> bytes:
        return bytes(self.segment.view[PAGE:])

    def expected(self, tensors: Sequence[torch.Tensor]) -> bytes:
        whole = bytearray(self.image.nbytes)
        for at, data in self.image.constants():
            whole[at : at + len(data)] = data
        for place, spec, tensor in zip(self.image.tensors, self.image.specs, tensors, strict=True):
            if spec.alias is None:
                whole[place.payload_at : place.payload_at + place.payload_bytes] = _raw(tensor)
        return bytes(whole)


@pytest.mark.parametrize("mirrored", [True, False])
def test_chunks_bring_every_bit(monkeypatch: pytest.MonkeyPatch, mirrored: bool) -> None:
    monkeypatch.setattr(gather, "_SMALL_BYTES", 100_000)
    monkeypatch.setattr(gather, "RUN_BYTES", 400_000)
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 250_000)
    tensors = _tensors()
    slot = _Slot(tensors)
    try:
        numbers, targets = slot.own()
        chunks = device_chunks(range(len(numbers)), targets, allocate_mirrors(CPU) if mirrored else [])
        kinds = [type(chunk) for chunk in chunks]
        assert (kinds.count(Run) > 3) == mirrored and kinds.count(Part) > 5 and kinds.count(Many) > 1
        begins = [(kind is not Run, chunk.begin) for kind, chunk in zip(kinds, chunks, strict=True)]
        assert begins == sorted(begins)
        mine = [tensors[number] for number in numbers]
        for _ in range(2):
            for chunk in chunks:
                chunk.copy(mine)
        assert slot.image_bytes() == slot.expected(tensors)
        del chunks, targets, chunk
    finally:
        slot.segment.close()


def test_a_run_has_only_what_is_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all small, without a gap, at least so many, and no longer than a mirror."""
    monkeypatch.setattr(gather, "RUN_BYTES", 60_000)
    tensors = [torch.zeros(100) for _ in range(100)]
    tensors[30] = torch.zeros(1 << 17)
    slot = _Slot(tensors)
    try:
        _, targets = slot.own()
        theirs = [number for number in range(100) if number not in (50, 57)]
        found = list(stretches(theirs, targets))
        assert [number for _, stretch in found for number in stretch] == theirs
        for gathered, stretch in found:
            last = targets.places[stretch[-1]]
            assert stretch == list(range(stretch[0], stretch[-1] + 1))
            assert gathered == (len(stretch) >= 8)
            if gathered:
                assert 30 not in stretch
                assert last.payload_at + last.payload_bytes - targets.places[stretch[0]].payload_at <= 60_000
        assert (False, [30]) in found and (False, list(range(51, 57))) in found
        del targets
    finally:
        slot.segment.close()


def test_torch_resolves_lazy_signs_before_it_copies_many() -> None:
    """What ``Many`` and ``Part`` rely on: no kernel sees a conjugate that is only a flag."""
    seen: list[bool] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "foreach" in str(func):
                seen.extend(tensor.is_conj() or tensor.is_neg() for tensor in args[1])
            return func(*args, **(kwargs or {}))

    lazy = torch.randn(4, dtype=torch.complex64).conj()
    with Watch(), torch.inference_mode():  # type: ignore[no-untyped-call]
        torch._foreach_copy_([torch.empty(4, dtype=torch.complex64), torch.empty(4)], [lazy, lazy.imag])
    assert seen == [False, False]


# Streams that run what was queued later, in any order that their events allow.


class _Streams:
    """All streams of a made-up device. What is queued runs when an event is waited for, and no sooner than it must."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.all: list[_Stream] = []
        self.current: list[_Stream] = []
        self.lock = threading.RLock()

    def step(self) -> bool:
        """Run one thing that can run; whether there was any."""
        able = [stream for stream in self.all if stream.queue and stream.queue[0].can_run()]
        if able:
            self.chance.choice(able).queue.pop(0).run()
        return bool(able)


class _Work:
    def __init__(self, run: Callable[[], None], after: _Work | None = None) -> None:
        self._run, self._after, self.done = run, after, False

    def can_run(self) -> bool:
        return self._after is None or self._after.done

    def run(self) -> None:
        self._run()
        self.done = True


class _Stream:
    def __init__(self, streams: _Streams) -> None:
        self.queue: list[_Work] = []
        self.streams = streams
        streams.all.append(self)

    def add(self, run: Callable[[], None], after: _Work | None = None) -> _Work:
        with self.streams.lock:
            self.queue.append(_Work(run, after))
            return self.queue[-1]

    def wait_event(self, event: _Event) -> None:
        self.add(lambda: None, event.work)

    def record_event(self) -> _Event:
        event = _Event()
        event.record(self)
        return event


class _Event:
    work: _Work
    stream: _Stream

    def __init__(self, blocking: bool = False) -> None:
        pass

    def record(self, stream: _Stream) -> None:
        self.work, self.stream = stream.add(lambda: None), stream

    def synchronize(self) -> None:
        with self.stream.streams.lock:
            while not self.work.done:
                assert self.stream.streams.step(), "streams wait for each other"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[_Streams]:
    """``torch.cuda``'s streams and events are made up; what chunks do is queued on the current one."""
    made = _Streams(getattr(request, "param", 0))

    @contextmanager
    def stream(chosen: _Stream) -> Iterator[None]:
        made.current.append(chosen)
        try:
            yield
        finally:
            made.current.pop()

    @contextmanager
    def device(_: torch.device) -> Iterator[None]:
        yield

    def queued(method: Callable[..., None]) -> Callable[..., None]:
        def queue(self: Any, *args: Any) -> None:
            made.current[-1].add(lambda: method(self, *args))

        return queue

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: _Stream(made))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(device_copy, "allocate_mirrors", lambda _: allocate_mirrors(CPU))
    for kind, name in [(Run, "gather"), (Run, "bring"), (Part, "copy")]:
        monkeypatch.setattr(kind, name, queued(getattr(kind, name)))

    class QueuedMany(Many):
        def copy(self, tensors: Sequence[torch.Tensor]) -> None:
            made.current[-1].add(lambda: super(QueuedMany, self).copy(tensors))

    monkeypatch.setattr(device_copy, "Many", QueuedMany)
    yield made
    assert not made.current


@pytest.mark.parametrize("streams", range(6), indirect=True)
def test_any_order_the_streams_allow_is_right(streams: _Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of two made-up devices and of the host, saved over and over with new values, that come late."""
    monkeypatch.setattr(gather, "_SMALL_BYTES", 100_000)
    monkeypatch.setattr(gather, "RUN_BYTES", 100_000)
    monkeypatch.setattr(device_copy, "_CHUNK_BYTES", 250_000)
    tensors = _tensors()
    tensors[60] = tensors[50]
    where = [torch.device("cuda", number // 200) if number % 90 > 2 else CPU for number in range(len(tensors))]
    slot = _Slot(tensors, {60: 50})
    numbers, _ = slot.own()
    monkeypatch.setattr(SlotStager, "_divide", _dividing_by([where[number] for number in numbers]))
    stager = SlotStager(slot.image, slot.segment, PAGE)
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(3):
                _save(slot, stager, tensors, where, streams, pool)
                for tensor in tensors:
                    if not tensor.is_conj() and not tensor.is_neg():
                        tensor.copy_(_any_bits(tensor.dtype, tuple(tensor.shape)))
    finally:
        stager.close()
        slot.segment.close()


def _save(
    slot: _Slot,
    stager: SlotStager,
    tensors: list[torch.Tensor],
    where: list[torch.device],
    streams: _Streams,
    pool: ThreadPoolExecutor,
) -> None:
    late = [tensor if each == CPU else torch.zeros_like(tensor) for tensor, each in zip(tensors, where, strict=True)]
    late[60] = late[50]
    ready: dict[Any, Any] = {}

    def compute(number: int) -> None:
        late[number].copy_(tensors[number])

    for each in set(where) - {CPU}:
        stream = _Stream(streams)
        for number, its in enumerate(where):
            if its == each:
                stream.add(partial(compute, number))
        ready[each] = stream.record_event()
    told = [0]
    fences: list[Any] = []
    expected = slot.expected(tensors)

    def arrived(nbytes: int) -> None:
        assert bytes(slot.segment.view[PAGE + told[-1] : PAGE + nbytes]) == expected[told[-1] : nbytes]
        told.append(nbytes)

    stager.copy(late, ready, pool, arrived, fences.extend)
    assert told == sorted(told) and told[-1] == slot.image.nbytes and len(set(told)) > 10
    assert len(fences) == len(ready)
    assert slot.image_bytes() == expected


def _dividing_by(devices: list[torch.device]) -> Callable[[SlotStager, list[torch.device]], None]:
    real = SlotStager._divide
    return lambda self, _: real(self, devices)


def test_a_copy_that_cannot_be_queued_leaves_none_behind(streams: _Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((100,), float(number)) for number in range(2000)]
    slot = _Slot(tensors)
    numbers, targets = slot.own()
    device = torch.device("cuda", 0)
    monkeypatch.setattr(gather, "RUN_BYTES", 100_000)
    copy = device_copy.DeviceCopy(device, range(len(numbers)), targets)
    try:
        bring, calls = Run.bring, iter(range(100))

        def broken(self: Run) -> None:
            if next(calls) == 3:
                raise RuntimeError("launch failed")
            bring(self)

        monkeypatch.setattr(Run, "bring", broken)
        ready: dict[Any, Any] = {device: _Stream(streams).record_event()}
        with pytest.raises(RuntimeError, match="launch failed"):
            copy.queue(tensors, ready)
        assert not any(stream.queue for stream in streams.all)
    finally:
        del copy, targets
        slot.segment.close()


def test_without_memory_for_mirrors_tensors_are_copied_one_by_one(
    streams: _Streams, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("the device is full")

    tensors = [torch.full((100,), float(number)) for number in range(100)]
    slot = _Slot(tensors)
    _, targets = slot.own()
    device = torch.device("cuda", 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        copy = device_copy.DeviceCopy(device, range(100), targets)
        device_copy.DeviceCopy(device, range(100), targets)
    try:
        assert caplog.text.count("copied one by one") == 1
        assert [isinstance(chunk, Many) for chunk in copy.chunks] == [True]
        ready: dict[Any, Any] = {device: _Stream(streams).record_event()}
        copy.wait(copy.queue(tensors, ready), lambda _: None)
        assert slot.image_bytes() == slot.expected(tensors)
    finally:
        del copy, targets
        slot.segment.close()


def test_the_whole_device_is_never_waited_for() -> None:
    """Of all that waits for a device, saves have one: events of their own, in one file. (To measure the phases of a
    sync of weights is to wait for the device.)"""
    folder = Path(asyncckpt.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("nvrx/*.py"), *folder.glob("worker/*.py"), *folder.glob("shm/*.py")]
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("synchronize", "wait_stream", "default_stream"):
                allowed = node.attr == "synchronize" and file.name == "device_copy.py"
                assert allowed and ast.unparse(node) != "torch.cuda.synchronize", f"{file}: {ast.unparse(node)}"


def test_the_step_is_held_back_and_not_the_host() -> None:
    fenced: list[bool] = []
    save = Save("somewhere", 1)
    with pytest.raises(SaveTimeoutError, match="not queued"):
        save.hold_back(0.01)
    save._copies_queued([lambda: fenced.append(True)])
    save.hold_back(0.01)
    assert fenced == [True] and not save.staged()
    with pytest.raises(SaveTimeoutError, match="not staged"):
        save.wait_staged(0.01)


def test_with_the_hosts_tensors_alone_the_host_is_held_back() -> None:
    save = Save("somewhere", 1)
    save._copies_queued([])
    with pytest.raises(SaveTimeoutError, match="not staged"):
        save.hold_back(0.01)
    failed = Save("somewhere", 2)
    failed._resolve(asyncckpt.CheckpointError("the device is lost"))
    failed.hold_back(0.01)


# Pinning.


class _Driver:
    """What ``cudaHostRegister`` and ``cudaHostUnregister`` answer, and were asked."""

    def __init__(self, answers: Sequence[int] = ()) -> None:
        self.answers = list(answers)
        self.registered: list[int] = []
        self.taken_back: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and address % PAGE == 0 and nbytes % PAGE == 0
        code = self.answers.pop(0) if self.answers else 0
        if code == 0:
            self.registered.append(address)
        return code

    def cudaHostUnregister(self, address: int) -> int:
        self.taken_back.append(address)
        return 0


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch, streams: _Streams) -> list[bool]:
    """One entry for each error of the driver that was taken off the thread."""
    found: list[bool] = []

    def launch(*_: Any, **__: Any) -> None:
        found.append(True)
        raise RuntimeError("CUDA error: that of before")

    monkeypatch.setattr(torch, "ones", launch)
    monkeypatch.setattr(pinned, "_PIECE_BYTES", 4 * PAGE)
    return found


def _pin(segment: Segment, driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return PinnedMemory(segment, [PAGE * 3, PAGE * 5, PAGE * 6], torch.device("cuda", 0))


def test_memory_is_pinned_in_pieces_and_taken_back(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]) -> None:
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver(), monkeypatch)
        assert [address - segment.address for address in driver.registered] == [0, 3 * PAGE, 6 * PAGE]
        memory.close()
        memory.close()
        assert sorted(driver.taken_back) == driver.registered and not forgotten


def test_what_cannot_be_pinned_is_told_and_leaves_no_error(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver([0, 2]), monkeypatch)
        assert "CUDA error 2" in caplog.text and f"{3 * PAGE} of {8 * PAGE} bytes" in caplog.text
        assert len(driver.registered) == 2 and forgotten == [True]
        memory.close()
        assert sorted(driver.taken_back) == driver.registered


def test_what_was_pinned_where_the_memory_is_now(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]) -> None:
    """The driver's pages are not ours: they are taken back, or nothing is copied there."""
    with Segment.create("asyncckpt-test", 8 * PAGE) as segment:
        memory = _pin(segment, driver := _Driver([712]), monkeypatch)
        assert driver.taken_back == [segment.address] and len(driver.registered) == 3 and forgotten == [True]
        memory.close()
        with pytest.raises(asyncckpt.CheckpointError, match="unmapped while it was pinned"):
            _pin(segment, driver := _Driver([0, 712, 712]), monkeypatch)
        assert driver.registered == [segment.address] and segment.address in driver.taken_back
