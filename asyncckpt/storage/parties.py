"""Messages between the parties of a checkpoint and its first rank, as small files.

A party is a process outside the ranks, perhaps on another host. It writes its part into the attempt of the ranks. It
has no connection to them, and uses these files:

- ``root/.parties/session.json``: the trainer's token, from which a party computes the name of the attempt. The first
  rank writes it.
- ``root/.parties/NAME/failed.json``: the attempts that this party has failed, and for "trainer" those of the ranks.
- ``parties/NAME.begun`` in the attempt: created by the first process with this name that joins the attempt. A party
  joins after "trainer", so it joins only an attempt that can still succeed. No second process of a name joins.
- ``parties/NAME.json`` in the attempt: the report of a party about its durable part. It stays in the checkpoint.
- ``parties/trainer.json`` in the attempt: the parties and the cut, written by the commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from asyncckpt.config import TRAINER
from asyncckpt.errors import CheckpointError, CheckpointExistsError, RankFailedError, decode, encode
from asyncckpt.format.manifest import NOT_AS_WRITTEN, checksum
from asyncckpt.format.write_request import WriteRequest
from asyncckpt.storage import is_address, storage_for
from asyncckpt.storage.file_system import make_folder, translated
from asyncckpt.storage.storage import OpenAttempt, Storage

PARTIES = "parties"
"""The folder with the parts in a checkpoint. Each party has a folder with its name there."""


_FAILED, _BEGUN = "failed.json", "begun"
# Number of failed attempts in the file of a party. Nobody asks for older ones.
_MOST_FAILURES = 16
_LOCAL_LOOK_S, _REMOTE_LOOK_S = 0.25, 1.0


@dataclass(frozen=True)
class Announcement:
    """The present trainer of a root: its token (see ``Joint``), and the parties of its checkpoints."""

    token: str
    parties: tuple[str, ...]


def folder_of(root: str, *parts: str) -> str:
    """Return the folder of the parties' files in ``root``, and make it on a file system. Raises ``StorageError``."""
    folder = os.path.join(root, f".{PARTIES}", *parts)
    if not is_address(folder):
        with translated("making a folder", folder):
            make_folder(folder)
    return folder


def announce(root: str, session: Announcement) -> None:
    """First rank: let the parties find this trainer. Raises ``StorageError``."""
    path, storage = os.path.join(folder_of(root), "session.json"), storage_for(root)
    before = storage.stamp(path)
    # Later than the announcement of an earlier trainer, even if the clock of its host was ahead.
    at = max(time.time_ns(), 0 if before is None else before.modified + 1)
    storage.advance(path, json.dumps(asdict(session)), at)


def session_of(root: str) -> Announcement | None:
    """Return the present trainer of ``root``; None: there was no trainer with parties. Raises ``StorageError``."""
    path, storage = os.path.join(root, f".{PARTIES}", "session.json"), storage_for(root)
    if storage.size(path) is None:
        return None
    with contextlib.suppress(*NOT_AS_WRITTEN):
        found = json.loads(storage.read(path))
        return Announcement(str(found["token"]), tuple(map(str, found["parties"])))
    return None


def is_superseded(root: str, token: str) -> bool:
    """Return whether the trainer of ``root`` has another token now, so it begins no attempts of ``token``.

    Raises ``StorageError``.
    """
    now = session_of(root)
    return now is not None and now.token != token


def name_of(party: str, kind: str = "json") -> str:
    """Return the name of a party's report in the attempt. ``kind``: "begun" for the mark of a process that joins."""
    return f"{PARTIES}/{party}.{kind}"


def encoded(report: dict[str, Any]) -> bytes:
    """Return the bytes of a report, with a checksum."""
    body = {name: value for name, value in report.items() if name != "xxh3"}
    return json.dumps({**body, "xxh3": f"{checksum(json.dumps(body).encode()):016x}"}).encode()


def write(attempt: OpenAttempt, name: str, data: bytes) -> None:
    """Write a small file to an attempt, durably. Raises ``StorageError``."""
    with contextlib.closing(attempt.create(name, large=False)) as file:
        file.write(memoryview(data), 0)
        file.sync()


def note_failure(root: str, who: str, attempt: str, error: CheckpointError) -> None:
    """Let the others see that a party, or the trainer, has failed an attempt. Raises ``StorageError``."""
    path, storage = os.path.join(folder_of(root, who), _FAILED), storage_for(root)
    known = [each for each in _failures(root, who).items() if each[0] != attempt][1 - _MOST_FAILURES :]
    storage.advance(path, json.dumps(dict(known) | {attempt: encode(error).decode()}), time.time_ns())


def failure_of(root: str, who: str, attempt: str) -> CheckpointError | None:
    """Return the reason why a party, or the trainer, has failed an attempt. Raises ``StorageError``."""
    found = _failures(root, who).get(attempt)
    return None if found is None else decode(found.encode())


def _failures(root: str, who: str) -> dict[str, str]:
    path, storage = os.path.join(root, f".{PARTIES}", who, _FAILED), storage_for(root)
    with contextlib.suppress(*NOT_AS_WRITTEN):
        if storage.size(path) is not None:
            return {str(attempt): str(error) for attempt, error in json.loads(storage.read(path)).items()}
    return {}


def join(storage: Storage, request: WriteRequest, nbytes: int, can_succeed: Callable[[], bool]) -> OpenAttempt:
    """Party: join the attempt of the ranks, after the first rank has begun it.

    Args:
        storage: The storage of the attempt.
        request: The request of the party.
        nbytes: Number of bytes of the part.
        can_succeed: Returns whether to go on waiting.

    Raises:
        CheckpointExistsError: The attempt has a part of this party already, or is complete.
        RankFailedError: The ranks will not begin this attempt, or have failed it.
        StorageError: Storage refuses.
    """
    root, attempt, trainer = os.path.dirname(request.path), request.attempt, name_of(TRAINER, _BEGUN)
    while not storage.has_claimed(request.path, attempt, trainer):
        is_old = request.joint is None or is_superseded(root, request.joint.token)
        if storage.is_finalized(request.path, attempt):
            raise CheckpointExistsError("this step is complete already, with a part of this party")
        if (failure := failure_of(root, TRAINER, attempt)) is not None:
            raise RankFailedError(f"the training has failed this step: {failure.message}")
        if is_old and not storage.has_claimed(request.path, attempt, trainer):
            raise RankFailedError("the training has gone back or was started again; save the part again")
        if not can_succeed():
            raise RankFailedError("the training did not save this step in time")
        time.sleep(look_s(storage))
    opened = storage.begin_checkpoint(request.path, attempt, nbytes)
    if opened.claim(name_of(request.party, _BEGUN)):
        return opened
    opened.release()
    raise CheckpointExistsError("this step has a part of this party already, perhaps of an earlier process")


def look_s(storage: Storage) -> float:
    """Return the interval of looks in seconds. An object store charges for looks."""
    return _LOCAL_LOOK_S if storage.has_locks else _REMOTE_LOOK_S


def received(attempt: OpenAttempt, party: str) -> bytes | None:
    """First rank: return the report of a party; None: it is not there yet. Raises ``StorageError``."""
    report = _checked(attempt.read(name_of(party)))
    return None if report is None else encoded(report)


def _checked(text: bytes | None) -> dict[str, Any] | None:
    """Return a report; None if it is not there, or not yet written whole."""
    with contextlib.suppress(*NOT_AS_WRITTEN):
        found = json.loads(text or b"")
        if encoded(found) == text:
            return dict(found)
    return None


def summary(parties: tuple[str, ...], cut: str | None) -> tuple[str, bytes]:
    """Return the name and the bytes of the file with the parties and the cut."""
    return name_of(TRAINER), json.dumps({"parties": parties, "cut": cut}).encode()


def marks(parties: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the marks of all processes that have joined an attempt, as files of a manifest."""
    empty = {"bytes": 0, "xxh3": f"{checksum(b''):016x}"}
    return {name_of(each, _BEGUN): empty for each in (TRAINER, *parties)}
