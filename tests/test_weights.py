"""Weights in shared memory: what is published is what is read, as one, and stays so while it is read."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import safetensors
import safetensors.torch
import torch
from conftest import same
from ranks import alone, say, serve

from asyncckpt.config import Config
from asyncckpt.errors import (
    ClosedError,
    JobTakenError,
    MismatchError,
    OutOfMemoryError,
    UnsavableStateError,
    VersionError,
    WeightsTimeoutError,
)
from asyncckpt.shm import leases
from asyncckpt.shm.segment import PAGE, Segment
from asyncckpt.shm.slots import Published, SlotTable
from asyncckpt.weights import WeightPublisher, Weights, WeightSubscriber
from asyncckpt.weights.shelf import Shelf


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    yield from serve()


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    with WeightPublisher("policy") as publisher:
        yield publisher


@pytest.fixture
def subscriber() -> Iterator[WeightSubscriber]:
    with WeightSubscriber("policy") as subscriber:
        yield subscriber


def model(version: int = 0) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.full((300, 200), float(version)),
        "norm.weight": torch.full((7,), float(version), dtype=torch.bfloat16),  # an odd number of halves
        "steps": torch.tensor(version),
    }


def version_in(weights: Weights) -> int:
    """The version that all elements have."""
    seen = {float(value) for tensor in weights.values() for value in tensor.flatten().tolist()}
    (found,) = seen
    return int(found)


def test_every_kind_of_tensor_comes_as_it_is(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    weights = {str(dtype): torch.randint(0, 255, (3, 5, 7)).to(torch.uint8).to(dtype) for dtype in kinds}
    weights |= {
        "large": torch.randn(300, 4001),
        "large, not contiguous": torch.randn(4001, 300).t(),
        "some rows": torch.randn(900, 40)[::3],
        "a negative view": torch.randn(6, dtype=torch.complex64).conj().imag,
        "expanded": torch.randn(1, 40).expand(60, 40),
        "a number": torch.tensor(3.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "a parameter": torch.nn.Parameter(torch.randn(11)),
    }
    publisher.publish(weights, 0)
    with subscriber.acquire() as acquired:
        assert set(acquired) == set(weights) and len(acquired) == len(weights)
        assert all(same(acquired[name], tensor.detach()) for name, tensor in weights.items())
        assert acquired.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        assert acquired.version == 0


def test_nothing_is_copied_and_nothing_can_be_written(publisher: WeightPublisher) -> None:
    publisher.publish(model(5), 5)
    code, said = alone(_write_to_what_is_published)
    assert code == -signal.SIGSEGV and said == (5, True)
    with WeightSubscriber("policy") as subscriber, subscriber.acquire() as weights:
        assert version_in(weights) == 5


def _write_to_what_is_published() -> None:
    weights = WeightSubscriber("policy").acquire()
    address = weights["embed.weight"].data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "asyncckpt" in line]
    places = [(range(*(int(end, 16) for end in line[0].split("-"))), line[1]) for line in maps]
    say((version_in(weights), any(address in place and mode.startswith("r--s") for place, mode in places)))
    weights["embed.weight"].fill_(99.0)


def test_a_lease_keeps_a_version_and_ends_with_its_block(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    for version in range(1, 4):
        publisher.publish(model(version), version)
    assert subscriber.versions() == [1, 2, 3]
    with subscriber.acquire(version=2) as second:
        for version in range(4, 10):
            assert not publisher.publish(model(version), version).skipped
            assert version_in(second) == 2
            with subscriber.acquire() as newest:
                assert version_in(newest) == newest.version == version
        assert subscriber.versions() == [2, 8, 9]
    publisher.publish(model(10), 10)
    assert subscriber.versions() == [8, 9, 10]


def test_a_tensor_that_outlives_the_block_keeps_its_slot(
    publisher: WeightPublisher, subscriber: WeightSubscriber, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(model(1), 1)
    with caplog.at_level(logging.INFO), subscriber.acquire() as weights:
        kept = weights["embed.weight"][3]
    assert "version 1 are still in use" in caplog.text
    with pytest.raises(ClosedError, match="lease on version 1"):
        weights["embed.weight"]
    subscriber.close()
    for version in range(2, 8):
        publisher.publish(model(version), version)
    assert kept.eq(1.0).all()
    del kept
    publisher.publish(model(8), 8)
    with WeightSubscriber("policy") as other:
        assert other.versions() == [6, 7, 8]


def test_readers_who_have_all_slots_do_not_hold_the_trainer_up(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    held = []
    for version in range(1, 4):
        publisher.publish(model(version), version)
        held.append(subscriber.acquire())
    publication = publisher.publish(model(4), 4)
    assert publication.skipped and publication.version == 4
    assert [version_in(weights) for weights in held] == [1, 2, 3]
    held[0].release()
    assert not publisher.publish(model(5), 5).skipped
    assert subscriber.versions() == [2, 3, 5]
    assert [version_in(weights) for weights in held[1:]] == [2, 3]
    for weights in held[1:]:
        weights.release()


def test_or_the_trainer_waits_for_them() -> None:
    patient = Config(timeout=60.0)
    with WeightPublisher("1", slots=2, when_busy="wait", config=patient) as publisher, WeightSubscriber("1") as reader:
        publisher.publish(model(1), 1)
        first = reader.acquire()
        publisher.publish(model(2), 2)
        second = reader.acquire()
        releaser = threading.Timer(0.2, first.release)
        releaser.start()
        assert not publisher.publish(model(3), 3).skipped
        releaser.join()
        assert reader.versions() == [2, 3] and version_in(second) == 2
        third = reader.acquire()
    hasty = Config(timeout=0.2)
    with WeightPublisher("2", slots=2, when_busy="wait", config=hasty) as publisher, WeightSubscriber("2") as reader:
        publisher.publish(model(1), 1)
        first = reader.acquire()
        publisher.publish(model(2), 2)
        with pytest.raises(WeightsTimeoutError, match="readers have kept all slots"):
            publisher.publish(model(3), 3)
        assert version_in(first) == 1
    assert (version_in(second), version_in(third)) == (2, 3)  # beyond all there was of the trainer


def test_the_lease_of_a_killed_reader_ends(publisher: WeightPublisher) -> None:
    publisher.publish(model(1), 1)
    code, said = alone(_acquire_and_die)
    assert (code, said) == (-signal.SIGKILL, 1)
    for version in range(2, 8):
        assert not publisher.publish(model(version), version).skipped
    with WeightSubscriber("policy") as subscriber:
        assert subscriber.versions() == [5, 6, 7]


def _acquire_and_die() -> None:
    weights = WeightSubscriber("policy").acquire()
    say(version_in(weights))
    os.kill(os.getpid(), signal.SIGKILL)


def test_versions_grow(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(7), 7)
    for version in (7, 6, 0):
        with pytest.raises(VersionError, match="not newer than 7"):
            publisher.publish(model(version), version)
    with pytest.raises(ValueError, match="from 0 on"):
        publisher.publish(model(), -1)
    with subscriber.acquire() as weights:
        assert version_in(weights) == 7
        epoch = weights.epoch
    publisher.publish(model(3), 3, roll_back=True)
    with subscriber.acquire() as weights:  # no surprise: the publisher has said so
        assert version_in(weights) == 3 and weights.epoch > epoch
    publisher.publish(model(4), 4)
    with subscriber.acquire(version=7) as weights:
        assert version_in(weights) == 7
    with subscriber.acquire() as weights:
        assert version_in(weights) == 4


def test_versions_of_numpy_are_numbers_too(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    for version, roll_back in ((numpy.int64(3), False), (numpy.uint8(2), True), (torch.tensor(3), False), (True, True)):
        publication = publisher.publish(model(), version, roll_back=roll_back)  # type: ignore[arg-type]
        assert type(publication.version) is int and subscriber.versions()[-1] == version
    for wrong in (5.0, "5", None):
        with pytest.raises(TypeError):
            publisher.publish(model(), wrong)  # type: ignore[arg-type]


def test_a_reader_waits_for_the_version_it_wants(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    with pytest.raises(WeightsTimeoutError, match=r"nobody has published at 'policy' within 0.05 s"):
        subscriber.acquire(timeout=0.05)
    publisher.publish(model(1), 1)
    with pytest.raises(WeightsTimeoutError, match=r"version 2 or later at 'policy' within 0.05 s; .* order: 1"):
        subscriber.acquire(2, timeout=0.05)
    with pytest.raises(WeightsTimeoutError, match="of version 5 at 'policy' within"):
        subscriber.acquire(version=5, timeout=0.05)
    got: list[int] = []

    def read() -> None:
        with subscriber.acquire(2) as weights:
            got.append(version_in(weights))

    reader = threading.Thread(target=read)
    reader.start()
    publisher.publish(model(2), 2)
    reader.join(30)
    assert got == [2]


def test_a_reader_may_be_there_first() -> None:
    with WeightSubscriber("policy") as subscriber:
        got: list[int] = []

        def read() -> None:
            with subscriber.acquire() as weights:
                got.append(version_in(weights))

        reader = threading.Thread(target=read)
        reader.start()
        with WeightPublisher("policy") as publisher:
            publisher.publish(model(1), 1)
            reader.join(30)
        assert got == [1]
    with pytest.raises(ClosedError):
        subscriber.acquire()
    with pytest.raises(ClosedError):
        publisher.publish(model(2), 2)


def test_tensors_are_converted_on_the_way(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    torch.manual_seed(1)
    state = {"w": torch.randn(300, 500), "small": torch.randn(3), "half": torch.randn(5).half(), "n": torch.arange(9)}
    state |= {"scaled": torch.randn(8).to(torch.float8_e4m3fn), "columns": torch.randn(300, 500).t()}
    for version in range(1, 4):
        publisher.publish(iter(state.items()) if version == 2 else state, version, dtype=torch.bfloat16)
        with subscriber.acquire() as acquired:
            for name, tensor in state.items():
                converts = tensor.is_floating_point() and tensor.dtype.itemsize > 1
                assert same(acquired[name], tensor.to(torch.bfloat16) if converts else tensor), (version, name)
            del acquired
    publisher.publish(state, 4)
    with subscriber.acquire() as acquired:
        assert same(dict(acquired), {name: state[name] for name in acquired})


def test_a_stream_may_use_one_buffer_for_all(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    buffer = torch.empty(40, 50)

    def stream(version: int, last: int = 20) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(last):
            yield f"layer.{number}", buffer.fill_(version * 100 + number)

    for version, last in enumerate((20, 20, 25, 25, 10, 10), start=1):  # the structure changes twice, half-way
        assert not publisher.publish(stream(version, last), version).skipped
        with subscriber.acquire() as weights:
            assert list(weights) == [f"layer.{number}" for number in range(last)]
            assert all(weights[f"layer.{number}"].eq(version * 100 + number).all() for number in range(last))
    with pytest.raises(UnsavableStateError, match=r"'layer.0' comes twice"):
        publisher.publish([("layer.0", buffer), ("layer.0", buffer)], 10)
    with subscriber.acquire() as weights:
        assert weights.version == 6


def test_a_stream_that_is_skipped_is_walked_through(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    held = []
    for version in range(1, 4):
        publisher.publish(model(version), version)
        held.append(subscriber.acquire())
    walked = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model(4).items():
            walked.append(name)
            yield name, tensor

    assert publisher.publish(stream(), 4).skipped and walked == list(model())
    held[0].release()
    assert not publisher.publish(stream(), 4).skipped
    for weights in held:
        weights.release()


def test_another_structure_takes_the_place_of_the_old_one(
    publisher: WeightPublisher, subscriber: WeightSubscriber
) -> None:
    publisher.publish(model(1), 1)
    first = subscriber.acquire()
    publisher.publish({"other": torch.full((70,), 2.0)}, 2)
    with subscriber.acquire() as weights:
        assert list(weights) == ["other"] and version_in(weights) == 2
    assert subscriber.versions() == [2]
    assert version_in(first) == 1  # what is leased stays, wherever it is
    first.release()
    publisher.publish(model(3), 3)
    with subscriber.acquire(3) as weights:
        assert version_in(weights) == 3


def test_buckets_have_all_tensors_in_pieces(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    weights = {f"layer.{number}": torch.full((100,), float(number)) for number in range(10)}
    publisher.publish(weights | {"large": torch.zeros(1000)}, 1)
    with subscriber.acquire() as acquired:
        buckets = list(acquired.buckets(1000))
        assert [len(bucket) for bucket in buckets] == [2, 2, 2, 2, 2, 1]
        assert dict(pair for bucket in buckets for pair in bucket).keys() == acquired.keys()
        assert all(tensor.data_ptr() == acquired[name].data_ptr() for bucket in buckets for name, tensor in bucket)
        assert len(list(acquired.buckets(1 << 20))) == 1
        del buckets


def test_it_is_a_safetensors_file(publisher: WeightPublisher, subscriber: WeightSubscriber, tmp_path: Path) -> None:
    weights = model(3) | {"flags": torch.tensor([True, False, True]), "empty": torch.empty(0, 2)}
    publisher.publish(weights, 1)
    with subscriber.acquire() as acquired:
        with acquired.safetensors(tmp_path) as (path,):
            assert Path(path).parent == tmp_path and path.endswith(".safetensors")
            assert same(dict(sorted(safetensors.torch.load_file(path).items())), dict(sorted(weights.items())))
            with safetensors.safe_open(path, "pt") as file:
                assert set(file.keys()) == set(weights)
            # As MoonshotAI's checkpoint-engine does it: the file as one tensor, shared, to be pinned; then removed.
            whole = torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8)
            header = 8 + int.from_bytes(bytes(whole[:8].tolist()), "little")
            assert header % 64 == 0 and whole.numel() == header + acquired.nbytes
            os.unlink(path)
            del whole
        with acquired.safetensors() as (path,):
            assert os.path.exists(path)
        assert not os.path.exists(path) and not os.path.exists(os.path.dirname(path))


def test_what_cannot_be_published(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    for bad in (torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(3, dtype=torch.complex128)):
        with pytest.raises(UnsavableStateError, match="'odd'"):
            publisher.publish({"odd": bad}, 1)
    publisher.publish({"model": {"w": torch.ones(3), "extra": b"bytes"}, "step": 4, "v": torch.zeros(2)}, 2)
    with subscriber.acquire() as weights:
        assert sorted(weights) == ["model.w", "v"]


def test_an_address_is_taken_once(publisher: WeightPublisher) -> None:
    publisher.publish(model(1), 1)
    with WeightPublisher("policy") as other, pytest.raises(JobTakenError):
        other.publish(model(2), 2)


def test_too_little_memory_means_fewer_versions(
    publisher: WeightPublisher,
    subscriber: WeightSubscriber,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher.publish(model(1), 1)
    publisher.publish(model(2), 2)

    def no_memory(*_: Any) -> Any:
        raise OutOfMemoryError("no memory, as the test wants")

    client = publisher._client
    assert client is not None
    monkeypatch.setattr(client, "allocate", no_memory)
    for version in range(3, 6):
        assert not publisher.publish(model(version), version).skipped
    assert subscriber.versions() == [4, 5] and "room for 2 versions in memory instead of 3" in caplog.text
    with pytest.raises(OutOfMemoryError):
        publisher.publish({"new": torch.zeros(3)}, 6)
    with subscriber.acquire() as weights:
        assert version_in(weights) == 5


def test_names_that_safetensors_cannot_have(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    odd = {name: torch.full((2,), float(number)) for number, name in enumerate(['é"\n\\', "", "a\x00b", "{}", " "])}
    publisher.publish(odd, 1)
    with subscriber.acquire() as weights:
        assert same(dict(weights), odd)
    for name in ("__metadata__", 3):
        for bad in ({name: torch.ones(3)}, [(name, torch.ones(3))]):
            with pytest.raises(UnsavableStateError, match="cannot be the name"):
                publisher.publish(bad, 2)  # type: ignore[arg-type]


def test_a_default_device_is_not_looked_at(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    weights = model(1) | {"empty": torch.empty(0, 2)}
    with torch.device("meta"):
        publisher.publish(weights, 1)
        with subscriber.acquire() as acquired:
            assert {tensor.device.type for tensor in acquired.values()} == {"cpu"}


def test_a_reader_that_is_only_let_go_of_leaves_nothing(publisher: WeightPublisher) -> None:
    publisher.publish(model(1), 1)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with WeightSubscriber("policy").acquire() as weights, weights.safetensors() as (path,):
            assert version_in(weights) == 1 and os.path.exists(path)
        del weights
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # that of listdir


def test_a_closed_subscriber_has_no_files(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    weights = subscriber.acquire()
    subscriber.close()
    assert version_in(weights) == 1
    with pytest.raises(ClosedError, match="its subscriber is closed"), weights.safetensors():
        pass
    weights.release()


def test_the_interpreter_may_end_with_all_of_it_alive() -> None:
    script = """if True:
        import torch
        from asyncckpt.weights import WeightPublisher, WeightSubscriber
        publisher = WeightPublisher("policy")
        publisher.publish({"w": torch.ones(10)}, 1)
        subscriber = WeightSubscriber("policy")
        weights = subscriber.acquire()
        kept = weights["w"]
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_threads_may_share_a_subscriber(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    wrong: list[str] = []
    done = threading.Event()
    publisher.publish(model(1), 1)

    def read() -> None:
        while not done.is_set():
            with subscriber.acquire() as weights:
                if version_in(weights) != weights.version:
                    wrong.append("torn")

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(2, 60):  # other structures, so that there is something to be asked for
        publisher.publish({f"{version % 7}": torch.full((300,), float(version))}, version)
        time.sleep(0.002)
    done.set()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()
    assert not wrong


def test_a_fork_asks_for_itself(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    subscriber.acquire().release()
    ours = subscriber._ranks[0]._browser
    assert ours is not None
    if (child := os.fork()) == 0:
        ours.shelves = None  # type: ignore[assignment,method-assign]  # whoever asks by that fails
        try:
            with subscriber.acquire() as weights:
                os._exit(weights.version + 10)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    assert subscriber.versions() == [1] and subscriber._ranks[0]._browser is ours


def test_a_stopped_worker_holds_nobody_up_at_its_door(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(model(1), 1)
    monkeypatch.setattr("asyncckpt.weights.subscriber._ANSWER_S", 0.001)
    monkeypatch.setattr("asyncckpt.worker.door._KNOCK_S", 1)
    client = publisher._client
    assert client is not None
    os.kill(client.pid, signal.SIGSTOP)
    ended: list[int] = []

    def ask() -> None:
        for number in range(70):  # more than may wait there
            with WeightSubscriber("policy") as reader, pytest.raises(TimeoutError):
                reader.acquire(timeout=0.001)
            ended.append(number)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    try:
        asker.join(30)
        assert len(ended) == 70
    finally:
        os.kill(client.pid, signal.SIGCONT)
    asker.join(30)


def test_what_is_half_told_is_not_told() -> None:
    """Where a process dies in between, be it the first time that something is published in a slot or not."""

    class Killed(Exception):
        pass

    class Words:
        def __init__(self, words: memoryview, left: int) -> None:
            self.words, self.left = words, left

        def __setitem__(self, number: int, value: int) -> None:
            if not self.left:
                raise Killed
            self.left -= 1
            self.words[number] = value

    one, other = Published(1, 7, False, 1), Published(2, 3, True, 2)
    for stores in range(5):
        table = SlotTable(memoryview(bytearray(PAGE)))
        table.publish(0, one)
        words = table._words
        table._words = Words(words, stores)  # type: ignore[assignment]
        with contextlib.suppress(Killed):
            table.publish(0, other)
        table._words = words
        assert table.published(0) in (None, one, other)


def test_the_death_of_the_worker_takes_nothing_away(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    publisher.publish(model(1), 1)
    first = subscriber.acquire()
    client = publisher._client
    assert client is not None
    os.kill(client.pid, signal.SIGKILL)
    client.wait_for_end(30)
    with subscriber.acquire() as weights:  # of what is mapped here
        assert version_in(weights) == 1
    publisher.publish(model(2), 2)
    with subscriber.acquire(2) as weights:
        assert version_in(weights) == 2
    with WeightSubscriber("policy") as other:
        assert other.versions() == [1, 2]
    for version in range(3, 7):
        publisher.publish(model(version), version)
    assert version_in(first) == 1
    first.release()


def _publish_and(death: str, *versions: int) -> None:
    publisher = WeightPublisher("policy")
    for version in versions:
        publisher.publish(model(version), version)
    if death == "copying":
        Shelf.copy = _half_a_copy  # type: ignore[method-assign]
        publisher.publish(model(99), 99)
    os.kill(os.getpid(), signal.SIGKILL)


def _half_a_copy(self: Shelf, slot: int, plan: Any, tensors: Any, pool: Any) -> None:
    self.targets(slot, plan)[0].fill_(99.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("death", ["between", "copying"])
def test_another_trainer_goes_on_where_one_has_died(subscriber: WeightSubscriber, death: str) -> None:
    assert alone(_publish_and, death, 1, 2, 3)[0] == -signal.SIGKILL
    held = subscriber.acquire()
    assert version_in(held) == 3  # there is no trainer
    with WeightPublisher("policy") as publisher:
        with pytest.raises(VersionError, match="not newer than 3"):
            publisher.publish(model(2), 2)
        # Before it has published anything, what there was is there.
        with WeightSubscriber("policy") as other:
            assert other.versions()[-1] == 3
        for version in range(4, 9):
            assert not publisher.publish(model(version), version).skipped
            with subscriber.acquire(version) as weights:
                assert version_in(weights) == version and weights.epoch > held.epoch
        assert version_in(held) == 3
        assert subscriber.versions() == [3, 7, 8]
        memory = psutil.Process(publisher._client.pid if publisher._client else 0).memory_maps(grouped=False)
        assert sum("asyncckpt" in region.path for region in memory) == 4  # a page, and three slots: none anew
        held.release()


def test_a_reader_is_told_when_a_trainer_went_back_unawares(subscriber: WeightSubscriber) -> None:
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(50), 50)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 50
    # All is gone; a trainer that is started now cannot know.
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(1), 1)
        with pytest.raises(VersionError, match="version 1 is the newest, and this reader has had 50"):
            subscriber.acquire()
        with subscriber.acquire(roll_back=True) as weights:
            assert version_in(weights) == 1
        publisher.publish(model(2), 2)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 2


def test_what_a_trainer_before_said_of_going_back_holds(subscriber: WeightSubscriber) -> None:
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(50), 50)
        subscriber.acquire().release()
        publisher.publish(model(40), 40, roll_back=True)
        publisher._close(linger=True)
    with WeightPublisher("policy") as publisher:
        publisher.publish(model(41), 41)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 41


def test_a_stopped_worker_is_not_waited_for_for_ever(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(model(1), 1)
    monkeypatch.setattr("asyncckpt.weights.subscriber._LEAST_ANSWER_S", 0.2)
    client = publisher._client
    assert client is not None
    with WeightSubscriber("policy") as subscriber:
        os.kill(client.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError, match="did not answer a reader within 0.2 s"):
                subscriber.acquire(timeout=0.1)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        with subscriber.acquire() as weights:
            assert version_in(weights) == 1


def test_a_claim_and_leases_exclude_each_other() -> None:
    with Segment.create("asyncckpt-test", PAGE) as segment:
        claims, other = leases.Claims(segment), leases.Claims(segment)
        assert claims.claim(3) and claims.claim(3)
        assert not other.claim(3) and other.claim(2)
        assert leases.lease(segment.fileno(), 3) is None
        claims.offer(3)
        one, two = (leases.lease(segment.fileno(), 3) for _ in range(2))
        assert one is not None and two is not None
        assert not claims.claim(3)
        os.close(one)
        assert not claims.claim(3)
        os.close(two)
        assert claims.claim(3)
        # A child has no part in the claims, and so cannot keep them.
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        try:
            claims.close()
            deadline = time.monotonic() + 30
            while not other.claim(3):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        other.close()
        # Who reads has no way to write.
        fd = leases.reopen(segment.fileno(), os.O_RDONLY)
        with pytest.raises(PermissionError):
            Segment.attach(fd)


def test_mistakes_are_told(publisher: WeightPublisher, subscriber: WeightSubscriber) -> None:
    with pytest.raises(UnsavableStateError, match="no tensor"):
        publisher.publish({"step": 3}, 1)
    publisher.publish(model(1), 1)
    with pytest.raises(TypeError, match="state dict"):
        publisher.publish(torch.nn.Linear(2, 2), 2)  # type: ignore[arg-type]
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(ValueError, match="floating point"):
            publisher.publish(model(2), 2, dtype=dtype)  # type: ignore[arg-type]
    for version in ("2", 2.0):
        with pytest.raises(TypeError):
            publisher.publish(model(2), version)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            subscriber.acquire(version=version)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        subscriber.acquire(1, version=1)
    with pytest.raises(ValueError, match="not empty"):
        WeightPublisher("")
    with WeightSubscriber("policy", prefix="modle.") as other, pytest.raises(MismatchError, match="'modle.'; they are"):
        other.acquire()
    with subscriber.acquire() as weights, pytest.raises(ValueError, match="a bucket has some bytes"):
        next(weights.buckets(0))
    with (
        WeightSubscriber("another") as other,
        pytest.raises(WeightsTimeoutError, match="nobody has published at 'another'"),
    ):
        other.acquire(timeout=0.0)
