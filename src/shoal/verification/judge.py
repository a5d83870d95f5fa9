"""Verdict on a parallel run, from the comparison of its traces with the references, step by step."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.data.source import MapSource, open_evaluations, opened, order_of
from shoal.distributed.mesh import alone
from shoal.errors import JobError, NotDeterministicError, ShoalError
from shoal.hardware.detect import cores
from shoal.jobs.job import Job
from shoal.numerics.outputs import evaluated_functions
from shoal.numerics.precision import Precision
from shoal.parallel.data.sparse_rows import sparse_parameters, why_dense
from shoal.plans.plan import Plan
from shoal.training.microbatch.coupling import MIXES, by_grain, meaning
from shoal.training.microbatch.evaluation import EvaluationSets, Evaluator
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.observe.trace.traces import PHASES, StepTrace, identical
from shoal.training.setup.job_model import seeded_model, with_grains
from shoal.verification.compare import MULTIPLE, STRAY, UNIT, UNITS, Check, References, compare
from shoal.verification.diagnose import MADE_BEFORE, Diagnosis, diagnose
from shoal.verification.reference import Computed, Reference, ReferenceVariant, SampledLayers
from shoal.verification.traced_run import Traced, read_outcome

# Before a gradient is reported as wrong, the step is computed in two more variants. Each rounds the gradient of every
# function by a unit in the last place: twice the largest rounding of one operation, in every element.
ROUNDED_WAYS = 2
ROUNDED_PHASES = ("backward", "reduction", "clipping")


@dataclass
class Verdict:
    """Result of a verification; `checks` in dataflow order, `seconds` of the references and comparisons."""

    checks: list[Check] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    notes: list[str] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def verified(self) -> bool:
        """True if at least one tensor was compared, and all passed."""
        return bool(self.num_steps) and not self.failed

    @property
    def failed(self) -> list[Check]:
        """The checks that failed, the first in the dataflow first."""
        return [check for check in self.checks if not check.passed]

    def add_exact(self, checks: list[Check]) -> None:
        """Add the bitwise checks of exact mode. A failed one becomes the first divergence if there is none yet."""
        self.checks += checks
        equal = sum(check.passed for check in checks)
        self.notes.append(f"exact: {equal} of {len(checks)} tensors are bit for bit those of the engine on one process")
        if self.diagnosis is None and self.failed:
            causes = ["a sum whose order depends on the layout, or a kernel whose result depends on the batch's shape"]
            self.diagnosis = Diagnosis(self.failed[0], causes)

    def table(self) -> list[str]:
        """Return a line per phase: number of checks, number of failures, and the worst check."""
        rows = []
        for phase in PHASES:
            checks = [check for check in self.checks if check.phase == phase]
            if checks:
                worst = max(checks, key=lambda check: check.ratio)
                failed = sum(not check.passed for check in checks)
                rows.append(f"{phase:<12} {len(checks):>7} {failed:>7}  {worst.ratio:<8.3g} {worst.name}")
        return rows

    def render(self) -> str:
        """Render the table, the diagnosis of a divergence and the verdict for people."""
        lines = [f"{'phase':<12} {'checks':>7} {'failed':>7}  worst error / tolerance, and of what", *self.table()]
        if self.diagnosis is not None:
            lines.append(self.diagnosis.render(len(self.failed) - 1))
        lines.append("verdict            " + ("verified" if self.verified else "DIVERGED"))
        return "\n".join(lines)

    def worst(self) -> dict[str, float]:
        """Return the worst ratio of error to tolerance of each tensor over all steps, by PHASE/NAME."""
        ratios: dict[str, float] = {}
        for check in self.checks:
            key = f"{check.phase}/{check.name}"
            ratios[key] = max(ratios.get(key, 0.0), check.ratio)
        return ratios


def judge_traces(job: Job, plan: Plan, folder: Path) -> Verdict:
    """Return the verdict on the traces in `folder`: `parallel` and, in exact mode, `alone`. Raises: as `judge`."""
    job = with_grains(job)
    traced = read_outcome(folder / "parallel")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    verdict = judge(job, plan, traced, traced.steps(folder / "parallel"), device)
    verdict.notes += traced.notes
    if (folder / "alone").exists():
        own = traced.steps(folder / "parallel", tensors=False)
        single = read_outcome(folder / "alone").steps(folder / "alone", tensors=False)
        verdict.add_exact(compare_exact(own, single))
    return verdict


def judge(job: Job, plan: Plan, traced: Traced, steps: Iterator[StepTrace], device: torch.device) -> Verdict:
    """Compute each step on one process and compare it; stop after the first step that diverges.

    `steps` starts with the state before the first step. Raises: NotDeterministicError if one process alone does not
    repeat its results; JobError for a job that cannot be verified.
    """
    began = time.monotonic()
    verdict = Verdict(num_steps=traced.num_steps)
    judges = _Judges(job, plan, traced, device, verdict.notes)
    try:
        before = next(steps)
        verdict.checks += judges.initial_values(before)
        for parallel in steps:
            if verdict.failed:
                break
            checks, references = judges.step(before, parallel)
            verdict.checks += (judges.sum_over_grains() if parallel.step == 0 else []) + checks
            if verdict.failed:
                verdict.diagnosis = diagnose(verdict.failed, parallel, before, references, judges.world_size)
            before = parallel
        if not verdict.failed:
            verdict.checks += judges.metrics(before)
    finally:
        judges.close()
    if verdict.failed and verdict.diagnosis is None:
        verdict.diagnosis = diagnose(verdict.failed, before, before, None, judges.world_size)
    verdict.seconds = time.monotonic() - began
    return verdict


class _Judges:
    def __init__(self, job: Job, plan: Plan, traced: Traced, device: torch.device, notes: list[str]) -> None:
        job = opened(job)
        source = job.train_data.source
        if not isinstance(source, MapSource):
            raise JobError(
                given="a job that trains on a stream",
                conflict="the reference reads the same samples again by their ids, which a stream does not have",
                remedy="verify with a map-style dataset of some of its samples",
            )
        self._job, self._plan, self._traced, self._device, self._notes = job, plan, traced, device, notes
        self._order = order_of(job.train_data, job, job.length)
        self.world_size = traced.world_size
        self._computation = (
            MicrobatchPolicy.from_json(traced.computation) if traced.computation else MicrobatchPolicy.of(job, 1)
        )
        ranks = plan.layout.data * plan.layout.shard
        self._measured: dict[str, float] = {}
        self._precision = Precision.of(plan.precision, device, plan.execution.channels_last)
        # Rounding to float8 is part of what is computed: also in float64.
        double = Precision(torch.float64, torch.float64, torch.float64, device, linear=plan.precision.products)
        self._double: Reference | None = None
        models, self._is_one_module = [seeded_model(job)], False
        if _fits(sum(p.numel() for p in models[0].parameters()), ranks, device):
            try:
                models.append(seeded_model(job))
                self._is_one_module = _share(*models)
                if self._is_one_module:  # such as one made at import: the job's own module stays as it is
                    models = [copy.deepcopy(model) for model in models]
            except Exception as error:  # from a second call of model(), or from a copy
                self._no_double(error)
                del models[1:]
        data: dict[str, Any] = {"source": source, "order": self._order, "num_ranks": ranks}
        data["sparse"] = sparse_parameters(models[0]) if why_dense(plan) is None else ()
        self._plain = Reference(job, models.pop(0), self._precision, **data)
        if models:
            try:
                self._double = Reference(job, models.pop(), double, **data)
            except Exception as error:
                self._no_double(error)
        self._sampled = None if self._double is not None else SampledLayers(self._plain.model)

    def initial_values(self, initial: StepTrace) -> Iterator[Check]:
        """Yield a failed check for each initial value of the parallel run that is not the job's own."""
        model = self._plain.model
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            key = f"update/{name}" if f"update/{name}" in initial.tensors else f"buffers/{name}"
            value_there = initial.tensors.get(key)
            said = "does not begin as the job's model() makes it from the seed"
            if self._is_one_module:
                said = f"is of {MADE_BEFORE}, with other values in each process that loads the job"
            said = "is missing" if value_there is None else said
            if value_there is None or not identical(value_there, value.detach().cpu()):
                yield Check(0, "data", f"initial {name}", None, math.inf, 0.0, said)
        for rank, key in initial.strays():
            yield Check(0, "data", f"initial {key.partition('/')[2]}", rank, math.inf, 0.0, STRAY)

    def sum_over_grains(self) -> list[Check]:
        """Check that the loss of several grains is the sum of their losses, unless the job says that it is not.

        If a module mixes samples, both the run and the references compute by grain, and a note reports it.
        """
        computation = self._computation
        if not self._job.fuse:
            self._notes.append(
                "Job(fuse=False): nobody asked whether the loss of several grains is the sum of theirs; "
                f"{meaning(MIXES, self._job.grain_size, self._job.global_batch)}"
            )
        if computation.fuse or not self._job.fuse or computation.randomness == "opaque":
            return []
        try:
            sums = self._double.loss_of_grains() if self._double is not None else None
        except ShoalError:  # the loss does not compute in float64
            sums = None
        if sums is not None and not all(map(math.isfinite, sums[:2])):  # float64 may not be finite
            sums = None
        if sums is None and self._precision.is_wide:
            sums = self._plain.loss_of_grains()
        if sums is None:  # bfloat16 is too coarse to tell
            return []
        together, apart, coupled = sums
        if math.isclose(together, apart, rel_tol=UNITS * UNIT):
            return []
        said = by_grain(coupled, self._job.grain_size, self._job.global_batch)
        if said:
            self._notes.append(said)
            return []
        said = f"is {together:.6g}, and the sum of their losses {apart:.6g}"
        if coupled:
            said += f": {coupled}"
        return [Check(0, "loss", "of all grains together", None, math.inf, 0.0, said)]

    def step(self, before: StepTrace, parallel: StepTrace) -> tuple[list[Check], References]:
        """Check one step: the first in all variants, which show how far rounding moves a step; later steps as planned.

        Rounding may weigh more in a later step. So a failing later step is also computed in all variants.
        """
        # A skipped step has measured the rounding of few tensors.
        first = not any(key.startswith("update/") for key in self._measured)
        checks, references = self._compared(before, parallel, complete=first)
        if not first and not all(check.passed for check in checks):
            checks, references = self._compared(before, parallel, complete=True)
        failed = next((check for check in checks if not check.passed), None)
        if failed is not None and failed.said is None and failed.phase in ROUNDED_PHASES:
            with contextlib.suppress(Exception):  # if the model does not support hooks, the verdict stays
                checks, references = self._compared(before, parallel, complete=True, rounded=ROUNDED_WAYS)
        return checks, references

    def _compared(
        self, before: StepTrace, parallel: StepTrace, complete: bool, rounded: int = 0
    ) -> tuple[list[Check], References]:
        with (complete and self._sampled) or contextlib.nullcontext():
            step = functools.partial(self._plain.step, parallel.step, before, parallel, self._computation)
            computed = [step(way) for way in self._ways(complete)]
            computed += [
                step(ReferenceVariant(f"rounded, {seed}", fused=seed % 2 == 0, threads=cores(), rounded=seed))
                for seed in range(rounded)
            ]
        if complete:
            refuse_unrepeatable(computed[0].trace, computed[1].trace)
        exact = self._exact(before, parallel, computed[0]) if complete else None
        updated = self._updated(before, parallel, computed[0])
        layers, joined = self._layers() if complete else 0.0, self._job.batch_norm == "batch"
        references = References(computed, exact, complete, layers, updated, joined)
        order = [name for name, p in self._plain.model.named_parameters() if p.requires_grad]
        return compare(parallel, before, references, order, self._measured), references

    def _ways(self, first: bool) -> list[ReferenceVariant]:
        """Return the variants. The first two compute the same microbatches, so only the order of sums may differ."""
        threads = cores()
        ways = [
            ReferenceVariant("as planned", fused=True, threads=threads),
            ReferenceVariant("as planned, every third first", order=3, fused=True, threads=threads),
            ReferenceVariant("grain by grain", threads=threads),
            ReferenceVariant("grain by grain, backwards, on one thread", order=-1, threads=1),
        ]
        fuses = self._computation.effective_grains > 1
        if not fuses:
            del ways[2]  # the same as the first
        # The order of sums in oneDNN's bfloat16 products with AMX depends on both the threads and the batch's shape.
        ranks = self._traced.num_threads
        if self._device.type == "cpu" and all((way.fused and fuses, way.threads) != (fuses, ranks) for way in ways):
            ways.append(ReferenceVariant("as planned, on the ranks' threads", fused=True, threads=ranks))
        if self._plan.layout.tensor > 1:
            ways.append(
                ReferenceVariant("as planned, linear layers in halves", fused=True, threads=threads, halves=True)
            )
        return ways if first else ways[:1]

    def _exact(self, before: StepTrace, parallel: StepTrace, plain: Computed) -> Computed | None:
        """Compute the step in float64; return None if float64 is not available or shows nothing."""
        if self._double is None or plain.trace.skipped == "nonfinite":
            return None
        try:
            way, facts = ReferenceVariant("float64", threads=cores()), replace(parallel, factor=1.0)
            double = self._double.step(parallel.step, before, facts, self._computation, way)
        except Exception as error:  # the plain reference has computed it, so float64 fails and not the job
            self._no_double(error)
            return None
        if double.trace.skipped == "nonfinite":
            note = "the float64 reference is not finite where the ways are: tolerances come from the ways alone"
            self._notes += [note] if note not in self._notes else []
            return None
        difference = abs(double.trace.loss - plain.trace.loss)
        if difference > 0.1 * abs(double.trace.loss) and self._precision.compute == torch.float32:
            self._notes.append(
                f"the float64 reference draws other random numbers (loss {double.trace.loss:.6g}, in float32 "
                f"{plain.trace.loss:.6g}): tolerances come from the ways alone"
            )
            self._double = None
            return None
        return double

    def _no_double(self, error: Exception) -> None:
        """Drop the float64 reference with a note: shoal chose float64, so the failure is no mistake of the job."""
        said = error.conflict if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
        self._notes.append(f"no float64 reference: the model does not compute in it ({said[:120]})")
        self._double = None

    def _updated(self, before: StepTrace, parallel: StepTrace, plain: Computed) -> References | None:
        """Compute the update from the parallel run's gradients; None if a side skipped it or a gradient is missing.

        None also for an optimizer that computes further gradients in its step, of which the order of sums is not known.
        """
        left_out = parallel.skipped or plain.trace.skipped or self._plain.needs_closure
        if left_out or parallel.phase("clipping").keys() != plain.trace.phase("clipping").keys():
            return None
        exact, threads = None, torch.get_num_threads()
        if self._double is not None:
            try:
                exact = Computed(self._double.update(before, parallel, self._computation))
            except Exception as error:
                self._no_double(error)
        torch.set_num_threads(self._traced.num_threads)  # products of other threads may add in another order
        try:
            plain_update = self._plain.update(before, parallel, self._computation)
        finally:
            torch.set_num_threads(threads)
        return References([Computed(plain_update)], exact, complete=True)

    def _layers(self) -> float:
        """Return how far sampled layers are from float64, if the whole model does not fit in it; else zero."""
        if self._sampled is None:
            return 0.0
        rounding = self._sampled.rounding(self._precision)
        worst = max(rounding, key=lambda name: rounding[name], default="")
        self._notes.append(
            "no float64 reference: a copy of the model in it does not fit. Computed in it one by one were "
            f"{len(rounding)} layers: {', '.join(rounding)}"
            + (f"; the farthest is {worst}, by {rounding[worst]:.2g} of its size" if rounding else "")
        )
        return max(rounding.values(), default=0.0)

    def metrics(self, last: StepTrace) -> Iterator[Check]:
        """Yield the checks of an evaluation on one process with the parallel run's final values."""
        if not self._traced.eval_samples or not self._job.evaluation_sets:
            return
        functions = evaluated_functions(self._job)
        most = self._traced.most_eval_samples
        evaluator = EvaluationSets(
            {
                name: Evaluator(self._job, alone(self._device), self._precision, data, functions, most_samples=most)
                for name, data in open_evaluations(self._job).items()
            }
        )
        threads = torch.get_num_threads()
        try:
            with self._plain.evaluated(last):
                torch.set_num_threads(1)
                expected, count = evaluator.evaluate(self._plain.model)
                torch.set_num_threads(cores())
                again, _ = evaluator.evaluate(self._plain.model)
        finally:
            torch.set_num_threads(threads)
        step = self._traced.num_steps - 1
        if count != self._traced.eval_samples:
            said = f"{self._traced.eval_samples} samples were evaluated, on one process {count}"
            yield Check(step, "metrics", "samples", None, math.inf, 0.0, said)
        for name, value in expected.items():
            measured = self._traced.metrics.get(name, math.nan)
            error = min(abs(measured - value), abs(measured - again[name]))
            error = 0.0 if measured == value or (math.isnan(measured) and math.isnan(value)) else error
            tolerance = MULTIPLE * abs(value - again[name]) + UNITS * UNIT * abs(value)
            yield Check(step, "metrics", name, None, error, tolerance)

    def close(self) -> None:
        """Remove the hooks."""
        self._plain.forward.close()
        if self._double is not None:
            self._double.forward.close()


def compare_exact(parallel: Iterable[StepTrace], alone_: Iterable[StepTrace]) -> list[Check]:
    """Check that every number of every step has the same bits as on one process, as exact mode demands."""
    checks: list[Check] = []
    for mine, single in zip(parallel, alone_, strict=True):
        mine_digests, single_digests = mine.first_digests, single.first_digests
        cut = {key for key in mine_digests if " [[" in key and key.partition(" [[")[0] in mine_digests}
        keys = sorted(
            (mine_digests.keys() - cut) | single_digests.keys(), key=lambda key: PHASES.index(key.partition("/")[0])
        )
        for key in keys:
            same = mine_digests.get(key) == single_digests.get(key)
            phase, _, name = key.partition("/")
            said = None if same else "is not bit for bit what one process computes"
            checks.append(Check(mine.step, phase, name, None, 0.0, 0.0, said))
        if (mine.loss, mine.norm) != (single.loss, single.norm) and math.isfinite(single.loss):
            said = f"loss {mine.loss!r}, norm {mine.norm!r}; on one process {single.loss!r}, {single.norm!r}"
            checks.append(Check(mine.step, "reduction", "loss and norm", None, math.inf, 0.0, said))
        if any(not check.passed for check in checks):
            break
    return checks


def _share(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two modules have a parameter or buffer in common."""
    tensors = {id(tensor) for tensor in (*one.parameters(), *one.buffers())}
    return any(id(tensor) in tensors for tensor in (*other.parameters(), *other.buffers()))


def _fits(num_parameters: int, num_ranks: int, device: torch.device) -> bool:
    """Return True if a float64 reference fits in free memory: values, gradients, sums, state and the ranks' shares."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return num_parameters * 8 * (6 + num_ranks) < free / 2


def at_least_one(name: str, value: int) -> None:
    """Check that a count is at least one. Raises: JobError otherwise."""
    if value < 1:
        raise JobError(given=f"{name}={value}", conflict="nothing would be compared", remedy=f"write {name}=1 or more")


def refuse_unrepeatable(once: StepTrace, again: StepTrace) -> None:
    """Check that two traces of one computation agree up to rounding. Raises: NotDeterministicError otherwise."""
    for call, grains in once.forward.items():
        for grain, numbers in grains.items():
            other = again.forward.get(call, {}).get(grain)
            limit = UNITS * UNIT * numbers[1]
            if other is None or any(abs(a - b) > limit for a, b in zip(numbers, other, strict=True)):
                raise _not_deterministic(f"module {call}" if call != "(batch)" else "the data")
    totals = {(part.rank, part.grains): part.total for part in again.parts}
    for part in once.parts:
        other_total = totals.get((part.rank, part.grains), math.nan)
        if math.isfinite(part.total) and not abs(other_total - part.total) <= UNITS * UNIT * abs(part.total):
            raise _not_deterministic("the loss")


def _not_deterministic(where: str) -> NotDeterministicError:
    return NotDeterministicError(
        given="this job, computed twice in the same way on one process",
        conflict=f"{where} came out differently: the difference is not the parallel run's",
        remedy="look for randomness outside torch's, Python's and numpy's global generators, or a race; then verify",
    )
