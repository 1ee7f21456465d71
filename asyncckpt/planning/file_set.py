"""A set of files that are saved together: all of them are there in the end, under one name, or none."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from asyncckpt.errors import UnsavableStateError, unless_interrupt
from asyncckpt.planning.torch_file_plan import TorchFileContents

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner

# Names at the top of a set that are not the caller's: our manifest and marker, and files of DCP and of states.
_OURS = re.compile(r"asyncckpt\.(json|uploaded)|\.metadata|.*__\d+_\d+\.(index\.json|distcp)")

# A smaller file of torch's is made here and now: its pickle alone may be more than its tensors, and may grow.
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class SafetensorsFile:
    """As ``safetensors.torch.save_file`` writes ``tensors`` and ``metadata``."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None


@dataclass(frozen=True)
class DcpFolder:
    """As ``torch.distributed.checkpoint.save`` writes ``state_dict``."""

    state_dict: Mapping[str, Any]
    planner: SavePlanner | None


Content: TypeAlias = TorchFileContents | SafetensorsFile | DcpFolder | bytes


class FileSet:
    """The files that one rank adds to a checkpoint of many files, by their names in its folder.

    A name is a path relative to that folder, with "/" between its parts. No two ranks may have the same name, but those
    of folders of DCP, which all ranks must have. Tensors and state dicts are looked at when the set is saved: until
    then they must stay as they are.
    """

    def __init__(self, kind: str = "") -> None:
        """Nothing is in it yet.

        Args:
            kind: Sets with files of the same names, but tensors of other sizes, that are saved in turns (two models,
                say) are planned once each if they have different kinds. Each kind has memory of its own.
        """
        self.kind = kind
        self.contents: dict[str, Content] = {}
        """What was added, by its name, in that order."""
        self.error: Exception | None = None
        """Why this rank cannot make its part: what was added is of no use."""

    def add_torch_file(self, name: str, obj: object, pickle_protocol: int = 2) -> None:
        """Add a file that ``torch.load`` reads. The object is pickled now; only its tensors are read later.

        Where it cannot be pickled, the save fails, on all ranks.

        Args:
            name: Of the file.
            obj: What ``torch.save`` takes.
            pickle_protocol: As ``torch.save`` has it.

        Raises:
            UnsavableStateError: The name is taken, or cannot be one.
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
        except unless_interrupt(Exception) as error:  # of the object's own code, or of its device
            self.fail(UnsavableStateError(f"{name!r} cannot be saved: {type(error).__name__}: {error}"))
        self._add(name, content)

    def add_safetensors(
        self, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Add a file that safetensors reads.

        Args:
            name: Of the file.
            tensors: Contiguous ones, none of which shares memory with another.
            metadata: Text for the header of the file.

        Raises:
            UnsavableStateError: The name is taken, or cannot be one.
        """
        self._add(name, SafetensorsFile(tensors, metadata))

    def add_dcp_folder(self, name: str, state_dict: Mapping[str, Any], planner: SavePlanner | None = None) -> None:
        """Add a folder that ``torch.distributed.checkpoint.load`` reads. All ranks add it, in the same order.

        Args:
            name: Of the folder; "" is that of the set itself.
            state_dict: This rank's part.
            planner: DCP's or the caller's own; None: DCP's default.

        Raises:
            UnsavableStateError: The name is taken, or cannot be one.
        """
        self._add(name, DcpFolder(state_dict, planner))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a file with these bytes; for small ones, as they are not staged in shared memory.

        Args:
            name: Of the file.
            data: What stands in it.

        Raises:
            UnsavableStateError: The name is taken, or cannot be one.
        """
        self._add(name, bytes(data))

    def fail(self, error: Exception) -> None:
        """Have the save of this set fail, on all ranks, as this one cannot make its part of it.

        Args:
            error: Why not; the first one counts.
        """
        self.error = self.error or error

    def _add(self, name: str, content: Content) -> None:
        parts = name.split("/") if name or not isinstance(content, DcpFolder) else []
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts) or _OURS.fullmatch("".join(parts[:1])):
            raise UnsavableStateError(f"{name!r} cannot be the name of a file in a checkpoint; give it another")
        for known in self.contents:
            if name == known or known.startswith(f"{name}/") or name.startswith(f"{known}/"):
                raise UnsavableStateError(f"{name!r} cannot stand beside {known!r}: give it another name")
        self.contents[name] = content
