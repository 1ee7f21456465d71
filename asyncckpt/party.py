"""Parties: processes that are no ranks of the training, and add their parts to its checkpoints."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, SupportsIndex

from asyncckpt.budgets import CHECK_S
from asyncckpt.config import TRAINER, Config, are_parties
from asyncckpt.engine.engine import Engine
from asyncckpt.engine.retention import Retention
from asyncckpt.errors import CheckpointError, CutError, SaveTimeoutError
from asyncckpt.format.write_request import Joint
from asyncckpt.link.api import Claim
from asyncckpt.loading.load import load
from asyncckpt.loading.source import StorageSource
from asyncckpt.planning.file_set import FileSet
from asyncckpt.publication import job_of_checkpoints
from asyncckpt.save_handle import Save
from asyncckpt.storage import absolute, parties, step_folder, storage_for, whole_number
from asyncckpt.storage.history import newest_step

logger = logging.getLogger(__name__)

_BYTES = "part"


@dataclass(frozen=True)
class LoadedPart:
    """The part of a party in a checkpoint.

    ``folder``: the folder with the files of the part. ``cut``: the cut that all parts of the step share. ``data``: the
    bytes, if the part was saved as bytes; otherwise None.
    """

    step: int
    folder: str
    cut: str | None = None
    data: bytes | None = None


def join(root: str | os.PathLike[str], name: str, *, of: Sequence[str], config: Config | None = None) -> Party:
    """Add the parts of this process to the checkpoints of a training with ``Config.parties``.

    A step is complete when the ranks of the training and all parties have written their parts. Otherwise it does not
    exist. Each party may run on any host that sees the root, and may be restarted between two steps.

    Args:
        root: The root of the training's ``Checkpointer``.
        name: The name of this party: letters, digits, "_" and "-". One process at a time has it.
        of: The names of all parties, among them "trainer" for the ranks of the training.
        config: The configuration; None: read it from the environment. ``commit_timeout`` limits how long a part waits
            for the others.

    Returns:
        The party. Close it at the end, or use it as a context manager.

    Raises:
        ValueError: The names are invalid, or ``name`` or "trainer" is not among ``of``.
        StorageError: The root cannot be written.
    """
    return Party(root, name, of=of, config=config)


class Party(contextlib.AbstractContextManager["Party"]):
    """A process that adds its parts to the checkpoints of a training. ``join`` makes it.

    The methods are not thread-safe: call them from one thread at a time.
    """

    def __init__(
        self, root: str | os.PathLike[str], name: str, *, of: Sequence[str], config: Config | None = None
    ) -> None:
        """See ``join``."""
        others = [each for each in of if each != TRAINER]
        if TRAINER not in of or name not in others or not are_parties(others):
            raise ValueError(f"a party is one of {TRAINER!r} and the names of all parties, not {name!r} of {[*of]}")
        config = Config.given(config)
        if config.local_root is not None or config.when_busy != "wait":
            raise ValueError("a party needs a root that all others see, without local_root, and when_busy='wait'")
        self.root, self.name = absolute(root), name
        self._parties, self._config = tuple(sorted(others)), config
        claim = Claim(parties.folder_of(self.root, name), config.job_id)
        job = job_of_checkpoints(claim.root, config.job_id)
        self._engine = Engine(config, alone=True, job=job, claim=claim)

    def save(self, step: SupportsIndex, part: Mapping[str, Any] | FileSet | bytes, *, cut: str | None = None) -> Save:
        """Add this party's part to the checkpoint of ``step``.

        Returns when the tensors are copied. The worker writes in the background, even if this process dies. Saves of
        one party end in the order of their calls.

        Args:
            step: The step that the training saves. All parties and ranks save it, in any order.
            part: A state dict, a set of files, or bytes.
            cut: A text that all parts of the step must share; None: no text, for all parts.

        Returns:
            The handle. ``result`` returns when the step is complete for all, and raises if it never will be.

        Raises:
            CutError: The training waits for other parties than those of ``of``.
            SaveTimeoutError: No training with parties has opened the root within ``Config.start_timeout`` seconds.
            CheckpointError: As ``Checkpointer.save`` does.
        """
        number = whole_number(step, "step")
        joint = Joint(self._parties, self.name, self._session(number).token, cut)
        path = step_folder(self.root, number)
        return self._engine.save(
            path, self._as_files(part), step=number, retention=Retention(existing="set aside"), joint=joint
        )

    def load(
        self,
        state_dict: dict[str, Any] | None = None,
        step: SupportsIndex | None = None,
        *,
        weights_only: bool = True,
        strict: bool = True,
    ) -> LoadedPart | None:
        """Load this party's part of the newest step that is complete for all.

        Args:
            state_dict: The state to fill, if the part was saved as a state dict.
            step: The step to load; None: the newest.
            weights_only, strict: See ``Checkpointer.load``.

        Returns:
            The part; None if there is no checkpoint, or if the newest was saved without this party.

        Raises:
            CheckpointError: As ``Checkpointer.load`` does. A given ``step`` does not exist, or has no such part.
        """
        number = newest_step(self.root) if step is None else whole_number(step, "step")
        if number is None:
            return None
        path = step_folder(self.root, number)
        with storage_for(path).reading(path):
            source = StorageSource(path)
            if parties.name_of(self.name) not in source.manifest.files:
                if step is not None:
                    raise CheckpointError(f"this checkpoint has no part of {self.name!r}", path=path, step=number)
                logger.warning("%s was saved without the party %r, which begins anew", path, self.name)
                return None
            facts = json.loads(source.read(parties.name_of(TRAINER)))
            folder, name = f"{parties.PARTIES}/{self.name}", f"{parties.PARTIES}/{self.name}/{_BYTES}"
            data = source.read(name) if name in source.manifest.files else None
            if state_dict is not None:
                load(state_dict, os.path.join(path, folder), no_dist=True, weights_only=weights_only, strict=strict)
            return LoadedPart(number, os.path.join(path, folder), facts["cut"], data)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves have ended, at most ``timeout`` seconds. Raises as ``Checkpointer.wait`` does."""
        self._engine.wait(timeout)

    def close(self) -> None:
        """Wait for all saves, and end the worker. Raises as ``Checkpointer.close`` does."""
        self._engine.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._engine.close(linger=kind is not None)
        except CheckpointError as trouble:
            if kind is None:
                raise
            logger.error("closing the party %r failed: %s", self.name, trouble)

    def _session(self, step: int) -> parties.Announcement:
        """Return the training that will save ``step``. If it has just failed the step, wait until it tries again."""
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            found = parties.session_of(self.root)
            if found is not None:
                attempt = Joint((), token=found.token).attempt(step)
                if parties.failure_of(self.root, TRAINER, attempt) is None:
                    break
            if time.monotonic() > deadline:
                what = "opened this root" if found is None else f"tried step {step} again"
                limit = self._config.start_timeout
                raise SaveTimeoutError(f"no training with Config.parties has {what} within {limit:g} s", path=self.root)
            time.sleep(CHECK_S)
        if found.parties != self._parties:
            raise CutError(
                f"the training waits for the parties {[*found.parties]}, and this one knows {[*self._parties]}: give"
                " all the same names",
                path=self.root,
            )
        return found

    def _as_files(self, part: Mapping[str, Any] | FileSet | bytes) -> FileSet:
        folder, files = f"{parties.PARTIES}/{self.name}", FileSet()
        if isinstance(part, FileSet):
            files.kind, files.error = part.kind, part.error
            files.contents = {f"{folder}/{name}".rstrip("/"): content for name, content in part.contents.items()}
        elif isinstance(part, Mapping):
            files.add_dcp_folder(folder, part)
        else:
            files.add_bytes(f"{folder}/{_BYTES}", part)
        return files
