"""The table of published errors that shoal prints error bars from: quantiles of measured over predicted seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.published import describe
from benchmarks.published.rows import described, number
from benchmarks.published.score import Pair
from shoal.planner.predict.workload import BEYOND, FEWEST_ROWS, Likeness, likeness

_HEAD = """\
# Written by `python -m benchmarks.published errors`, from predictions by the catalogue alone (docs/planner.md).
# Of a group's rows nine of ten took `low` times the predicted seconds or more, and nine of ten `high` or less.
# `beyond`: how many more took over twice the predicted seconds. `least_parameters`, `most_parameters`: of their models.
"""


def ratios(found: Iterable[Pair]) -> list[tuple[Likeness, float, float]]:
    """The group of each timed row, its model's parameters, and measured over predicted seconds."""
    timed = (pair for pair in found if pair.measured.ran and pair.measured.seconds and pair.seconds)
    return [
        (of_row(pair.row), number(pair.row, "n_params"), pair.measured.seconds / pair.seconds)  # type: ignore[operator]
        for pair in timed
    ]


def of_row(row: Any) -> Likeness:
    """The group of a row of transformers.csv."""
    blind = described(row)
    return likeness(describe.cluster(blind).device.name, number(row, "n_params"), describe.plan(blind).layout)


def groups(known: Sequence[tuple[Likeness, float, float]]) -> dict[Likeness, list[tuple[float, float]]]:
    """Sorted ratios of each group and of each that contains it, each with its model's parameters."""
    found: dict[Likeness, list[tuple[float, float]]] = defaultdict(list)
    for like, parameters, ratio in known:
        for group in dict.fromkeys(like.wider()):
            found[group].append((ratio, parameters))
    return {group: sorted(of) for group, of in sorted(found.items())}


def text(found: Iterable[Pair]) -> str:
    """The table as TOML."""
    lines = [_HEAD]
    for group, every in groups(ratios(found)).items():
        of, sizes = [ratio for ratio, _ in every if ratio <= BEYOND], [parameters for _, parameters in every]
        if len(of) < FEWEST_ROWS:
            continue
        low, high = of[len(of) // 10], of[-1 - len(of) // 10]
        lines += ["[[group]]", *(f'{key} = "{value}"' for key, value in group._asdict().items())]
        lines += [f"least_parameters = {min(sizes):.3g}", f"most_parameters = {max(sizes):.3g}"]
        lines += [f"rows = {len(of)}", f"beyond = {len(every) - len(of)}", f"low = {low:.3f}", f"high = {high:.3f}", ""]
    return "\n".join(lines)
