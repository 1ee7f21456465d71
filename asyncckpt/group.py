"""The group: the ranks that save together, and how their trainers come to one answer.

One broadcast of ``torch.distributed``, at the first save, hands round where the store is that the first rank's worker
hosts. After that no collective is made: what the ranks have to agree upon goes through rounds over that store (see
``worker/rounds.py``), where every wait has a limit and an error names the rank it is about.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.errors import CheckpointError, RankFailedError, WorkerDiedError
from asyncckpt.worker.client import WorkerClient
from asyncckpt.worker.commit import settle
from asyncckpt.worker.messages import Meeting, Order
from asyncckpt.worker.rounds import Rounds, grace, round_name

logger = logging.getLogger(__name__)

_YES = "yes"
_OWN_PATIENCE_S = 1.0
# How long another rank looks for the store, which the first may just be bringing back.
_PATIENCE_S = 10.0
# How long the first rank may take to conclude a save that this one has failed, if it is just publishing it; and storage
# to say what has become of it.
_VERDICT_S = 30.0
# What trainers ask each other in a save, one after the other.
KINDS = ("agree", "plan", "layout", "memory", "busy")

T = TypeVar("T")
U = TypeVar("U")


class Group:
    """The ranks of ``process_group`` (None: of the whole job), or this process alone.

    All ranks must make the same calls in the same order, as with any process group.
    """

    def __init__(self, config: Config, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self._config = config
        self._process_group = process_group
        self._may_join = not alone and dist.is_available()
        self._joined = joined = self._may_join and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if joined else 0
        self.world_size = dist.get_world_size(process_group) if joined else 1
        if self.rank < 0:
            raise ValueError("this process is not in the process group it should save with")
        self.token = uuid.uuid4().hex
        self._secret = secrets.token_bytes(32)
        self._meeting: Meeting | None = None
        self._client: WorkerClient | None = None
        self._rounds: Rounds | None = None
        # A wait keeps a connection busy: that a save has failed here is told over another.
        self._failing: Rounds | None = None
        # And what nobody waits for, and what nobody may have to wait for.
        self._later: Rounds | None = None
        self._asking: Rounds | None = None

    def is_outdated(self) -> bool:
        """Whether this was made for one process that has become one of many since."""
        return self._may_join and not self._joined and dist.is_initialized() and dist.get_world_size() > 1

    @property
    def alone(self) -> bool:
        """Whether there is but one rank."""
        return self.world_size == 1

    def attempt(self, number: int) -> str:
        """The name of save ``number`` on storage: the same on all ranks, and of no other save."""
        return f"{self.token[:12]}-{number}"

    def meet(self, client: WorkerClient) -> None:
        """Bring this rank's worker together with the others'. The first time this is a collective.

        A worker that takes the place of a dead one finds the store at its old address, or, on the first rank, hosts it
        there. Raises ``RankFailedError``, ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        if self.alone or client is self._client:
            return
        if self._meeting is None:
            self._connect(self._hand_round(client))
        elif self.rank == 0:
            client.host(self._meeting.port, self._config.start_timeout)
        if self._meeting is not None:
            client.join(self._meeting, self._config.start_timeout)
        self._client = client

    def miss(self, error: CheckpointError) -> None:
        """This rank has no worker, because of ``error``. The others must not wait for it, in the first meeting."""
        if not self.alone and self._meeting is None:
            self._connect(self._hand_round(error))

    def _connect(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.token = meeting.token
        # The first rank's own worker hosts the store: if it is not there, it will not come by waiting.
        patience = _OWN_PATIENCE_S if self.rank == 0 else _PATIENCE_S
        self._rounds = Rounds(meeting, self._config.start_timeout, patience)
        self._failing = Rounds(meeting, self._config.start_timeout, patience)
        self._later = Rounds(meeting, self._config.start_timeout, patience)
        self._asking = Rounds(meeting, self._config.start_timeout, 0.0)

    def consult(self, kind: str, number: int, local: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]) -> U:
        """Every rank brings a value, the first makes of all of them an answer for each: returns this rank's.

        ``local`` makes the value; ``decide`` gets those of all ranks, in their order. What either raises, on any rank,
        is raised on all. Takes at most ``Config.timeout`` seconds. Raises ``RankFailedError``, ``SaveTimeoutError``.
        """
        if self._rounds is None:
            return decide([local()])[0]
        rounds, name = self._rounds, round_name(kind, number)
        if self.rank > 0:
            try:
                value = _pack(local())
            except Exception as error:
                told = self._told(error)
                rounds.fail(name, told)
                raise told from error
            begun = time.monotonic()
            try:
                rounds.report(name, value)
            except WorkerDiedError:
                if time.monotonic() - begun > _PATIENCE_S / 2:
                    raise
                rounds.report(name, value)  # to the store of another worker: this one has not concluded anything
            patience = self._config.timeout + grace(self._config.timeout)
            answer: U = _answer(rounds.outcome(name, patience, own=True))
            return answer
        self._client_of_all().check_usable()
        try:
            own = local()
            rounds.report(name, b"")
            others = rounds.collect(name, self._config.timeout, also=round_name("save", number))[1:]
            answers = decide([own, *map(_unpack, others)])
            each = {rank: _pack(answer) for rank, answer in enumerate(answers) if rank > 0}
        except Exception as error:
            told = self._told(error)
            if not self._is_loss_of_store(told):
                rounds.conclude_failed(name, told)
            raise told from error
        rounds.conclude(name, b"", each)
        self._clear(rounds, kind, number)
        return answers[0]

    def follow_first(self, kind: str, number: int, decide: Callable[[], T]) -> T:
        """What the first rank decides, which does not wait for the others."""
        return decide() if self._rounds is None else self._follow_first(self._rounds, kind, number, decide)

    def any_says(self, number: int, mine: bool) -> bool:
        """Whether any rank has said yes by now, the same answer for question ``number`` on all ranks.

        No, while the worker is gone that brings them together.
        """
        asking = self._asking
        if asking is None:
            return mine
        try:
            if mine and self.rank > 0:
                asking.say(_YES)
            return self._follow_first(asking, "any", number, lambda: mine or asking.is_said(_YES))
        except CheckpointError as error:
            logger.warning("the ranks could not be asked: %s", str(error))
            return False

    def _follow_first(self, rounds: Rounds, kind: str, number: int, decide: Callable[[], T]) -> T:
        name = round_name(kind, number)
        if self.rank > 0:
            answer: T = _answer(rounds.outcome(name, self._config.timeout, own=False))
            return answer
        decision = decide()
        rounds.conclude(name, _pack(decision))
        self._clear(rounds, kind, number)
        return decision

    @staticmethod
    def _clear(rounds: Rounds, kind: str, number: int) -> None:
        try:
            rounds.clear(kind, number)
        except CheckpointError as error:  # the others have their answer all the same
            logger.warning("the store could not be cleared up: %s", str(error))

    def fail(self, number: int, error: BaseException, *, begun: bool) -> None:
        """Tell the other ranks that their save ``number`` cannot be committed, because of this one.

        ``begun``: this rank's worker knows of that save. If so, the first rank's concludes it; otherwise nobody would.
        """
        told = self._told(error)
        if self._failing is None or self._later is None:
            return
        name = round_name("save", number)
        if self._is_loss_of_store(told):
            if self.rank > 0:  # the first rank may ask again, over another store, and shall not wait for this one
                self._later.fail_soon(name, told, self._config.timeout)
            return
        try:
            if self.rank == 0 and not begun:
                for kind in (*KINDS, "save"):  # in whichever of them the others are waiting
                    self._failing.conclude_failed(round_name(kind, number), told)
            else:
                self._failing.fail(name, told)
        except CheckpointError as trouble:
            logger.warning("the other ranks could not be told of a failure: %s", trouble)

    def is_committed(self, order: Order, inode: int | None) -> bool:
        """Whether a save is committed although this rank's worker, which had a part in it, is dead. If not, it never
        will be. ``inode``: see ``settle``.

        It may be, if that part was reported. Ranks but the first ask the first, whose word is the same for all, and
        have failed the save before they ask: so the answer comes at once, unless that one is just publishing. Raises
        ``SaveTimeoutError`` where neither it nor storage answers.
        """
        if self.rank > 0 and self._meeting is not None:
            rounds = Rounds(self._meeting, _VERDICT_S, _OWN_PATIENCE_S)
            try:
                return not isinstance(rounds.outcome(round_name("save", order.save_id), _VERDICT_S), CheckpointError)
            except CheckpointError as error:
                logger.warning("rank 0 could not be asked how save %d has ended: %s", order.save_id, str(error))
            finally:
                rounds.close()
        return settle(order, _VERDICT_S, inode)

    def close(self) -> None:
        """Drop the connections to the store."""
        for rounds in filter(None, (self._rounds, self._failing, self._later, self._asking)):
            rounds.close()

    def _hand_round(self, client: WorkerClient | CheckpointError) -> Meeting:
        """A collective: the first rank's worker hosts the store, and all learn where."""
        offer: list[Any] = [client if isinstance(client, CheckpointError) else None]
        if self.rank == 0 and isinstance(client, WorkerClient):
            try:
                port = client.host(0, self._config.start_timeout)
                meeting = Meeting(self._address(), port, self.token, self._secret, 0, self.world_size)
                offer[0] = (meeting, socket.gethostname())
            except CheckpointError as error:
                offer[0] = error
        group, own = _with_cpu(self._process_group, self._config.timeout)
        try:
            dist.broadcast_object_list(offer, src=dist.get_global_rank(group, 0) if group else 0, group=group)
        except RuntimeError as error:
            raise RankFailedError(
                f"meeting the other ranks failed: {str(error).splitlines()[0]}; one of them may have died",
                rank=self.rank,
            ) from error
        finally:
            if own:
                dist.destroy_process_group(group)
        if isinstance(offer[0], CheckpointError):
            raise offer[0]
        meeting, host = offer[0]
        # A host's own name is not always known to itself.
        address = "127.0.0.1" if host == socket.gethostname() else meeting.address
        mine: Meeting = replace(meeting, rank=self.rank, address=address)
        return mine

    def _address(self) -> str:
        if self._config.host is not None:
            return self._config.host
        if dist.get_rank() == 0 and "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]  # torchrun's name for the first rank's host, known to all
        return socket.gethostname()

    def _client_of_all(self) -> WorkerClient:
        """First rank: the worker that hosts the store."""
        if self._client is None:
            raise RankFailedError("the ranks have not met yet: please report this", rank=self.rank)
        return self._client

    def _is_loss_of_store(self, error: CheckpointError) -> bool:
        """Whether there is nobody left who could be told of ``error``: all notice by themselves."""
        if self.rank == 0:
            return self._client is None or not self._client.alive
        return isinstance(error, WorkerDiedError) and error.rank == 0

    def _told(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            rank = self.rank if error.rank is None else error.rank
            return type(error)(error.message, path=error.path, rank=rank, step=error.step)
        return RankFailedError(f"{type(error).__name__}: {error}", rank=self.rank)


def _with_cpu(group: dist.ProcessGroup | None, timeout: float) -> tuple[dist.ProcessGroup | None, bool]:
    """``group``, or, where it has no CPU backend, a new one of the same ranks; and whether it is new."""
    if "cpu" in str(dist.get_backend_config(group)):
        return group, False
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    new = dist.new_group(ranks, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True)
    return new, True


def _answer(outcome: bytes | CheckpointError) -> Any:
    if isinstance(outcome, CheckpointError):
        raise outcome
    return _unpack(outcome)


def _pack(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value), 1)


def _unpack(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))
