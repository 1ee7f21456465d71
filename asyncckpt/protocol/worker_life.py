"""The life of a worker: sessions with trainers, attach requests, and the worker's end.

A worker serves one trainer after the other. The connection to a trainer is a session. Sessions are numbered from 1.
When a trainer is gone, the worker finishes the saves that this trainer has staged. Then the worker lingers for the next
trainer, for the time that the last trainer asked for. A worker that starts before its first trainer begins in
LINGERING.

    state      event                                       next state  actions
    SERVING    SessionFinishing                            FINISHING
    SERVING    AttachAsked, RetireAsked by a process                   LookAgain
    FINISHING  AttachAsked, the first that fits                        TellRestarted (the peer is the next)
    FINISHING  the same, there is a next                               LookAgain
    FINISHING  AttachAsked, the worker is to leave                     Refuse
    FINISHING  PeerLeft of the next                                    LookAgain (there is no next from now on)
    FINISHING  RetireAsked                                             TellRestarted (the worker is to leave)
    FINISHING  SessionEnded, there is a next               SERVING     BeginSession
    FINISHING  SessionEnded, the worker is to leave        LEAVING     EndWorker
    FINISHING  SessionEnded                                LINGERING
    LINGERING  AttachAsked that fits                       SERVING     TellRestarted, BeginSession
    LINGERING  RetireAsked                                 LEAVING     TellRestarted, EndWorker
    LINGERING  Looked: nothing held after a session        LEAVING     EndWorker
    LINGERING  Looked: the time is over                    LEAVING     EndWorker
    LEAVING    AttachAsked                                             Refuse

``AttachAsked`` with the number of an older session results in ``LookAgain`` in every state. Otherwise a peer that does
not fit gets ``Refuse`` in LINGERING, and in FINISHING if there is no next peer. A worker must leave if its trainer has
closed, or if a process or a signal asked it to retire. Without a next peer, a worker also leaves if its linger time
is 0.

Rules: a worker has at most one session. A refused process has no session. A worker that leaves begins no session.
Neither a process nor a signal can ask a worker to leave while it has a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

_LEAVES = "the worker is exiting"


class LifeState(Enum):
    """The state of a worker. The module docstring lists the transitions."""

    SERVING = auto()
    """A trainer has a session."""
    FINISHING = auto()
    """The trainer is gone. The worker writes the images that the trainer had staged."""
    LINGERING = auto()
    """The worker waits for the next trainer. All images of the last session, if any, are written."""
    LEAVING = auto()
    """The worker ends."""


@dataclass(frozen=True)
class SessionFinishing:
    """The trainer is gone. ``closed``: the trainer closed rather than died."""

    closed: bool


@dataclass(frozen=True)
class SessionEnded:
    """All images of the session are written."""


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
        session: The number of the last session that the process has seen.
        trouble: The reason why the process does not fit; None: the process fits.
        linger: Seconds that the worker waits for another trainer after this session; 0: leave after the session.
    """

    peer: int
    session: int
    trouble: str | None
    linger: float


@dataclass(frozen=True)
class RetireAsked:
    """A process (``peer``) or a signal (``peer`` None) asks the worker to leave."""

    peer: int | None


@dataclass(frozen=True)
class Looked:
    """Time has passed. ``holds``: the worker holds images or weights that another process may still ask for."""

    holds: bool


@dataclass(frozen=True)
class BeginSession:
    """Begin the session of a process."""

    peer: int


@dataclass(frozen=True)
class Refuse:
    """Tell a process the reason why it gets no session."""

    peer: int
    why: str


@dataclass(frozen=True)
class LookAgain:
    """Disconnect a process, because its information about this worker is out of date."""

    peer: int


@dataclass(frozen=True)
class TellRestarted:
    """Tell the old session that the job was restarted, so that its saves do not wait for lost ranks."""


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
            waits_since: Start time of the wait for the first trainer; None: begin with a session.
        """
        self.state = LifeState.SERVING if waits_since is None else LifeState.LINGERING
        self.session = 1 if waits_since is None else 0
        """The number of the last session; 0: no session yet."""
        self._linger = linger
        self._next: AttachAsked | None = None
        self._is_closed = self._is_retired = False
        self._peers: set[int] = set()
        self._idle_since = waits_since or 0.0

    @property
    def next_peer(self) -> int | None:
        """The process that gets the next session; None: no process has asked for a session."""
        return None if self._next is None else self._next.peer

    @property
    def is_closed(self) -> bool:
        """Whether the trainer closed rather than died."""
        return self._is_closed

    @property
    def is_to_leave(self) -> bool:
        """Whether the worker leaves as soon as all images are written."""
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
