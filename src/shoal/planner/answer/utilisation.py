"""Utilisation of the device's peak: the shares of a step not spent on model FLOPs at the peak rate, by cause.

One cause has its own advice: products whose rows do not start at multiples of 16 bytes, compared with padded rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.planner.answer.answer import SearchResult
from shoal.planner.predict.roofline import ITEMSIZE, DeviceModel
from shoal.planner.predict.share import MatrixRow, Share, unaligned_rows
from shoal.planner.profile.values import ALIGNED, Operation, OperationKind
from shoal.report.quantities import seconds

# Smallest share of a step that justifies advice to pad, which changes the model.
_WORTH = 0.03
# Rows whose products take less than this share of all unaligned ones are not named.
_NAMED = 0.1
MEMORY_BOUND = "operators that move memory"
BELOW_PEAK = "products and attention below the peak"


def lost_shares(answer: SearchResult) -> dict[str, float]:
    """Return the shares of a step by cause, the largest first; with the share of the peak they sum to 1.

    The term `compute` is split by kind of operator, in the proportions of the whole model.
    """
    prediction = answer.chosen.prediction
    if prediction.mfu is None:
        return {}
    shares = {name: spent / prediction.step_seconds for name, spent in prediction.terms.items()}
    computing = shares.pop("compute")
    computer, every = operators(answer)
    total: dict[OperationKind, float] = defaultdict(float)
    for operation, share, count in every:
        total[operation.kind] += count * computer.operation(operation, share).seconds
    whole = sum(total.values())
    moving = computing * (total[OperationKind.MEMORY] / whole if whole else 0.0)
    shares[MEMORY_BOUND] = min(moving, computing - prediction.mfu)
    shares[BELOW_PEAK] = computing - prediction.mfu - shares[MEMORY_BOUND]
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def wide_products(answer: SearchResult) -> tuple[float, str] | None:
    """Return the share of the model's FLOPs in float32 in a 16-bit plan, and the operator with most of them.

    Autocast casts a fixed list of operators (docs.pytorch.org/docs/stable/amp.html) and no others.
    """
    if ITEMSIZE[answer.chosen.plan.precision.compute] != ITEMSIZE["bfloat16"]:
        return None
    wide: dict[str, float] = defaultdict(float)
    whole = 0.0
    for unit in answer.question.case.work.profile.units:
        for operation in unit.body.operations:
            flops = operation.flops.at(1.0)
            whole += flops
            if ITEMSIZE.get(operation.dtype) == ITEMSIZE["float32"]:
                wide[operation.name] += flops
    share = sum(wide.values()) / whole if whole else 0.0
    return (share, max(wide, key=lambda name: wide[name])) if share else None


def operators(answer: SearchResult) -> tuple[DeviceModel, list[tuple[Operation, Share, int]]]:
    """Return the device model and, for each operator, a rank's share of it and its count in the whole model."""
    case, plan = answer.question.case, answer.chosen.plan
    predictor = case.predictor
    computer, share = predictor.staging.costs(plan).computer, predictor.staging.ranks(plan).share
    result: list[tuple[Operation, Share, int]] = []
    for body, count in Counter(unit.body for unit in case.work.profile.units).items():
        of_body = share.of(body, predictor.program.divides_ends)
        result += [(operation, of_body, count) for operation in computer.operations(body)]
    return computer, result


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
    if device.unaligned >= 1.0:
        return None
    computer, every = operators(answer)
    total, of_rows = 0.0, defaultdict[tuple[MatrixRow, ...], float](float)  # device seconds over the whole model
    for operation, share, count in every:
        spent = count * computer.operation(operation, share).device
        total += spent
        if computer.is_unaligned(operation, share):
            of_rows[unaligned_rows(operation, share)] += spent
    shares = {rows: spent / total for rows, spent in of_rows.items()}
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
