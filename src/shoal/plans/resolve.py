"""Completion of a plan from a user's options and for another number of devices, and refusal of every conflict."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from shoal.errors import PlanError, SettingWarning, nearest
from shoal.plans.grains import share_sizes
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
from shoal.plans.plan import (
    AXES,
    DataSection,
    ExecutionSection,
    Layout,
    PipelineSection,
    Plan,
    ServerSection,
    ShardSection,
    TensorSection,
    divisors,
)
from shoal.plans.rules import shown

# Values of `--precision`: parameters, compute, reduce, loss_scale, products. Autocast if compute differs from
# parameters.
PRECISIONS = {
    "fp32": ("float32", "float32", "float32", "none", "same"),
    "bf16": ("float32", "bfloat16", "float32", "none", "same"),
    "bf16-pure": ("bfloat16", "bfloat16", "float32", "none", "same"),
    "fp16": ("float32", "float16", "float32", "dynamic", "same"),
    "fp8": ("float32", "bfloat16", "float32", "none", "float8_rows"),
}
# Values of `--step` but auto: execution.cuda_graph, execution.compile.
STEPS = {
    "eager": (False, "none"),
    "graph": (True, "none"),
    "compiled": (False, "default"),
    "compiled-graph": (True, "default"),
}
_UNUSED = {"shard": ShardSection(), "tensor": TensorSection(), "pipeline": PipelineSection()}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


@dataclass(frozen=True)
class Wishes:
    """Options of a command line or Session beyond the plan; None if an option is absent."""

    devices: int | None = None
    exact: bool | None = None
    precision: str | None = None
    workers: int | None = None
    max_microbatch: int | None = None  # samples
    step: str | None = None  # a name in STEPS; None leaves the plan's keys


def apply_wishes(plan: Plan, wishes: Wishes, from_file: bool) -> Plan:
    """Return the plan with the wishes written into it.

    Raises: PlanError if a wish contradicts a plan file, or if the precision is unknown.
    """
    before = plan
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
        values = PRECISIONS.get(_ALIASES.get(wishes.precision, wishes.precision))
        if values is None:
            raise PlanError(
                given=f"--precision {wishes.precision}",
                conflict="no such precision",
                remedy=f"write one of {', '.join(PRECISIONS)}{nearest(wishes.precision, list(PRECISIONS))}",
            )
        names = ("parameters", "compute", "reduce", "loss_scale", "products")
        plan = plan.with_sections(precision=dict(zip(names, values, strict=True)))
    if wishes.step is not None:
        graph, compile_kind = STEPS[wishes.step]
        own = sets_step(plan) if from_file else ()
        if compile_kind != "none" and plan.execution.compile != "none":
            compile_kind = plan.execution.compile
        mode = {"cuda_graph": graph, "compile": compile_kind}
        if any(getattr(plan.execution, key) != mode[key] for key in own):
            raise PlanError(
                given=f"--step {wishes.step}",
                conflict=f"the plan file has {shown(plan, *(f'execution.{key}' for key in own))}",
                remedy="leave --step out, or leave these keys out of the file",
            )
        plan = plan.with_sections(execution=mode)
    changed = [name for name in ("layout", "precision", "execution") if getattr(plan, name) != getattr(before, name)]
    if changed and plan.prediction:
        message = f"[prediction] is left out: it is of another {' and '.join(changed)} than this command asks for"
        warnings.warn(message, SettingWarning, stacklevel=2)
        plan = plan.model_copy(update={"prediction": {}})
    if wishes.workers is not None:
        plan = plan.with_sections(data={"workers": wishes.workers})
    return plan


def sets_step(plan: Plan) -> tuple[str, ...]:
    """Return the keys of [execution] that a plan as the user wrote it sets, of those that `--step` sets."""
    return tuple(key for key in ("cuda_graph", "compile") if key in plan.execution.model_fields_set)


def without_step(plan: Plan) -> Plan:
    """Return the plan with the mode of steps left open if it is the default, so that a run tries it."""
    exact = plan.execution.exact
    if plan.execution != ExecutionSection(exact=exact):
        return plan
    return Plan.from_mapping({**plan.to_mapping(), "execution": {"exact": exact}}, source="plan")


def relaid(plan: Plan, devices: int) -> Plan:
    """Return the plan with degrees whose product is `devices`; only the data degree changes if that suffices.

    Otherwise the axes stay in use if the number of devices allows it, with degrees close to the old ones. Settings for
    microbatches and stages of other degrees become open, and settings of unused axes are dropped. The facts of the job
    decide later whether its model allows the degrees.
    """
    old = plan.layout
    if devices == old.world_size:
        return plan
    rest = old.world_size // old.data
    if devices % rest == 0:
        expert = old.fitting_experts(devices // old.pipeline)
        return plan.with_sections(layout={"data": devices // rest, "expert": expert, "shares": []})
    used = [axis for axis in AXES if axis != "data" and old.degree(axis) > 1]

    def candidates(axes: list[str], left: int) -> Iterator[dict[str, int]]:
        """Yield degrees with this product on these axes, and on the data axis, which takes the rest."""
        if not axes:
            yield {**dict.fromkeys(AXES, 1), "data": left}
            return
        for degree in divisors(left):
            yield from ({**others, axes[0]: degree} for others in candidates(axes[1:], left // degree))

    def distance(degrees: dict[str, int]) -> tuple[float, ...]:
        """Return a sort key: axes that go out of use, changes of degrees that the model bounds, changes of others.

        For bounded degrees a divisor is safest: a model that four ranks divide can also be divided by two.
        """
        gone = sum(degrees[axis] == 1 for axis in used)
        unsafe = sum(old.degree(axis) % degrees[axis] != 0 for axis in used if axis != "shard")
        moved = {axis: abs(math.log(degrees[axis] / old.degree(axis))) for axis in AXES}
        bounded = sum(moved[axis] for axis in used if axis != "shard")
        return gone, unsafe, bounded, moved["shard"], moved["data"]

    degrees = min(candidates(used, devices), key=distance)
    sections: dict[str, object] = {name: unused for name, unused in _UNUSED.items() if degrees[name] == 1}
    if plan.layout.pipeline != degrees["pipeline"] > 1:
        sections["pipeline"] = plan.pipeline.model_copy(update={"split": ()})
    if plan.layout.shard != degrees["shard"] > 1:
        sections["shard"] = plan.shard.model_copy(update={"sizes": ()})
    batch = plan.batch.model_copy(update={"grains_per_microbatch": 0})
    degrees["expert"] = old.fitting_experts(devices // degrees["pipeline"])
    return plan.model_copy(update={"layout": Layout.model_validate(degrees), "batch": batch, **sections})


class CompletePlan(Plan):
    """Plan with every setting resolved and checked against its job; engines are built only from complete plans.

    Only `judge` makes one from another plan; `with_sections` returns an unchecked `Plan`.
    """

    @property
    def alone(self) -> Self:
        """The same plan on one process, without servers."""
        shard = self.shard.model_copy(update={"sizes": ()})
        return self.model_copy(update={"layout": Layout(), "server": ServerSection(), "shard": shard})

    def with_choices(
        self, *, workers: int | None = None, shared: bool | None = None, execution: Mapping[str, object] | None = None
    ) -> Self:
        """Return the same plan with a run's own choices; None leaves a setting unchanged.

        `workers`: data-loading processes per rank, for a plan without servers. `shared`: whether the ranks of a host
        share one copy of the parameters. `execution`: keys of the section, of fast mode.
        """
        data = self.data if workers is None else DataSection(workers=workers)
        memory = {} if shared is None else {"shared": shared}
        update = {
            "data": data,
            "execution": self.execution.model_copy(update=dict(execution or {})),
            "memory": self.memory.model_copy(update=memory),
        }
        return self.model_copy(update=update)

    def with_shares(self, shares: tuple[int, ...], num_grains: int) -> Self:
        """Return the same plan with other shares of the grains. A microbatch of all grains of a rank stays one."""
        ranks, per = self.layout.divides_grains, self.batch.grains_per_microbatch
        before, after = (max(share_sizes(num_grains, ranks, one)) for one in (self.layout.shares, shares))
        per = after if per == before and not self.execution.exact else min(per, after)
        batch = self.batch.model_copy(update={"grains_per_microbatch": per})
        return self.model_copy(update={"layout": self.layout.model_copy(update={"shares": shares}), "batch": batch})


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

    Default microbatch: all grains of a rank; one grain in exact mode; under a pipeline, the grains that fill it in the
    fewest microbatches. `max_microbatch`: limit in samples; the microbatch gets as many whole grains as fit.
    Raises: PlanError with every conflict at once, each with the nearest legal values.
    """
    if plan.layout.data * plan.layout.shard <= facts.num_grains:  # otherwise the plan is refused anyway
        share = max(share_sizes(facts.num_grains, plan.divides_step, plan.layout.shares))
        wanted = plan.batch.grains_per_microbatch or _fewest_microbatches(plan, facts) or share
        if max_microbatch is not None:
            if max_microbatch < facts.grain_size:
                smaller = -(-facts.num_grains * facts.grain_size // max_microbatch)
                raise PlanError(
                    given=f"--max-microbatch {max_microbatch} for a job of grains={facts.num_grains}",
                    conflict=f"a grain is computed whole, and has {facts.grain_size} samples",
                    remedy=f"write --max-microbatch {facts.grain_size} or more, or Job(grains={smaller}) (which "
                    "changes the run)",
                )
            wanted = min(wanted, max_microbatch // facts.grain_size)
        if plan.execution.exact and wanted != 1:
            if plan.batch.grains_per_microbatch > 1:
                message = "batch.grains_per_microbatch has no effect: exact mode computes grain by grain"
                warnings.warn(message, SettingWarning, stacklevel=2)
            wanted = 1
        plan = plan.with_sections(batch={"grains_per_microbatch": min(wanted, share)})
    refuse(conflicts(plan, facts))
    whole = CompletePlan.from_mapping(plan.to_mapping(), source="plan")
    return Judged(whole, facts.num_grains, facts.grain_size, tuple(notes(plan, facts)))


def complete(plan: Plan, num_grains: int, grain_size: int, max_microbatch: int | None = None) -> CompletePlan:
    """Return the plan as `judge` does, for a job whose model is not examined."""
    return judge(plan, ModelFacts(num_grains, grain_size), max_microbatch).plan


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
    filling = {per: numbers for per, numbers in counts.items() if min(numbers) >= plan.layout.pipeline} or counts
    fewest = filling[max(filling)] if filling else ()
    return min((per for per, numbers in filling.items() if numbers == fewest), default=0)


def unheeded(plan: Plan, num_grains: int, alone: str | None) -> Iterator[str]:
    """Yield a sentence for each batch setting without effect on a job with `num_grains` grains.

    `plan`: as the user wrote it. `alone`: why grains do not share a forward, if they do not. Exact mode also computes
    grain by grain, but `judge` reports that.
    """
    wanted = plan.batch.grains_per_microbatch
    share = max(share_sizes(num_grains, plan.divides_step, plan.layout.shares))
    given = shown(plan, "batch.grains_per_microbatch")
    if wanted > 1 and alone is not None and not plan.execution.exact:
        yield f"{given}: no effect, since {alone}: each grain has a forward of its own"
    elif wanted > share and not plan.execution.exact:
        yield f"{given}: no effect beyond {share}, since a rank has no more grains in a step"
    counts = num_microbatches(plan, ModelFacts(num_grains, grain_size=1))
    if alone is None and plan.shards_model and plan.shard.reduce == "last_microbatch" and max(counts) == 1:
        yield f"{shown(plan, 'shard.reduce')}: no effect, since a rank computes one microbatch a step"


def warn_of(sentences: Iterable[str]) -> None:
    """Issue a warning for each sentence at the line that called the caller."""
    for sentence in sentences:
        warnings.warn(sentence, SettingWarning, stacklevel=3)
