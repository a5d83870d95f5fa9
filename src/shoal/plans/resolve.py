"""Completion of a plan from a user's options, and refusal of every conflict."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from shoal.errors import PlanError, SettingWarning, nearest
from shoal.plans.conflicts import shown
from shoal.plans.legal import (
    ModelFacts,
    World,
    conflicts,
    legal_grains_per_microbatch,
    notes,
    num_microbatches,
    other_world,
    refuse,
)
from shoal.plans.plan import DataSection, LayoutSection, Plan, ServerSection
from shoal.plans.relaid import relaid

# Values of `--precision`: parameters, compute, reduce, loss_scale. Autocast if compute differs from parameters.
PRECISIONS = {
    "fp32": ("float32", "float32", "float32", "none"),
    "bf16": ("float32", "bfloat16", "float32", "none"),
    "bf16-pure": ("bfloat16", "bfloat16", "float32", "none"),
    "fp16": ("float32", "float16", "float32", "dynamic"),
}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


@dataclass(frozen=True)
class Wishes:
    """Options of a command line or Session beyond the plan; None if an option is absent."""

    devices: int | None = None
    exact: bool | None = None
    precision: str | None = None
    workers: int | None = None
    max_microbatch: int | None = None  # samples


def apply_wishes(plan: Plan, wishes: Wishes, from_file: bool) -> Plan:
    """Return the plan with the wishes written into it.

    Raises: PlanError if a wish contradicts a plan file, or if the precision is unknown.
    """
    given = plan
    if wishes.devices is not None:
        if wishes.devices < 1:
            raise PlanError(
                given=f"--devices {wishes.devices}",
                conflict="a run needs at least one process",
                remedy="write --devices 1 or more",
            )
        if from_file:
            refuse(other_world(plan, World(wishes.devices, f"--devices {wishes.devices}")))
        else:
            plan = relaid(plan, wishes.devices)
    if wishes.exact is not None:
        plan = plan.with_sections(execution={"exact": wishes.exact})
    if wishes.precision is not None:
        plan = plan.with_sections(precision=_precision(wishes.precision))
    plan = _without_stale_prediction(plan, given)
    if wishes.workers is not None:
        plan = plan.with_sections(data={"workers": wishes.workers})
    return plan


def _without_stale_prediction(plan: Plan, given: Plan) -> Plan:
    """Return the plan without a prediction that was made for other degrees, another precision or another mode."""
    changed = [name for name in ("layout", "precision", "execution") if getattr(plan, name) != getattr(given, name)]
    if not changed or not plan.prediction:
        return plan
    what = " and ".join(changed)
    message = f"[prediction] is left out: it is of another {what} than this command asks for"
    warnings.warn(message, SettingWarning, stacklevel=3)
    return plan.model_copy(update={"prediction": {}})


class CompletePlan(Plan):
    """Plan with every setting resolved and checked against its job; engines are built only from complete plans.

    Only `judge` makes one from another plan; `with_sections` returns an unchecked `Plan`.
    """

    @property
    def alone(self) -> Self:
        """The same plan on one process, without servers."""
        return self.model_copy(update={"layout": LayoutSection(), "server": ServerSection()})

    @property
    def with_copies(self) -> Self:
        """The same plan with a copy of the parameters for each rank."""
        return self.model_copy(update={"memory": self.memory.model_copy(update={"shared": False})})

    def with_format(self, *, channels_last: bool) -> Self:
        """Return the same plan with another memory format of images; for fast mode."""
        execution = self.execution.model_copy(update={"channels_last": channels_last})
        return self.model_copy(update={"execution": execution})

    def with_workers(self, workers: int) -> Self:
        """Return the same plan with `workers` data-loading processes per rank; for a plan without servers."""
        return self.model_copy(update={"data": DataSection(workers=workers)})


@dataclass(frozen=True)
class Judged:
    """Complete plan, the grains of its job, and the drawbacks of its layout, a sentence each.

    `why_grains`: the reason for the number of grains, in words.
    """

    plan: CompletePlan
    num_grains: int
    grain_size: int
    notes: tuple[str, ...] = ()
    why_grains: str = "as the job says"


def judge(plan: Plan, facts: ModelFacts, max_microbatch: int | None = None) -> Judged:
    """Return the complete plan for a job and its model. One process calls it once per run.

    `max_microbatch`: limit in samples; the microbatch gets as many whole grains as fit.
    Raises: PlanError with every conflict at once, each with the nearest legal values.
    """
    if plan.layout.data * plan.layout.shard <= facts.num_grains:  # otherwise the plan is refused anyway
        plan = plan.with_sections(batch={"grains_per_microbatch": _microbatch(plan, facts, max_microbatch)})
    refuse(conflicts(plan, facts))
    found = CompletePlan.from_mapping(plan.to_mapping(), source="plan")
    return Judged(found, facts.num_grains, facts.grain_size, tuple(notes(plan, facts)))


def complete(plan: Plan, num_grains: int, grain_size: int, max_microbatch: int | None = None) -> CompletePlan:
    """Return the plan as `judge` does, for a job whose model is not examined."""
    return judge(plan, ModelFacts(num_grains, grain_size), max_microbatch).plan


def _microbatch(plan: Plan, facts: ModelFacts, max_microbatch: int | None) -> int:
    share = -(-facts.num_grains // plan.divides_step)
    wanted = plan.batch.grains_per_microbatch or _fewest_microbatches(plan, facts) or share
    if max_microbatch is not None:
        if max_microbatch < facts.grain_size:
            smaller = -(-facts.num_grains * facts.grain_size // max_microbatch)
            raise PlanError(
                given=f"--max-microbatch {max_microbatch} for a job of grains={facts.num_grains}",
                conflict=f"a grain is computed whole, and has {facts.grain_size} samples",
                remedy=f"write --max-microbatch {facts.grain_size} or more, or Job(grains={smaller}) (which changes "
                "the run)",
            )
        wanted = min(wanted, max_microbatch // facts.grain_size)
    if plan.execution.exact and wanted != 1:
        if plan.batch.grains_per_microbatch > 1:
            message = "batch.grains_per_microbatch has no effect: exact mode computes grain by grain"
            warnings.warn(message, SettingWarning, stacklevel=2)
        wanted = 1
    return min(wanted, share)


def _precision(name: str) -> dict[str, str]:
    known = list(PRECISIONS)
    values = PRECISIONS.get(_ALIASES.get(name, name))
    if values is None:
        raise PlanError(
            given=f"--precision {name}",
            conflict="no such precision",
            remedy=f"write one of {', '.join(known)}{nearest(name, known)}",
        )
    return dict(zip(("parameters", "compute", "reduce", "loss_scale"), values, strict=True))


def _fewest_microbatches(plan: Plan, facts: ModelFacts) -> int:
    """Return the grains per microbatch for the fewest, most even microbatches that the schedule allows; 0 if none.

    Microbatches that fill the pipeline, at least one per rank, are preferred.
    """
    if plan.layout.pipeline == 1:
        return 0
    counts = {
        per: num_microbatches(plan.with_sections(batch={"grains_per_microbatch": per}), facts)
        for per in legal_grains_per_microbatch(plan, facts)
    }
    filling = {per: found for per, found in counts.items() if min(found) >= plan.layout.pipeline} or counts
    fewest = filling[max(filling)] if filling else ()
    return min((per for per, found in filling.items() if found == fewest), default=0)


def unheeded(plan: Plan, num_grains: int, alone: str | None) -> Iterator[str]:
    """Yield a sentence for each batch setting without effect on a job with `num_grains` grains.

    `plan`: as the user wrote it. `alone`: why grains do not share a forward, if they do not. Exact mode also computes
    grain by grain, but `judge` reports that.
    """
    wanted, share = plan.batch.grains_per_microbatch, -(-num_grains // plan.divides_step)
    given = shown(plan, "batch.grains_per_microbatch")
    if wanted > 1 and alone is not None and not plan.execution.exact:
        yield f"{given}: no effect, since {alone}: each grain has a forward of its own"
    elif wanted > share and not plan.execution.exact:
        yield f"{given}: no effect beyond {share}, since a rank has no more grains in a step"
    counts = num_microbatches(plan, ModelFacts(num_grains, grain_size=1))
    if alone is None and plan.shards_model and plan.shard.reduce == "last_microbatch" and max(counts) == 1:
        yield f"{shown(plan, 'shard.reduce')}: no effect, since a rank computes one microbatch a step"


def warn_of(sentences: Iterable[str], above: int = 0) -> None:
    """Issue a warning for each sentence at the line that called the caller, or `above` calls further up."""
    for sentence in sentences:
        warnings.warn(sentence, SettingWarning, stacklevel=3 + above)
