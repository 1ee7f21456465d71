"""Every byte of a checkpoint against its checksum; without torch, and without reading a pickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncckpt.catalog import check_size, read_checked, read_manifest
from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.source import FolderSource
from asyncckpt.spans import SpanFile, read_pool
from asyncckpt.worker.storage import reading, translated


@dataclass
class Report:
    """What ``verify`` found: ``nbytes`` looked at, and a sentence for each thing that is wrong, with its file."""

    path: str
    nbytes: int = 0
    damages: list[DamagedCheckpointError] = field(default_factory=list)


def verify(path: str, progress: Callable[[int], object] = lambda nbytes: None) -> Report:
    """Read all of the checkpoint ``path`` and report all that is damaged, each with file and tensor.

    ``progress`` is called with the bytes done since the last call. Raises ``CheckpointNotFoundError`` where there is no
    checkpoint at all, ``StorageError`` where it cannot be read.
    """
    path = os.path.abspath(path)
    report = Report(path)
    if os.path.isdir(path):
        with translated("opening", path), reading(path):
            _verify(report, progress)
    else:
        read_manifest(path)  # says what is wrong
    return report


def _verify(report: Report, progress: Callable[[int], object]) -> None:
    try:
        manifest = read_manifest(report.path)
    except DamagedCheckpointError as error:
        report.damages.append(error)
        return
    for name, facts in manifest.files.items():
        try:
            if facts["xxh3"] is None:
                check_size(report.path, manifest, name)
                _verify_data(report, FolderSource(report.path, manifest).open(name), progress)
            else:
                read_checked(report.path, manifest, name)
                progress(facts["bytes"])
        except DamagedCheckpointError as error:
            if error.args not in [known.args for known in report.damages]:  # an index is looked at twice
                report.damages.append(error)
        report.nbytes += facts["bytes"]


def _verify_data(report: Report, file: SpanFile, progress: Callable[[int], object]) -> None:
    def consume(begin: int, data: memoryview) -> None:
        pass  # that it is checked is all

    try:
        with read_pool() as pool:
            file.read([(0, file.nbytes)], consume, pool, on_damage=report.damages.append, tell=progress)
    finally:
        file.close()
