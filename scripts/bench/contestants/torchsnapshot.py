"""torchsnapshot with ``async_take``, which returns after the copy and writes from a thread. It does not sync."""

from __future__ import annotations

import torchsnapshot

from bench.contestants.contestant import Contestant, Pending
from bench.states import State


class TorchSnapshot(Contestant):
    fsyncs = False

    def save(self, number: int, state: State) -> Pending:
        pending = torchsnapshot.Snapshot.async_take(self.path(number), {"state": torchsnapshot.StateDict(**state)})

        def poll() -> bool:
            if pending.done():
                pending.wait()  # raises any error of the save
                return True
            return False

        return Pending(wait=pending.wait, poll=poll)

    def load(self, number: int, state: State) -> State:
        into = torchsnapshot.StateDict(**state)
        torchsnapshot.Snapshot(self.path(number)).restore({"state": into})
        return dict(into)
