"""The archive: the zip file that ``torch.load`` reads, with the storages first and all varying parts behind them.

Each record is stored without compression. Padding in the local header aligns the record's bytes. A descriptor behind
the bytes holds their checksum (CRC-32). So the headers are known before the bytes, and are the same in every save.

Each record equals the output of ``torch.save``, including the padding. So ``torch.load`` can calculate the offset of a
storage without reading the file (``torch.utils.serialization.config.load.calculate_storage_offsets``). Only the order
of records differs: the pickle, of varying length, follows the storages, so that no storage ever moves.

The format is PKWARE's APPNOTE.TXT. Its 64-bit fields are used if a size or an offset needs them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from zipfile import ZipInfo

from asyncckpt.format.manifest import checksum

try:
    from isal.isal_zlib import crc32 as crc32  # five times as fast as zlib's
except ImportError:  # isal has no build for this kind of processor
    from zlib import crc32 as crc32

# The folder of all records. torch.save uses the file's own name, or this name if it knows none.
_FOLDER = "archive"
# Numbers from these limits on do not fit a 32-bit or 16-bit field. A 64-bit field holds them instead.
_LIMIT = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF

_LOCAL = struct.Struct("<4s5H3L2H")
LOCAL_BYTES = _LOCAL.size
"""Size of a record's header without its name."""
LOCAL_MAGIC = b"PK\3\4"
"""The first bytes of a record's header."""
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
_EXTRA = struct.Struct("<2H")
_EXTRA_64 = 1
# torch's own mark for padding.
_EXTRA_PADDING = int.from_bytes(b"FB", "little")

# The bytes of each record begin at a multiple of this.
_TORCH_ALIGNMENT = 64

_VERSION, _VERSION_64 = 20, 45
_HAS_DESCRIPTOR, _IS_UTF8 = 0x8, 0x800
_DATE = (1 << 5) | 1  # the first day that a zip file can name

# Number of bytes to checksum at a time, so that writing need not wait for the end of a large storage.
_PIECE_BYTES = 16 << 20
# Enough for one small record: header and name without padding, its bytes, its descriptor.
_SMALL_BYTES = 256


class Record(NamedTuple):
    """A record: its header begins at ``at``, its ``nbytes`` begin at ``payload_at``, both byte offsets in the file."""

    name: str
    at: int
    payload_at: int
    nbytes: int

    @property
    def large(self) -> bool:
        """Whether the record needs 64-bit fields."""
        return self.nbytes >= _LIMIT or self.at >= _LIMIT

    @property
    def end(self) -> int:
        """The start of the next record. A record without bytes has no descriptor."""
        return self.payload_at + self.nbytes + (_descriptor(self).size if self.nbytes else 0)


def lay_out(alignment: int, room: int, *sizes: int) -> list[Record]:
    """Return the records of the storages, and behind them the record of the pickle.

    Args:
        alignment: Multiple for the start of each record's bytes.
        room: Maximum size of the pickle in bytes.
        *sizes: Size of each storage in bytes.
    """
    records: list[Record] = []
    end = 0
    for number, nbytes in enumerate(sizes):
        records.append(_place(f"data/{number}", end, nbytes, alignment))
        end = records[-1].end
    return [*records, _place("data.pkl", end, room, alignment)]


def tail_room(alignment: int, storages: int) -> int:
    """Return a number of bytes that is enough for everything behind the pickle."""
    small = _small_records(alignment, 0)
    longest = len(f"{_FOLDER}/data/{storages}") + len(_extra_64(_LIMIT, _LIMIT))
    directory = (storages + 1) * (_CENTRAL.size + longest) + len(small) * _SMALL_BYTES
    return _SMALL_BYTES + len(small) * (_SMALL_BYTES + alignment) + directory


def header(record: Record) -> bytes:
    """Return the header of a record."""
    name, extra = record.name.encode(), _extra_64(record.nbytes, record.at)
    padding = record.payload_at - record.at - _LOCAL.size - len(name) - len(extra) - _EXTRA.size
    extra += _EXTRA.pack(_EXTRA_PADDING, padding) + b"Z" * padding
    flags, version = _flags(record.nbytes), _version(record)
    return _LOCAL.pack(LOCAL_MAGIC, version, flags, 0, 0, _DATE, 0, 0, 0, len(name), len(extra)) + name + extra


def record_at(data: bytes, at: int = 0) -> tuple[bytes, int]:
    """Return the name of the record with its header at ``at`` in ``data``, and the offset of the record's bytes.

    The first ``LOCAL_BYTES`` of the header must be in ``data``. The name may be cut off.
    """
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(data, at)
    name_at = at + LOCAL_BYTES
    return data[name_at : name_at + name_bytes], int(name_at + name_bytes + extra_bytes)


def place_before(info: ZipInfo, end: int) -> int | None:
    """Return the offset of a record's bytes, if the next record's header begins at ``end``; None: the offset is unsure.

    The offset is sure for a record of ``torch.save``: aligned as early as possible, without a gap behind it.
    """
    at, nbytes, name_bytes = info.header_offset, info.file_size, len(info.filename.encode())
    record = Record(info.filename, at, _payload_at(at, name_bytes, nbytes, _TORCH_ALIGNMENT), nbytes)
    is_known = info.flag_bits == _flags(nbytes) and (record.large or info.extract_version < _VERSION_64)
    return record.payload_at if is_known and record.end == end else None


def is_archive(data: bytes) -> bool:
    """Return whether ``data`` is a whole archive, or another zip file without a comment."""
    return data.startswith(LOCAL_MAGIC) and data[-_END.size :].startswith(b"PK\5\6") and data.endswith(b"\0\0")


def stretched(data: bytes, nbytes: int) -> bytes:
    """Return the archive ``data`` with zeros before its directory, so that it has ``nbytes``."""
    gap = nbytes - len(data)
    found = bytearray(data)
    end = len(data) - _END.size
    *fields, directory, comment = _END.unpack_from(data, end)
    locator = end - _LOCATOR_64.size
    if data.startswith(b"PK\6\7", locator):
        magic, disk, end_64, disks = _LOCATOR_64.unpack_from(data, locator)
        *fields_64, directory = _END_64.unpack_from(data, end_64)
        _END_64.pack_into(found, end_64, *fields_64, directory + gap)
        _LOCATOR_64.pack_into(found, locator, magic, disk, end_64 + gap, disks)
    _END.pack_into(found, end, *fields, min(directory + gap, _LIMIT), comment)
    found[directory:directory] = bytes(gap)
    return bytes(found)


def complete(
    image: memoryview,
    alignment: int,
    room: int,
    sizes: Sequence[int],
    pickle_bytes: int,
    wait_for: Callable[[int], None],
    advance: Callable[[int], None],
) -> int:
    """Complete an archive: checksum the storages and the pickle, and write the parts that depend on the checksums.

    Args:
        image: Holds the storages and the pickle as laid out. The bytes between and behind them are changed.
        alignment: As given to ``lay_out``.
        room: As given to ``lay_out``.
        sizes: As given to ``lay_out``.
        pickle_bytes: Size of the pickle in bytes.
        wait_for: Called with a position in bytes. Returns when the image has arrived up to it.
        advance: Called repeatedly with the position in bytes up to which the image is final.

    Returns:
        The length of the file, in bytes.
    """
    archive = Archive(image)
    for record, nbytes in zip(lay_out(alignment, room, *sizes), (*sizes, pickle_bytes), strict=True):
        crc = 0
        stop = record.payload_at + nbytes
        for begin in range(record.payload_at, stop, _PIECE_BYTES):
            end = min(begin + _PIECE_BYTES, stop)
            wait_for(end)
            crc = crc32(image[begin:end], crc)
            advance(end)
        wait_for(record.end)  # otherwise arriving bytes could overwrite the descriptor
        archive.close(record, nbytes, crc)
    archive.finish(alignment)
    return archive.end


class Image(Protocol):
    """The bytes of a file in memory: the whole file, or the part that is being completed."""

    def __setitem__(self, where: slice, data: bytes | bytearray, /) -> None: ...


class Archive:
    """An archive being completed in an image, which already has the headers, the storages and the pickle."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._directory = bytearray()
        self._records = 0
        self._crc = 0
        self.end = 0
        """End of the completed part, in bytes."""

    def close(self, record: Record, nbytes: int, crc: int) -> None:
        """Write a record's descriptor behind its bytes, and add the record to the directory.

        Args:
            record: The record as laid out.
            nbytes: Number of its bytes that are used.
            crc: CRC-32 of these bytes.
        """
        self.end = record.payload_at + nbytes
        if nbytes:
            self._put(_descriptor(record).pack(b"PK\7\x08", crc, nbytes, nbytes))
        name, extra = record.name.encode(), _extra_64(nbytes, record.at)
        size, at = min(nbytes, _LIMIT), min(record.at, _LIMIT)
        # Signature, version of the writer, version needed to read, flags, method (stored), time, date, checksum, sizes.
        # The zeros after the lengths: no comment, first disk, no attributes.
        fields = (b"PK\1\2", _VERSION_64, _version(record), _flags(nbytes), 0, 0, _DATE, crc, size, size)
        self._directory += _CENTRAL.pack(*fields, len(name), len(extra), 0, 0, 0, 0, at) + name + extra
        self._records += 1
        self._crc = crc32(crc.to_bytes(4, "little"), self._crc)

    def finish(self, alignment: int) -> None:
        """Append the small records and the directory."""
        names = checksum(bytes(self._directory))
        for name, data in _small_records(alignment, names, self._crc).items():
            record = _place(name, self.end, len(data), alignment)
            self.end = record.at
            self._put(header(record) + data)
            self.close(record, len(data), crc32(data))
        at, nbytes = self.end, len(self._directory)
        self._put(self._directory)
        end, count = self.end, self._records
        self._put(
            # Size of the rest of this record, versions of the writer and needed to read, this disk, directory's disk.
            _END_64.pack(b"PK\6\6", _END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, nbytes, at)
            + _LOCATOR_64.pack(b"PK\6\7", 0, end, 1)
            + _END.pack(b"PK\5\6", 0, 0, *2 * (min(count, _LIMIT_16),), min(nbytes, _LIMIT), min(at, _LIMIT), 0)
        )

    def _put(self, data: bytes | bytearray) -> None:
        self._image[self.end : self.end + len(data)] = data
        self.end += len(data)


def _place(name: str, at: int, nbytes: int, alignment: int) -> Record:
    """Return the record with its header at ``at``, and its bytes at the next multiple of ``alignment`` behind it."""
    name = f"{_FOLDER}/{name}"
    return Record(name, at, _payload_at(at, len(name), nbytes, alignment), nbytes)


def _payload_at(at: int, name_bytes: int, nbytes: int, alignment: int) -> int:
    least = at + _LOCAL.size + name_bytes + len(_extra_64(nbytes, at)) + _EXTRA.size
    return -(-least // alignment) * alignment


def _small_records(alignment: int, *identity: int) -> dict[str, bytes]:
    """Return the small records about the file, in the order of ``torch.save``. torch only logs ``identity``."""
    return {
        ".format_version": b"1",
        ".storage_alignment": str(alignment).encode(),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
        ".data/serialization_id": "".join(f"{number:020}" for number in identity).encode(),
    }


def _descriptor(record: Record) -> struct.Struct:
    return _DESCRIPTOR_64 if record.large else _DESCRIPTOR


def _version(record: Record) -> int:
    return _VERSION_64 if record.large else _VERSION


def _flags(nbytes: int) -> int:
    return _IS_UTF8 | (_HAS_DESCRIPTOR if nbytes else 0)


def _extra_64(nbytes: int, at: int) -> bytes:
    """Return the extra field with the numbers that do not fit 32 bits; empty if all fit."""
    numbers = ([nbytes, nbytes] if nbytes >= _LIMIT else []) + ([at] if at >= _LIMIT else [])
    return _EXTRA.pack(_EXTRA_64, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers) if numbers else b""
