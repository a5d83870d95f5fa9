"""Trials of step modes as values: turns, comparisons, refusals, and the file of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shoal.errors import CommandError
from shoal.runs.step_trial import (
    _RECORDS,
    CHANNELS_LAST,
    StepMode,
    StepTrial,
    TrialCandidate,
    TrialKey,
    has_compiled,
    is_too_short,
    read_trial,
    record_trial,
    recorded_trial,
    trial_text,
)

ALL = (TrialCandidate("graph", 1.0), TrialCandidate("compiled", 40.0), TrialCandidate("compiled-graph", 41.0))
LAST = (TrialCandidate(CHANNELS_LAST),)


def trial(*candidates: TrialCandidate, num_steps: int = 100_000) -> StepTrial:
    return StepTrial("eager", "net", num_steps, list(candidates))


def measured(tried: StepTrial, seconds: Mapping[str, float | Iterator[float]]) -> StepTrial:
    """The trial after turns that take these seconds a step."""
    while tried.chosen is None:
        own = seconds[tried.turns[-1].mode]
        tried.decide(own if isinstance(own, float) else next(own))
    return tried


def modes(tried: StepTrial) -> list[str]:
    return [turn.mode for turn in tried.turns]


def test_names_are_modes() -> None:
    for name in ("eager", "graph", "compiled", "compiled-graph", "compiled-graph, channels last"):
        assert StepMode.named(name).name == name
    assert StepMode(compile="max-autotune").name == "compiled"
    with pytest.raises(KeyError):
        StepMode.named("fast")


def test_each_candidate_lies_between_two_turns_of_the_best_one() -> None:
    tried = measured(trial(*ALL), {"eager": 0.1, "graph": 0.08, "compiled": 0.09, "compiled-graph": 0.05})
    assert modes(tried) == ["eager", "graph", "eager", "graph", "compiled", "graph", "compiled-graph", "graph"]
    assert tried.chosen == "compiled-graph"
    assert [turn.until for turn in tried.turns] == [13 * number for number in range(1, 9)]
    assert all(one.after == other.until for other, one in zip(tried.turns, tried.turns[1:], strict=False))


def test_a_format_adds_to_the_best_mode() -> None:
    tried = measured(
        trial(*LAST, ALL[1]), {"eager": 0.1, "eager, channels last": 0.09, "compiled, channels last": 0.08}
    )
    assert tried.chosen == "compiled, channels last"


@pytest.mark.parametrize(
    ("before", "own", "after", "is_chosen"),
    [(0.1, 0.0995, 0.1, False), (0.1, 0.098, 0.1, True), (0.1, 0.09, 0.13, False), (0.1, 0.12, 0.1, False)],
    ids=["less than 1 %", "2 %", "less than the spread", "slower"],
)
def test_a_switch_needs_a_gain_above_one_percent_and_the_spread(
    before: float, own: float, after: float, is_chosen: bool
) -> None:
    tried = measured(trial(*LAST), {"eager": iter((before, after)), "eager, channels last": own})
    assert (tried.chosen == "eager, channels last") is is_chosen
    verdict = tried.verdicts[CHANNELS_LAST]
    assert verdict.seconds == own
    assert verdict.spread == pytest.approx(abs(before - after) / ((before + after) / 2))


def test_short_steps_have_long_turns() -> None:
    tried = trial(*LAST)
    tried.decide(0.001)
    assert tried.turns[-1].until - tried.turns[-1].after == 203


def test_what_does_not_pay_is_not_tried() -> None:
    """2,350 steps of 1 ms: a graph pays, compiling does not; 8 steps a second for an hour pay for both."""
    short = measured(trial(*ALL, num_steps=6000), {"eager": 0.001, "graph": 0.0005})
    assert short.chosen == "graph"
    assert "it costs about 40 s, and the" in short.verdicts["compiled"].reason
    assert "not tried" in short.verdicts["compiled-graph"].reason
    few = measured(trial(*LAST, num_steps=90), {"eager": 0.1})
    assert few.chosen == "eager"
    assert "of the 90 steps that are left" in few.verdicts[CHANNELS_LAST].reason
    assert is_too_short(199)
    assert not is_too_short(200)


def test_a_candidate_that_cannot_run_is_left_out_and_the_others_are_tried() -> None:
    tried = trial(*ALL)
    tried.decide(0.1)
    tried.refuse(13, "no graph")
    assert (tried.turns[-1].mode, tried.turns[-1].after) == ("compiled", 13)
    tried.refuse(15, "it fails")  # in the midst of its turn
    turns = [(turn.mode, turn.after, turn.until) for turn in tried.turns[1:]]
    assert turns == [("compiled", 13, 15), ("eager", 15, 28)]
    measured(tried, {"eager": 0.1, "compiled-graph": 0.09})
    assert tried.chosen == "compiled-graph"
    assert tried.verdicts["graph"].reason == "left out: no graph"
    assert tried.mode_after(14).name == "compiled"
    assert tried.mode_after(15).name == "eager"


def test_a_turn_that_nobody_measured_is_repeated() -> None:
    tried = trial(*LAST)
    tried.decide(0.1)
    tried.decide(None)
    assert modes(tried) == ["eager", "eager, channels last", "eager, channels last"]
    assert measured(tried, {"eager": 0.1, "eager, channels last": 0.05}).chosen == "eager, channels last"


def test_steps_have_the_modes_of_their_turns() -> None:
    tried = measured(trial(*LAST), {"eager": 0.1, "eager, channels last": 0.05})
    assert [tried.mode_after(step).channels_last for step in (0, 12, 13, 25, 26, 38, 39, 9000)] == [
        *(False, False, True, True, False, False, True, True)
    ]
    assert [tried.next_end(step) for step in (0, 12, 13, 38, 39)] == [13, 13, 26, 39, None]


def test_an_end_in_the_midst_keeps_the_best_one() -> None:
    tried = trial(*LAST)
    tried.decide(0.1)
    tried.end(15, "another layout")
    assert (tried.chosen, tried.ends_at) == ("eager", 15)
    assert tried.verdicts[CHANNELS_LAST].reason == "not tried: another layout"


def test_nothing_to_try_is_chosen_at_once() -> None:
    tried = trial()
    assert (tried.chosen, tried.turns, tried.next_end(0)) == ("eager", [], None)


def test_a_trial_is_read_as_it_was_written(tmp_path: Path) -> None:
    tried = trial(*ALL)
    tried.decide(0.1)
    path = tmp_path / "trial.json"
    assert read_trial(path) is None
    path.write_text(trial_text(tried))
    assert read_trial(path) == tried
    path.write_text(trial_text(tried).replace('"graph"', '"fast"'))
    with pytest.raises(CommandError, match="no trial of step modes"):
        read_trial(path)


def test_this_machine_records_the_trial_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = measured(trial(*ALL), {"eager": 0.1, "graph": 0.08, "compiled": 0.09, "compiled-graph": 0.05})
    key = TrialKey.of({"code": "a"}, 300)
    assert recorded_trial(key) is None
    assert not has_compiled(key)
    assert record_trial(key, tried) is None
    assert recorded_trial(key) == tried
    assert recorded_trial(TrialKey.of({"code": "a"}, 301)) is None
    assert has_compiled(TrialKey.of({"code": "a"}, 301))
    assert not has_compiled(TrialKey.of({"code": "b"}, 300))
    assert len(json.loads(_RECORDS.path.read_text())) == 1
    _RECORDS.path.write_text("{")
    assert recorded_trial(key) is None
    assert record_trial(key, tried) is None
    assert recorded_trial(key) == tried


def test_a_machine_file_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    reason = record_trial(TrialKey.of({}, 1), trial())
    assert reason is not None
    assert "Not a directory" in reason
