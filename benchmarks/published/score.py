"""What predictions are worth, by source: errors, order, regret, memory and the curve over device counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

from benchmarks.published import rows as published
from benchmarks.published.rows import Row

# What the published comparison prints for Calculon on these sources (shared/published/README.md).
CALCULON = {"megatron-2020": "14.5 % mean (8 rows)", "vtrain-single": "38.9 % mean, mean regret 10.0 % (all 1,440)"}


@dataclass(frozen=True)
class Pair:
    """A row with what was predicted for it; quantities as `Outcome` has them."""

    row: Row
    measured: published.Outcome
    seconds: float | None
    peak_gib: float | None
    fits: bool


def pairs(rows: Iterable[Row], predictions: Iterable[Row], outcome: Callable[[Row], published.Outcome]) -> list[Pair]:
    """Each row that may be scored (trust C may not) with its prediction."""
    told = {prediction["row_id"]: prediction for prediction in predictions}
    found = []
    for row in rows:
        prediction = told.get(row["row_id"])
        if prediction is None or row.get("trust") == "C":
            continue
        try:
            measured = outcome(row)
        except published.CellError:
            continue  # nothing to compare with
        seconds = published.number(prediction, "step_time_s") or None
        gib = published.number(prediction, "peak_mem_gib") or None
        found.append(Pair(row, measured, seconds, gib, prediction.get("fits") == "True"))
    return found


def score(found: Sequence[Pair]) -> dict[str, dict[str, str]]:
    """By source, never pooled: each figure by its name, as text."""
    sources: dict[str, list[Pair]] = defaultdict(list)
    for pair in found:
        sources[pair.row["source_key"]].append(pair)
    return {source: _of_source(source, of) for source, of in sorted(sources.items())}


def _of_source(source: str, found: Sequence[Pair]) -> dict[str, str]:
    timed = [p for p in found if p.measured.ran and p.measured.seconds and p.seconds]
    errors = [p.seconds / p.measured.seconds - 1 for p in timed]  # type: ignore[operator]
    groups = [group for group in _groups(timed, published.job) if len(group) > 1]
    figures = {
        "rows": str(len(found)),
        "scored": str(len(timed)),
        "median |error|": _percent(median(map(abs, errors)) if errors else None),
        "mean |error|": _percent(fmean(map(abs, errors)) if errors else None),
        "bias (median)": _percent(median(errors) if errors else None, sign=True),
        "groups": str(len(groups)),
        "Kendall tau": _number(_mean(kendall(g) for g in groups)),
        "mean regret": _percent(_mean(regret(g) for g in groups)),
        "efficiency error": _points(efficiency_error(timed)),
        "constant MFU |error|": _percent(constant_mfu(timed)),
        "twice as slow or more": f"{sum(error < -0.5 for error in errors)} of {len(errors)}",
        "Calculon (printed)": CALCULON.get(source, "-"),
    }
    return figures | _memory(found)


def _memory(found: Sequence[Pair]) -> dict[str, str]:
    both = [p for p in found if p.measured.ran and p.measured.peak_gib and p.peak_gib]
    errors = [p.peak_gib / p.measured.peak_gib - 1 for p in both]  # type: ignore[operator]
    fits = [p for p in found if p.fits]
    wrong = [p for p in fits if p.row.get("status", "ok") == "oom"]
    unclear = [p for p in fits if p.row.get("status", "ok") == "failed_or_oom"]
    refused = [p for p in found if p.measured.ran and p.seconds and not p.fits]
    return {
        "memory rows": str(len(both)),
        "memory median |error|": _percent(median(map(abs, errors)) if errors else None),
        "memory bias": _percent(median(errors) if errors else None, sign=True),
        "false fits": f"{len(wrong)} of {len(fits)} predicted to fit"
        + (f"; {len(unclear)} more failed, for want of memory or otherwise" if unclear else ""),
        "ran, predicted not to fit": f"{len(refused)} of {sum(p.measured.ran for p in found)}",
    }


def _groups(found: Iterable[Pair], key: Callable[[Row], tuple[str, ...]]) -> list[list[Pair]]:
    groups: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in found:
        groups[key(pair.row)].append(pair)
    return list(groups.values())


def kendall(group: Sequence[Pair]) -> float | None:
    """Kendall's tau-b between predicted and measured seconds; None where one of them is the same throughout."""
    agreed = ties_x = ties_y = 0
    total = 0
    for a, b in combinations(group, 2):
        x = _sign(a.seconds, b.seconds)
        y = _sign(a.measured.seconds, b.measured.seconds)
        total += 1
        agreed += x * y
        ties_x += x == 0
        ties_y += y == 0
    scale = ((total - ties_x) * (total - ties_y)) ** 0.5
    return float(agreed / scale) if scale else None


def _sign(a: float | None, b: float | None) -> int:
    assert a is not None, "only rows with a prediction are compared"
    assert b is not None, "only measured rows are compared"
    return (a > b) - (a < b)


def regret(group: Sequence[Pair]) -> float:
    """How much slower the chosen layout was than the fastest: predicted to be fastest of those predicted to fit."""
    chosen = min([p for p in group if p.fits] or group, key=lambda p: p.seconds or 0.0)
    best = min(p.measured.seconds or 0.0 for p in group)
    return (chosen.measured.seconds or 0.0) / best - 1


def efficiency_error(timed: Sequence[Pair]) -> float | None:
    """Mean error, as a fraction of one, of the efficiency relative to the fewest devices of the same job."""
    errors = []
    for group in _groups(timed, published.scaling):
        counts = {published.integer(p.row, "n_gpus") for p in group}
        if len(counts) < 2:
            continue
        best = {
            n: min((p for p in group if published.integer(p.row, "n_gpus") == n), key=lambda p: _cost(p, False))
            for n in counts
        }
        base = best[min(counts)]
        for n in sorted(counts)[1:]:
            predicted = _cost(base, True) / _cost(best[n], True)
            errors.append(abs(predicted - _cost(base, False) / _cost(best[n], False)))
    return fmean(errors) if errors else None


def _cost(pair: Pair, is_predicted: bool) -> float:
    """Device-seconds a sample."""
    seconds = pair.seconds if is_predicted else pair.measured.seconds
    samples = published.number(pair.row, "global_batch", 1.0)
    return (seconds or 0.0) * published.integer(pair.row, "n_gpus") / samples


def constant_mfu(timed: Sequence[Pair]) -> float | None:
    """Mean error of the best single rate: seconds proportional to FLOPs over devices, fitted on these very rows."""
    points = [(model_flops(p.row) / published.integer(p.row, "n_gpus"), p.measured.seconds or 0.0) for p in timed]
    points = [(work, seconds) for work, seconds in points if work]
    if not points:
        return None
    ratios = sorted(seconds / work for work, seconds in points)
    return min(fmean(abs(rate * work / seconds - 1) for work, seconds in points) for rate in ratios)


def model_flops(row: Row) -> float:
    """FLOPs of a step of a transformer's row as the field counts them; 0 where the row has no dimensions."""
    tokens = published.number(row, "global_batch") * published.number(row, "seq_len")
    parameters = published.number(row, "n_params")
    attention = 12 * published.number(row, "n_layers") * published.number(row, "hidden")
    return tokens * (6 * parameters + attention * published.number(row, "seq_len"))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _percent(value: float | None, sign: bool = False) -> str:
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} points"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(figures: Mapping[str, Mapping[str, str]]) -> str:
    """The figures as text, a block a source."""
    lines = []
    for source, of in figures.items():
        lines.append(source)
        lines += [f"  {name:28} {text}" for name, text in of.items()]
    return "\n".join(lines)
