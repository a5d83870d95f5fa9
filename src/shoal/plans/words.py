"""Plans in words: a line for people on a plan's layout."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.plans.plan import Plan

_ZERO = {"optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3"}


def described(plan: Plan) -> str:
    """Degrees in use, what differs from the default, and the servers if there are any."""
    words = [f"{axis} {degree}" for axis, degree in plan.layout.__dict__.items() if degree > 1] or ["one device"]
    if plan.layout.shard > 1:
        words.append(_ZERO[plan.shard.level])
    if plan.layout.pipeline > 1:
        stages = f" x {plan.pipeline.stages_per_rank}" if plan.pipeline.stages_per_rank > 1 else ""
        words.append(plan.pipeline.schedule + stages)
    if plan.tensor.sequence and plan.layout.tensor > 1:
        words.append("sequence")
    if plan.memory.recompute != "none":
        words.append(f"recompute {plan.memory.recompute}")
    if plan.serves:
        bound = f" (staleness {plan.server.staleness})" if plan.server.mode == "bounded" else ""
        count = plan.server.num_servers
        words.append(f"{plan.server.mode}{bound} with {count} server{'s' if count > 1 else ''}")
    return ", ".join(words)


def cut_by_itself(places: Sequence[str] | None, blocks: Sequence[str] = ()) -> str:
    """Number and names of the default stage boundaries, in words; the model's blocks where they are not known."""
    if places is None:
        return f"a model of {len(blocks)} layers ({blocks[0]} to {blocks[-1]}): a stage has at least one"
    named = f" ({', '.join(places if len(places) <= 6 else [*places[:5], '...', places[-1]])})" if places else ""
    return f"a model that can be cut at {len(places)} place{'' if len(places) == 1 else 's'} by itself{named}"
