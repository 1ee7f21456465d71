"""A set of files, saved together as one checkpoint: after a save, either all files exist or none does."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.planning.dcp_plan import DcpFolder
from asyncckpt.planning.safetensors_plan import SafetensorsFile
from asyncckpt.planning.torch_file_plan import TorchFileContents

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner

# Reserved names at the top of a set: the manifest and marker of this package, and files of DCP and of states.
_OURS = re.compile(r"asyncckpt\.(json|uploaded)|\.metadata|.*__\d+_\d+\.(index\.json|distcp)")

# A smaller file of ``torch.save`` is made at once: its pickle may be larger than its tensors, and may grow.
_LARGE_BYTES = 1 << 20


Content: TypeAlias = TorchFileContents | SafetensorsFile | DcpFolder | bytes


class FileSet:
    """The files that one rank adds to a checkpoint of many files, by their names in the checkpoint's folder.

    A name is a path relative to the folder, with "/" between its parts. No two ranks may add files of the same name,
    but all ranks must add the same folders of DCP. A save of the set reads the tensors and state dicts. Do not change
    them before the save.
    """

    def __init__(self, kind: str = "", *, is_held: bool = False) -> None:
        """Make an empty set.

        Args:
            kind: A name for sets with one structure. Give different kinds to sets with the same file names but other
                tensor sizes that are saved in turns, for example of two models. Then each kind is planned once and has
                memory of its own.
            is_held: Whether the worker holds the newest images of these sets after the trainer's death, for
                ``extension.held_files``. The worker always holds a set with a state dict at its top.
        """
        self.kind, self.is_held = kind, is_held
        self.contents: dict[str, Content] = {}
        """The added files and folders by name, in the order of the calls."""
        self.error: Exception | None = None
        """The error because of which this rank cannot make its part. With an error, ``contents`` is not saved."""

    def add_torch_file(self, name: str, obj: object, pickle_protocol: int = 2) -> None:
        """Add a file that ``torch.load`` reads. The object is pickled now. A save reads only its tensors.

        If the object cannot be pickled, the save fails on all ranks.

        Args:
            name: The name of the file.
            obj: An object that ``torch.save`` accepts.
            pickle_protocol: The pickle protocol, as for ``torch.save``.

        Raises:
            UnsavableStateError: The name is taken or invalid.
        """
        content: TorchFileContents | bytes = b""
        try:
            content = TorchFileContents(obj, pickle_protocol)
            if sum(content.sizes) < _LARGE_BYTES:
                buffer = io.BytesIO()
                torch.save(obj, buffer, pickle_protocol=pickle_protocol)
                content = buffer.getvalue()
        except UnsavableStateError as error:
            self.fail(error)
        except unless_interrupt(Exception) as error:  # raised by the object's own code, or by its device
            self.fail(UnsavableStateError(f"{name!r} cannot be saved: {type(error).__name__}: {error}"))
        self._add(name, content)

    def add_safetensors(
        self, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Add a file that safetensors reads.

        Args:
            name: The name of the file.
            tensors: Contiguous tensors that share no memory with each other.
            metadata: Text for the header of the file.

        Raises:
            UnsavableStateError: The name is taken or invalid.
        """
        self._add(name, SafetensorsFile(tensors, metadata))

    def add_dcp_folder(self, name: str, state_dict: Mapping[str, Any], planner: SavePlanner | None = None) -> None:
        """Add a folder that ``torch.distributed.checkpoint.load`` reads. All ranks add the same folders in one order.

        Args:
            name: The name of the folder; "": the folder of the set itself.
            state_dict: This rank's part of the state dict.
            planner: A planner of DCP or of the caller; None: DCP's default planner.

        Raises:
            UnsavableStateError: The name is taken or invalid.
        """
        self._add(name, DcpFolder(state_dict, planner))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a small file with these bytes. The bytes are not staged in shared memory.

        Args:
            name: The name of the file.
            data: The content of the file.

        Raises:
            UnsavableStateError: The name is taken or invalid.
        """
        self._add(name, bytes(data))

    def fail(self, error: Exception) -> None:
        """Make the save of this set fail on all ranks, because this rank cannot make its part.

        Args:
            error: The reason. Only the error of the first call counts.
        """
        self.error = self.error or error

    def _add(self, name: str, content: Content) -> None:
        parts = name.split("/") if name or not isinstance(content, DcpFolder) else []
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts) or _OURS.fullmatch("".join(parts[:1])):
            raise UnsavableStateError(f"{name!r} cannot be the name of a file in a checkpoint; give it another")
        for known, other in self.contents.items():
            (outer, around), (inner, _) = sorted(((known, other), (name, content)), key=lambda named: len(named[0]))
            within = inner.removeprefix(f"{outer}/")
            # Other files may be in a folder of DCP, as Megatron-LM has them there.
            has_room = within == inner or (isinstance(around, DcpFolder) and not _OURS.fullmatch(within))
            if name == known or not has_room:
                raise UnsavableStateError(f"{name!r} cannot stand beside {known!r}: give it another name")
        self.contents[name] = content
