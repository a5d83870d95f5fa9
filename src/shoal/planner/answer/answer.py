"""Result of `shoal plan` as one value, from which the tables, the page and the plan file are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.planner.answer.goodput import Goodput, goodput
from shoal.planner.answer.outlook import (
    STORAGE_BYTES_PER_SECOND,
    Case,
    Change,
    ScalingCurve,
    curve,
    failures,
    sensitivity,
)
from shoal.planner.answer.question import Question
from shoal.planner.calibrate.comparison import section
from shoal.planner.search.aims import Aim
from shoal.planner.search.choice import Choice, NothingFitsError, choose, counted, gib
from shoal.planner.search.search import Candidate
from shoal.planner.search.space import counts
from shoal.plans.plan import Plan
from shoal.plans.words import described
from shoal.runs.version import __version__

_LARGEST = 1024  # hosts, in the search for a cluster on which something fits


@dataclass(frozen=True)
class Answer:
    """Result of a search with its outlook; `goodput` where the devices' failure rate is known."""

    question: Question
    choice: Choice
    curve: ScalingCurve
    changes: tuple[Change, ...]
    goodput: Goodput | None
    search_seconds: float
    job: str

    @property
    def chosen(self) -> Candidate:
        """The chosen plan and its prediction."""
        return self.choice.chosen

    @property
    def price(self) -> float | None:
        """US dollars of a device-hour."""
        return self.question.case.cluster.device.price_per_hour

    def job_seconds(self, seconds: float) -> float | None:
        """Seconds of the whole job, where a step takes so many."""
        return seconds * self.question.num_steps if self.question.num_steps else None

    def cost(self, candidate: Candidate) -> float | None:
        """US dollars of the whole job."""
        seconds = self.job_seconds(candidate.seconds)
        if self.price is None or seconds is None:
            return None
        return candidate.devices * seconds / 3600.0 * self.price

    @property
    def plan(self) -> Plan:
        """The chosen plan, complete, with its prediction."""
        case = self.question.case
        about: dict[str, Any] = {
            "cluster": case.cluster.name,
            "devices": self.chosen.devices,
            "device": case.cluster.device.name,
            "device_kind": case.cluster.device.kind,
            "aim": str(self.choice.aim),
            "planner": __version__,
            "job": self.job,
            "parameters": case.work.profile.num_parameters,
            "flops_per_sample": case.work.profile.flops(1.0),
            "factors": dict(self.question.correction.factors),
            "host_seconds": self.question.correction.host_seconds,
        }
        document = self.chosen.plan.to_mapping()
        document["pipeline"]["split"] = list(self._split)
        document["prediction"] = section(self.chosen.prediction, about)
        return Plan.from_mapping(document, source="plan")

    @property
    def _split(self) -> tuple[str, ...]:
        """Where the prediction cuts the model, so that the run does too; none where the model cannot be cut there."""
        split, at = self.chosen.prediction.split, self.chosen.plan
        known = all(name in self.question.case.space.facts.cuts for name in split)
        stages = at.layout.pipeline * at.pipeline.stages_per_rank
        return split if known and len(split) == stages - 1 else at.pipeline.split


def with_way_out(error: NothingFitsError, case: Case) -> NothingFitsError:
    """The error with the smallest larger cluster of the kind on which a plan fits, if there is one."""
    cluster, most = case.cluster, case.space.counts[-1]
    hosts = cluster.num_hosts
    while hosts <= _LARGEST:
        devices = [n for n in counts(replace(cluster, num_hosts=hosts)) if n > most]
        if hosts > 1 and cluster.between is None:
            break
        for number in devices[:: max(1, len(devices) // 8)] if devices else []:
            larger = replace(case, cluster=replace(cluster, num_hosts=hosts), space=case.space.at(number))
            found = next(larger.search().in_order(Aim()), None)
            if found is not None:
                words = (
                    f"on {counted(number)} it fits ({described(found.plan)}, {gib(found.prediction.peak_bytes)} each)"
                )
                return NothingFitsError(
                    given=error.given, conflict=error.conflict, remedy=f"{words}; or {error.remedy}"
                )
        hosts *= 2
    return error


def answer(question: Question, aim: Aim, job: str, device_hours: float | None, clock: Any) -> Answer:
    """Searches, and looks around. Raises: PlanError where nothing serves the aim."""
    case = question.case
    began = clock()
    search = case.search()
    try:
        choice = choose(search, aim, question.num_steps)
    except NothingFitsError as error:
        raise (error if aim.name == "deadline" else with_way_out(error, case)) from None
    seconds = clock() - began
    hours = device_hours or case.cluster.mean_hours_between_failures
    devices = choice.chosen.devices
    return Answer(
        question=question,
        choice=choice,
        curve=curve(search, devices),
        changes=sensitivity(case, choice.chosen),
        goodput=goodput(failures(case, devices, hours)) if hours else None,
        search_seconds=seconds,
        job=job,
    )


def storage_known(answer: Answer) -> str:
    """How fast checkpoints are assumed to be written, in words."""
    rate = answer.question.case.cluster.storage_bytes_per_second
    if rate:
        return f"{rate / 1e9:.1f} GB/s a host"
    return f"{STORAGE_BYTES_PER_SECOND / 1e9:.0f} GB/s a host, assumed: the cluster does not say"
