"""Check all states that a weak file system may leave after a crash, from the recorded calls of one training.

The promises hold in each state, and a training resumes from it. ``crash_disk.py`` defines the possible states. Naive
savers, and real savers on a disk that ignores fsyncs, show that the judge finds broken promises.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import random
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
from tqdm import tqdm

from asyncckpt.engine.shared import shared
from asyncckpt.errors import CheckpointError
from asyncckpt.loading.source import verify
from torture.crash_disk import Data, Disk, Kept, Leaf, Point, Tree, digest_of, ends_of_syncs
from torture.promises import go_on, judge
from torture.recorded_calls import Recording, has_compiler, record
from torture.scenarios import SCENARIOS, Files, Saver, Scenario, state_of
from torture.tally import Tally

# Resume from one state in this number, and from each state with new names, within a limit.
_GO_ON = 40
# Judge all states of a crash if there are at most this many.
_ALL = 512
# Leave a crash after this number of random states in a row without a new one.
_VAIN = 60
# To find a missing fsync, judge this number of states, from this number of crashes after the fsync.
_FEW, _SOON = 150, 25
_SHOWN = 3
_STEPS = 5
_FINAL = re.compile(r"(?:.*/)?(?:step-\d{8}|global_\d+|latest)")
_MEMORY = Path("/dev/shm")


class _Naive(Files):
    """Replace a file by a rename, as many programs do, with one fsync too few."""

    def __init__(self, name: str, *, syncs_file: bool, syncs_folder: bool) -> None:
        self.name = name
        self._syncs_file, self._syncs_folder = syncs_file, syncs_folder

    @contextlib.contextmanager
    def saving(self, root: Path, rank: int = 0) -> Iterator[Saver]:
        def save(step: int) -> None:
            new = root / "model.new"
            with new.open("wb") as file:
                torch.save(state_of(step, rank), file)
                file.flush()
                if self._syncs_file:
                    os.fsync(file.fileno())
            new.replace(root / "model.pt")
            if self._syncs_folder:
                folder = os.open(root, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)

        yield save


NAIVE = (
    _Naive("no fsync of the file", syncs_file=False, syncs_folder=True),
    _Naive("no fsync of the folder", syncs_file=True, syncs_folder=False),
)
SOUND = _Naive("both fsyncs", syncs_file=True, syncs_folder=True)


def crash_states(
    tally: Tally, folder: Path, most: int, choice: random.Random, scenarios: Sequence[Scenario] = SCENARIOS
) -> None:
    """Judge up to ``most`` states of each scenario."""
    if not has_compiler():
        tally.counts["no compiler: no calls recorded"] += 1
        return
    place = _MEMORY if _MEMORY.is_dir() else folder
    with _quiet(), tempfile.TemporaryDirectory(dir=place, prefix="asyncckpt-crashes-") as name:
        for naive in NAIVE:
            with _recorded(Path(name), naive, 3) as recorded:
                _must_break(tally, recorded, choice, syncs=True)
        for scenario in (SOUND, *scenarios):
            with _recorded(Path(name), scenario, 3 if scenario is SOUND else _STEPS) as recorded:
                _must_break(tally, recorded, choice, syncs=False)
                _count_needed(tally, recorded, choice)
                _must_hold(tally, recorded, most, choice)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence stock DCP, which logs at length to the root logger about each checkpoint that it cannot read."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    finally:
        logging.disable(logging.NOTSET)


@dataclass
class _Recorded:
    """A recorded scenario, and the folder of its states, which is also the folder of the recording."""

    scenario: Scenario
    recording: Recording
    root: Path
    store: Path
    """Holds the bytes of each file once, by digest."""
    digests: dict[tuple[int, tuple[int, int], Data], bytes] = field(default_factory=dict)
    verified: dict[bytes, list[str]] = field(default_factory=dict)

    def digest(self, disk: Disk, leaf: Leaf) -> bytes:
        """Return the digest of a file's bytes, and put the bytes into the store."""
        key = leaf.number, leaf.versions, leaf.data
        if (found := self.digests.get(key)) is None:
            content = disk.bytes_of(leaf)
            found = self.digests[key] = hashlib.blake2b(content, digest_size=16).digest()
            if not (path := self.store / found.hex()).exists():
                path.write_bytes(content)
        return found

    def damages(self, disk: Disk, tree: Tree) -> list[str]:
        """Return the damages that ``verify`` finds in final checkpoints. Only ``verify`` reads the indexes."""
        broken = []
        for name in filter(_FINAL.fullmatch, tree):
            within = {path: leaf for path, leaf in tree.items() if path.startswith(f"{name}/")}
            key = digest_of(within, lambda leaf: self.digest(disk, leaf))
            if key not in self.verified:
                try:
                    self.verified[key] = [str(damage) for damage in verify(str(self.root / name)).damages]
                except CheckpointError as error:
                    self.verified[key] = [f"{name} has its final name: {error}"]
            broken += self.verified[key]
        return broken

    def build(self, disk: Disk, tree: Tree, *, to_read: bool) -> None:
        """Build a state. ``to_read``: the state is only read, so files are linked from the store."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        first: dict[int, Path] = {}
        for name, leaf in tree.items():
            path = self.root / name
            if leaf.kind == "d":
                path.mkdir()
            elif leaf.kind == "l":
                path.symlink_to(self.recording.targets[leaf.number])
            elif to_read:
                path.hardlink_to(self.store / self.digest(disk, leaf).hex())
            elif leaf.number in first:
                path.hardlink_to(first[leaf.number])
            else:
                shutil.copyfile(self.store / self.digest(disk, leaf).hex(), path)
                first[leaf.number] = path


@contextlib.contextmanager
def _recorded(folder: Path, scenario: Scenario, steps: int) -> Iterator[_Recorded]:
    """Record a scenario. Raises ``RuntimeError`` if a replay of the calls does not give the recorded folder."""
    root, store = folder / "root", folder / "store"
    store.mkdir()
    try:
        recorded = _Recorded(scenario, record(folder, root, scenario, steps), root, store)
        there = _contents(root)
        disk = Disk(recorded.recording)
        point = disk.point(len(recorded.recording.events))
        recorded.build(disk, disk.tree(point, frozenset(point.loose), lambda _: "new"), to_read=False)
        if there != (replayed := _contents(root)):
            wrong = {path for path in {*there, *replayed} if there.get(path) != replayed.get(path)}
            raise RuntimeError(f"{scenario.name}: the recorded calls lead to other files: {sorted(wrong)}")
        yield recorded
    finally:
        for path in (root, store):
            shutil.rmtree(path, ignore_errors=True)


def _contents(root: Path) -> dict[str, object]:
    """Return the bytes or target of each path, and the first of its hard links."""
    found: dict[str, object] = {}
    first: dict[int, Path] = {}
    for path in sorted(root.rglob("*")):
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        links = None if path.is_dir() else first.setdefault(path.lstat().st_ino, path)
        found[str(path.relative_to(root))] = links, content
    return found


@dataclass(frozen=True)
class _Plan:
    """A choice among the states of a crash: the surviving events, and the surviving bytes of each file."""

    kept: Kept
    data: Data = "new"
    but: tuple[tuple[int, Data], ...] = ()

    def data_of(self, file: int) -> Data:
        for number, data in self.but:
            if number == file:
                return data
        return self.data + file if isinstance(self.data, int) else self.data


@dataclass(frozen=True)
class _State:
    point: Point
    plan: _Plan
    tree: Tree
    digest: bytes


_Look: TypeAlias = Callable[[_Recorded, Disk, _State], list[str]]
"""Return the broken promises of a state."""


def _must_break(tally: Tally, recorded: _Recorded, choice: random.Random, *, syncs: bool) -> None:
    """Check that the judge finds a broken promise. An fsync is missing, or the disk ignores all fsyncs."""
    name = recorded.scenario.name + ("" if syncs else ", no fsync does anything")
    disk = Disk(recorded.recording, () if syncs else ends_of_syncs(recorded.recording))
    for count, state in enumerate(_states(recorded, disk, choice), 1):
        if count > 2000:
            break
        if broken := _judge(recorded, disk, state):
            tally.counts[f"crash states: {name}: broken, as it must be"] += 1
            tqdm.write(f"{name}: state {count}: {_blame(recorded, disk, state, _judge)}: {broken[0]}")
            return
    tally.lose(f"crash states: {name}: no broken promise was found, so this judge finds nothing")


def _count_needed(tally: Tally, recorded: _Recorded, choice: random.Random) -> None:
    """Count the fsyncs that the judge proves necessary, by removing each one. A higher count means a better judge."""
    ends = ends_of_syncs(recorded.recording)
    for end in tqdm(ends, desc=f"{recorded.scenario.name}: fsyncs", unit="fsync", disable=None):
        disk = Disk(recorded.recording, {end})
        soon = [point for point in disk.points() if point.crash > end][:_SOON]
        states = itertools.islice(_states(recorded, disk, choice, soon), _FEW)
        is_needed = any(_judge(recorded, disk, state) for state in states)
        tally.counts[f"crash states: {recorded.scenario.name}: fsyncs whose loss is found"] += is_needed
    tally.counts[f"crash states: {recorded.scenario.name}: fsyncs"] += len(ends)


def _must_hold(tally: Tally, recorded: _Recorded, most: int, choice: random.Random) -> None:
    scenario, disk = recorded.scenario, Disk(recorded.recording)
    begun, lost, gone_on, forms = time.monotonic(), 0, 0, set[frozenset[str]]()
    went_on_s = 0.0
    states = itertools.islice(_states(recorded, disk, choice), most)
    count = 0
    for count, state in enumerate(tqdm(states, desc=scenario.name, unit="state", total=most, disable=None), 1):
        look = _judge
        broken = look(recorded, disk, state)
        if (form := _form(state.tree)) not in forms or count % _GO_ON == 0:
            forms.add(form)
            if not broken and gone_on * _GO_ON <= count * 2:
                at = time.monotonic()
                broken = _gone_on(recorded, disk, state)
                look = _gone_on
                gone_on += 1
                went_on_s += time.monotonic() - at
        lost += bool(broken)
        if broken and lost <= _SHOWN:
            tally.lose(f"crash states: {scenario.name}: {_blame(recorded, disk, state, look)}: {broken[0]}")
    if lost > _SHOWN:
        tally.lose(f"crash states: {scenario.name}: {lost} states in all have broken promises")
    took = time.monotonic() - begun - went_on_s
    tally.counts[f"crash states: {scenario.name}"] += count
    tally.counts[f"crash states: {scenario.name}: gone on from"] += gone_on
    tally.counts[f"crash states: {scenario.name}: crashes"] += len(disk.points())
    tally.counts[f"crash states: {scenario.name}: states a second"] = round(count / took)


def _gone_on(recorded: _Recorded, disk: Disk, state: _State) -> list[str]:
    """Resume a training from a state. Return the broken promises."""
    recorded.build(disk, state.tree, to_read=False)
    try:
        return [f"when going on: {each}" for each in go_on(recorded.scenario, recorded.root, state.point.begun)]
    except Exception as error:
        return [f"when going on: {type(error).__name__}: {error}"]
    finally:
        shared.close()  # the engine that saves of single files share


def _judge(recorded: _Recorded, disk: Disk, state: _State) -> list[str]:
    recorded.build(disk, state.tree, to_read=True)
    broken = judge(recorded.scenario, recorded.root, state.point.begun, state.point.done)
    return broken or recorded.damages(disk, state.tree)


def _form(tree: Tree) -> frozenset[str]:
    """Return the names near the top of the folder, without their random parts."""
    return frozenset(re.sub(r"[0-9a-f]{12}", "*", path) for path in tree if path.count("/") < 3)


def _states(
    recorded: _Recorded, disk: Disk, choice: random.Random, points: Sequence[Point] | None = None
) -> Iterator[_State]:
    """Yield different states from the crashes ``points`` in turn. ``points`` defaults to all crashes."""
    seen: set[tuple[bytes, int, int]] = set()

    def contents(leaf: Leaf) -> bytes:
        return recorded.digest(disk, leaf)

    def new_states(point: Point) -> Iterator[_State]:
        vain = 0
        for is_random, plan in _plans(disk, point, choice):
            tree = disk.tree(point, plan.kept, plan.data_of)
            key = digest_of(tree, contents), point.begun, point.done
            if key not in seen:
                seen.add(key)
                vain = 0
                yield _State(point, plan, tree, key[0])
            elif is_random and (vain := vain + 1) > _VAIN:
                return

    left = [new_states(point) for point in (disk.points() if points is None else points)]
    while left:
        for states in [*left]:
            if (state := next(states, None)) is None:
                left.remove(states)
            else:
                yield state


def _plans(disk: Disk, point: Point, choice: random.Random) -> Iterator[tuple[bool, _Plan]]:
    """Yield choices, the most telling ones first, and whether each choice is random."""
    every, none = frozenset(point.loose), frozenset[int]()

    def closed(events: Sequence[int]) -> Kept:
        return frozenset(disk.with_needs(events)) & every

    def seed() -> int:
        return choice.randrange(1 << 60)

    def dirty(kept: Kept) -> list[int]:
        leaves = disk.tree(point, kept, lambda _: "old").values()
        return sorted({leaf.number for leaf in leaves if leaf.kind == "f" and leaf.data == "old"})

    for kept in (every, none):
        for data in ("new", "old", "size"):
            yield False, _Plan(kept, data)
    for file in dirty(every):
        for its in ("old", "size", seed()):
            yield False, _Plan(every, "new", ((file, its),))
    if 2 ** len(point.loose) <= _ALL:
        subsets = [
            closed(chosen) for count in range(len(point.loose) + 1) for chosen in itertools.combinations(every, count)
        ]
        subsets = list(dict.fromkeys(subsets))
        choice.shuffle(subsets)
        for kept in subsets:
            files = dirty(kept)
            if len(subsets) * 3 ** len(files) <= _ALL:
                for of_each in itertools.product(("new", "old", "size"), repeat=len(files)):
                    yield False, _Plan(kept, "new", tuple(zip(files, of_each, strict=True)))
            else:
                yield from ((False, _Plan(kept, data)) for data in ("new", "old", "size"))
    else:
        prefixes = [point.loose[:count] for count in range(len(point.loose))]
        keeps = [[at] for at in point.loose]
        drops = [[other for other in point.loose if at not in disk.with_needs([other])] for at in point.loose]
        for chosen in choice.sample(all_ := prefixes + keeps + drops, len(all_)):
            yield False, _Plan(closed(chosen), "new")
            yield False, _Plan(closed(chosen), seed())
    while True:
        share = choice.choice((0.1, 0.5, 0.9))
        kept = closed([at for at in point.loose if choice.random() < share])
        yield True, _Plan(kept, choice.choice(("new", "old", "size", seed(), seed())))


def _blame(recorded: _Recorded, disk: Disk, state: _State, look: _Look) -> str:
    """Describe the smallest loss that breaks a promise: restore other losses as long as the promise stays broken."""
    point, plan = state.point, state.plan

    def is_broken(plan: _Plan) -> bool:
        tree = disk.tree(point, plan.kept, plan.data_of)
        return bool(look(recorded, disk, replace(state, plan=plan, tree=tree)))

    plan = replace(
        plan, data="new", but=tuple((leaf.number, leaf.data) for leaf in state.tree.values() if leaf.data != "new")
    )
    for file, _ in plan.but:
        less = replace(plan, but=tuple(each for each in plan.but if each[0] != file))
        plan = less if is_broken(less) else plan
    for at in point.loose:
        if at not in plan.kept:
            more = replace(plan, kept=plan.kept | (frozenset(disk.with_needs([at])) & frozenset(point.loose)))
            plan = more if is_broken(more) else plan
    names = {leaf.number: path for path, leaf in disk.tree(point, plan.kept, plan.data_of).items()}
    lost = [disk.text(at) for at in point.loose if at not in plan.kept]
    lost += [f"bytes of {names.get(file, file)} ({data})" for file, data in plan.but]
    return f"crash before event {point.crash}, step {point.begun} begun, {point.done} done, lost: {'; '.join(lost)}"
