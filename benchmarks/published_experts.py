"""Claim: two constants, fitted on some sources of published mixtures, predict the others.

`sustained`: the share of a large product's rate that the steps of these programs reach on Hopper and Blackwell, whose
clocks fall under power. `dispatch_share`: the share of the bandwidth within a host that an all_to_all of rows reaches.
Between hosts it reaches that of the network, as DeepEP's exchange does everywhere: with one share for both the held-out
median was 18 % instead of 15 %.
Both are taken from a coarse grid, and each source is predicted with the constants of all other sources. A source with a
single row does not count for the constants: nothing in it tells them from what is wrong with that row.

Repeat with `python -m benchmarks.published_experts`; the table is in benchmarks/results/published_experts.md.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.published import predict
from benchmarks.published import rows as published

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "published" / "data" / "experts.csv"
RESULTS = ROOT / "benchmarks" / "results" / "published_experts.json"
PAGE = ROOT / "benchmarks" / "results" / "published_experts.md"
BEGIN, END = "<!-- written by benchmarks/published_experts.py -->", "<!-- end of what it writes -->"
SUSTAINED, SHARES = (0.70, 0.80, 0.90), (1.0, 0.75, 0.5, 0.35)


class Constants(NamedTuple):
    """One point of the grid."""

    sustained: float
    share: float


class Scored(NamedTuple):
    """A row: its source, and log(predicted / measured) by the constants."""

    row_id: str
    source: str
    kind: str  # "dense", or the routing of a mixture: "balanced" or "free"
    measured: float
    logs: Mapping[Constants, float]


def scored(row: published.Row) -> Scored | None:
    """A row with its predictions, or None where it has no step or cannot be described."""
    measured = published.outcome(row)
    if not (measured.ran and measured.seconds) or row.get("trust") == "C":
        return None
    logs: dict[Constants, float] = {}
    for at in map(Constants._make, product(SUSTAINED, SHARES)):
        predictors = predict.Predictors("transformers", dataclasses.replace(predict.AS_TOLD, **at._asdict()))
        answer = predictors.answer(published.described(row))
        if answer.seconds is None:
            return None
        logs[at] = log(answer.seconds / measured.seconds)
    routing = "free" if "free" in row.get("routing", "") else "balanced"
    return Scored(
        row["row_id"], row["source_key"], routing if row.get("num_experts") else "dense", measured.seconds, logs
    )


def best(found: Iterable[Scored]) -> Constants:
    """The constants with the least mean over sources of the median error."""
    sources: dict[str, list[Scored]] = defaultdict(list)
    for one in found:
        sources[one.source].append(one)

    def error(at: Constants) -> float:
        return fmean(median(abs(one.logs[at]) for one in of) for of in sources.values() if len(of) > 1)

    return min(map(Constants._make, product(SUSTAINED, SHARES)), key=error)


def text(found: list[Scored]) -> str:
    """The table: each source with the constants of the others."""
    lines = [
        "| Held out | Routing | Rows | `sustained` of the others | `dispatch_share` of the others | Median error |"
        " Bias | By the catalogue alone |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    plain = Constants(SUSTAINED[0], SHARES[0])
    for source in sorted({one.source for one in found}):
        at = best(one for one in found if one.source != source)
        for kind in ("balanced", "free", "dense"):
            own = [one for one in found if (one.source, one.kind) == (source, kind)]
            if own:
                errors = [exp(one.logs[at]) - 1 for one in own]
                before = median(abs(exp(one.logs[plain]) - 1) for one in own)
                lines.append(
                    f"| {source} | {kind} | {len(own)} | {at.sustained:g} | {at.share:g} |"
                    f" {median(map(abs, errors)):.1%} | {median(errors):+.1%} | {before:.1%} |"
                )
    at = best(found)
    lines += ["", f"Of all sources together: `sustained` {at.sustained:g}, `dispatch_share` {at.share:g}.", ""]
    lines += ["| Row | Measured | Predicted with the constants of the others |", "|---|---:|---:|"]
    for one in found:
        held_out = best(other for other in found if other.source != one.source)
        error = exp(one.logs[held_out]) - 1
        lines.append(f"| {one.row_id} | {one.measured:.4g} s | {one.measured * (1 + error):.4g} s ({error:+.0%}) |")
    return "\n".join(lines)


def main() -> None:
    """Predicts all rows at all points of the grid and writes the table; with --table, from what was kept."""
    if "--table" in sys.argv[1:]:
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))
        found = [Scored(**{**one, "logs": {Constants(*at): v for *at, v in one["logs"]}}) for one in kept]
    else:
        found = [one for row in published.read(ROWS) if (one := scored(row)) is not None]
    RESULTS.write_text(
        json.dumps([{**one._asdict(), "logs": [[*at, round(v, 4)] for at, v in one.logs.items()]} for one in found]),
        encoding="utf-8",
    )
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    PAGE.write_text(f"{before}{BEGIN}\n\n{text(found)}\n\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
