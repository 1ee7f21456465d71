"""The image of a save, shown to readers of weights as a version."""

from __future__ import annotations

from asyncckpt.errors import CheckpointError
from asyncckpt.planning.file_set_plan import FileSetPlan
from asyncckpt.planning.plan import CheckpointPlan
from asyncckpt.publication import VersionState
from asyncckpt.ranks.group import Group
from asyncckpt.shm.slots import PublishedVersion
from asyncckpt.staging.buffer import Plan, StagingBuffer


def known_by_all(group: Group, number: int, known: VersionState) -> list[VersionState]:
    """What each rank knows of versions. ``number``: of this question, the same on all ranks."""
    return group.ask_all("epoch", number, lambda: known, lambda all_know: [all_know] * len(all_know))


def show(image: tuple[StagingBuffer, int] | None, version: PublishedVersion, folder: str | None) -> str | None:
    """Let readers see an image as ``version``.

    Args:
        image: The slot that has it; None: none has any more.
        version: As what.
        folder: Of a set of files: the folder of DCP's that readers see; None: the only one.

    Returns:
        None: they do; else why they do not.

    Raises:
        CheckpointError: It is nothing that can be published, or readers could not find it.
    """
    if image is None:
        return "its image is not in memory any more, or never was"
    buffer, slot = image
    version = version._replace(folder=_number_of(buffer.plan, folder))
    if not buffer.client.has_endpoint:
        raise CheckpointError(
            "readers cannot find the worker, which has no endpoint: the engine has no job, or see the log"
        )
    if buffer.publish(slot, version):
        return None
    return "readers have all slots but that; more of them would help (Config.slots)"


def _number_of(plan: Plan, folder: str | None) -> int:
    """The number of what readers are to see of the image: a whole state dict, or a folder in a set.

    Only what the trainer has written stays as it is: archives are completed by the worker, in the slot.
    """
    match plan:
        case CheckpointPlan():
            if folder is not None:
                raise CheckpointError(f"a state dict is published whole, and has no folder {folder!r}")
            return 0
        case FileSetPlan():
            folders = [name for name, part in plan.parts.items() if isinstance(part, CheckpointPlan)]
            if folder is None and len(folders) == 1:
                return 0
            if folder in folders:
                return folders.index(folder)
            wrong = "it has to be named" if folder is None else f"{folder!r} is none"
            raise CheckpointError(
                "of a set of files one of the folders of DCP's can be published, and no other file; of those in this"
                f" set, {folders}, {wrong}"
            )
        case _:
            raise CheckpointError("a file cannot be published, only state dicts; a WeightPublisher publishes tensors")
