"""DCP's reader, which reads a checkpoint's metadata once."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from asyncckpt.worker.manifest import METADATA_NAME

_Version = tuple[int, int, int]


class CachedMetadataFileSystemReader(FileSystemReader):
    """As nvrx's: what is in ``.metadata`` is shared by all readers of that folder. As long as that file is the same:
    when another checkpoint has taken its place, it is read again.
    """

    _cache: ClassVar[dict[str, tuple[_Version, Metadata]]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path=path)
        self._cached = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not self._cached:
            return super().read_metadata(*args, **kwargs)
        key = os.path.abspath(os.fspath(self.path))
        facts = os.stat(os.path.join(key, METADATA_NAME))
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if key not in self._cache or self._cache[key][0] != version:
            self._cache[key] = version, super().read_metadata(*args, **kwargs)
        return self._cache[key][1]

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata of the checkpoint ``path``; None: of all."""
        if path is None:
            cls._cache.clear()
        else:
            cls._cache.pop(os.path.abspath(os.fspath(path)), None)
