"""The life of a worker: which trainer it serves, who may attach, and when it leaves.

A worker serves one trainer after the other. The connection to a trainer is a session. Sessions have numbers, from 1 on.
When a trainer is gone, the worker finishes what that one has staged. Then it lingers for the next trainer, for as long
as the one before has asked for. A worker that was started ahead of its first trainer begins in LINGERING.

    state      event                                       next state  actions
    SERVING    SessionFinishing                            FINISHING
    SERVING    AttachAsked, RetireAsked by a process                   LookAgain
    FINISHING  AttachAsked, the first that fits                        TellRestarted (the peer is the next)
    FINISHING  the same, there is a next                               LookAgain
    FINISHING  AttachAsked, the worker is to leave                     Refuse
    FINISHING  PeerLeft of the next                                    LookAgain (there is no next any more)
    FINISHING  RetireAsked                                             TellRestarted (the worker is to leave)
    FINISHING  SessionEnded, there is a next               SERVING     BeginSession
    FINISHING  SessionEnded, the worker is to leave        LEAVING     EndWorker
    FINISHING  SessionEnded                                LINGERING
    LINGERING  AttachAsked that fits                       SERVING     TellRestarted, BeginSession
    LINGERING  RetireAsked                                 LEAVING     TellRestarted, EndWorker
    LINGERING  Looked: nothing held after a session        LEAVING     EndWorker
    LINGERING  Looked: the time is over                    LEAVING     EndWorker
    LEAVING    AttachAsked                                             Refuse

``AttachAsked`` with the number of an older session means ``LookAgain`` in each state. Otherwise a peer that does not
fit gets ``Refuse`` in LINGERING, and in FINISHING if there is no next. A worker is to leave if its trainer has closed,
if it was asked to retire, or, without a next, if it is not to linger.

Rules: there is one session at most. A process that is refused has no session. A worker that leaves begins none. Nobody
can make a worker leave that has a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

_LEAVES = "it is leaving"


class LifeState(Enum):
    """The state of a worker. The transitions are in the docstring of the module."""

    SERVING = auto()
    """A trainer has a session."""
    FINISHING = auto()
    """The trainer is gone. What it had staged is known, and is being written."""
    LINGERING = auto()
    """All is written, if there was a session, and the worker waits for the next trainer."""
    LEAVING = auto()
    """The worker ends."""


@dataclass(frozen=True)
class SessionFinishing:
    """The trainer is gone. ``closed``: it has closed rather than died."""

    closed: bool


@dataclass(frozen=True)
class SessionEnded:
    """All is written."""


@dataclass(frozen=True)
class PeerCame:
    """A process has connected."""

    peer: int


@dataclass(frozen=True)
class PeerLeft:
    """A process has closed its connection, or has ended."""

    peer: int


@dataclass(frozen=True)
class AttachAsked:
    """A process asks for a session.

    Args:
        peer: The process.
        session: The number of the session that the process has seen last.
        trouble: The reason why the process does not fit; None: it fits.
        linger: Seconds that the worker is to wait for the next trainer after this one; 0: it leaves with this one.
    """

    peer: int
    session: int
    trouble: str | None
    linger: float


@dataclass(frozen=True)
class RetireAsked:
    """A process asks the worker to leave; ``peer`` None: a signal does."""

    peer: int | None


@dataclass(frozen=True)
class Looked:
    """Time has passed, and the shell has looked. ``holds``: there is something that somebody may come for."""

    holds: bool


@dataclass(frozen=True)
class BeginSession:
    """Begin the session of a process."""

    peer: int


@dataclass(frozen=True)
class Refuse:
    """Tell a process that it gets no session, and why."""

    peer: int
    why: str


@dataclass(frozen=True)
class LookAgain:
    """Hang up on a process: what it knows of this worker is no longer so."""

    peer: int


@dataclass(frozen=True)
class TellRestarted:
    """Tell the old session that the job was started again, so that its saves wait for nobody who is lost."""


@dataclass(frozen=True)
class EndWorker:
    """End the worker."""


LifeEvent: TypeAlias = SessionFinishing | SessionEnded | PeerCame | PeerLeft | AttachAsked | RetireAsked | Looked
LifeAction: TypeAlias = BeginSession | Refuse | LookAgain | TellRestarted | EndWorker


class WorkerLife:
    """The life of one worker."""

    def __init__(self, linger: float, waits_since: float | None = None) -> None:
        """Begin with a session, or with a wait for the first trainer.

        Args:
            linger: Seconds that the worker waits for the next trainer after the last process has left.
            waits_since: The time when the wait begins; None: there is a session.
        """
        self.state = LifeState.SERVING if waits_since is None else LifeState.LINGERING
        self.session = 1 if waits_since is None else 0
        """The number of the last session; 0: there was none."""
        self._linger = linger
        self._next: AttachAsked | None = None
        self._is_closed = self._is_retired = False
        self._peers: set[int] = set()
        self._idle_since = waits_since or 0.0

    @property
    def next_peer(self) -> int | None:
        """The process that gets the next session; None: none has asked for it."""
        return None if self._next is None else self._next.peer

    @property
    def is_closed(self) -> bool:
        """Whether the trainer has closed rather than died."""
        return self._is_closed

    @property
    def is_to_leave(self) -> bool:
        """Whether the worker leaves as soon as all is written."""
        return self._is_closed or self._is_retired or self.state is LifeState.LEAVING

    def lingers_s(self, now: float) -> float | None:
        """Return the seconds that the worker still lingers if nobody connects; None if it does not linger."""
        if self.state is not LifeState.LINGERING:
            return None
        return self._linger if self._peers else max(0.0, self._idle_since + self._linger - now)

    def handle(self, event: LifeEvent, now: float) -> list[LifeAction]:
        """Change the state by an event. Return the actions to carry out, in their order.

        ``now``: the time in seconds, on any clock that does not jump.
        """
        match event:
            case SessionFinishing(closed) if self.state is LifeState.SERVING:
                self.state = LifeState.FINISHING
                self._is_closed = closed
            case SessionEnded() if self.state is LifeState.FINISHING:
                return self._on_session_ended(now)
            case PeerCame(peer):
                self._peers.add(peer)
            case PeerLeft(peer):
                self._peers.discard(peer)
                self._idle_since = now
                if self.next_peer == peer:
                    self._next = None
                    return [LookAgain(peer)]
            case AttachAsked():
                return self._on_attach(event)
            case RetireAsked(peer):
                return self._on_retire(peer)
            case Looked(holds) if self.state is LifeState.LINGERING:
                if (not holds and self.session > 0) or self.lingers_s(now) == 0:
                    return self._leave()
        return []

    def _on_session_ended(self, now: float) -> list[LifeAction]:
        self._idle_since = now
        if self._next is not None:
            return self._begin(self._next)
        if self.is_to_leave or not self._linger:
            return self._leave()
        self.state = LifeState.LINGERING
        return []

    def _on_attach(self, asked: AttachAsked) -> list[LifeAction]:
        if self.state is LifeState.SERVING or self._next is not None or asked.session != self.session:
            return [LookAgain(asked.peer)]
        if asked.trouble is not None:
            return [Refuse(asked.peer, asked.trouble)]
        if self.is_to_leave:
            return [Refuse(asked.peer, _LEAVES)]
        if self.state is LifeState.LINGERING:
            return [TellRestarted(), *self._begin(asked)]
        self._next = asked
        return [TellRestarted()]

    def _on_retire(self, peer: int | None) -> list[LifeAction]:
        if self.state is LifeState.SERVING or self._next is not None:
            return [] if peer is None else [LookAgain(peer)]
        if self.state is LifeState.LEAVING:
            return []
        self._is_retired = True
        return [TellRestarted(), *(self._leave() if self.state is LifeState.LINGERING else [])]

    def _begin(self, asked: AttachAsked) -> list[LifeAction]:
        self.state, self._linger = LifeState.SERVING, asked.linger
        self.session += 1
        self._next = None
        return [BeginSession(asked.peer)]

    def _leave(self) -> list[LifeAction]:
        self.state = LifeState.LEAVING
        return [EndWorker()]
