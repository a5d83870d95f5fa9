from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from shoal.planner.predict.compute_time import Pass, Passes
from shoal.planner.predict.lower_bounds import PipelineShape
from shoal.planner.predict.pipeline import makespan
from shoal.plans.schedule import Action, ActionKind, actions, simulate

_SECONDS = st.floats(0.0, 10.0)
_PASS = st.tuples(*[_SECONDS] * len(Pass._fields)).map(lambda seconds: Pass(*seconds))
_STAGE = st.tuples(_PASS, _PASS, _PASS).map(lambda passes: Passes(*passes))


def simulated(shape: PipelineShape, stages: list[Passes], message: float) -> float:
    """The makespan, action by action."""

    def seconds(action: Action) -> float:
        one = stages[action.stage]
        if action.kind is ActionKind.FORWARD:
            return one.forward_seconds + message
        if action.kind is ActionKind.BACKWARD:
            return one.backward_seconds + message
        if action.kind is ActionKind.BACKWARD_INPUT:
            return one.backward_seconds - one.weight_seconds + message
        return one.weight_seconds

    return simulate(actions(*shape), seconds)[0]


@st.composite
def pipelines(draw: Any) -> tuple[PipelineShape, list[Passes], float]:
    schedule = draw(st.sampled_from(["1f1b", "zero_bubble", "gpipe", "interleaved_1f1b"]))
    ranks = draw(st.integers(2, 6))
    stages = 1 if schedule in ("1f1b", "zero_bubble") else draw(st.integers(2, 3))
    shape = PipelineShape(schedule, ranks, stages, draw(st.integers(1, 14)))
    return shape, draw(st.lists(_STAGE, min_size=ranks * stages, max_size=ranks * stages)), draw(_SECONDS)


@given(pipelines())
@example((PipelineShape("zero_bubble", 2, 1, 1), [Passes(Pass(1.0), Pass(1.0), Pass(9.0))] * 2, 0.5))
def test_to_the_bit_what_is_simulated_action_by_action(case: tuple[PipelineShape, list[Passes], float]) -> None:
    assert makespan(*case) == simulated(*case)
