"""Transport by NIXL: through shared memory between processes of a host, and over TCP as between hosts without RDMA."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.image_holder import IMAGE, KEY, hold, image_bytes, image_holder
from support.transport_contract import MUCH, NBYTES, Reader, TransportContract, wait_for

from asyncckpt.config import Config
from asyncckpt.format.write_request import HeldImage
from asyncckpt.link.segment_store import SegmentStore
from asyncckpt.shm.segment import Segment
from asyncckpt.transfer import nixl
from asyncckpt.transfer.api import TransferAddress
from asyncckpt.transfer.holder import Holder, RemoteImage
from asyncckpt.transfer.nixl import NixlTransport
from asyncckpt.transfer.nixl_process import MODULES
from asyncckpt.transfer.server import TransferServer

needs_nixl = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, MODULES)), reason="NIXL is not installed: pip install 'asyncckpt[nixl]'"
)


@pytest.fixture(params=[None, "tcp,self"], ids=["default", "tcp"], autouse=True)
def _ucx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the transports of UCX."""
    if request.param is not None:
        monkeypatch.setenv("UCX_TLS", request.param)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Check that no process and no thread is left. ``no_leaks`` would wait for a process."""
    before = set(_children()), threading.active_count()
    yield
    assert set(_children()) == before[0] and threading.active_count() <= before[1]


@needs_nixl
class TestNixl(TransportContract):
    kind = "nixl"


@pytest.fixture
def server() -> Iterator[TransferServer]:
    """A server of an image, in this process."""
    store = SegmentStore()
    hold(store, NBYTES)
    server = TransferServer(store, (KEY,), "127.0.0.1")
    yield server
    server.close()
    store.close()


def _children(pid: int | None = None) -> list[int]:
    """Return the NIXL processes. The processes of other tests live as long as pytest."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has just ended
            if any("nixl_process" in word for word in child.cmdline()):
                found.append(child.pid)
    return found


def _is_whole(image: RemoteImage[HeldImage]) -> bool:
    into = memoryview(bytearray(NBYTES))
    image.read(image.described.layout.slots[0], into)
    return into == image_bytes(NBYTES)


def _can_be_read(peer: Holder) -> bool:
    """Return whether a read succeeds. It fails until the holder notices that its NIXL process has ended."""
    image = peer.open(IMAGE)
    try:
        image.read(image.described.layout.slots[0], memoryview(bytearray(1)))
    except OSError:
        return False
    finally:
        image.close()
    return True


@needs_nixl
def test_a_segment_is_offered_once_for_all_its_leases(server: TransferServer) -> None:
    with Holder(TransferAddress("127.0.0.1", server.port), KEY, "nixl") as peer:
        one, other = peer.open(IMAGE), peer.open(IMAGE)
        kind = server._kinds["nixl"]
        assert isinstance(kind, NixlTransport) and [each.leases for each in kind._offered.values()] == [2]
        assert _is_whole(one)
        one.close()
        peer.ping()
        assert _is_whole(other)
        other.close()
        peer.ping()
        assert not kind._offered
        assert _is_whole(peer.open(IMAGE))
        assert len(_children()) == 2  # one process offers, and one reads


@needs_nixl
def test_many_threads_read_at_once(server: TransferServer) -> None:
    expected = image_bytes(NBYTES)
    with Holder(TransferAddress("127.0.0.1", server.port), KEY, "nixl") as peer, ThreadPoolExecutor(24) as pool:
        images = [peer.open(IMAGE) for _ in range(3)]
        begin, step = images[0].described.layout.slots[0], NBYTES // 24

        def read(number: int) -> bool:
            at = number % 12 * step
            into = memoryview(bytearray(step * 12))
            images[number % 3].read(begin + at, into)
            return into == expected[at : at + len(into)]

        assert all(pool.map(read, range(72)))


@needs_nixl
def test_a_holder_comes_back_elsewhere(server: TransferServer) -> None:
    with Holder(TransferAddress("127.0.0.1", server.port), KEY, "nixl") as here:
        stays = here.open(IMAGE)
        for _ in range(2):
            with image_holder(NBYTES) as holder, Holder(holder.address, KEY, "nixl") as peer:
                image = peer.open(IMAGE)
                assert _is_whole(image)
                holder.process.kill()
                with pytest.raises(OSError):
                    while True:
                        _is_whole(image)
        assert _is_whole(stays)


@needs_nixl
def test_the_process_of_the_holder_that_offers_is_killed() -> None:
    with image_holder(MUCH) as holder, Holder(holder.address, KEY, "nixl") as peer:
        reader = Reader(peer.open(IMAGE), MUCH)
        wait_for(lambda: reader.nbytes > 0)
        (offers,) = _children(holder.process.pid)
        os.kill(offers, signal.SIGKILL)
        assert isinstance(reader.failure(), OSError)
        wait_for(lambda: _can_be_read(peer))


@needs_nixl
def test_the_process_that_reads_is_killed(server: TransferServer) -> None:
    with Holder(TransferAddress("127.0.0.1", server.port), KEY, "nixl") as peer:
        image = peer.open(IMAGE)
        reader = nixl._reader
        assert reader is not None and _is_whole(image)
        os.kill(reader.process.pid, signal.SIGKILL)
        with pytest.raises(OSError):
            _is_whole(image)
        wait_for(lambda: reader.process.has_ended)
        assert _is_whole(peer.open(IMAGE))


@needs_nixl
def test_nothing_is_written_after_a_transfer_that_was_stuck(
    server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer resumes with the holder. Meanwhile another holder can be read, and no CPU time is used."""
    monkeypatch.setattr(nixl, "_PIECES", 4)  # all pieces may be stuck
    address = TransferAddress("127.0.0.1", server.port)
    with (
        image_holder(MUCH) as holder,
        Holder(holder.address, KEY, "nixl", answer_s=1.0) as peer,
        Holder(address, KEY, "nixl") as other,
    ):
        image, stays = peer.open(IMAGE), other.open(IMAGE)
        reader = Reader(image, MUCH)
        wait_for(lambda: reader.nbytes > 0)
        processes = [holder.process.pid, *_children(holder.process.pid)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        if os.environ.get("UCX_TLS") is None:
            image.close()  # the memory of a stopped process can still be read
        assert isinstance(reader.failure(), OSError)
        mine = [psutil.Process(child) for child in _children() if child not in processes]
        before = bytes(reader.into), sum(sum(each.cpu_times()[:2]) for each in mine)
        try:
            assert _is_whole(stays)
        except TimeoutError:
            assert _is_whole(other.open(IMAGE))
        time.sleep(1.0)
        assert mine and sum(sum(each.cpu_times()[:2]) for each in mine) - before[1] < 0.4
        for process in reversed(processes):
            os.kill(process, signal.SIGCONT)
        time.sleep(0.5)
        assert reader.into == before[0]
        assert holder.process.poll() is None


@needs_nixl
def test_one_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with image_holder(NBYTES) as holder, Holder(holder.address, KEY, "nixl") as peer:
        image = peer.open(IMAGE)
        assert _is_whole(image)
        (offers,) = _children(holder.process.pid)
        os.kill(offers, signal.SIGSTOP)  # the worker itself answers
        with monkeypatch.context() as patched, pytest.raises(TimeoutError):
            patched.setattr(nixl, "SILENCE_S", 1.0)
            _is_whole(image)
        os.kill(offers, signal.SIGKILL)
        wait_for(lambda: _can_be_read(peer))


@needs_nixl
def test_what_is_not_in_the_segment_is_refused(server: TransferServer) -> None:
    with Holder(TransferAddress("127.0.0.1", server.port), KEY, "nixl") as peer:
        image = peer.open(IMAGE)
        with pytest.raises(OSError):
            image.read(1 << 40, memoryview(bytearray(1)))
        assert _is_whole(image)


@needs_nixl
def test_the_same_process_offers_segment_after_segment() -> None:
    kind = NixlTransport()
    for _ in range(20):
        with Segment.create("one of many", 1 << 20) as segment:
            kind.offer(segment).close()
    (child,) = _children()
    # The segments are neither mapped nor registered any more.
    assert "one of many" not in Path(f"/proc/{child}/maps").read_text()
    assert psutil.Process(child).num_threads() < 10
    kind.close()


def test_who_has_no_nixl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"asyncckpt\[nixl\]"):
        Config(transport="nixl")
