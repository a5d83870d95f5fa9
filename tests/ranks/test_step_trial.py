"""Trials of step modes: what a run tries, chooses and writes, and that the same command has the same bits again."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.launching import JOBS, Ended, Run, run, run_all

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'tried.py'}:job"
LAST = "eager, channels last"
COMPILE_LIMIT_SECONDS = 300.0


def tried(folder: Path, name: str, *arguments: str, devices: int | None = 1, home: str = "cache", **more: Any) -> Run:
    """A run whose records of this machine are in `home`."""
    environment = {"XDG_CACHE_HOME": str(folder / home), "OMP_NUM_THREADS": "1", **more.pop("environment", {})}
    return Run(JOB, folder / name, devices, arguments=arguments, environment=environment, **more)


def trial(ended: Ended) -> Any:
    return ended.expect(0).result["trial"]


def weights(ended: Ended) -> Any:
    return ended.expect(0).result["weights_sha256"]


def execution(out: Path) -> Any:
    return tomllib.loads((out / "plan.toml").read_text(encoding="utf-8"))["execution"]


def turns(out: Path) -> Any:
    return json.loads((out / "trial.json").read_text(encoding="utf-8"))["turns"]


def test_the_fastest_mode_is_chosen_and_the_same_command_tries_nothing(tmp_path: Path) -> None:
    first = run(tried(tmp_path, "first"))
    assert trial(first)["chosen"] == LAST
    assert trial(first)["from_step"] == 10
    assert [(one["mode"], one["seconds"]) for one in trial(first)["turns"]] == [("eager", 1), (LAST, 0.5), ("eager", 1)]
    assert trial(first)["candidates"]["channels last"]["reason"].startswith("50.0% less than eager")
    assert f"step: {LAST} from step 10 on, by a trial of its candidates" in first.output
    assert execution(tmp_path / "first")["channels_last"]
    second = run(tried(tmp_path, "second", environment={"SHOAL_TEST_FAST": "eager"}))
    assert trial(second)["reason"] == "as recorded on this machine"
    assert execution(tmp_path / "second")["channels_last"]
    assert weights(second) == weights(first)
    planned = run(tried(tmp_path, "planned", "--plan", str(tmp_path / "first" / "plan.toml"), devices=None))
    assert trial(planned)["reason"] == "the plan file sets it"
    assert weights(planned) != weights(first), "its first steps have other bits"
    given = ("--plan", str(tmp_path / "first" / "plan.toml"), "--step", str(tmp_path / "first" / "trial.json"))
    again = run(tried(tmp_path, "again", *given, devices=None, home="elsewhere"))
    assert weights(again) == weights(first)
    assert execution(tmp_path / "again") == execution(tmp_path / "first")
    exact = run(tried(tmp_path, "exact", "--step", given[-1], exact=True)).expect(2)
    assert "this run takes no turns: exact mode" in " ".join(exact.stderr.split())


def test_turns_that_cannot_be_followed_are_refused_or_tried_anew(tmp_path: Path) -> None:
    text = (run(tried(tmp_path, "first")).expect(0).out / "trial.json").read_text()
    given = tmp_path / "graph.json"
    given.write_text(text.replace(LAST, "graph"))
    [record] = (tmp_path / "cache").rglob("*-steps.json")
    records = record.read_text()
    record.write_text(records.replace(LAST, "graph"))
    refused, anew = run_all([tried(tmp_path, "refused", "--step", str(given)), tried(tmp_path, "anew")])
    assert "graph: no step is captured on cpu" in " ".join(refused.expect(2).stderr.split())
    assert trial(anew)["reason"] == "the fastest of those that were tried"
    assert record.read_text() == records


def test_a_recorded_trial_that_is_unfinished_is_finished_and_recorded(tmp_path: Path) -> None:
    first = run(tried(tmp_path, "first")).expect(0)
    [record] = (tmp_path / "cache").rglob("*-steps.json")
    text = record.read_text()
    [(name, known)] = json.loads(text).items()
    unfinished = {"turns": [{**known["turns"][0], "seconds": None}], "verdicts": {}, "chosen": None, "best": "eager"}
    unfinished["candidates"] = [{"name": "channels last"}]
    record.write_text(json.dumps({name: {**known, **unfinished}}))
    assert weights(run(tried(tmp_path, "second"))) == weights(first)
    assert json.loads(record.read_text())[name]["chosen"] == LAST


def test_two_equal_commands_under_load_have_equal_bits(tmp_path: Path) -> None:
    """Measured for real, beside a program that keeps the cores busy in the first run only."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        first = run(tried(tmp_path, "first", settings={"fast": "real"}))
        busy.kill()
    second = run(tried(tmp_path, "second", settings={"fast": "real"}))
    assert weights(first) == weights(second)
    assert turns(tmp_path / "first") == turns(tmp_path / "second")


def test_ranks_choose_together_by_the_slowest(tmp_path: Path) -> None:
    fast, slow = run_all(
        [
            tried(tmp_path, "fast", devices=2),
            tried(tmp_path, "slow", devices=2, home="other", settings={"slow": LAST}),
        ]
    )
    assert trial(fast)["chosen"] == LAST
    assert trial(slow)["chosen"] == "eager"
    assert trial(slow)["candidates"]["channels last"]["seconds"] == 1.5
    assert not execution(tmp_path / "slow")["channels_last"]


def test_a_candidate_that_fails_on_one_rank_is_left_out_on_all(tmp_path: Path) -> None:
    ended = run(tried(tmp_path, "fails", devices=2, settings={"fails": True}))
    assert trial(ended)["chosen"] == "eager"
    assert "not with channels last" in trial(ended)["candidates"]["channels last"]["reason"]
    assert [(one["mode"], one["until"]) for one in turns(tmp_path / "fails")] == [("eager", 3), (LAST, 5)]
    assert ended.result["steps"] == 30
    given = ("--step", str(tmp_path / "fails" / "trial.json"))
    assert weights(run(tried(tmp_path, "again", *given, devices=2, home="none"))) == weights(ended)


def test_a_run_that_is_killed_in_the_midst_of_its_trial_goes_on_with_its_turns(tmp_path: Path) -> None:
    undisturbed, same_turns = run(tried(tmp_path, "undisturbed")), 0
    for dies in (5, 8, 12):  # in the second turn, in the third one, after the trial
        name, mark = f"killed-{dies}", {"SHOAL_TEST_DIES": str(tmp_path / f"mark-{dies}")}
        again = ("--checkpoint-every", "2")
        settings, home = {"dies": dies}, f"home-{dies}"
        killed = run(tried(tmp_path, name, *again, settings=settings, home=home, environment=mark))
        assert killed.code != 0
        ended = run(tried(tmp_path, name, *again, "--resume", settings=settings, home=home, environment=mark))
        own = turns(tmp_path / name)
        assert trial(ended)["chosen"] == LAST
        same = [(one["mode"], one["after"]) for one in own]
        assert same[:2] == [("eager", 0), (LAST, 3)]
        if own == turns(tmp_path / "undisturbed"):
            same_turns += 1
            assert weights(ended) == weights(undisturbed)
        given = ("--step", str(tmp_path / name / "trial.json"))
        assert weights(run(tried(tmp_path, f"{name}-again", *given, home="none"))) == weights(ended)
    assert same_turns


def test_runs_without_a_trial_say_why(tmp_path: Path) -> None:
    short, exact, eager, view = run_all(
        [
            tried(tmp_path, "short", settings={"steps": 12}),
            tried(tmp_path, "exact", exact=True),
            tried(tmp_path, "eager", "--step", "eager"),
            tried(tmp_path, "view", settings={"way": "view"}),
        ]
    )
    assert trial(short)["reason"] == "12 steps are too few for a trial"
    assert trial(exact)["reason"] == "exact mode has one way to compute a step"
    assert trial(eager)["reason"] == "--step eager"
    assert "view size is not compatible" in trial(view)["candidates"]["channels last"]["reason"]
    assert "it costs about 40 s" in trial(view)["candidates"]["compiled"]["reason"]
    assert trial(view)["reason"] == "no candidate pays"
    assert {trial(one)["chosen"] for one in (short, exact, eager, view)} == {"eager"}


def test_a_record_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    ended = run(tried(tmp_path, "run"))
    assert trial(ended)["chosen"] == LAST
    assert "the trial could not be recorded for later runs" in " ".join(ended.output.split())


@pytest.mark.slow
def test_two_ranks_compile_in_the_midst_of_a_run_and_again_with_equal_bits(tmp_path: Path) -> None:
    """The launcher watches them: a compilation takes longer than any step before."""
    settings = {"fast": "compiled", "compiles": True}
    runs = [tried(tmp_path, name, devices=2, settings=settings) for name in ("first", "second")]
    first, second = (run(one, COMPILE_LIMIT_SECONDS) for one in runs)
    if "no C++ compiler" in trial(first)["candidates"]["compiled"]["reason"]:
        pytest.skip("this machine has no C++ compiler")
    assert trial(first)["chosen"] == "compiled"
    assert execution(tmp_path / "first")["compile"] == "default"
    assert trial(second)["reason"] == "as recorded on this machine"
    assert weights(first) == weights(second)
