"""Cost of products whose rows do not begin at 16 bytes, and of the same step with those rows padded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.planner.answer.answer import SearchResult
from shoal.planner.answer.utilisation import operators
from shoal.planner.predict.product_sizes import MatrixRow, unaligned_rows
from shoal.planner.profile.values import ALIGNED
from shoal.report.quantities import seconds

# Below this share of a step padding is not worth a line: it changes the model.
_WORTH = 0.03
# Rows of products that are less than this share of all unaligned ones are not named.
_NAMED = 0.1


@dataclass(frozen=True)
class UnalignedProducts:
    """Products that the chosen plan runs slower: their rows, those of most seconds first, and seconds of a step.

    `product_seconds`: of these products; `aligned_seconds`: of the step with their rows padded. `rate`: their share of
    an aligned product's, and where that is from.
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
    """The unaligned products of the chosen plan, where they cost more than 3 % of its step."""
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
    """Shares of the operators' seconds on the device, by the unaligned rows of a product, of the model as a whole."""
    computer, every = operators(answer)
    whole, found = 0.0, defaultdict[tuple[MatrixRow, ...], float](float)
    for operation, share, count in every:
        taken = count * computer.operation(operation, share).device
        whole += taken
        if computer.is_unaligned(operation, share):
            found[unaligned_rows(operation, share)] += taken
    return {rows: taken / whole for rows, taken in found.items()}
