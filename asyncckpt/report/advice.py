"""``asyncckpt advise``: suggest how often to save, from the cost of the saves in a root, and show the arithmetic."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from asyncckpt.errors import CheckpointError, CheckpointNotFoundError
from asyncckpt.format.manifest import Manifest
from asyncckpt.interval import Advice, Loss, parse_duration
from asyncckpt.report.answers import Answers, duration, manifests_at, number
from asyncckpt.report.listing import Measured

# Number of newest saves for the present interval: older saves may have been removed, and some of them kept.
_NEWEST = 3


@dataclass(frozen=True)
class SavesOfRoot:
    """Measurements in the manifests of a root, in the order of the calls.

    ``costs``, ``lags``: of each save, without waits for a free slot, because these are an effect of saving too often.
    ``interval_s``: from call to call. ``step_s``: duration of a training step, saves included. Both are None if
    unknown, as with one save.
    """

    costs: Sequence[float]
    lags: Sequence[float]
    left_out: int
    interval_s: float | None
    step_s: float | None

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> SavesOfRoot:
        """Return the measurements of manifests, in any order. Manifests without a duration are ignored."""
        found = [(its, manifest) for manifest in manifests if (its := Measured.of(manifest)).called_at is not None]
        found = [each for each in found if each[0].cost_s is not None]
        found.sort(key=lambda each: each[0].called_at or 0.0)
        begins = _begins([manifest for _, manifest in found])
        kept = [its for (its, _), is_first in zip(found, begins, strict=True) if not is_first] or [
            its for its, _ in found
        ]
        calls = [(its.called_at or 0.0, manifest.step) for its, manifest in found]
        pairs = [pair for pair, is_first in zip(pairwise(calls), begins[1:], strict=True) if not is_first]
        gaps = [after - before for (before, _), (after, _) in pairs if after > before]
        paces = [
            (after - before) / (step - last)
            for (before, last), (after, step) in pairs
            if last is not None and step is not None and step > last and after > before
        ]
        return cls(
            costs=[its.cost_s or 0.0 for its in kept],
            lags=[its.lag_s or 0.0 for its in kept],
            left_out=len(found) - len(kept),
            interval_s=median(gaps[-_NEWEST:]) if gaps else None,
            step_s=median(paces) if paces else None,
        )


def _begins(manifests: Sequence[Manifest]) -> list[bool]:
    """Return, for saves in the order of their calls, whether each is the first save of a run, the one that plans.

    A run counts its saves from 1 on (``prepare`` counts, too), in the name of the attempt. The first save may have been
    removed since.
    """
    ends = [manifest.attempt.rpartition("-")[2] for manifest in manifests]
    numbers = [int(end) if end.isdecimal() else 0 for end in ends]
    return [after <= before for before, after in pairwise([2, *numbers])]


def advise(answers: Answers, given: str, args: argparse.Namespace) -> None:
    """Report how often to save to the root ``given``."""
    manifests = [manifest for _, manifest in manifests_at(answers, given)]
    with answers.about(given):
        if not manifests:
            if answers.status:
                return  # this has been reported
            raise CheckpointNotFoundError("there is no checkpoint here yet", path=given)
        saves = SavesOfRoot.of(manifests)
        if not saves.costs:
            raise CheckpointError("none of these checkpoints says how long it took", path=given)
        medians = median(saves.costs), median(saves.lags)
        try:
            restart = None if args.restart is None else parse_duration(args.restart)
            advice = Advice(*medians, parse_duration(args.mtbf), len(saves.costs), restart)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        answers.add({"path": given, **_facts(advice, saves)})
        for line in _lines(given, advice, saves):
            answers.line(line)


def _facts(advice: Advice, saves: SavesOfRoot) -> dict[str, Any]:
    """Return the advice as JSON data, in seconds."""
    facts: dict[str, Any] = {**vars(advice), "saves_left_out": saves.left_out}
    facts |= {"young_s": advice.young_s, "daly_s": advice.daly_s, "interval_s": advice.interval_s}
    facts |= {"bound_by_storage": advice.is_bound_by_storage, "step_s": saves.step_s}
    now = None if saves.interval_s is None else _loss_facts(advice.loss(saves.interval_s), saves)
    return facts | {"now": now, "suggested": _loss_facts(advice.loss(advice.interval_s), saves)}


def _loss_facts(loss: Loss, saves: SavesOfRoot) -> dict[str, Any]:
    return {**vars(loss), "part": loss.part, "steps": _steps(loss.interval_s, saves)}


def _lines(given: str, advice: Advice, saves: SavesOfRoot) -> list[str]:
    """Return the advice as text lines."""
    left_out = f"; {number(saves.left_out, 'first save')} of a run left out, as that plans" if saves.left_out else ""
    restart = "not given (--restart 2m), and left out" if advice.restart_s is None else duration(advice.restart_s)
    cost, mtbf = f"{advice.stall_s:.4g}", f"{advice.mtbf_s:.6g}"
    x = (advice.stall_s / (2 * advice.mtbf_s)) ** 0.5
    lines = [
        f"{given}: from {number(advice.saves, 'save')}{left_out}",
        f"  C, what a save keeps the training for (median of the slowest ranks): {duration(advice.stall_s)}",
        f"  L, until it is durable (median): {duration(advice.durable_s)}",
        "  (both without what a save waits for a free slot, which is no cost of it, but of saving too often)",
        f"  M, mean time between failures, as given: {duration(advice.mtbf_s)}",
        f"  R, a restart: {restart}",
        "",
        f"Young (1974): sqrt(2 C M) = sqrt(2 x {cost} x {mtbf}) s = {duration(advice.young_s)}",
        f"Daly (2006): sqrt(2 C M) (1 + x/3 + x^2/9), x = sqrt(C / 2M) = {x:.3g}: {duration(advice.daly_s)}",
    ]
    suggested = f"Suggested: a save every {_every(advice.interval_s, saves)}"
    if advice.is_bound_by_storage:
        suggested += ", which is L: more often storage might not take them"
    lines.append(suggested)
    if saves.interval_s is None:
        lines.append("How often it saves now cannot be told from these.")
    else:
        lines += ["", *_arithmetic("now, by the newest saves", advice, advice.loss(saves.interval_s), saves)]
    return [*lines, "", *_arithmetic("suggested", advice, advice.loss(advice.interval_s), saves)]


def _arithmetic(name: str, advice: Advice, loss: Loss, saves: SavesOfRoot) -> list[str]:
    """Return the loss with an interval T, as text lines."""
    interval, restart = f"{loss.interval_s:.4g}", "" if advice.restart_s is None else f" + {advice.restart_s:.4g}"
    sums, failure = f"{interval} / 2 + {advice.durable_s:.3g}{restart}", duration(loss.per_failure_s)
    parts = f"{advice.stall_s:.4g} / {interval} + {loss.per_failure_s:.4g} / {advice.mtbf_s:.6g}"
    no_progress = ["  So the training gets nowhere: more is lost than there is."] if loss.part >= 1 else []
    return [
        f"{name}, T = {_every(loss.interval_s, saves)}:",
        f"  lost by a failure: T / 2 + L{' + R' if restart else ''} = {sums} s = {failure}",
        f"  lost of all time: C / T + lost / M = {parts}"
        f" = {loss.save_part:.2%} + {loss.failure_part:.2%} = {loss.part:.2%}",
        *no_progress,
    ]


def _steps(seconds: float, saves: SavesOfRoot) -> int | None:
    return None if saves.step_s is None else max(1, round(seconds / saves.step_s))


def _every(seconds: float, saves: SavesOfRoot) -> str:
    steps = _steps(seconds, saves)
    return duration(seconds) + ("" if steps is None else f" ({number(steps, 'step')})")
