"""Cost of products whose rows do not start at multiples of 16 bytes, compared with padded rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.planner.answer.answer import SearchResult
from shoal.planner.answer.utilisation import operators
from shoal.planner.predict.product_sizes import MatrixRow, unaligned_rows
from shoal.planner.profile.values import ALIGNED
from shoal.report.quantities import seconds

# Smallest share of a step that justifies advice to pad, which changes the model.
_WORTH = 0.03
# Rows whose products take less than this share of all unaligned ones are not named.
_NAMED = 0.1


@dataclass(frozen=True)
class UnalignedProducts:
    """Products that unaligned rows slow down in the chosen plan: their rows, slowest first, and seconds per step.

    `product_seconds`: time of these products. `aligned_seconds`: time of the step with padded rows.
    `rate`: their speed relative to aligned products, and its source.
    """

    rows: tuple[MatrixRow, ...]
    product_seconds: float
    step_seconds: float
    aligned_seconds: float
    rate: tuple[float, str]

    def __str__(self) -> str:
        on_ranks = " on each rank" if any(row.ranks > 1 for row in self.rows) else ""
        share, source = self.rate
        return (
            f"Products with rows of {_listed([row.length for row in self.rows])} numbers, no multiple of "
            f"{ALIGNED}{on_ranks}, take {seconds(self.product_seconds)} of a step: they run at {share:.2g} of the rate "
            f"of others ({source}). Padded to {_listed([row.padded for row in self.rows])} a step would take "
            f"{seconds(self.aligned_seconds)} instead of {seconds(self.step_seconds)}; that changes the model."
        )


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(f"{number:,}" for number in numbers)


def unaligned_products(answer: SearchResult) -> UnalignedProducts | None:
    """Return the unaligned products of the chosen plan if they cost more than 3 % of its step, else None."""
    case, chosen = answer.question.case, answer.chosen
    device = case.cluster.device
    shares = _shares(answer) if device.unaligned < 1.0 else {}
    if not shares:
        return None
    cluster = replace(case.cluster, device=replace(device, unaligned=1.0))
    aligned_seconds = replace(case, cluster=cluster).search().predict(chosen.plan).step_seconds
    if chosen.seconds - aligned_seconds <= _WORTH * chosen.seconds:
        return None
    whole, most_first = sum(shares.values()), sorted(shares, key=lambda rows: -shares[rows])
    named = [row for rows in most_first if shares[rows] >= _NAMED * whole for row in rows]
    return UnalignedProducts(
        tuple(dict.fromkeys(named)),
        whole * chosen.prediction.terms["compute"],
        chosen.seconds,
        aligned_seconds,
        (device.unaligned, device.sources.get("unaligned", "no source is given")),
    )


def _shares(answer: SearchResult) -> dict[tuple[MatrixRow, ...], float]:
    """Return shares of the operators' device seconds by the unaligned rows of a product, over the whole model."""
    computer, every = operators(answer)
    whole, found = 0.0, defaultdict[tuple[MatrixRow, ...], float](float)
    for operation, share, count in every:
        taken = count * computer.operation(operation, share).device
        whole += taken
        if computer.is_unaligned(operation, share):
            found[unaligned_rows(operation, share)] += taken
    return {rows: taken / whole for rows, taken in found.items()}
