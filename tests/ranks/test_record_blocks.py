"""A run of more than 10,000 steps: killed within a block of steps, resumed, and read by each command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.jobs.many_steps import BATCH, KILLED_AT, STEPS
from tests.launching import JOBS, Run, run

import shoal
from shoal.cli.main import main
from shoal.runs.run_files import read_run

pytestmark = pytest.mark.ranks


@pytest.mark.slow
def test_a_killed_run_counts_each_step_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, records, saved = tmp_path / "run", tmp_path / "run" / "records.jsonl", 10_050
    arguments = ("--checkpoint-every", str(saved), "--no-source")
    wanted = Run(JOBS / "many_steps.py", out, arguments=arguments, settings={"marks": str(tmp_path)})
    run(wanted).expect(69)  # the process that trains kills itself
    begun = records.read_bytes()
    known = [json.loads(line) for line in begun.splitlines()]
    last = known[-1]["step"]
    assert KILLED_AT - 33 < last < KILLED_AT  # the open block is lost, and the one that a next step would have ended
    wanted.arguments += ("--resume",)
    result = run(wanted).expect(0).result
    assert (result["resumed_from"], result["steps"], result["samples"]) == (saved, STEPS, STEPS * BATCH)
    assert records.read_bytes().startswith(begun)

    found = shoal.Run(out).records
    steps = [step for record in found for step in range(record.first, record.step + 1)]
    assert steps == list(range(1, STEPS + 1))
    assert sum(record.num_samples for record in found) == result["samples"]
    assert found[-1].digest == result["sample_digest"]
    assert found[-1].loss == result["train_loss"]
    assert sum(record.steps > 1 for record in found) >= 6
    assert [undone.steps for attempt in read_run(out).attempts for undone in attempt.undone] == [last - saved]

    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    assert f"completed after step {STEPS}" in capsys.readouterr().out
    for command in (["report", str(out)], ["watch", "--once", str(out)], ["doctor", str(out)]):
        assert main(command) == 0
        assert "from step 10,001 each record is of a block of up to 16 steps" in capsys.readouterr().out
    assert "From step 10,001 each record is of a block" in (out / "report.html").read_text()
    assert main(["report", "--json", str(out)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["blocks"] == {"from_step": 10_001, "most_steps": 16}
    assert (document["samples"]["trained"], document["samples"]["trained_again"]) == (
        STEPS * BATCH,
        (last - saved) * BATCH,
    )
    assert main(["watch", "--once", "--openmetrics", str(tmp_path / "page"), str(out)]) == 0
    assert 'shoal_blocks_from_step{run="run"} 10001.0' in (tmp_path / "page").read_text()
    capsys.readouterr()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["steps"] == STEPS


@pytest.mark.slow
def test_a_resume_keeps_the_choice_of_all_records(tmp_path: Path) -> None:
    out = tmp_path / "run"
    wanted = Run(JOBS / "many_steps.py", out, arguments=("--records", "all", "--steps", "10030", "--no-source"))
    run(wanted).expect(0)
    wanted.arguments = ("--resume", "--no-source", "--steps", "10060")
    run(wanted).expect(0)
    wanted.arguments = ("--resume", "--no-source", "--steps", str(STEPS), "--records", "blocks")
    run(wanted).expect(0)
    steps = [record.steps for record in shoal.Run(out).records]
    assert steps[:10_060] == [1] * 10_060
    assert sum(steps) == STEPS
    assert len(steps) < STEPS - 30
