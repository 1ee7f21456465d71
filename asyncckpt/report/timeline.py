"""``asyncckpt timeline``: the phases of each rank in each save, as a trace for Perfetto or ``chrome://tracing``.

The format is Chrome's trace events: a process is a rank, a thread is a lane of the rank. Events of one lane do not
overlap, unless one is within the other. All times come from the hosts' clocks, which may differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncckpt.errors import StorageError
from asyncckpt.format.manifest import CALLED_AT, Manifest
from asyncckpt.report.answers import UNUSABLE, Answers, manifests_at, number

_LANES = ("trainer", "copy", "write", "checksum", "commit")
"""The lanes of a rank, in order.

The trainer during the call; the copy, if it goes on after the call (``overlap``); the worker's threads that write; its
threads that compute checksums meanwhile; the commit, from the end of this rank's write.
"""

# Maximum difference of the two clocks, in seconds: a copy that ends this long after the call still belongs to the call.
_CLOCKS_S = 1e-3
_RANK = re.compile(r"__(\d+)_\d+\.index\.json")


class LaneSpan(NamedTuple):
    """A phase of a rank on a lane, in seconds since the epoch, and the phases within it."""

    name: str
    lane: str
    begin: float
    end: float
    args: Mapping[str, Any]
    within: Sequence[LaneSpan] = ()


def spans_of(path: str, manifest: Manifest) -> dict[int, list[LaneSpan]]:
    """Return the phases of the save at ``path``, by rank. Ranks without a time of the call are left out."""
    nbytes: Counter[int] = Counter()  # of large files; the rank of a small file is not recorded
    for facts in manifest.files.values():
        if (match := _RANK.fullmatch(facts.get("index", ""))) is not None:
            nbytes[int(match[1])] += facts["bytes"]
    found = {}
    for rank in range(manifest.world_size):
        timings = {name: value for name, each in manifest.timings.items() if (value := each[rank]) is not None}
        args = {"step": manifest.step, "rank": rank, "bytes_of_own_files": nbytes.get(rank), "path": path}
        if CALLED_AT in timings and (spans := _spans(timings, manifest.created, args)):
            found[rank] = spans
    return found


def _spans(timings: Mapping[str, float], created: float, args: Mapping[str, Any]) -> list[LaneSpan]:
    called = timings[CALLED_AT]

    def span(phase: str, lane: str, begin_s: float | None = None, name: str | None = None) -> list[LaneSpan]:
        """Return the span of a phase, or nothing if the timings lack it."""
        begin = timings.get(f"{phase}_from_s", begin_s)
        if f"{phase}_s" not in timings or begin is None:
            return []
        return [LaneSpan(name or phase, lane, called + begin, called + begin + timings[f"{phase}_s"], args)]

    inside = [*span("plan", "trainer", 0.0), *span("slot", "trainer", timings.get("plan_s"), "wait for a slot")]
    copy, spans = span("copy", "copy"), []
    if "stall_s" in timings:
        end = called + timings["stall_s"]
        if copy and copy[0].end <= end + _CLOCKS_S:
            inside, copy = inside + copy, []
        name = "save" if args["step"] is None else f"save {args['step']}"
        spans = [LaneSpan(name, "trainer", called, end, args, _kept_within(inside, called, end))]
    spans += copy
    for write in span("write", "write"):
        spans.append(write._replace(within=_kept_within(span("sync", "write"), write.begin, write.end)))
        spans += _kept_within(span("checksum", "checksum"), write.begin, write.end)
        if created > write.end:
            what = "from when this rank had written until the manifest was made; the rename comes after that"
            spans.append(LaneSpan("commit", "commit", write.end, created, {**args, "what": what}))
    return spans


def _kept_within(spans: Iterable[LaneSpan], begin: float, end: float) -> list[LaneSpan]:
    """Return the spans, fitted one after the other between ``begin`` and ``end``, because two clocks measured them."""
    found = []
    for each in spans:
        begin = min(max(each.begin, begin), end)
        last = min(max(each.end, begin), end)
        found.append(each._replace(begin=begin, end=last))
        begin = last
    return found


def trace(saves: Iterable[Mapping[int, Sequence[LaneSpan]]]) -> dict[str, Any]:
    """Return the trace as Chrome's JSON. Its times are relative to the first event."""
    of_ranks: dict[int, list[LaneSpan]] = {}
    for save in saves:
        for rank, spans in save.items():
            of_ranks.setdefault(rank, []).extend(spans)
    first = min((span.begin for spans in of_ranks.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []

    def name(kind: str, rank: int, thread: int, **args: object) -> None:
        events.append({"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": args})

    for rank, its in sorted(of_ranks.items()):
        name("process_name", rank, 0, name=f"rank {rank}")
        name("process_sort_index", rank, 0, sort_index=rank)
        for lane, spans in _lanes_of(its):
            thread = len(events)
            name("thread_name", rank, thread, name=lane)
            name("thread_sort_index", rank, thread, sort_index=thread)
            for each in (one for span in spans for one in (span, *span.within)):
                begin, end = (round((at - first) * 1e6) for at in (each.begin, each.end))
                about = {"name": each.name, "cat": each.lane, "ph": "X", "ts": begin, "dur": end - begin}
                events.append(about | {"pid": rank, "tid": thread, "args": dict(each.args)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begins_at_s": first}}


def _lanes_of(spans: Iterable[LaneSpan]) -> list[tuple[str, list[LaneSpan]]]:
    """Return the lanes of a rank by name, each with spans that do not overlap.

    Overlapping spans get another lane of that name: those of two jobs, or of a save that is committed while the next
    save is.
    """
    lanes: list[tuple[str, list[LaneSpan]]] = []
    for lane in _LANES:
        found: list[list[LaneSpan]] = []
        for span in sorted((each for each in spans if each.lane == lane), key=lambda each: each.begin):
            free = next((row for row in found if row[-1].end <= span.begin), None)
            if free is None:
                found.append([span])
            else:
                free.append(span)
        lanes += [(lane if not more else f"{lane} {more + 1}", row) for more, row in enumerate(found)]
    return lanes


def show_timeline(answers: Answers, _: None, args: argparse.Namespace) -> None:
    """Write the trace of all saves at ``args.places`` to ``args.out``, or to stdout."""
    if args.out is None and sys.stdout.isatty():
        answers.say("the trace is long, and no text: name a file for it (-o trace.json), or pipe it")
        answers.fail(UNUSABLE)
        return
    saves = []
    for given in args.places:
        for path, manifest in manifests_at(answers, given):
            if its := spans_of(path, manifest):
                saves.append(its)
            else:
                answers.say(f"{path}: it does not say when it was saved, and is left out")
    if not saves:
        answers.say("there is no save to show")
        answers.fail(UNUSABLE)
        return
    text = json.dumps(trace(saves), allow_nan=False)
    if args.out is None:
        answers.print(text)
        return
    with answers.about(args.out):
        try:
            with open(args.out, "w") as file:
                file.write(text)
        except OSError as error:
            raise StorageError(f"writing failed: {error.strerror}", path=args.out) from error
        shown = f"{number(len(saves), 'save')} of {number(max(map(len, saves)), 'rank')}"
        answers.print(f"{args.out}: {shown}; ui.perfetto.dev opens it")
