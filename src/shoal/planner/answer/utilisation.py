"""Utilisation of the device's peak: the shares of a step not spent on model FLOPs at the peak rate, by cause."""

from __future__ import annotations

from collections import Counter, defaultdict

from shoal.planner.answer.answer import SearchResult
from shoal.planner.predict.roofline import ITEMSIZE, DeviceModel
from shoal.planner.predict.share import Share
from shoal.planner.profile.values import Operation, OperationKind

MEMORY_BOUND = "operators that move memory"
BELOW_PEAK = "products and attention below the peak"


def lost_shares(answer: SearchResult) -> dict[str, float]:
    """Return the shares of a step by cause, the largest first; with the share of the peak they sum to 1.

    The term `compute` is split by kind of operator, in the proportions of the whole model.
    """
    found = answer.chosen.prediction
    if found.mfu is None:
        return {}
    shares = {name: seconds / found.step_seconds for name, seconds in found.terms.items()}
    computing = shares.pop("compute")
    moving = computing * _moving_share(answer)
    shares[MEMORY_BOUND] = min(moving, computing - found.mfu)
    shares[BELOW_PEAK] = computing - found.mfu - shares[MEMORY_BOUND]
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
    found: list[tuple[Operation, Share, int]] = []
    for body, count in Counter(unit.body for unit in case.work.profile.units).items():
        of_body = share.of(body, predictor.program.divides_ends)
        found += [(operation, of_body, count) for operation in computer.operations(body)]
    return computer, found


def _moving_share(answer: SearchResult) -> float:
    """Return the share of the operators' seconds spent on operators that only move memory."""
    computer, every = operators(answer)
    total: dict[OperationKind, float] = defaultdict(float)
    for operation, share, count in every:
        total[operation.kind] += count * computer.operation(operation, share).seconds
    whole = sum(total.values())
    return total[OperationKind.MEMORY] / whole if whole else 0.0
