"""Every byte of a checkpoint against its checksum; without torch, and without reading a pickle."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from asyncckpt.errors import DamagedCheckpointError
from asyncckpt.loading.data_file import ChecksummedFile, read_pool
from asyncckpt.loading.source import StorageSource
from asyncckpt.worker.storage import storage_for


@dataclass
class Report:
    """What ``verify`` found: ``nbytes`` checked, and an error for each damage, with its file."""

    path: str
    nbytes: int = 0
    damages: list[DamagedCheckpointError] = field(default_factory=list)


def verify(path: str, progress: Callable[[int], object] = lambda nbytes: None) -> Report:
    """Read all of the checkpoint ``path`` and report all that is damaged, each with file and tensor.

    ``progress`` is called with the bytes read since the last call. Raises ``CheckpointNotFoundError`` where there is no
    checkpoint at all, ``StorageError`` where it cannot be read.
    """
    path = os.path.abspath(path)
    report = Report(path)
    with storage_for(path).reading(path):
        _verify(report, progress)
    return report


def _verify(report: Report, progress: Callable[[int], object]) -> None:
    try:
        source = StorageSource(report.path)
    except DamagedCheckpointError as error:
        report.damages.append(error)
        return
    for name, facts in source.manifest.files.items():
        try:
            if facts["xxh3"] is None:
                _verify_data(report, source.open(name), progress)
            else:
                source.read(name)
                progress(facts["bytes"])
        except DamagedCheckpointError as error:
            if error.args not in [known.args for known in report.damages]:  # an index is read twice
                report.damages.append(error)
        report.nbytes += facts["bytes"]


def _verify_data(report: Report, file: ChecksummedFile, progress: Callable[[int], object]) -> None:
    with closing(file), read_pool() as pool:
        for run in file.read([(0, file.nbytes)], pool):
            report.damages += run.damages
            progress(run.nbytes)
