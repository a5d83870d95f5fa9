"""A model whose states no process may hold: one runs out of memory and says so, four that divide them train it."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from tests.launching import JOBS, Ended, start_command

from shoal.checkpoint.store import Store

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(500)]

# tests/jobs/large.py: 16 blocks of 3000 x 3000, and with Adam 16 bytes a parameter.
PARAMETERS = 16 * (3000 * 3000 + 3000) + 3000 * 2 + 2
STATES = 16 * PARAMETERS
# Half of it is taken before anything is trained: what is mapped of torch, and its threads.
LIMIT_KIB = 2_100_000


def limited(out: Path, *arguments: str, job: Path = JOBS / "large.py") -> Ended:
    """A run in which no process may have more than LIMIT_KIB of memory, mapped or used."""
    command = [sys.executable, "-m", "shoal", "run", str(job), "--out", str(out), *arguments]
    shell = ["bash", "-c", f'ulimit -v {LIMIT_KIB}; exec "$@"', "limited", *command]
    with start_command(shell, out) as started:
        return started.wait(400.0)


def test_the_states_are_more_than_a_process_may_have() -> None:
    assert STATES > LIMIT_KIB * 1024


def test_one_process_says_before_a_step_that_it_does_not_fit_and_what_would(tmp_path: Path) -> None:
    ended = limited(tmp_path / "run", "--devices", "1").expect(2)
    said = ("OutOfMemoryError", "a rank needs 2.1 GiB without activations", "a process (ulimit -v) has 2.0 GiB")
    for text in said:
        assert text in ended.stderr, ended.stderr
    assert re.search(r"write instead: .*(--layout \w+=2|on \d+ devices it fits)", ended.stderr), ended.stderr
    assert "Traceback" not in ended.output


def test_memory_that_runs_out_says_what_would_fit(tmp_path: Path) -> None:
    """With SGD a rank needs no more than it may have, but for what is mapped of torch."""
    job = tmp_path / "larger.py"
    job.write_text(
        f"import sys\nsys.path.insert(0, {str(JOBS)!r})\nimport dataclasses, large, torch\n\ndef job():\n"
        "    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)\n"
        "    return dataclasses.replace(large.job(blocks=28), optimizer=sgd)\n"
    )
    ended = limited(tmp_path / "run", "--devices", "1", job=job).expect(2)
    assert "DefaultCPUAllocator: can't allocate memory" in ended.stderr, ended.stderr
    assert re.search(r"write instead: .*(--layout \w+=2|on \d+ devices it fits)", ended.stderr), ended.stderr


def test_four_processes_that_divide_it_train(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[layout]\nshard = 4\n\n[shard]\nlevel = "parameters"\n', encoding="utf-8")
    ended = limited(tmp_path / "run", "--plan", str(plan), "--checkpoint-every", "2").expect(0)
    assert [record["step"] for record in ended.records] == [1, 2]
    assert all(math.isfinite(record["loss"]) for record in ended.records)
    assert f"{PARAMETERS:,} parameters" in ended.stdout
    assert Store(tmp_path / "run" / "checkpoints").steps() == [2]
