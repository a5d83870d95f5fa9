"""A run on an engine has the command that was given, as words, with its directory and its number of processes."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import _parser
from shoal.cli.options import RunOptions
from shoal.cli.run.start import requested, run
from shoal.cli.run.submit import submission_of
from shoal.errors import CommandError
from shoal.jobs.handed_job import HandedJob
from shoal.jobs.job_file import JobRequest
from shoal.jobs.settings import setting_of
from shoal.plans import Plan
from shoal.runs.options import arguments_of, options_of

GIVEN = [
    "job.py:made",
    *("--devices", "3", "--exact", "--precision", "bf16", "--set", "x=1, 2", "--set", "lr=0.5", "--out", "a b"),
    *("--max-microbatch", "4", "--workers", "0", "--steps", "9", "--resume", "--accept-changes"),
    *("--checkpoint-every", "5", "--require-certificate", "c.json", "--no-telemetry", "--track", "tensorboard"),
    *("--max-restarts", "0", "--init-from", "w", "--init-allow", "missing", "--init-rename", "a=b"),
]


def options(*words: str) -> RunOptions:
    return replace(options_of(RunOptions, _parser().parse_args(["run", *words])), started_at=0.0)


def test_the_words_make_the_same_options_again() -> None:
    given = options(*GIVEN, "--plan", "p.toml")
    assert options(*arguments_of(given)) == given
    assert arguments_of(options("job.py")) == ["job.py"]
    values = {"lr": 0.5, "name": "a b", "on": True, "last": None, "sizes": [1, 2], "tag": "none"}
    typed = replace(options("job.py"), set=tuple((name, setting_of(name, value)) for name, value in values.items()))
    texts = ["lr=0.5", "name=a b", "on=true", "last=none", "sizes=[1, 2]", 'tag="none"']
    assert arguments_of(typed) == ["job.py", *(word for text in texts for word in ("--set", text))]


def test_a_value_that_no_word_says_is_refused() -> None:
    with pytest.raises(CommandError, match="path of a file"):
        arguments_of(RunOptions("job.py", plan=Plan()))


def test_a_job_function_of_a_file_is_found_by_its_name_and_another_is_refused() -> None:
    handed = HandedJob("my_jobs", None, ())
    job = JobRequest(Path("my_jobs.py"), "small", (("lr", {"value": 0.5}),), handed)
    assert arguments_of(RunOptions(job)) == ["my_jobs.py:small", "--set", "lr=0.5"]
    for other in (replace(handed, module=None), replace(handed, module="package.my_jobs")):
        with pytest.raises(CommandError, match="a file of its own"):
            arguments_of(RunOptions(replace(job, handed=other)))


def test_a_submission_has_a_directory_and_a_number_of_processes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my job.py").write_text("")
    given = options("my job.py", "--devices", "2", "--on", "slurm:--time=9")
    found = submission_of(given, requested(given), "--time=9")
    assert found.name == "my-job"
    assert (found.num_processes, found.folder, found.options) == (2, tmp_path, "--time=9")
    assert found.out == tmp_path / "runs" / "my job"
    assert found.arguments == ("run", "my job.py", "--devices", "2", "--out", str(found.out))


def test_a_dry_run_prints_and_leaves_nothing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    assert run(options("job.py", "--devices", "2", "--dry-run")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# ranks"
    assert [shlex.split(line)[:2] for line in lines[1:]] == [[f"RANK={rank}", "WORLD_SIZE=2"] for rank in range(2)]
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_the_cluster_of_a_plan_decides_hosts_and_gpus(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("def job():\n    pass\n")
    words = ("job.py", "--plan", "plan.toml", "--out", "run")
    expected = {'cluster = "2x8xH100"': (2, True, "2x8xH100"), 'cluster = "ours"': (None, None, None), "": (None,) * 3}
    for line, found in expected.items():
        (tmp_path / "plan.toml").write_text(f"[layout]\ndata = 16\n[prediction]\n{line}\n")
        given = options(*words)
        submission = submission_of(given, requested(given))
        assert (submission.num_hosts, submission.gpus, submission.cluster) == found
