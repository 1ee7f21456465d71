"""The group: the ranks that save together, and the agreement among their trainers.

At the first save, one broadcast of ``torch.distributed`` tells all ranks the address of the store, which the first
rank's worker hosts. After that there are no collectives. The ranks agree in rounds over that store (see
``asyncckpt/ranks/rounds.py``). Every wait in a round has a timeout, and an error names the rank that caused it.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from asyncckpt.budgets import ANSWER_S, SILENCE_S, TELL_S
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
from asyncckpt.link.api import Hosting, Rendezvous, SessionApi
from asyncckpt.link.client import WorkerClient
from asyncckpt.protocol.commit import grace
from asyncckpt.ranks.ranks import ranks_of
from asyncckpt.ranks.rounds import COMMITTED, PATIENCE_S, UNKNOWN, Rounds, pack, round_name, unpack
from asyncckpt.ranks.store_connection import Patience
from asyncckpt.storage import resolve
from asyncckpt.threads import wait_done, without_gc

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE, DOMAIN_VARIABLE = "ASYNC_CKPT_ADDRESS", "ASYNC_CKPT_DOMAIN"
"""Environment variables of a single host. A ``Config`` that was not made from the environment uses them, too."""


def address_to_listen_at(name: str, world_size: int) -> str:
    """Return the numeric address that the store should listen at; "" for all addresses of the host.

    Args:
        name: This host's name for the other ranks. Unless the name is numeric, other hosts may resolve it to any
            address.
        world_size: Size of the job.
    """
    sizes = {os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE"), str(world_size)}
    if name == "localhost" or len(sizes) == 1:  # torchrun says that all ranks are on this host
        return LOOPBACK
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""


def first_address(given: str | None) -> str:
    """Return the name of the first rank's host for the other ranks. ``given``: value of ``Config.host``."""
    if given is not None:
        return given
    if dist.get_rank() == 0 and "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]  # torchrun's name for the first rank's host, known to all ranks
    return socket.gethostname()


def own_address(given: str | None) -> str:
    """Return the address of this host for other hosts of the job.

    Args:
        given: Value of ``Config.address``. If it is None, use the environment, or else this host's address on the
            network to the first rank's host, or else the host name.
    """
    if given is not None or ADDRESS_VARIABLE in os.environ:
        return given or os.environ[ADDRESS_VARIABLE]
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR"), 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, where in sorted(found, key=lambda each: each[0] != socket.AF_INET):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # a datagram socket sends nothing here
                own = str(probe.getsockname()[0])
                if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                    return own
    return socket.gethostname()


def own_domain(given: str | None) -> str:
    """Return this host's failure domain: ``Config.domain``, or the environment's value, or else the machine's boot id.

    Containers of one machine have one domain, because they fail together.
    """
    if given is not None or DOMAIN_VARIABLE in os.environ:
        return given or os.environ[DOMAIN_VARIABLE]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def loopback_scope() -> str:
    """Return a text that is equal for two processes if they reach each other at the loopback address.

    The host name alone is not enough: hosts may have equal names, and containers of one host may have their own
    networks.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:  # unknown, so return a text that no other process has
        return uuid.uuid4().hex
    return f"{boot}/{network.st_dev:x}/{network.st_ino:x}/{socket.gethostname()}"


_YES = "yes"
# Time to look for the store on the first rank, whose own worker hosts the store. Other ranks have ``PATIENCE_S``.
_OWN_PATIENCE_S = 1.0
# Timeout for a store that does not answer at all, for questions that storage can answer as well, with the same answer
# for all ranks. For other questions it is longer, because ranks would act differently if only some got an answer.
_SHORT_SILENCE_S = 2.0
# The kinds of rounds of the trainers in a save, in their order.
KINDS = ("agree", "plan", "layout", "copies", "memory", "slot")

T = TypeVar("T")
U = TypeVar("U")


class Group:
    """The ranks of ``process_group`` (None: of the whole job), or this process alone.

    All ranks must make the same calls in the same order, as with any process group.
    """

    def __init__(self, config: Config, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        """Prepare the group. No other rank is contacted yet.

        Args:
            config: Provides the timeouts, and ``host``.
            process_group: The ranks.
            alone: Make a group of this process alone, even within a job.

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
        self._newest_joint = -1  # the step of the last save with parties
        self._tries = 0
        self._rendezvous: Rendezvous | None = None
        self._client: WorkerClient | None = None
        self._rounds: Rounds | None = None
        # First rank: outcomes of saves that its dead worker could not tell the other ranks.
        self._untold: dict[int, CheckpointError | None] = {}

    def is_current(self) -> bool:
        """Return whether the current job is the job that this group was made in.

        A job that was destroyed is still current if no other job has begun.
        """
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
        """Whether there is only one rank."""
        return self.world_size == 1

    def attempt(self, number: int) -> str:
        """Return the name of the attempt of save ``number``: the same on all ranks, unique, and not guessable."""
        secret = self._secret if self._rendezvous is None else self._rendezvous.secret
        return f"{hmac.new(secret, f'attempt {number}'.encode(), 'sha256').hexdigest()[:12]}-{number}"

    def begin_joint(self, step: int) -> None:
        """Note that a save with parties begins. A step that was tried before gets a new token."""
        if step <= self._newest_joint:
            self.renew_joint()
        self._newest_joint = step

    def renew_joint(self) -> None:
        """Take a new token, because the training goes back."""
        self._tries += 1
        self._newest_joint = -1

    def joint_token(self) -> str:
        """Return the token of the next saves with parties: the same on all ranks that are connected."""
        secret = self._secret if self._rendezvous is None else self._rendezvous.secret
        return f"{hmac.new(secret, b'parties', 'sha256').hexdigest()[:16]}-{self._tries}"

    @property
    def has_met(self) -> bool:
        """Return whether the ranks have met, so that ``connect_worker`` is no longer a collective."""
        return self.alone or self._rendezvous is not None

    def connect_worker(self, start: Callable[[int], WorkerClient]) -> WorkerClient:
        """Return the worker that ``start`` returns, after connecting it to the other ranks.

        The first call is a collective. A worker that replaces a dead worker uses the store at its old address. On the
        first rank, it hosts the store there.

        Raises ``RankFailedError``, ``WorkerDiedError``, ``SaveTimeoutError``, and the errors of ``start``.
        """
        try:
            client = start(self.rank)
        except CheckpointError as error:
            if not self.alone and self._rendezvous is None:
                self._connect(self._exchange(error))  # the other ranks wait for this rank
            raise
        if self.alone or client is self._client:
            self._tell_untold()
            return client
        if self._rendezvous is None:
            self._rendezvous = self._connect(self._exchange(client))
        elif self.rank == 0:
            self._host(client, self._rendezvous.port, self._listens_at)
        client.tell(SessionApi.join, self._rendezvous, self._config.start_timeout)
        if self._config.replicas:
            _serve(client, self._rendezvous.secret, self._config, self.rank)
        self._client = client
        self._tell_untold()
        return client

    def ask_all(self, kind: str, number: int, local: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]) -> U:
        """Collect a value from each rank. The first rank makes an answer for each rank. Return this rank's answer.

        Args:
            kind: Kind of the question; one of ``KINDS`` in a save.
            number: Number of the save, the same on all ranks.
            local: Returns this rank's value.
            decide: First rank: takes the values in the order of the ranks, and returns the answers in that order.

        Raises:
            CheckpointError: An error of ``local`` or ``decide`` on any rank is raised on all ranks.
            RankFailedError, SaveTimeoutError: A rank is gone, or has reported no value within ``Config.timeout``
                seconds.
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
        self._client.check_usable()  # this worker hosts the store
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
        with _logged("clearing up the store"):  # the other ranks have their answer anyway
            rounds.clear(kind, number)
        return answers[0]

    def hear_decision(self, kind: str, number: int) -> Any:
        """Other ranks: wait for the decision of the first rank. The arguments are those of ``tell_decision``."""
        if self._rounds is None:
            raise RankFailedError("the ranks are not connected yet: please report this", rank=self.rank)
        self._rounds.patience.renew()
        return _answer(self._rounds.outcome(round_name(kind, number), self._config.timeout))

    def tell_decision(self, kind: str, number: int, decision: object) -> None:
        """First rank: tell the others a decision, without waiting for them. Another thread may use the store meanwhile.

        Args:
            kind: See ``ask_all``.
            number: See ``ask_all``.
            decision: The decision. If the store cannot be reached, the save fails on all ranks.
        """
        if (rounds := self._rounds) is None:
            return
        timeout = self._config.timeout
        try:
            rounds.conclude_soon(round_name(kind, number), pack(decision), timeout).result(timeout)
        except (CheckpointError, FutureTimeoutError) as error:
            for begun in (False, True):  # False: end the others' wait; True: end the save in this rank's worker
                self.report_failure(number, error, begun=begun)
            raise
        rounds.clear(kind, number)

    def check_first(self) -> None:
        """Raise ``SaveTimeoutError`` if the first rank's worker, which ends all saves, is alive but does not answer."""
        if self._rounds is not None and self.rank > 0:
            with contextlib.suppress(WorkerDiedError):  # without that worker, this rank's worker ends the saves
                self._rounds.impatient(ANSWER_S).ping()

    def any_rank_says(self, number: int, mine: bool) -> bool:
        """Return True if any rank has reported ``mine=True``. All ranks get the same answer to question ``number``.

        Return False while the worker that hosts the store is gone.
        """
        if self._rounds is None:
            return mine
        # Do not wait for a store that is gone.
        rounds = self._rounds.impatient(ANSWER_S)
        try:
            if mine and self.rank > 0:
                rounds.set_flag(_YES)
            return self._follow_first(rounds, "any", number, lambda: mine or rounds.is_flag_set(_YES))
        except CheckpointError as error:
            logger.warning("the other ranks could not be asked: %s", str(error))
            if self.rank == 0:  # the other ranks may reach a store again, and then wait for this answer
                self._rounds.conclude_soon(round_name("any", number), pack(False), self._config.timeout)
            return False

    def report_failure(self, number: int, error: BaseException, *, begun: bool) -> None:
        """Tell the other ranks that this rank has failed a save, so that it cannot be committed.

        Args:
            number: Number of the save.
            error: The reason.
            begun: Whether this rank's worker knows of the save. Then the first rank's worker concludes the save.
        """
        found = self._located(error)
        rounds = self._rounds
        if rounds is None:
            return
        name = round_name("save", number)
        is_lost = self._is_loss_of_store(found)
        if self.rank == 0 and is_lost:
            self._untold[number] = found  # reported when the next worker hosts a store
        elif self.rank > 0 or begun:
            telling = rounds.fail_soon(name, found, self._config.commit_timeout)
            wait_done(telling, 0.0 if is_lost else TELL_S)
        else:
            with _logged("telling the other ranks of a failure"):
                self._conclude_failed(rounds, number, found)

    def is_committed(self, request: WriteRequest, inode: int | None) -> bool:
        """Return whether a save is committed, after the death of this rank's worker. If not, it never will be.

        Ranks other than the first have failed the save, and ask the first rank. The first rank answers at once unless
        it is committing the save just now.

        ``inode``: inode of a single file. Raises ``SaveTimeoutError`` if neither the first rank nor storage answers.
        """
        if self.rank > 0 and self._rendezvous is not None:
            # Use a separate connection, because reports of failures of other saves must not wait behind this call.
            rounds = Rounds(self._rendezvous, SILENCE_S, Patience(_OWN_PATIENCE_S), silence=_SHORT_SILENCE_S)
            try:
                outcome = rounds.outcome(round_name("save", request.save_id), SILENCE_S)
                if outcome != UNKNOWN:
                    return not isinstance(outcome, CheckpointError)
            except CheckpointError as error:
                logger.warning("rank 0 could not be asked for the outcome of save %d: %s", request.save_id, str(error))
            finally:
                rounds.close()
        is_committed = resolve(request, SILENCE_S, inode)
        if is_committed and self.rank == 0 and not self.alone:
            self._untold[request.save_id] = None
            if self._client is not None and self._client.alive:  # the next worker is here already
                self._tell_untold()
        return is_committed

    def close(self) -> None:
        """Drop the connections to the store."""
        if self._rounds is not None:
            self._rounds.close()

    def _connect(self, rendezvous: Rendezvous) -> Rendezvous:
        self._rendezvous = rendezvous
        self.token = rendezvous.token
        patience = Patience(_OWN_PATIENCE_S if self.rank == 0 else PATIENCE_S)
        self._rounds = Rounds(rendezvous, self._config.start_timeout, patience, silence=ANSWER_S)
        return rendezvous

    def _tell_untold(self) -> None:
        """Report the outcomes of saves that the other ranks, or their workers, still wait for."""
        if self._rounds is None:
            return
        for number, failure in list(self._untold.items()):
            with _logged("telling the other ranks how a save has ended"):
                if failure is None:
                    self._rounds.conclude(round_name("save", number), COMMITTED)
                else:
                    self._conclude_failed(self._rounds, number, failure)
                self._untold.pop(number, None)  # removed last, so that the next call retries an outcome that was lost

    def _conclude_failed(self, rounds: Rounds, number: int, failure: CheckpointError) -> None:
        for kind in (*KINDS, "save"):  # the round in which the other ranks are waiting is not known
            rounds.conclude_failed(round_name(kind, number), failure)

    def _ask_first(self, rounds: Rounds, name: str, local: Callable[[], object]) -> Any:
        """Other ranks: report a value, and wait for the first rank's answer."""
        try:
            value = pack(local())
        except Exception as error:
            found = self._located(error)
            wait_done(rounds.fail_soon(name, found, self._config.timeout), TELL_S)
            raise found from error
        try:
            rounds.report(name, value)
        except WorkerDiedError:
            if rounds.patience.left() <= 0:
                raise
            rounds.report(name, value)  # retry with a new worker's store, which has not concluded anything yet
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
        """Have the first rank's worker host the store, and tell all ranks its address. This is a collective."""

        def host() -> tuple[Rendezvous, str]:
            if isinstance(client, CheckpointError):
                raise client
            name = first_address(self._config.host)
            listens_at = address_to_listen_at(name, dist.get_world_size())
            hosting = self._host(client, 0, listens_at)
            self._listens_at = hosting.address
            address = hosting.address or name
            rendezvous = Rendezvous(address, hosting.port, self.token, self._secret, 0, self.world_size)
            return rendezvous, "" if hosting.address else loopback_scope()

        timeout, first_s = self._config.timeout, self._config.start_timeout  # the first rank may be starting its worker
        lost = (
            "the rendezvous of the ranks failed: {}; one of them has died, or has not made this call in"
            f" {timeout + first_s:g} s (look for one under `if rank == 0`)"
        )
        rendezvous, scope = ranks_of(self._process_group, timeout, first_s=first_s, lost=lost).from_first(host)
        # Use the loopback address on the first rank's own host, because a host cannot always resolve its own name.
        address = "127.0.0.1" if scope == loopback_scope() else rendezvous.address
        mine: Rendezvous = replace(rendezvous, rank=self.rank, address=address)
        return mine

    def _is_loss_of_store(self, error: CheckpointError) -> bool:
        """Return whether the store is gone, so that ``error`` cannot be reported to any rank now."""
        if self.rank == 0:
            return self._client is None or not self._client.alive
        return isinstance(error, (WorkerDiedError, SaveTimeoutError)) and error.rank == 0

    def _host(self, client: WorkerClient, port: int, address: str) -> Hosting:
        """Have the first rank's worker host the store that joins the ranks."""
        return client.call(self._config.start_timeout, SessionApi.host, port, address, self._secret)

    def _located(self, error: BaseException) -> CheckpointError:
        return located(error, rank=self.rank, otherwise=RankFailedError)


def _serve(client: WorkerClient, key: bytes, config: Config, rank: int) -> None:
    """Have the worker serve its images to workers of other hosts."""
    address = own_address(config.address)
    trouble = client.call(config.start_timeout, SessionApi.serve, key, address).trouble
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
    """Return, on the first rank, the answers for all ranks, and the packed answers for the other ranks.

    The garbage collector is off meanwhile, because thousands of ranks may have sent large values.
    """
    answers = decide([own, *map(unpack, others)])
    return answers, {rank: pack(answer) for rank, answer in enumerate(answers) if rank > 0}


def _answer(outcome: bytes | CheckpointError) -> Any:
    if isinstance(outcome, CheckpointError):
        raise outcome
    return unpack(outcome)


@dataclass(frozen=True)
class RankPlace:
    """The failure ``domain`` of a rank, and the size of a segment for copies of its images, in bytes."""

    domain: str
    nbytes: int


def copied_ranks(places: Sequence[RankPlace], replicas: int) -> list[tuple[CopiedRank, ...]]:
    """Assign the copies to the ranks. Return, for each rank, the source ranks of the images that it copies.

    Args:
        places: Places of the ranks, in the order of the ranks.
        replicas: Number of other hosts that keep a copy of each image.

    Raises:
        UnsavableStateError: There are too few other hosts.
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
