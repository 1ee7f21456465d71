"""Markdown tables, one for each kind of measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import sub
from statistics import median
from typing import Any

from tabulate import tabulate

from bench import costs
from bench.contestants import OURS, title
from bench.figures import (
    COPY_FILE,
    UPLOADS,
    LoopFigures,
    SaveFigures,
    SaveLimits,
    UnchangedFigures,
    copy_limit,
    load_figures,
    sooner_than_peers,
)
from bench.hosts import LINK
from bench.results import Result
from bench.unchanged import ALL_FULL, ALL_LINKED, COPY_CHANGING, DIGESTS, FULL, LINKED, WRITE_CHANGING


def seconds(value: float | None) -> str:
    """Format seconds with three digits, in a suitable unit."""
    if value is None:
        return ""
    if abs(value) >= 0.9995:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e3:.2f} ms"


def times(value: float | None) -> str:
    """Format a ratio."""
    return "" if value is None else f"{value:.2f}x" if abs(value) < 9.995 else f"{value:.0f}x"


def size(nbytes: float) -> str:
    """Format bytes in binary units."""
    for unit, of_it in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(nbytes) >= 0.9995 * of_it:
            return f"{nbytes / of_it:.3g} {unit}"
    return f"{nbytes / 1024:.0f} KiB"


def _table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    aligned = ("left", *("right" for _ in headers[1:]))
    return tabulate(list(rows), headers=headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def save(found: Result) -> str:
    limits = SaveLimits.of(found)
    rows: list[Sequence[object]] = [
        ("the limits", seconds(limits.copy), "1x", "", seconds(limits.durable), "1x", "", "")
    ]
    for name, values in found["limits"].items():
        rows.append((f"- {name}", seconds(median(values)), "", "", "", "", "", ""))
    for name, result in found["results"].items():
        each = SaveFigures.of(result, limits)
        first = seconds(each.first_blocked)
        cells = seconds(each.blocked), times(each.blocked_ratio), seconds(each.free)
        rows.append((title(name), *cells, seconds(each.durable), times(each.durable_ratio), first, each.saves))
    headers = ["", "blocked", "/ copy", "free after", "durable after", "/ (copy + write)", "first save blocks", "saves"]
    return _table(headers, rows)


def save_remark(found: Result) -> str:
    best = sooner_than_peers(found)
    return (
        "" if best is None else f"Durable {best[0]:.1f} times sooner than the best asynchronous peer, {title(best[1])}."
    )


def unchanged(found: Result) -> str:
    limits, image = found["limits"], found["nbytes"]
    copy = median(limits[COPY_CHANGING])
    empty = [""] * 9
    rows: list[Sequence[object]] = [
        ("copying all bytes once", seconds(copy_limit(found)), *empty),
        ("reading them with XXH3", seconds(median(limits[DIGESTS])), *empty),
        ("copying what changes", seconds(copy), *empty),
        ("and writing it", "", seconds(copy + median(limits[WRITE_CHANGING])), *empty[1:]),
    ]
    firsts: list[Sequence[object]] = []
    for name, result in found["results"].items():
        each, full = UnchangedFigures.of(result), found["results"].get(ALL_FULL if _all_changes(name) else FULL)
        slower = "" if full is None else times(each.durable / UnchangedFigures.of(full).durable)
        more = times(each.written / (image if _all_changes(name) else found["changing"]))
        cells = seconds(each.call), seconds(each.durable), slower, size(each.written), more, size(each.allocated)
        memory = size(each.memory), f"{each.memory / image:.2f}"
        rows.append(
            (title(name), *cells, *memory, f"{seconds(each.trainer_cpu)}, {seconds(each.worker_cpu)}", each.saves)
        )
        firsts.append((title(name), *map(_first, result["first"])))
    headers = ["", "call", "durable after", "/ all written", "written", "/ changing", "on disk", "memory", "images"]
    table = _table([*headers, "CPU of trainer, worker", "saves"], rows)
    numbers = range(1, 1 + max((len(row) - 1 for row in firsts), default=0))
    return f"{table}\n\n{_table(['call, durable, written', *(f'save {number}' for number in numbers)], firsts)}"


def _all_changes(name: str) -> bool:
    return name in (ALL_LINKED, ALL_FULL)


def _first(row: dict[str, float]) -> str:
    return f"{seconds(row['call_s'])}, {seconds(row['durable_s'])}, {size(row['written'])}"


def unchanged_remark(found: Result) -> str:
    each = {name: UnchangedFigures.of(result) for name, result in found["results"].items()}
    copy, said = copy_limit(found), []
    if LINKED in each and FULL in each:
        ours, full = each[LINKED], each[FULL]
        said.append(
            f"{ours.written / found['changing']:.2f} times the bytes that change are written, durable after "
            f"{ours.durable / full.durable:.3f} of the time of a full save. The call takes {ours.call / copy:.2f} "
            f"times a full copy, as a full save does ({full.call / copy:.2f})."
        )
    if ALL_LINKED in each and ALL_FULL in each:
        ours, full = each[ALL_LINKED], each[ALL_FULL]
        said.append(
            f"Where all changes, the call takes {ours.call / full.call:.2f} of the time that it takes where nothing is "
            f"linked, and it is durable after {ours.durable / full.durable:.2f}."
        )
    return " ".join(said)


def loop(found: Result) -> str:
    memcpy = copy_limit(found)
    rows: list[Sequence[str]] = [("copying the bytes once", seconds(memcpy), "", "", "1x", "")]
    for name, result in found["results"].items():
        each = LoopFigures.of(result, memcpy)
        spread = f"{seconds(each.low)} to {seconds(each.high)}"
        late = f"{each.pairs}, {each.late} late" if each.late else str(each.pairs)
        rows.append((title(name), seconds(each.cost), spread, f"{each.steps:.1f}", times(each.ratio), late))
    return _table(["", "a save costs the loop", "quartiles", "in steps", "/ copy", "pairs"], rows)


def store(found: Result) -> str:
    limits, uploads = SaveLimits.of(found), found["limits"]
    rows: list[Sequence[object]] = [("copying the bytes once", seconds(limits.copy), "1x", "", "", "", "")]
    for name in UPLOADS:
        middle = median(uploads[name])
        rows.append((f"{name} by obstore", "", "", seconds(middle), times(middle / limits.durable), "", ""))
    for name, result in found["results"].items():
        each = SaveFigures.of(result, limits)
        cells = seconds(each.blocked), times(each.blocked_ratio), seconds(each.durable), times(each.durable_ratio)
        rows.append((name, *cells, seconds(each.first_blocked), each.saves))
    saves = _table(["", "blocked", "/ copy", "durable after", "/ upload", "first save blocks", "saves"], rows)
    read = median(found["read_s"])
    rows = [("ranged read by obstore", seconds(read), "1x", "", len(found["read_s"]))]
    for name, result in found["loads"].items():
        middle = median(result["load_s"])
        rows.append(
            (name, seconds(middle), times(middle / read), seconds(result["first_load_s"]), len(result["load_s"]))
        )
    return f"{saves}\n\n{_table(['', 'load', '/ read', 'first load', 'loads'], rows)}"


def store_remark(found: Result) -> str:
    requests = found["requests"]
    kinds = ", ".join(f"{count} {name}" for name, count in requests["kinds"].items())
    share, image = requests["sent"] / requests["image"], size(requests["image"])
    counted = f"One save of {OURS} is {requests['count']} requests ({kinds}), with {share:.4f} of its image of {image}."
    best = sooner_than_peers(found, found["results"].keys() - {OURS})
    if best is None:
        return counted
    return f"Durable after {1 / best[0]:.2f} of the time of the fastest of the others, {best[1]}. {counted}"


def load(found: Result) -> str:
    def of_ranks(name: str) -> list[list[int]]:
        """Return the bytes that all ranks have read from storage; nothing for a load of one process."""
        its = found["results"].get(name, {})
        return [its["read_bytes"]] if "read_bytes" in its else []

    names = {"dcp-load": "DCP load", "torch-load": "torch.load, mmap"}
    rows = [
        (
            names.get(name, name),
            seconds(each.load),
            times(each.read_ratio),
            times(each.copy_ratio),
            seconds(each.first),
            *(times(median(nbytes) / found["state"]["bytes"]) for nbytes in of_ranks(name)),
        )
        for name, each in load_figures(found).items()
    ]
    heads = ["", "load", "/ (read + copy)", "/ copy", "first load"]
    return _table([*heads, "read / state"] if any(map(of_ranks, found["results"])) else heads, rows)


def scale(found: Result) -> str:
    """Return a table with a row for each point, and a column for each contestant."""
    points = found["points"]
    names = list(dict.fromkeys(name for point in points for name in point["results"]))
    rows = []
    for point in points:
        limits = SaveLimits.of(point)
        row = [f"{point['state']['tensors']:,} tensors, {size(point['state']['bytes'])}"]
        row.append(f"{seconds(limits.copy)}, {seconds(limits.durable)}")
        for name in names:
            if name not in point["results"]:
                row.append("")
                continue
            each = SaveFigures.of(point["results"][name], limits)
            row.append("" if each.blocked is None else f"{seconds(each.blocked)}, {seconds(each.durable)}")
        rows.append(row)
    return _table(["blocked, durable", "the limits", *map(title, names)], rows)


def cost(found: Result) -> str:
    limits = {name: median(each) for name, each in found["limits"].items()}
    floor = limits[costs.COPY] + limits[costs.WRITE]
    rows: list[Sequence[object]] = [(name, seconds(each), *[""] * 8) for name, each in limits.items()]
    for name, each in found["results"].items():
        cpu, saves = median(each["cpu_s"]), len(each["cpu_s"])
        ratios = times(cpu / floor), times(cpu / (floor + limits[costs.DIGESTS]))
        parts = (seconds(sum(each[key]) / saves) for key in ("user_s", "system_s"))
        counts = f"{median(each['faults']):,.0f}", f"{median(each['calls']):,.0f}", size(median(each["written"]))
        rows.append((title(name), seconds(cpu), *ratios, *parts, *counts, saves))
    both = "/ copy and write", "/ with a checksum"
    return _table(["", "CPU", *both, "user", "system", "page faults", "calls", "written", "saves"], rows)


def memory(found: Result) -> str:
    rows = []
    for name, each in found["results"].items():
        peak, steady = each["peak"], each["steady"]
        others = f"{size(steady['others'])} in {steady['processes']}" if steady["processes"] else "none"
        cells = size(peak["total"]), size(steady["total"]), size(steady["trainer"]), others, size(steady["shared"])
        rows.append((title(name), *cells, size(each["page_cache"]) if each["page_cache"] else "0"))
    headers = ["", "peak", "steady", "of it the trainer", "other processes", "shared memory", "page cache left"]
    return _table(headers, rows)


def ways(found: Result) -> str:
    copy = copy_limit(found)
    rows: list[Sequence[object]] = [("copying the bytes once", seconds(copy), "1x", "", "")]
    for name, each in found["results"].items():
        middle = median(each["elapsed_s"])
        cells = seconds(middle), times(middle / copy), seconds(each["first_s"]), len(each["elapsed_s"])
        rows.append((title(name), *cells))
    return _table(["", "takes", "/ copy", "the first time", "turns"], rows)


def hosts(found: Result) -> str:
    (limit,) = found["limits"][LINK]
    rows: list[Sequence[object]] = [(LINK, seconds(limit), "1x", "")]
    for name, each in found["results"].items():
        middle = median(each["elapsed_s"])
        rows.append((name, seconds(middle), times(middle / limit), len(each["elapsed_s"])))
    return _table(["", "all have it after", "/ the link", "turns"], rows)


def sparse(found: Result) -> str:
    (limit,) = found["limits"][LINK]
    rows: list[Sequence[object]] = [(LINK, seconds(limit), "1x", size(found["nbytes"]), "")]
    for name, each in found["results"].items():
        middle, sent = median(each["elapsed_s"]), found["sent"][name]
        rows.append((name, seconds(middle), times(middle / limit), size(sent), len(each["elapsed_s"])))
    return _table(["", "all have it after", "/ the link", "sent by the publisher", "turns"], rows)


def hosts_remark(found: Result) -> str:
    sent = " and ".join(f"{nbytes / found['nbytes']:.2f} with {many}" for many, nbytes in found["sent"].items())
    return f"How often the publisher's link has carried the bytes of a version: {sent}."


def columns(found: Result) -> str:
    """Return a transposed table: a column for each number of ranks."""
    rows = found["rows"]
    keys = list(rows[0])
    shown = [[key, *(f"{row[key]:,.4g}" for row in rows)] for key in keys[1:]]
    return _table([keys[0], *(f"{row[keys[0]]:,}" for row in rows)], shown)


def export(found: Result) -> str:
    limit = median(found["limits"][COPY_FILE])
    rows: list[Sequence[object]] = [(COPY_FILE, seconds(limit), "1x", "1x", len(found["limits"][COPY_FILE]))]
    for name, result in found["results"].items():
        middle = median(result["export_s"])
        rows.append((name, seconds(middle), times(middle / limit), times(limit / middle), len(result["export_s"])))
    return _table(["", "export", "/ limit", "of its speed", "exports"], rows)


def telemetry(found: Result) -> str:
    (nobody, plain), *others = found["results"].items()
    call = median(plain["call_s"])
    rows: list[Sequence[object]] = [(nobody, seconds(call), "", "", seconds(median(plain["cpu_s"])), "", "")]
    for name, each in others:
        cells: list[str] = []
        for key in ("call_s", "cpu_s"):
            more = median(map(sub, each[key], plain[key]))
            cells += [seconds(median(each[key])), seconds(more), f"{more / call:.2%}"]
        rows.append((name, *cells))
    headers = ["", "the call", "longer by", "of the call", "its thread computes", "more by", "of the call"]
    return _table(headers, rows)


def telemetry_remark(found: Result) -> str:
    each = ", ".join(f"{name} {value * 1e6:.0f} us" for name, value in found["adapters"].items())
    return f"On threads of their own the adapters have computed, for a save: {each}."


def frameworks(found: Result) -> str:
    copy = copy_limit(found)
    write = copy + median(found["limits"]["direct write"][1:])
    rows: list[Sequence[object]] = [("the limits", seconds(copy), "1x", "", "", seconds(write), "1x", "", "")]
    for name, turns in found["results"].items():
        blocked, lost, durable, step = (
            median(each[key] for each in turns[1:]) for key in ("blocked", "lost", "durable", "step")
        )
        cells = seconds(blocked), times(blocked / copy), seconds(lost), times(lost / copy)
        rows.append((name, *cells, seconds(durable), times(durable / write), seconds(step), len(turns) - 1))
    headers = ["", "blocked", "/ copy", "lost", "/ copy", "durable after", "/ (copy + write)", "a step", "turns"]
    return _table(headers, rows)


def vllm(found: Result) -> str:
    copies = found["limits"]["one copy"]
    copy = median(copies)
    rows: list[Sequence[object]] = [("one copy", seconds(copy), "1x", "", "", len(copies))]
    for name, each in found["results"].items():
        held = median(each["held_s"])
        both = median([sum(pair) for pair in zip(each["held_s"], each["update_s"], strict=True)])
        cells = seconds(held), times(held / copy), seconds(median(each["update_s"])), seconds(both), len(each["held_s"])
        rows.append((title(name), *cells))
    return _table(["", "held", "/ copy", "update", "both", "turns"], rows)


TABLES = {
    "save": save,
    "unchanged": unchanged,
    "loop": loop,
    "load": load,
    "store": store,
    "export": export,
    "telemetry": telemetry,
    "frameworks": frameworks,
    "scale": scale,
    "cost": cost,
    "memory": memory,
    "ranks": columns,
    "simulation": columns,
    "publish": ways,
    "hosts": hosts,
    "sparse": sparse,
    "vllm": vllm,
}
REMARKS = {
    "save": save_remark,
    "unchanged": unchanged_remark,
    "store": store_remark,
    "telemetry": telemetry_remark,
    "hosts": hosts_remark,
}
