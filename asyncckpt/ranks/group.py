"""The group: the ranks that save together, and how their trainers come to one answer.

One broadcast of ``torch.distributed``, at the first save, tells all ranks where the store is that the first rank's
worker hosts. After that no collective is made: what the ranks have to agree upon goes through rounds over that store
(see ``asyncckpt/ranks/rounds.py``), where every wait has a limit and an error names the rank it is about.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from asyncckpt.config import Config
from asyncckpt.errors import (
    CheckpointError,
    RankFailedError,
    SaveTimeoutError,
    UnsavableStateError,
    WorkerDiedError,
    located,
)
from asyncckpt.format.write_request import CopiedRank, WriteRequest
from asyncckpt.link.client import WorkerClient, grace
from asyncckpt.link.endpoint_messages import Serve, Served
from asyncckpt.link.messages import Host, Hosting, Join, Rendezvous
from asyncckpt.ranks.address import address_to_listen_at, loopback_scope, own_address
from asyncckpt.ranks.collectives import from_first
from asyncckpt.ranks.rounds import Rounds, pack, round_name, unpack
from asyncckpt.ranks.store_connection import Patience
from asyncckpt.storage import resolve
from asyncckpt.threads import without_gc

logger = logging.getLogger(__name__)

_YES = "yes"
# How long the first rank looks for the store, which its own worker hosts: if it is not there, it will not come by
# waiting. And how long another does: the first may just be bringing it back.
_OWN_PATIENCE_S, _PATIENCE_S = 1.0, 20.0
# How long the store may say nothing at all: ranks of which only some hear its answer would not do the same. And where
# storage says it too, the same to all.
_SILENCE_S, _SHORT_SILENCE_S = 10.0, 2.0
# How long a failure may take to be told. It is told later all the same, unless this process ends before.
_TELL_S = 1.0
# How long the first rank may take to conclude a save that this one has failed, if it is just committing it; and storage
# to tell what has become of it.
_RESOLVE_S = 30.0
# What trainers ask each other in a save, one after the other.
KINDS = ("agree", "plan", "layout", "copies", "memory", "slot")

T = TypeVar("T")
U = TypeVar("U")


class Group:
    """The ranks of ``process_group`` (None: of the whole job), or this process alone.

    All ranks must make the same calls in the same order, as with any process group.
    """

    def __init__(self, config: Config, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        """Talk to no other rank yet.

        Args:
            config: The timeouts, and ``host``.
            process_group: The ranks.
            alone: For this process, whatever the job.

        Raises:
            ValueError: This process is not in the process group.
        """
        self._config = config
        self._process_group = process_group
        self._may_join = not alone and dist.is_available()
        joined = self._may_join and dist.is_initialized()
        self._world = weakref.ref(dist.group.WORLD) if joined and dist.group.WORLD is not None else None
        self.rank = dist.get_rank(process_group) if joined else 0
        self.world_size = dist.get_world_size(process_group) if joined else 1
        if self.rank < 0:
            raise ValueError("this process is not in the process group it should save with")
        self.token = uuid.uuid4().hex
        self._secret, self._listens_at = secrets.token_bytes(32), ""
        self._rendezvous: Rendezvous | None = None
        self._client: WorkerClient | None = None
        self._rounds: Rounds | None = None
        # First rank: how saves have ended that its dead worker took along, which nobody told the others yet.
        self._untold: dict[int, CheckpointError | None] = {}

    def is_current(self) -> bool:
        """Whether the job is that which this was made in. One that is destroyed, and no other begun, still is."""
        if self._world is None:
            return not (self._may_join and dist.is_initialized()) or dist.get_world_size() == 1
        return not dist.is_initialized() or self._world() is dist.group.WORLD

    def check_current(self) -> None:
        """Raise ``CheckpointError`` unless ``is_current``."""
        if not self.is_current():
            what = "torch.distributed was initialised after the first save, or anew since then"
            raise CheckpointError(f"{what}; close this engine or checkpointer, and make a new one")

    @property
    def alone(self) -> bool:
        """Whether there is but one rank."""
        return self.world_size == 1

    def attempt(self, number: int) -> str:
        """The name of save ``number`` on storage: the same on all ranks, of no other save, and not to be guessed."""
        secret = self._secret if self._rendezvous is None else self._rendezvous.secret
        return f"{hmac.new(secret, f'attempt {number}'.encode(), 'sha256').hexdigest()[:12]}-{number}"

    def connect_worker(self, start: Callable[[int], WorkerClient]) -> WorkerClient:
        """This rank's worker, which ``start`` gives, connected with those of the others. At first this is a collective.

        A worker that takes the place of a dead one finds the store at its old address, or, on the first rank, hosts it
        there. Raises what ``start`` does; ``RankFailedError``, ``WorkerDiedError``, ``SaveTimeoutError``.
        """
        try:
            client = start(self.rank)
        except CheckpointError as error:
            if not self.alone and self._rendezvous is None:
                self._connect(self._exchange(error))  # the others wait for this one
            raise
        if self.alone or client is self._client:
            return client
        if self._rendezvous is None:
            self._rendezvous = self._connect(self._exchange(client))
        elif self.rank == 0:
            _host(client, Host(self._rendezvous.port, self._listens_at, self._secret), self._config)
        client.tell(Join(self._rendezvous, self._config.start_timeout))
        if self._config.replicas:
            _serve(client, self._rendezvous.secret, self._config, self.rank)
        self._client = client
        self._tell_untold()
        return client

    def ask_all(self, kind: str, number: int, local: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]) -> U:
        """Every rank brings a value, and the first rank makes of all values an answer for each, which is returned.

        Args:
            kind: What is asked; one of ``KINDS`` in a save.
            number: The number of the save, the same on all ranks.
            local: Makes this rank's value.
            decide: First rank: gets the values in the order of the ranks, returns the answers in that order.

        Raises:
            CheckpointError: What ``local`` or ``decide`` raised, on any rank, is raised on all.
            RankFailedError, SaveTimeoutError: A rank is gone, or has brought no value in ``Config.timeout`` seconds.
        """
        if self._rounds is None:
            return decide([local()])[0]
        name, rounds = round_name(kind, number), self._rounds
        rounds.patience.renew()
        if self.rank > 0:
            answer: U = self._ask_first(rounds, name, local)
            return answer
        if self._client is None:
            raise RankFailedError("the ranks are not connected yet: please report this", rank=self.rank)
        self._client.check_usable()  # it hosts the store
        try:
            own = local()
            rounds.report(name, b"")
            others = rounds.collect(name, self._config.timeout, also=round_name("save", number))[1:]
            answers, each = _decided(decide, own, others)
        except Exception as error:
            found = self._located(error)
            if not self._is_loss_of_store(found):
                rounds.conclude_failed(name, found)
            raise found from error
        rounds.conclude_each(name, each)
        with _logged("clearing up the store"):  # the others have their answer all the same
            rounds.clear(kind, number)
        return answers[0]

    def follow_first(self, kind: str, number: int, decide: Callable[[], T]) -> T:
        """The first rank decides, without waiting for the others, and they follow. Returns the decision.

        Args:
            kind: As of ``ask_all``.
            number: As there.
            decide: First rank: makes the decision.
        """
        if self._rounds is None:
            return decide()
        self._rounds.patience.renew()
        return self._follow_first(self._rounds, kind, number, decide)

    def check_first(self) -> None:
        """Raise ``SaveTimeoutError`` where the first rank's worker, which ends all saves, lives and does not answer."""
        if self._rounds is not None and self.rank > 0:
            with contextlib.suppress(WorkerDiedError):  # then this rank's worker ends them
                self._rounds.impatient(_SILENCE_S).ping()

    def any_rank_says(self, number: int, mine: bool) -> bool:
        """Whether any rank has said yes by now, the same answer for question ``number`` on all ranks.

        No, while the worker that hosts the store is gone.
        """
        if self._rounds is None:
            return mine
        # Nobody waits for a store that is gone.
        rounds = self._rounds.impatient(_SILENCE_S)
        try:
            if mine and self.rank > 0:
                rounds.set_flag(_YES)
            return self._follow_first(rounds, "any", number, lambda: mine or rounds.is_flag_set(_YES))
        except CheckpointError as error:
            logger.warning("the ranks could not be asked: %s", str(error))
            if self.rank == 0:  # the others may be answered again, and wait for this
                self._rounds.conclude_soon(round_name("any", number), pack(False), self._config.timeout)
            return False

    def report_failure(self, number: int, error: BaseException, *, begun: bool) -> None:
        """Tell the other ranks that a save cannot be committed, because of this rank.

        Args:
            number: The number of the save.
            error: Why.
            begun: Whether this rank's worker knows of that save, so that the first rank's worker concludes it.
        """
        found = self._located(error)
        rounds = self._rounds
        if rounds is None:
            return
        name = round_name("save", number)
        is_lost = self._is_loss_of_store(found)
        if self.rank == 0 and is_lost:
            self._untold[number] = found  # for when there is another store
        elif self.rank > 0 or begun:
            telling = rounds.fail_soon(name, found, self._config.commit_timeout)
            wait([telling], 0.0 if is_lost else _TELL_S)
        else:
            with _logged("telling the other ranks of a failure"):
                self._conclude_failed(rounds, number, found)

    def is_committed(self, request: WriteRequest, inode: int | None) -> bool:
        """Whether a save is committed, although this rank's worker is dead; if not, it never will be. ``inode``: of a
        single file. Raises ``SaveTimeoutError`` where neither the first rank nor storage answers.

        Ranks but the first have failed the save, and ask the first: it answers at once unless it is just committing.
        """
        if self.rank > 0 and self._rendezvous is not None:
            # A connection of its own: failures of other saves must not wait behind this wait.
            rounds = Rounds(self._rendezvous, _RESOLVE_S, Patience(_OWN_PATIENCE_S), silence=_SHORT_SILENCE_S)
            try:
                return not isinstance(rounds.outcome(round_name("save", request.save_id), _RESOLVE_S), CheckpointError)
            except CheckpointError as error:
                logger.warning("rank 0 could not be asked how save %d has ended: %s", request.save_id, str(error))
            finally:
                rounds.close()
        is_committed = resolve(request, _RESOLVE_S, inode)
        if is_committed and self.rank == 0 and not self.alone:
            self._untold[request.save_id] = None
        return is_committed

    def close(self) -> None:
        """Drop the connections to the store."""
        if self._rounds is not None:
            self._rounds.close()

    def _connect(self, rendezvous: Rendezvous) -> Rendezvous:
        self._rendezvous = rendezvous
        self.token = rendezvous.token
        patience = Patience(_OWN_PATIENCE_S if self.rank == 0 else _PATIENCE_S)
        self._rounds = Rounds(rendezvous, self._config.start_timeout, patience, silence=_SILENCE_S)
        return rendezvous

    def _tell_untold(self) -> None:
        """The others, or their workers, still wait to hear how those saves ended."""
        while self._untold and self._rounds is not None:
            number, failure = self._untold.popitem()
            with _logged("telling the other ranks how a save has ended"):
                if failure is None:
                    self._rounds.conclude(round_name("save", number), b"")
                else:
                    self._conclude_failed(self._rounds, number, failure)

    def _conclude_failed(self, rounds: Rounds, number: int, failure: CheckpointError) -> None:
        for kind in (*KINDS, "save"):  # in whichever of them the others are waiting
            rounds.conclude_failed(round_name(kind, number), failure)

    def _ask_first(self, rounds: Rounds, name: str, local: Callable[[], object]) -> Any:
        """Another rank: bring a value, and wait for the first rank's answer."""
        try:
            value = pack(local())
        except Exception as error:
            found = self._located(error)
            wait([rounds.fail_soon(name, found, self._config.timeout)], _TELL_S)
            raise found from error
        try:
            rounds.report(name, value)
        except WorkerDiedError:
            if rounds.patience.left() <= 0:
                raise
            rounds.report(name, value)  # to the store of another worker: this one has not concluded anything
        return _answer(rounds.outcome(name, self._config.timeout + grace(self._config.timeout)))

    def _follow_first(self, rounds: Rounds, kind: str, number: int, decide: Callable[[], T]) -> T:
        name = round_name(kind, number)
        if self.rank > 0:
            answer: T = _answer(rounds.outcome(name, self._config.timeout))
            return answer
        decision = decide()
        rounds.conclude(name, pack(decision))
        with _logged("clearing up the store"):
            rounds.clear(kind, number)
        return decision

    def _exchange(self, client: WorkerClient | CheckpointError) -> Rendezvous:
        """A collective: the first rank's worker hosts the store, and all learn where."""

        def host() -> tuple[Rendezvous, str]:
            if isinstance(client, CheckpointError):
                raise client
            name = self._address()
            listens_at = address_to_listen_at(name, dist.get_world_size())
            hosting = _host(client, Host(0, listens_at, self._secret), self._config)
            self._listens_at = hosting.address
            address = hosting.address or name
            rendezvous = Rendezvous(address, hosting.port, self.token, self._secret, 0, self.world_size)
            return rendezvous, "" if hosting.address else loopback_scope()

        limits = self._config.timeout, self._config.start_timeout  # the first rank may be starting its worker
        try:
            rendezvous, scope = from_first(host, self._process_group, *limits)
        except RuntimeError as error:
            raise RankFailedError(
                f"the rendezvous of the ranks failed: {str(error).splitlines()[0]}; one of them has died, or has"
                f" not made this call in {sum(limits):g} s (look for one under `if rank == 0`)",
                rank=self.rank,
            ) from error
        # A host's own name is not always known to itself.
        address = "127.0.0.1" if scope == loopback_scope() else rendezvous.address
        mine: Rendezvous = replace(rendezvous, rank=self.rank, address=address)
        return mine

    def _address(self) -> str:
        if self._config.host is not None:
            return self._config.host
        if dist.get_rank() == 0 and "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]  # torchrun's name for the first rank's host, known to all
        return socket.gethostname()

    def _is_loss_of_store(self, error: CheckpointError) -> bool:
        """Whether there is nobody now who could be told of ``error``."""
        if self.rank == 0:
            return self._client is None or not self._client.alive
        return isinstance(error, (WorkerDiedError, SaveTimeoutError)) and error.rank == 0

    def _located(self, error: BaseException) -> CheckpointError:
        return located(error, rank=self.rank, otherwise=RankFailedError)


def _host(client: WorkerClient, request: Host, config: Config) -> Hosting:
    """Have the first rank's worker host the store that joins the ranks."""
    return client.ask(request, Hosting, config.start_timeout, "hosting the store that joins the ranks")


def _serve(client: WorkerClient, key: bytes, config: Config, rank: int) -> None:
    """Have the worker serve its images to those of other hosts."""
    address, doing = own_address(config.address), "serving images to other hosts"
    trouble = client.ask(Serve(key, address), Served, config.start_timeout, doing).trouble
    if trouble is not None:
        raise RankFailedError(
            f"the worker cannot serve its images at {address}: {trouble} (see Config.address)", rank=rank
        )


@contextlib.contextmanager
def _logged(doing: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        logger.warning("%s failed: %s", doing, str(error))


@without_gc
def _decided(
    decide: Callable[[list[T]], Sequence[U]], own: T, others: Sequence[bytes]
) -> tuple[Sequence[U], dict[int, bytes]]:
    """First rank: the answers for all ranks, and, packed, those for the others. Thousands may have said much."""
    answers = decide([own, *map(unpack, others)])
    return answers, {rank: pack(answer) for rank, answer in enumerate(answers) if rank > 0}


def _answer(outcome: bytes | CheckpointError) -> Any:
    if isinstance(outcome, CheckpointError):
        raise outcome
    return unpack(outcome)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is: in which ``domain``; and how large a segment for copies of its images is, in bytes."""

    domain: str
    nbytes: int


def copied_ranks(places: Sequence[RankPlace], replicas: int) -> list[tuple[CopiedRank, ...]]:
    """The ranks that each rank is to keep copies of.

    Args:
        places: Where the ranks are, in their order.
        replicas: On how many other hosts there are to be copies.

    Raises:
        UnsavableStateError: There are not as many other hosts.
    """
    domains: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        domains.setdefault(place.domain, []).append(rank)
    if replicas >= len(domains):
        raise UnsavableStateError(
            f"Config.replicas is {replicas}, which takes {replicas + 1} hosts or more, and the ranks are on"
            f" {len(domains)}"
        )
    ring = list(domains.values())
    kept: list[list[CopiedRank]] = [[] for _ in places]
    for at, ranks in enumerate(ring):
        for jump in range(1, replicas + 1):
            others = ring[(at + jump) % len(ring)]
            for number, rank in enumerate(ranks):
                kept[others[number % len(others)]].append(CopiedRank(rank, places[rank].nbytes))
    return [tuple(each) for each in kept]
