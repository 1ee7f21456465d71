"""The step of a save that its caller does not report as saved before it is durable."""

from __future__ import annotations


class DeferredStep(int):
    """A step whose checkpoint may become durable later: the caller waits for it before it names it as the latest.

    The driver of a job gives it to the workers in the place of verl's ``int``. Of any other step they have to return
    when it is durable: the caller will name it at once.
    """

    __slots__ = ()
