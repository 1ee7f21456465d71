"""Files that several ranks write together, each its part, at its extents."""

from __future__ import annotations

import os
import random
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import DamagedCheckpointError, StorageError
from asyncckpt.planning.sharded_safetensors import extents_of
from asyncckpt.shm.huge import huge_buffer
from asyncckpt.shm.segment import PAGE
from asyncckpt.worker.extent import Extent, check_whole, packed, unpacked
from asyncckpt.worker.joint_file import JointInput, JointOutput
from asyncckpt.worker.storage.local import LocalStorage
from asyncckpt.worker.storage.object_store import ObjectStorage
from asyncckpt.worker.storage.objects import Objects


@pytest.mark.parametrize("large", [False, True])
def test_ranks_write_ranges_of_one_file(tmp_path: Path, large: bool) -> None:
    storage = LocalStorage()
    ranks = [storage.begin_checkpoint(str(tmp_path / "final"), "a-1", 0) for _ in range(2)]
    pages = huge_buffer(2 * PAGE)
    pages[:] = os.urandom(len(pages))
    files = [rank.create_joint("deep/joint", 2 * PAGE - 1, large=large) for rank in ranks]
    assert storage.size(f"{ranks[0].path}/deep/joint") == 2 * PAGE - 1
    files[1].write(pages[:PAGE], 0)
    edge = ranks[0].create_joint("deep/joint", 2 * PAGE - 1, large=False)
    edge.write_runs(pages[PAGE:-1], PAGE, 999, 999)
    for file in (*files, edge):
        file.sync()
        file.close()
    assert storage.read(f"{ranks[0].path}/deep/joint") == bytes(pages[:-1])
    with pytest.raises(StorageError):
        ranks[0].create("deep/joint", large=False)
    for rank in ranks:
        rank.discard(["deep/joint"])
    assert not os.listdir(tmp_path)


def test_an_object_store_has_no_such_files() -> None:
    storage = ObjectStorage(Objects(pytest.importorskip("obstore.store").MemoryStore(), "memory://bucket"))
    attempt = storage.begin_checkpoint("memory://bucket/final", "a-1", 0)
    with pytest.raises(StorageError, match="several ranks"):
        attempt.create_joint("joint", 5, large=True)
    attempt.discard()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_box_stands_where_its_extents_say(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    whole = np.arange(np.prod(shape, dtype=int) * 2, dtype=np.uint8).reshape(*shape, 2)
    box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].tobytes()
    extents = list(extents_of(7, 100, 2, shape, offsets, sizes))
    flat, found = whole.reshape(-1), b""
    for extent in extents:
        assert extent.at == 7 + len(found)
        for number in range(extent.runs):
            begin = extent.begin + number * extent.stride - 100
            found += flat[begin : begin + extent.run_bytes].tobytes()
    assert found == box
    assert unpacked(packed(extents)) == extents


def _parts(dice: random.Random) -> tuple[int, list[list[Extent]]]:
    """A file of rows, of which each of some parts has columns, between whole ranges."""
    parts: list[list[Extent]] = [[] for _ in range(3)]
    ends, at = [0] * 3, 0
    for _ in range(6):
        if dice.random() < 0.5:
            each, nbytes = dice.randrange(3), dice.choice([1, 700, 3 * PAGE + 5, 300_000])
            parts[each].append(Extent(ends[each] + 3, nbytes, 1, at, nbytes))
            ends[each] += 3 + nbytes
            at += nbytes
            continue
        widths, rows = [dice.choice([1, 90, 5000, 70_000]) for _ in range(3)], dice.randint(1, 30)
        begin = at
        for each, width in enumerate(widths):
            parts[each].append(Extent(ends[each], width, rows, begin, sum(widths)))
            ends[each] += width * rows
            begin += width
        at += sum(widths) * rows
    return at, parts


@pytest.mark.parametrize("seed", range(6))
def test_parts_come_together_and_apart_again(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    nbytes, parts = _parts(dice)
    check_whole([extent for part in parts for extent in part], nbytes, "file")
    expected = random.Random(seed).randbytes(nbytes)
    attempt = LocalStorage().begin_checkpoint(str(tmp_path / "final"), "a-1", 0)
    images = []
    for extents in parts:
        image = huge_buffer(extents[-1].at + extents[-1].nbytes + 9)
        for each in extents:
            for number in range(each.runs):
                begin, at = each.begin + number * each.stride, each.at + number * each.run_bytes
                image[at : at + each.run_bytes] = expected[begin : begin + each.run_bytes]
        output = JointOutput(lambda direct: attempt.create_joint("joint", nbytes, large=direct), extents)
        with closing(output):
            cuts = sorted({0, len(image), *(dice.randrange(len(image)) for _ in range(3))})
            for begin, end in zip(cuts, cuts[1:], strict=False):
                output.write(image[begin:end], begin)
            output.sync()
        images.append(bytes(image))
    path = f"{attempt.path}/joint"
    assert Path(path).read_bytes() == expected
    with closing(LocalStorage().open(path)) as file:
        for its, extents in zip(images, parts, strict=True):
            part = JointInput(file, extents)
            for begin, end in [(0, len(its)), *(sorted(dice.choices(range(len(its)), k=2)) for _ in range(9))]:
                assert part.read(begin, end) == its[begin:end]
    os.truncate(path, nbytes - 1)
    with closing(LocalStorage().open(path)) as file, pytest.raises(DamagedCheckpointError, match="shorter"):
        for extents in parts:
            JointInput(file, extents).read(0, extents[-1].at + extents[-1].nbytes)
    attempt.discard()


def test_parts_that_are_not_the_whole() -> None:
    one, other = Extent(0, 8, 1, 0, 8), Extent(0, 8, 1, 8, 8)
    check_whole([one, other], 16, "file")
    for extents, nbytes in product(([one], [one, one], [one, other, other]), (8, 16, 24)):
        if (extents, nbytes) != ([one], 8):
            with pytest.raises(DamagedCheckpointError):
                check_whole(extents, nbytes, "file")
