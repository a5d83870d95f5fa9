"""A bound of a pipeline's makespan that needs no division into stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.predict.pipeline_bound import PipelineShape, filled
from shoal.plans.legal import fits
from shoal.plans.schedule import Action, ActionKind, actions, simulate

ONE = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.01, 1))  # forward, for inputs, for weights


@given(
    schedule=st.sampled_from(("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")),
    ranks=st.integers(2, 4),
    per=st.integers(1, 3),
    microbatches=st.integers(1, 9),
    data=st.data(),
)
def test_no_division_into_stages_goes_below(
    schedule: str, ranks: int, per: int, microbatches: int, data: st.DataObject
) -> None:
    per = {"gpipe": per, "interleaved_1f1b": per + 1}.get(schedule, 1)
    if not fits(schedule, ranks, microbatches):
        return
    stages = data.draw(st.lists(ONE, min_size=ranks * per, max_size=ranks * per))

    def of(action: Action) -> float:
        forward, inputs, weights = stages[action.stage]
        kinds = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: inputs + weights, ActionKind.BACKWARD_INPUT: inputs}
        return kinds.get(action.kind, weights)

    makespan = simulate(actions(schedule, ranks, per, microbatches), of)[0]
    bound = filled(sum(map(sum, stages)), PipelineShape(schedule, ranks, per, microbatches))
    assert bound <= makespan * (1 + 1e-9)


def test_equal_stages_wait_for_the_first_microbatch() -> None:
    assert filled(4.0, PipelineShape("1f1b", 1, 1, 3)) == 12.0
    assert filled(4.0, PipelineShape("1f1b", 4, 1, 1)) == 4.0  # one microbatch passes all stages alone
    assert 4.5 < filled(4.0, PipelineShape("1f1b", 4, 1, 4)) <= 7.0  # of which 7 are those of equal stages
