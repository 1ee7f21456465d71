"""Folders of versions: for engines that load new weights from a folder of safetensors files.

updates/weight_v000007/model.safetensors      a link to shared memory: nothing is copied
updates/weight_v000007/config.json            links to the files of ``like``
updates/latest -> weight_v000007              replaced atomically
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from asyncckpt.errors import ClosedError, UnsavableStateError
from asyncckpt.planning.safetensors_plan import METADATA
from asyncckpt.weights.subscriber import WeightSubscriber

_NAME = "weight_v{:06d}"
_LATEST = "latest"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


class WeightFolders:
    """The newest versions of a subscriber, each as a folder, for engines of this host and user.

    The links lead to the memory of this process, so this process must live while an engine reads the folders. Nothing
    is synced to disk, because a power cut also ends the memory. ``close`` removes all folders. A context manager.
    """

    def __init__(
        self,
        subscriber: WeightSubscriber,
        folder: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str] | None = None,
        keep: int = 2,
    ) -> None:
        """Create ``folder``. Acquire no version yet.

        Args:
            subscriber: The source of the versions. The caller keeps and closes it.
            folder: The parent folder of the versions. Versions left there by an earlier process are removed.
            like: A folder of the model. Links to its files are added beside the weights, except for its weight files.
            keep: Number of versions to keep, 1 or more. Older versions are removed at once, so no engine may still
                read them.
        """
        if keep < 1:
            raise ValueError(f"keep is 1 or more, not {keep}")
        self._subscriber = subscriber
        self._folder = Path(folder).absolute()
        self._like = None if like is None else Path(like).absolute()
        self._keep = keep
        self._versions: list[tuple[int, int, ExitStack]] = []  # oldest first
        self._closed = False
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob("*weight_v*"):
            shutil.rmtree(left, ignore_errors=True)

    def update(self, min_version: int | None = None, *, timeout: float = 60.0) -> str:
        """Acquire the newest version, and return the path of its folder.

        Args:
            min_version: Wait for this version or a later one.
            timeout: Timeout in seconds.

        Raises:
            UnsavableStateError: The weights are not complete safetensors files, because they belong to a checkpoint,
                are sharded, or are limited by the subscriber's prefix.
            ClosedError: This object is closed. Further errors are those of ``WeightSubscriber.acquire``.
        """
        if self._closed:
            raise ClosedError("these folders are closed; make new ones")
        weights = self._subscriber.acquire(min_version, readonly=True, timeout=timeout)
        name = _NAME.format(weights.version)
        if self._versions and self._versions[-1][:2] == (weights.version, weights.epoch):
            weights.release()
            return str(self._folder / name)
        with ExitStack() as kept:
            kept.enter_context(weights)
            partial = self._folder / f".{name}.{weights.epoch}.partial"
            partial.mkdir()
            kept.callback(shutil.rmtree, partial, ignore_errors=True)
            try:
                links = kept.enter_context(weights.safetensors(partial))
            except ValueError as error:
                raise UnsavableStateError(f"version {weights.version} cannot be a folder: {error}") from error
            self._fill(partial, links)
            for older in [each for each in self._versions if each[0] == weights.version]:
                self._drop(older)  # the trainer has rolled back and published this number again
            kept.callback(shutil.rmtree, self._folder / name, ignore_errors=True)
            partial.rename(self._folder / name)
            self._versions.append((weights.version, weights.epoch, kept.pop_all()))
        self._point_to(name)
        while len(self._versions) > self._keep:
            self._drop(self._versions[0])
        return str(self._folder / name)

    def close(self) -> None:
        """Remove the folders, and end the leases. Safe to call twice."""
        self._closed = True
        (self._folder / _LATEST).unlink(missing_ok=True)
        while self._versions:
            self._drop(self._versions[-1])

    def __enter__(self) -> WeightFolders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, partial: Path, links: list[str]) -> None:
        """Give the files the names that loaders expect, with an index if there are several files."""
        if len(links) == 1:
            os.rename(links[0], partial / "model.safetensors")
        else:
            weight_map: dict[str, str] = {}
            for number, link in enumerate(links, 1):
                name = f"model-{number:05d}-of-{len(links):05d}.safetensors"
                with open(link, "rb") as file:
                    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
                weight_map |= dict.fromkeys(header.keys() - {METADATA}, name)
                os.rename(link, partial / name)
            index = {"metadata": {}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index))
        for other in () if self._like is None else self._like.iterdir():
            if not other.name.endswith(_WEIGHTS):
                (partial / other.name).symlink_to(other)

    def _point_to(self, name: str) -> None:
        other = self._folder / f".{_LATEST}.partial"
        other.unlink(missing_ok=True)
        other.symlink_to(name)
        other.replace(self._folder / _LATEST)

    def _drop(self, version: tuple[int, int, ExitStack]) -> None:
        self._versions.remove(version)
        version[2].close()
