"""Each option is declared once: the call names it with its default, and few other places do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import shoal
from shoal.cli.options import RunOptions
from shoal.errors import CommandError
from shoal.runs.options import Course, Origin, arguments_of, course_of, declared, options_from

ROOT = Path(__file__).resolve().parents[3]
# Options of the command alone; `shoal.run` has `settings` and keywords for `--set`.
OF_THE_COMMAND = ("job", "set", "verify", "dry_run")
# Modules that carry the options of a run from the command to their uses: none of them names one of these.
HANDING_ON = {
    *("runs/request.py", "cli/run/description.py", "training/setup/preflight.py", "cli/run/submit.py"),
    "cli/run/start.py",
}
SINGLE = ("checkpoint_every", "evaluate_every", "keep_checkpoints", "bad_samples", "check_replicas")


def test_the_call_has_each_option_with_its_default_and_says_what_it_means() -> None:
    options = {one.name: one.default for one in declared(RunOptions) if one.name not in OF_THE_COMMAND}
    keywords = inspect.signature(shoal.run).parameters
    assert list(keywords) == ["job", "settings", *options, "job_settings"]
    assert {name: keywords[name].default for name in options} == options
    rows = re.findall(r"^ *\| `(\w+)` \| .+ \|$", inspect.getdoc(shoal.run) or "", re.MULTILINE)
    assert rows == ["job", "settings", *options]


@pytest.mark.parametrize("name", SINGLE)
def test_an_option_of_a_run_is_named_where_it_is_declared_and_where_it_is_used(name: str) -> None:
    """No module between the two hands it on by name."""
    package, pattern = ROOT / "src" / "shoal", re.compile(rf"\b(?:course|options)\.{name}\b")
    uses = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if pattern.search(path.read_text("utf-8")) and "session" not in path.parts
    }
    assert uses, "or it has no effect"
    assert not uses & HANDING_ON


def test_ranks_compare_and_a_resume_keeps_what_is_declared() -> None:
    course = Course(bad_samples=3, keep_checkpoints="all", steps=7)
    assert course.compared()["--bad-samples"] == "3"
    assert {"--resume", "--trace", "--init-from", "--require-certificate"} <= set(course.compared())
    assert course.saved()["stop_after"] == 7
    again, origins = course_of(Course(resume=True, bad_samples=0), course.saved())
    assert (again.steps, again.keep_checkpoints, again.bad_samples) == (7, "all", 0)
    assert (origins["steps"], origins["bad_samples"]) == (Origin.RUN, Origin.OPTION)
    assert "evaluate_every" not in origins
    assert course_of(Course(), None)[0].keep_checkpoints == 3


def test_options_are_words_of_a_command_and_back() -> None:
    words = {"trace": "10-12", "track": ("mlflow:here", "wandb"), "keep_checkpoints": "2", "bad_samples": "0"}
    options = options_from(RunOptions, {"job": "job.py", **words})
    assert arguments_of(options)[1:] == [
        *("--keep-checkpoints", "2", "--track", "mlflow:here", "--track", "wandb"),
        *("--trace", "10-12", "--bad-samples", "0"),
    ]
    with pytest.raises(CommandError, match="--trace takes a step"):
        options_from(RunOptions, {"job": "job.py", "trace": "x"})


def test_each_option_says_what_it_means() -> None:
    assert all(one.settings["help"] and not one.settings["help"].endswith(".") for one in declared(RunOptions))
