"""The only place where a Plan becomes strategies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.mesh import Mesh
from shoal.plan.plan import Plan
from shoal.plan.resolve import refuse_unsupported
from shoal.precision import Precision
from shoal.strategies.base import Mark, Strategy
from shoal.strategies.data_parallel import DataParallel, ExactDataParallel
from shoal.strategies.sharded import ShardedOptimizer


def assemble(plan: Plan, mesh: Mesh, parameters: Sequence[Tensor], num_grains: int, mark: Mark) -> Strategy:
    """The strategy that a plan asks for. Raises: PlanError for what this version does not execute."""
    refuse_unsupported(plan)
    reduce = Precision.of(plan.precision, mesh.device).reduce
    strategy: Strategy
    if plan.execution.exact:
        strategy = ExactDataParallel(parameters, mesh, reduce, num_grains, mark)
    else:
        strategy = DataParallel(parameters, mesh, reduce, mark)
    return ShardedOptimizer(strategy, parameters, mesh, mark) if plan.layout.shard > 1 else strategy
