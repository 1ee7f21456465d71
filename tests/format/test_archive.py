"""The zip archive of ``torch.save``: the positions of its records, beyond 4 GiB too."""

from __future__ import annotations

import io
import mmap
import pickle
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from asyncckpt.format import archive


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


def test_zip64(path: Path) -> None:
    """Write a sparse file with a storage of 5 GiB, a storage after that, and a pickle for both."""
    large = 5 << 30
    last = torch.arange(1000.0)
    sizes = [large, last.nbytes]
    buffer = io.BytesIO()
    torch.save([torch.empty(0), last], buffer)
    with zipfile.ZipFile(buffer) as file:
        data = file.read("archive/data.pkl")
    # The pickle gives the empty storage this size. Its tensor still has no elements.
    first = data.index(b"cpuq") if b"cpuq" in data else data.index(b"cpu")
    at = data.index(b"K\x00", first)
    data = data[:at] + pickle.dumps(large // 4, protocol=2)[2:-1] + data[at + 2 :]
    *records, pickled = archive.lay_out(64, len(data), *sizes)
    with path.open("w+b") as file_:
        file_.truncate(pickled.end + archive.tail_room(64, 2))
        with mmap.mmap(file_.fileno(), 0) as map_:
            image = memoryview(map_)
            for record in (*records, pickled):
                head = archive.header(record)
                image[record.at : record.at + len(head)] = head
            image[records[1].payload_at : records[1].payload_at + last.nbytes] = last.numpy().tobytes()
            image[pickled.payload_at : pickled.payload_at + len(data)] = data
            made = archive.Archive(image)
            made.close(records[0], large, 0)  # no reader needs this checksum here
            for record, nbytes in ((records[1], last.nbytes), (pickled, len(data))):
                made.close(record, nbytes, zlib.crc32(image[record.payload_at : record.payload_at + nbytes]))
            made.finish(64)
            end = made.end
            del made
            image.release()
        file_.truncate(end)
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
        assert [(entry.file_size, entry.header_offset) for entry in entries[:2]] == [(large, 0), (4000, records[1].at)]
        for entry in entries[1:]:
            assert file.read(entry)  # and the checksum is right
    loaded = torch.load(path, mmap=True)
    assert loaded[0].untyped_storage().nbytes() == large and torch.equal(loaded[1], last)


def test_tail_room_is_enough() -> None:
    for count in (0, 1, 10, 11, 1000):
        for alignment in (1, 64, 4096):
            *_, pickled = archive.lay_out(alignment, 1, *[1] * count)
            image = memoryview(bytearray(pickled.end + archive.tail_room(alignment, count)))
            before = len(image)
            end = archive.complete(image, alignment, 1, [1] * count, 1, lambda _: None, lambda _: None)
            assert end <= before
