"""The plugin that saves Lightning's checkpoints of one file."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError
from asyncckpt.extension import Engine, FileSet, Save, engines, replace_or_set_aside
from asyncckpt.integrations.lightning.files import AnyPath, is_needed_at_once, local_place
from asyncckpt.integrations.lightning.pending import Pending

logger = logging.getLogger(__name__)


class AsyncckptIO(TorchCheckpointIO):
    """Saves as Lightning's own ``TorchCheckpointIO`` does, but in the background, and only to local files.

    What goes elsewhere (``s3://``) Lightning itself saves, and the training waits; so is what is needed at once (see
    ``files.is_needed_at_once``). Each process saves for itself.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Start nothing yet.

        Args:
            config: For the engine, if this is the first save of this process alone; None: as the environment says.
        """
        self._config = config
        self._timeout = Config.given(config).timeout
        self.pending = Pending(self._timeout)
        """What is under way."""
        self._engines: list[Engine] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._config,)  # a process that is spawned has saved nothing yet

    def save_checkpoint(self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any = None) -> None:
        """Return when the tensors are copied.

        Args:
            checkpoint: What ``torch.save`` takes.
            path: The file. The folder it is in is made. A link there is replaced when the file is durable, and not
                what it leads to.
            storage_options: Not supported, as by ``TorchCheckpointIO``.

        Raises:
            TypeError: There are ``storage_options``.
            CheckpointError: As ``Engine.save_file`` raises; an earlier save has failed, and nobody was told.
        """
        place = local_place(path)
        if place is None or storage_options is not None or is_needed_at_once(place):
            super().save_checkpoint(checkpoint, path, storage_options)
            if place is None:
                _warn_of_remote()
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        self.pending.make_way(place)
        engine = engines.get(alone=True, config=self._config)
        self._begun(place, engine.save_file(place, checkpoint, follow_link=False), engine)

    def save_files(self, place: str, files: FileSet) -> None:
        """Save a checkpoint of several files, together with the other ranks, and return when the tensors are copied.

        Args:
            place: Of the folder, see ``files.place_of``; the same on all ranks. A checkpoint of ours that is there, or
                a link, is replaced, all else is set aside, when the new one is durable.
            files: This rank's part.

        Raises:
            CheckpointError: As ``Engine.save`` raises; an earlier save has failed, and nobody was told.
        """
        self.pending.make_way(place)
        engine = engines.get(config=self._config)
        save = engine.save(place, files, existing=replace_or_set_aside(place))
        self._begun(place, save, engine)

    def load_checkpoint(
        self, path: AnyPath, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load as ``TorchCheckpointIO`` does, after what is under way for ``path``.

        Args:
            path, map_location, weights_only: As there.

        Raises:
            CheckpointError: The last save to there has just failed.
            FileNotFoundError: There is none.
        """
        if (place := local_place(path)) is not None:
            self.pending.wait_for(place)
        loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return loaded

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Remove a checkpoint when the newest save that was begun is durable. If that fails, it stays.

        Args:
            path: Of a file or a folder.
        """
        place = local_place(path)
        if place is None:
            self.pending.wait()  # what is to take its place may be here
            super().remove_checkpoint(path)
        elif self.pending.will_exist(place) or os.path.lexists(place):
            self.pending.remove(place)

    def teardown(self) -> None:
        """Wait until all is durable, removed and linked, also on the other ranks, which save nothing themselves.

        Raises:
            CheckpointError: A save has failed, and nobody was told. In the handling of another error it is in the log.
            OSError: Something could not be removed or linked; likewise.
        """
        is_failing = sys.exc_info()[1] is not None
        try:
            self.pending.wait()
            for engine in self._engines:
                engine.wait()
            self.pending.end()
            if not is_failing:  # the others may have gone
                self.pending.wait_for_others()
        except (CheckpointError, OSError) as error:
            if not is_failing:
                raise
            logger.error("while the training is being given up: %s", error)

    def _begun(self, place: str, save: Save, engine: Engine) -> None:
        self.pending.add(place, save)
        if engine not in self._engines:
            self._engines.append(engine)
        # Also with Config.overlap: nobody else would wait before the next step of the optimizer.
        save.wait_staged(self._timeout)


@functools.cache
def _warn_of_remote() -> None:
    logger.warning("what does not go to a local file Lightning itself saves, and the training waits")
