"""All lives of a worker with a few processes: every order of events, and each state once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.protocol import worker_life
from simulation.schedule import Violation

_LINGER_S = 60.0
_MOST_SESSIONS = 3


@dataclass
class Life:
    """A worker and the processes around it, with the rules for them."""

    peers: int
    machines: Any
    """The module of the machine, or a mutation of it."""
    machine: Any
    now: float = 0.0
    has_session: bool = True
    had_session: bool = True
    linger: float = _LINGER_S
    has_left: bool = False
    is_closed: bool = False
    is_retired: bool = False
    fits: dict[int, bool] = field(default_factory=dict)
    """Whether each process that has asked for a session fits."""
    connected: set[int] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)
    """By process: the session that was the last one when it looked."""
    lingers: dict[int, float] = field(default_factory=dict)
    """How long each process that has asked for a session wants the worker to linger after it."""
    waiting: set[int] = field(default_factory=set)
    """The processes that have asked for a session, and have no answer."""
    served: int | None = None
    """The process with a session; None: the one that has started the worker."""

    def key(self) -> tuple[object, ...]:
        """Return a key. Two lives with the same key have the same future."""
        machine = dict(vars(self.machine)) | {"_idle_since": self.now - self.machine._idle_since < _LINGER_S}
        machine["_peers"] = tuple(sorted(self.machine._peers))
        fits = sorted((peer, self.fits[peer], self.lingers[peer]) for peer in self.waiting)
        sets = [sorted(each) for each in (self.connected, self.seen.items(), self.waiting)]
        flags = (
            self.has_session,
            self.had_session,
            self.has_left,
            self.is_closed,
            self.is_retired,
            self.served,
            self.linger,
        )
        return (repr((fits, sets, flags)), *sorted(machine.items(), key=lambda each: each[0]))

    def events(self) -> Iterator[tuple[Any, float]]:
        """Return the events that may come next, each with the seconds until then."""
        state = self.machine.state
        if self.has_session and state is self.machines.LifeState.SERVING:
            yield self.machines.SessionFinishing(closed=False), 0.0
            yield self.machines.SessionFinishing(closed=True), 0.0
        if self.has_session and state is self.machines.LifeState.FINISHING:
            yield self.machines.SessionEnded(), 0.0
        yield self.machines.Looked(holds=True), 0.0
        yield self.machines.Looked(holds=True), 2 * _LINGER_S
        yield self.machines.Looked(holds=False), 0.0
        yield self.machines.RetireAsked(None), 0.0
        for peer in range(self.peers):
            if peer not in self.connected:
                yield self.machines.PeerCame(peer), 0.0
                continue
            yield self.machines.PeerLeft(peer), 0.0
            if peer not in self.waiting and peer != self.served:
                yield self.machines.RetireAsked(peer), 0.0
                for trouble, linger in ((None, _LINGER_S), (None, 0.0), ("it is another version", 0.0)):
                    yield self.machines.AttachAsked(peer, self.seen[peer], trouble, linger), 0.0

    def step(self, event: Any, seconds: float) -> Life:
        """Return the life after an event. Raise ``Violation`` if something does not hold."""
        sets = {name: copy.copy(getattr(self, name)) for name in ("connected", "seen", "waiting", "fits", "lingers")}
        after = replace(self, machine=copy.deepcopy(self.machine), now=self.now + seconds, **sets)
        after._note(event)
        was_to_leave = self.machine.is_to_leave
        actions = after.machine.handle(event, after.now)
        for action in actions:
            self._check_restart(action)
            after._check(event, action)
        self._check_attach(event, actions, after)
        if after.waiting and after.machine.state is not self.machines.LifeState.FINISHING:
            raise Violation(f"{after.waiting} have no answer, and wait for nothing")
        if len(after.waiting) > 1:
            raise Violation(f"{after.waiting} are told nothing, and one of them can come next")
        is_retired = isinstance(event, self.machines.RetireAsked) and not was_to_leave and after.machine.is_to_leave
        if is_retired and (self.machine.state is self.machines.LifeState.SERVING or self.waiting):
            raise Violation("a worker with a trainer was made to leave")
        self._check_stay(event, after)
        if after.has_left != (after.machine.state is self.machines.LifeState.LEAVING):
            raise Violation("a worker that leaves says so once")
        return after

    def _check_stay(self, event: Any, after: Life) -> None:
        """Raise ``Violation`` if the worker leaves too early or too late."""
        lingers = self.machine.state is self.machines.LifeState.LINGERING
        match event:
            case self.machines.RetireAsked():
                has_to_leave = lingers
            case self.machines.SessionEnded():
                has_to_leave = not after.has_session and (self.is_closed or self.is_retired or not self.linger)
            case self.machines.Looked(holds):
                stays = holds or not self.had_session
                has_to_leave = lingers and not stays
                if stays and self.connected and after.has_left and not self.has_left:
                    raise Violation("the worker leaves, and somebody is connected")
            case _:
                return
        if has_to_leave and not after.has_left:
            raise Violation(f"the worker stays after {event}")

    def _note(self, event: Any) -> None:
        match event:
            case self.machines.PeerCame(peer):
                self.connected.add(peer)
                self.seen[peer] = self.machine.session
            case self.machines.PeerLeft(peer):
                self.connected.discard(peer)
                self.seen.pop(peer)
                self.fits.pop(peer, None)
                self.lingers.pop(peer, None)
            case self.machines.RetireAsked():
                has_trainer = self.machine.state is self.machines.LifeState.SERVING or self.waiting
                self.is_retired = self.is_retired or not has_trainer
            case self.machines.AttachAsked(peer, _, trouble, linger):
                self.waiting.add(peer)
                self.fits[peer] = trouble is None
                self.lingers[peer] = linger
            case self.machines.SessionFinishing(closed):
                self.is_closed = closed
            case self.machines.SessionEnded():
                self.has_session, self.served = False, None

    def _check(self, event: Any, action: Any) -> None:
        match action:
            case self.machines.BeginSession(peer):
                if self.has_session or self.has_left:
                    raise Violation("a second session begins, or one after the end")
                if not self.fits.get(peer) or self.is_closed or self.is_retired:
                    raise Violation(f"{peer} does not fit, or the worker is to leave")
                if peer not in self.waiting or peer not in self.connected:
                    raise Violation(f"{peer} has not asked, or is gone")
                if self.seen[peer] + 1 != self.machine.session:
                    raise Violation(f"{peer} has seen session {self.seen[peer]}, and gets {self.machine.session}")
                self.has_session, self.had_session, self.served = True, True, peer
                self.linger = self.lingers[peer]
                self.waiting.discard(peer)
            case self.machines.Refuse(peer) | self.machines.LookAgain(peer):
                of_retire = isinstance(event, self.machines.RetireAsked) and event.peer == peer
                if peer not in self.waiting and not of_retire:
                    raise Violation(f"{peer} has not asked")
                self.waiting.discard(peer)
            case self.machines.EndWorker():
                if self.has_session or self.has_left or self.waiting:
                    raise Violation("a worker leaves with a trainer, or twice")
                self.has_left = True

    def _check_restart(self, action: Any) -> None:
        """Raise ``Violation`` if the session of a living trainer is told of a restart."""
        is_served = self.machine.state is self.machines.LifeState.SERVING
        if is_served and isinstance(action, self.machines.TellRestarted):
            raise Violation("the session of a trainer that is there was told of a restart")

    def _check_attach(self, event: Any, actions: list[Any], after: Life) -> None:
        """Raise ``Violation`` if a process may attach and does not, or if the session before is not told."""
        if not isinstance(event, self.machines.AttachAsked) or event.trouble or event.session != self.machine.session:
            return
        states = self.machines.LifeState
        is_free = self.machine.state in (states.FINISHING, states.LINGERING) and not self.waiting
        if is_free and not (self.is_closed or self.is_retired):
            if event.peer not in after.waiting and event.peer != after.served:
                raise Violation(f"{event.peer} may attach, and does not")
            if self.machines.TellRestarted() not in actions:
                raise Violation("the session before is not told")

    def check_end(self) -> None:
        """Raise ``Violation`` if the worker stays when all have gone, and its time is over."""
        life = self
        for peer in sorted(self.connected):
            life = life.step(self.machines.PeerLeft(peer), 0.0)
        if life.machine.state is self.machines.LifeState.SERVING:
            life = life.step(self.machines.SessionFinishing(closed=False), 0.0)
        if life.machine.state is self.machines.LifeState.FINISHING:
            life = life.step(self.machines.SessionEnded(), 0.0)
        life = life.step(self.machines.Looked(holds=True), 2 * _LINGER_S)
        if not life.has_left:
            raise Violation("the worker stays for ever")


def explore(peers: int, machines: Any = worker_life) -> int:
    """Try every order of events. Return the number of different states. Raise ``Violation``."""
    first = Life(peers, machines, machines.WorkerLife(_LINGER_S))
    ahead = replace(first, machine=machines.WorkerLife(_LINGER_S, first.now), has_session=False, had_session=False)
    open_ = [first, ahead]
    known = {each.key() for each in open_}
    while open_:
        life = open_.pop()
        life.check_end()
        for event, seconds in life.events():
            after = life.step(event, seconds)
            if after.machine.session <= _MOST_SESSIONS and (key := after.key()) not in known:
                known.add(key)
                open_.append(after)
    return len(known)
