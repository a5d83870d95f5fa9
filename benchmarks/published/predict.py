"""One prediction for each row, from what describes it alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.published import describe
from benchmarks.published.rows import Row
from shoal.errors import ShoalError
from shoal.planner.predict.step_time import Predictor
from shoal.plans.plan import Plan

GIB = 1 << 30
MEMORY_ERROR = 0.1  # of predicted memory: 4 to 18 % in the median (benchmarks/results/published.md)


@dataclass(frozen=True)
class Constants:
    """Constants that replace those of `describe`, where they are not None; see `benchmarks.published_experts`."""

    sustained: float | None = None
    share: float | None = None


AS_TOLD = Constants()


@dataclass(frozen=True)
class Answer:
    """Seconds a step, GiB on the rank that needs most, whether it fits, and why not where nothing is predicted."""

    seconds: float | None = None
    gib: float | None = None
    fits: bool | None = None
    note: str = ""


class Predictors:
    """Predictors by what they are made for: rows of one model on one cluster share one."""

    def __init__(self, kind: str, constants: Constants = AS_TOLD) -> None:
        self._kind, self._constants = kind, constants
        self._known: dict[str, Predictor] = {}

    def answer(self, row: Row) -> Answer:
        """The prediction for a row; a note where there can be none."""
        try:
            return self._answer(row)
        except (describe.UnknownError, ShoalError) as error:
            return Answer(note=str(error).splitlines()[0])
        except (ValueError, ArithmeticError, LookupError, RuntimeError, TypeError) as error:  # of this row alone
            return Answer(note=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _answer(self, row: Row) -> Answer:
        work, plan, cluster, program = self._described(row)
        key = repr(
            (
                id(work.profile),
                work.global_batch,
                work.num_grains,
                cluster.name,
                cluster.device.name,
                cluster.device.sustained,
                cluster.between,
                program,
            )
        )
        if key not in self._known:
            self._known[key] = Predictor(work, cluster, program)
        plan, chosen = self._best(self._known[key], plan, row)
        found = self._known[key].predict(plan)
        largest = sorted(found.terms.items(), key=lambda term: -term[1])[:3]
        told = ", ".join(f"{name} {100 * seconds / found.step_seconds:.0f} %" for name, seconds in largest if seconds)
        told += f"; {chosen}" if chosen else ""
        # Most sources print what torch's allocator counts, without the driver's and the library's own memory.
        apart = 0.0 if "nvidia-smi" in row.get("mem_def", "") else found.memory["reserved"]
        peak = self._known[key].first_bytes(plan) if "rank-0" in row.get("mem_def", "") else found.peak_bytes
        return Answer(found.step_seconds, (peak - apart) / GIB, found.fits, told)

    def _best(self, predictor: Predictor, plan: Plan, row: Row) -> tuple[Plan, str]:
        """The plan with the fastest microbatch that fits, of those that a row may mean; and what was chosen."""
        sizes = describe.microbatches(row) if self._kind == "transformers" else ()
        degrees = describe.expert_degrees(row) if row.get("num_experts") else (plan.layout.expert,)
        plans = [
            plan.with_sections(batch={"grains_per_microbatch": size}, layout={"expert": degree})
            for size in sizes or (plan.batch.grains_per_microbatch,)
            for degree in degrees
        ]
        chosen = []
        if row.get("num_experts") and not row.get("recompute_kind"):
            plans = [self._recomputed(predictor, one) for one in plans]
            chosen.append(f"recompute {plans[0].memory.recompute}")
        fitting = [one for one in plans if predictor.predict(one).fits] or plans[:1]
        best = min(fitting, key=lambda one: predictor.predict(one).step_seconds)
        chosen += [f"microbatch {best.batch.grains_per_microbatch}"] if len(sizes) > 1 else []
        chosen += [f"expert {best.layout.expert}"] if len(degrees) > 1 else []
        return best, f"the best of what the row does not tell: {', '.join(chosen)}" if chosen else ""

    def _recomputed(self, predictor: Predictor, plan: Plan) -> Plan:
        """The plan with the least recomputation that leads to a peak of the device's memory, but for an error of it."""
        for mode in ("none", "selective", "full"):
            one = plan.with_sections(memory={"recompute": mode})
            if predictor.predict(one).peak_bytes <= predictor.cluster.device.memory_bytes * (1 + MEMORY_ERROR):
                return one
        return one

    def _described(self, row: Row) -> describe.Described:
        if self._kind == "ddp":
            from benchmarks.published import data_parallel

            return data_parallel.describe(row)
        work, plan, cluster, program = describe.describe(row)
        if self._constants.share is not None:
            program = replace(program, dispatch_share=self._constants.share)
        if self._constants.sustained is not None:
            cluster = describe.cluster(row, self._constants.sustained)
        return work, plan, cluster, program
