"""The batch script has the run's command and sbatch's options, and its shell does with exit codes as it says."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import CommandError
from shoal.launch.launchers import slurm
from shoal.launch.launchers.base import Submission

OUT = Path("/runs/my job")
SUBMISSION = Submission(("run", "job.py", "--out", str(OUT)), "job", OUT, Path("/srv"), 4, max_restarts=2)


def script(options: str = "", **changes: object) -> str:
    return slurm.render(replace(SUBMISSION, options=options, **changes))["slurm.sh"]  # type: ignore[arg-type]


def directives(text: str) -> list[str]:
    lines = (line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH "))
    return [word for line in lines for word in shlex.split(line)]


def test_options_of_sbatch_follow_those_of_the_run() -> None:
    found = directives(script("--partition=gpu --time=60", gpus=True, num_hosts=2))
    assert found[0] == "--job-name=job"
    assert found.index("--ntasks=4") < found.index("--partition=gpu")
    assert {"--nodes=2", "--gpus-per-task=1", "--requeue", "--chdir=/srv"} <= set(found)
    assert found[-2:] == ["--partition=gpu", "--time=60"]
    with pytest.raises(CommandError, match="one word"):
        script("--partition gpu")


def test_a_range_is_one_of_nodes() -> None:
    found = directives(script("--ntasks-per-node=2", least_processes=2))
    assert {"--nodes=1-2", "--ntasks-per-node=2"} <= set(found)
    found = directives(script("--ntasks-per-node=1", least_processes=2))
    assert "--nodes=2-4" in found
    assert not [word for word in found if word.startswith("--ntasks")]  # Slurm would give two, however many are free


def test_words_with_spaces_and_percents_are_whole() -> None:
    text = script("'--comment=two words'", arguments=(*SUBMISSION.arguments, "--set", "format=%a %d"))
    assert "#SBATCH '--comment=two words'" in text
    assert "'format=%a %d'" in text


def test_an_array_has_its_number_in_arguments_and_directory() -> None:
    text = script("--array=1-4", arguments=(*SUBMISSION.arguments, "--set", "lr=0.%a"))
    assert 'lr=0."$SLURM_ARRAY_TASK_ID"' in text
    assert "'/runs/my job/'\"$SLURM_ARRAY_TASK_ID\"" in text
    assert "--output=/runs/my job/slurm-%A_%a.out" in directives(text)
    given = Path("/runs/x-%a/y")
    own = script("--array=1-4", out=given, arguments=("run", "job.py", "--out", str(given)))
    assert '/runs/x-"$SLURM_ARRAY_TASK_ID"/y' in own
    assert "--output=/runs/slurm-%A_%a.out" in directives(own)


@pytest.mark.parametrize(
    ("codes", "ended", "starts", "requeued"),
    [
        ([0], 0, 1, False),
        ([2], 2, 1, False),
        ([75], 75, 1, True),
        ([69, 0], 0, 2, False),
        ([137, 69, 0], 0, 3, False),
        ([69, 69, 69], 69, 3, False),
        ([137, 137, 137], 69, 3, False),
    ],
)
def test_the_shell(codes: list[int], ended: int, starts: int, requeued: bool, tmp_path: Path) -> None:
    (tmp_path / "slurm.sh").write_text(script(), encoding="utf-8")
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes), encoding="utf-8")
    fakes = {
        "srun": 'echo "$SHOAL_RESTARTS" >> starts; code=$(head -1 codes); sed -i 1d codes; exit "$code"',
        "scontrol": 'echo "$@" > requeued',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "slurm.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == ended, done.stderr
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert (tmp_path / "requeued").exists() == requeued


def test_the_command_is_one_for_the_shell() -> None:
    line = next(line for line in script().splitlines() if "-m shoal" in line)
    assert shlex.split(line) == list(SUBMISSION.command)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"JobState": "COMPLETED"}, 0),
        ({"JobState": "FAILED", "ExitCode": "2:0"}, 2),
        ({"JobState": "FAILED", "ExitCode": "0:9"}, 69),
        ({"JobState": "CANCELLED"}, 75),
        ({"JobState": "NODE_FAIL"}, 69),
        ({"JobState": "unheard of"}, 1),
    ],
)
def test_a_jobs_state_is_an_exit_code(state: dict[str, str], code: int) -> None:
    assert slurm._code(state) == code


def test_a_run_directory_at_an_address_has_its_output_on_a_disk() -> None:
    at = {"address": "s3://bucket/run", "arguments": ("run", "job.py", "--out", "s3://bucket/run")}
    text = script(**at)
    assert "--output=/srv/runs/job.slurm/slurm-%j.out" in directives(text)
    assert "--out s3://bucket/run\n" in text
    assert '--out s3://bucket/run/"$SLURM_ARRAY_TASK_ID"' in script("--array=1-4", **at)
