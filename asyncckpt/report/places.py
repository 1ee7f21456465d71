"""Checkpoints at a path that somebody has named: the newest of them, their manifests, and the kind of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Literal

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError
from asyncckpt.format.manifest import METADATA_NAME, Manifest
from asyncckpt.loading.contents import checkpoints_at
from asyncckpt.loading.source import is_stock, read_manifest
from asyncckpt.report.answers import Answers
from asyncckpt.storage import storage_for

Kind = Literal["asyncckpt", "file set", "dcp"]


def newest_of(answers: Answers, paths: list[str]) -> str | None:
    """What was created last, which after going back is not the highest step; None: nothing can be read, as was said."""
    found: list[tuple[float, int, str]] = []
    for number_of, path in enumerate(paths):
        with answers.about(path), still_there(path, ""):
            # What stock DCP wrote does not say when: it comes before all that does.
            found.append((-math.inf if is_stock(path) else read_manifest(path).created, number_of, path))
    return max(found)[2] if found else None


def kind_of(manifest: Manifest) -> Kind:
    """Return the kind that a manifest is of."""
    return "asyncckpt" if METADATA_NAME in manifest.files else "file set"


def manifests_at(answers: Answers, given: str) -> Iterator[tuple[str, Manifest]]:
    """Yield the paths and manifests of the checkpoints at ``given``, and say what cannot be read of them."""
    with answers.about(given):
        paths = checkpoints_at(given)
        if paths == [given] and is_stock(given):
            raise CheckpointNotFoundError(
                "stock DCP wrote this: only checkpoints of asyncckpt say how long they took", path=given
            )
        for path in paths:
            with answers.about(path), still_there(path, given):
                yield path, read_manifest(path)


@contextlib.contextmanager
def still_there(path: str, given: str) -> Iterator[None]:
    """Pass over a checkpoint that was listed and is gone since, as by retention; not one that was ``given``."""
    try:
        yield
    except CheckpointError:
        if path == given or storage_for(path).exists(path):
            raise
