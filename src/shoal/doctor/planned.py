"""Counterfactuals of the planner: a run's plan and others on this machine, corrected by the run's records."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shoal.doctor.causes import WORTH, LostTime, Remedy
from shoal.doctor.run_times import RunTimes
from shoal.doctor.trial import changed_plan
from shoal.errors import HardwareError, PlanError
from shoal.hardware.values import Cluster
from shoal.planner.answer.outlook import Case, in_mode, mode, unaligned_products
from shoal.planner.calibrate.comparison import MeasuredStep, beside, section
from shoal.planner.calibrate.lessons import Correction, learn, observation
from shoal.planner.predict.workload import Prediction
from shoal.planner.search.search import Aim, Candidate, choose
from shoal.plans.plan import Plan, described
from shoal.plans.resolve import judge

# Plan sections on whose every key a prediction depends; it cannot evaluate changes of other sections.
_PRICED = {"layout", "batch", "shard", "tensor", "pipeline", "memory", "precision", "collectives"}
# Plan sections that a search varies.
_VARIED = ("layout", "batch", "shard", "tensor", "pipeline", "memory", "collectives")


@dataclass(frozen=True)
class PlannedRun:
    """A run's plan from the planner's point of view.

    `case`: corrected by the run's measurement of each part of its step. `plain`: with this machine's usual correction.
    """

    case: Case
    plain: Case
    plan: Plan
    times: RunTimes

    def predicted(self, plan: Plan) -> Prediction:
        """Return the prediction for a complete plan."""
        return _predicted(self.case, plan)

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of the run's own plan, corrected by the measured seconds and therefore close to them."""
        return self.predicted(self.plan).step_seconds

    def gain(self, remedy: Remedy) -> float | None:
        """Return the fraction of training time that a remedy saves; None if predictions do not separate the plans."""
        if not (remedy.sections or remedy.devices) or not set(remedy.sections) <= _PRICED or remedy.variables:
            return None
        try:
            plan = judge(changed_plan(self.plan, remedy), self.case.space.facts).plan
        except PlanError:
            return None
        seconds = self.predicted(plan).step_seconds
        return None if seconds == self.seconds else self._of_training(seconds)

    def _of_training(self, seconds: float) -> float:
        """Return the gain from a predicted step time if evaluations and checkpoints stay unchanged."""
        return (1.0 - seconds / self.seconds) * self.times.step / self.times.total

    def best(self, losses: Sequence[LostTime] = ()) -> Remedy | None:
        """Return the planner's own choice as a remedy if it saves time and differs from the remedies of `losses`.

        The saving must hold as predicted and as corrected by this run's ratio of measured to predicted time. The
        correction knows nothing of exchanges between ranks that this run does not make.
        """
        try:
            chosen = choose(self.plain.search(), Aim()).chosen
        except PlanError:
            return None
        of_plain = _predicted(self.plain, self.plan).step_seconds
        seconds = max(self.predicted(chosen.plan).step_seconds, chosen.seconds / of_plain * self.seconds)
        gain, others = self._of_training(seconds), [self.plan]
        for remedy in (remedy for loss in losses for remedy in loss.remedies if remedy.sections or remedy.devices):
            with contextlib.suppress(PlanError):
                others.append(judge(changed_plan(self.plan, remedy), self.case.space.facts).plan)
        if gain < WORTH or any(_varied(chosen.plan) == _varied(other) for other in others):
            return None
        mine = _varied(self.plan)
        sections = {name: values for name, values in _varied(chosen.plan).items() if values != mine[name]}
        words = f"the planner would choose {described(chosen.plan)}"
        devices = chosen.devices if chosen.devices != self.times.world_size else None
        cost = chosen.devices / self.times.world_size
        return Remedy("planned", words, gain, sections, devices, planned=gain, cost=cost)

    # ---------------------------------------------------------------------------------------- what all ranks share

    @cached_property
    def memory_share(self) -> float:
        """Fraction of forward and backward that is due to other ranks' use of the memory; 0 if it was not measured."""
        cluster, world_size = self.case.cluster, self.plan.layout.world_size
        device = cluster.device_for(min(world_size, cluster.devices_per_host))
        if world_size == 1 or device.memory_alone is None:
            return 0.0
        alone = replace(device, memory=device.memory_alone)
        lonely = replace(self.case, cluster=replace(cluster, device=alone, alternatives={}), correction=Correction())
        shared = replace(lonely, cluster=replace(cluster, device=device, alternatives={}))
        then, now = (_predicted(case, self.plan).terms["compute"] for case in (lonely, shared))
        return max(0.0, 1.0 - then / now) if now else 0.0

    def memory(self) -> LostTime | None:
        """Return shared memory bandwidth as a cause, or None.

        Smaller microbatches are not a remedy: trials did not confirm the predicted effect of caches.
        """
        lost = self.times.computing * self.memory_share
        if lost < WORTH * self.times.total:
            return None
        words = f"1 device instead of {self.plan.layout.world_size}: nothing shares the memory with it"
        alone = Remedy("one-device", words, 0.0, devices=1, cost=1 / self.times.world_size)
        gain = self.gain(alone)
        seen = (
            f"{self.plan.layout.world_size} ranks move memory at a time: by this machine's measurements "
            f"{self.memory_share:.0%} of forward and backward, which one rank beside idle ones would not take"
        )
        share = lost / self.times.total
        # One device is a remedy if it costs little time.
        remedies = () if gain is None or gain < -WORTH else (replace(alone, gain=gain, planned=gain),)
        return LostTime("memory", "memory bandwidth shared by ranks", lost, share, seen, remedies, share)

    # ------------------------------------------------------------------------------------------------ a GPU's host

    def launches(self) -> LostTime | None:
        """Return kernels that wait for their host as a cause, if a CUDA graph of the step could start them."""
        graph = in_mode(self.case, self.plan, {"compiled": "compiled-graph"}.get(mode(self.plan), "graph"))
        gain = 0.0 if graph is None else self._of_training(_predicted(graph, self.plan).step_seconds)
        if gain < WORTH:
            return None
        seen = "one process starts a GPU's kernels one after another, and by the planner they take less time than that"
        words = "each step replayed from one CUDA graph, execution.cuda_graph = true, where it can be captured"
        remedy = Remedy("cuda-graph", words, gain, {"execution": {"cuda_graph": True}}, planned=gain)
        return LostTime("launches", "a GPU that waits for its host", gain * self.times.total, gain, seen, (remedy,))

    def vocabulary(self) -> LostTime | None:
        """Return 16-bit products on a GPU that rows of no multiple of 16 bytes slow down as a cause, or None."""
        case = self.case if self.case.cluster.device.kind == "gpu" else None
        products = case and unaligned_products(case, Candidate(self.plan, self.predicted(self.plan)))
        if not products:
            return None
        gain = self._of_training(products.aligned_seconds)
        words = f"a model with {products.padded} in place of {products.lengths} numbers, which changes the model"
        remedy = Remedy("padding", words, gain, planned=gain)
        return LostTime("rows", "products with unaligned rows", gain * self.times.total, gain, str(products), (remedy,))


def _predicted(case: Case, plan: Plan) -> Prediction:
    """Return the prediction for a complete plan."""
    return case.search().costs(plan.layout.world_size).predict(plan)


def _varied(plan: Plan) -> dict[str, Any]:
    """Return the sections of a plan that a search varies."""
    document = plan.to_mapping()
    return {name: document[name] for name in _VARIED}


def base_of(plan: Plan) -> Plan:
    """Return a plan with a run's sections that a search does not vary, without a captured step (one device only)."""
    execution = plan.execution.model_copy(update={"cuda_graph": False})
    return Plan(precision=plan.precision, execution=execution, data=plan.data)


def planned_run(case: Case, plan: Plan, steps: Sequence[MeasuredStep], times: RunTimes) -> PlannedRun:
    """Return the planner's view of a run; `case`: its job on this machine.

    Raises: PlanError or HardwareError if the planner cannot predict the run.
    """
    plan = plan.model_copy(update={"prediction": {}})
    if plan.serves:
        raise PlanError(
            given="a run with parameter servers",
            conflict="the planner cannot predict parameter servers",
            remedy="ask about a run without them",
        )
    if (case.cluster.device.kind == "gpu") != (times.device == "gpu"):
        raise HardwareError(
            given=f"a run on a {times.device}",
            conflict=f"this machine has a {case.cluster.device.kind}",
            remedy="ask on a machine of the run's kind",
        )
    case = replace(case, cluster=_with_ranks(case.cluster, plan.layout.world_size))
    own = replace(case, correction=Correction())
    of_plan = section(_predicted(own, plan), {})
    lesson = learn([observation(beside(of_plan, steps, None, times.device))])
    return PlannedRun(replace(own, correction=lesson.correction), case, plan, times)


def _with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """Return the machine as `ranks` ranks share it.

    Fewer ranks keep the same threads each, because neither remedies nor trials change threads. If there are more ranks
    than cores, each gets a part of a core.
    """
    there = cluster.devices_per_host
    if cluster.device.kind == "gpu" or cluster.num_hosts > 1:
        return cluster
    core = cluster.device_for(min(ranks, there))
    fewer = dict.fromkeys(range(2, min(ranks, there) + 1), core)
    alone = {1: core if ranks == 1 else replace(core, memory=core.memory_alone or core.memory)}
    alternatives = {**cluster.alternatives, **fewer, **alone}
    if ranks <= there:
        return replace(cluster, alternatives=alternatives)
    part = there / ranks
    crowded = replace(
        core,
        memory_bytes=int(core.memory_bytes * part),
        memory_bytes_per_second=core.memory_bytes_per_second * part,
        memory_alone=None,
        flops={dtype: value * part for dtype, value in core.flops.items()},
        launch_seconds=core.launch_seconds / part,
        dispatch_seconds=core.dispatch_seconds / part,
    )
    return replace(cluster, device=crowded, devices_per_host=ranks, alternatives=alternatives)


def with_planner(losses: Sequence[LostTime], planned: PlannedRun) -> tuple[LostTime, ...]:
    """Add the planner's gain to each remedy that is a plan, and the causes that only the planner can find."""
    causes = [
        replace(loss, remedies=tuple(replace(remedy, planned=planned.gain(remedy)) for remedy in loss.remedies))
        for loss in losses
    ]
    causes += [
        loss
        for loss in (planned.memory(), planned.launches(), planned.vocabulary())
        if loss is not None and loss.is_worth_telling
    ]
    return tuple(sorted(causes, key=lambda loss: -loss.regained))
