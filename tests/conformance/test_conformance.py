"""Every case, on every number of ranks that it names, is verified: the parallel run is the run of one process."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from tests.conformance.adapter import chosen
from tests.conformance.cases import CASES, Case
from tests.conformance.strategies import STRATEGIES, Use
from tests.usual import SLOW, pairs

import shoal
from shoal.errors import InternalError
from shoal.parallel import assemble
from shoal.parallel.base import Strategy
from shoal.parallel.data import pushed
from shoal.parallel.shard import zero23
from shoal.parallel.shard.one_copy import OneCopyUpdate
from shoal.parallel.shard.update_division import ShardedOptimizer
from shoal.training.setup.preflight import judged
from shoal.verification.judge import Verdict, judge_traces


def applies(case: Case, use: Use) -> bool:
    """Exact mode computes grain by grain in float32: what is about microbatches or narrow dtypes says nothing there."""
    if use.axis == "tensor" and case.undivided:
        return False
    if use.axis == "context" and not case.blocks:
        return False
    if use.exact:
        return not case.sections
    if case.slow and (use.kind not in ("DataParallel", "OneCopyUpdate") or "tensor" in use.sections):
        return False  # compiled: refused by positions, see tests/unit/plans/test_legal.py
    return "exact" not in case.sections.get("execution", {})


# With torch's compiler, which uses what torch calls deprecated.
COMPILED = (
    SLOW,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
)
USED_MOST = ("DataParallel", "ExactDataParallel")
# Every case that a strategy can run, with the axis that the strategy is about.
ROWS = [
    (name, "data" if strategy in USED_MOST else "others", use.axis, strategy)
    for name, case in CASES.items()
    for strategy, use in STRATEGIES.items()
    if applies(case, use) and (not use.cases or name in use.cases)
]
# Every run takes each case once, with one of those that most people use or of the others, and each strategy.
USUAL = pairs([row for row in ROWS if not CASES[row[0]].slow], [(0, 0), (1, 2), (2, 3)])
# Both are of the strategy that takes most time; one of them is enough.
USUAL -= {("blocks computed again", "others", "context", "context axis and pipeline")}
USUAL |= {("blocks computed again", "others", "shard", "ShardedOptimizer")}


# torch: "FSDP does not support non-contiguous parameters yet"; said as an error of shoal's own, which it should not be.
NOT_YET = pytest.mark.xfail(raises=InternalError, strict=True, reason="fully_shard takes contiguous parameters only")


def marks(row: tuple[str, str, str, str], last: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Slow are compiled cases, those that are not usual, and all numbers of ranks but the last."""
    if CASES[row[0]].slow:
        return COMPILED
    known = (NOT_YET,) if row[0] == "strided gradients" and STRATEGIES[row[3]].kind == "FullySharded" else ()
    return known if row in USUAL and last else (SLOW, *known)


def numbers_of_ranks(case: Case, use: Use) -> tuple[int, ...]:
    return case.ranks if use is STRATEGIES["DataParallel"] else (use.num_ranks or case.ranks[-1],)


RUNS = [
    pytest.param(
        CASES[row[0]],
        ranks,
        STRATEGIES[row[3]],
        id=f"{row[0]}-{ranks}-{row[3]}",
        marks=marks(row, ranks == numbers_of_ranks(CASES[row[0]], STRATEGIES[row[3]])[-1]),
    )
    for row in ROWS
    for ranks in numbers_of_ranks(CASES[row[0]], STRATEGIES[row[3]])
]


def verdict_on(job: shoal.Job, plan: shoal.Plan, folder: Path, steps: int) -> Verdict:
    """Traced by the chosen adapter, judged by shoal."""
    plan = judged(job, plan).plan
    chosen().trace(job, plan, folder, steps)
    return judge_traces(job, plan, folder)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "ranks", "use"), RUNS)
def test_verified(case: Case, ranks: int, use: Use, tmp_path: Path) -> None:
    verdict = verdict_on(case.job(), use.plan(ranks, case.sections), tmp_path, case.steps)
    assert verdict.verified, verdict.render()
    assert verdict.num_steps == case.steps
    assert verdict.checks


# What a worker computes of a step whose parameters are kept by servers: tests/ranks/test_parameter_server.py verifies
# the run of all of them, which has more processes than its layout has ranks.
SERVED = {"FastPart", "ExactPart"}


def test_no_strategy_is_left_out() -> None:
    """A strategy that is not run here is not done: add it to strategies.py."""

    def concrete(kind: type[Strategy]) -> set[str]:
        below = set().union(*(concrete(child) for child in kind.__subclasses__()))
        own = kind.__module__.startswith("shoal.") and not inspect.isabstract(kind)
        return below | ({kind.__name__} if own else set())

    # Where every strategy is imported, these when a plan asks for them.
    assert all(module.__name__ for module in (assemble, zero23, pushed))
    assert (
        concrete(Strategy) | {ShardedOptimizer.__name__, OneCopyUpdate.__name__}
        == {use.kind for use in STRATEGIES.values()} | SERVED
    )
