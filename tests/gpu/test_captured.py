"""Steps replayed from a CUDA graph on a GPU: the course of steps that are queued one operation after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs.read_late import Course, job, trained
from tests.unit.training.loop.test_captured_step import JOBS, PLAN, REFUSED, normed, said_of_graph, same, spoilt

import shoal
from shoal.distributed.mesh import alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device (or tests/conftest.py hides it)"
    ),
]
# What is refused for the stand-in on a CPU alone: there draws by position are the host's.
_OF_THE_CPU = ("many grains, which the host draws for",)


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits each time, without which two runs of one kind would differ as well."""
    monkeypatch.setattr("shoal.training.loop.late_reads.LONG_STEP_SECONDS", math.inf)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


def both(made: dict[str, Any], **how: Any) -> tuple[Course, Course]:
    """The courses without a graph and with one."""
    folder, found = how.pop("folder", None), []
    for name, plan in (("queued", PLAN.with_sections(execution={"cuda_graph": False})), ("captured", PLAN)):
        mesh = alone(torch.device("cuda", 0))
        found.append(trained(job(**made), plan, mesh, folder=folder and folder / name, **how))
    return found[0], found[1]


@pytest.mark.parametrize("name", JOBS)
def test_a_replayed_step_is_the_step_that_is_queued(name: str) -> None:
    """Weights, records and state, with the masks of dropout among them, bit for bit."""
    queued, captured = both(JOBS[name], counts_reads=True)
    assert said_of_graph(captured) == ["execution.cuda_graph: steps are replayed from step 2 on"], captured.notes
    assert same(captured) == same(queued)
    assert sum(captured.reads.values()) == 0, captured.reads


def test_a_short_last_batch_is_queued_without_the_graph() -> None:
    queued, captured = both({"model": normed, "global_batch": 12, "length": shoal.Steps(18)})
    assert said_of_graph(captured) == ["execution.cuda_graph: steps are replayed from step 2 on"]
    assert same(captured) == same(queued)


@pytest.mark.parametrize("policy", ["skip", "stop", "rollback"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(policy: str, tmp_path: Path) -> None:
    made = {"loss": spoilt(torch.inf, 35), "on_nonfinite": policy, "shuffle": False, "length": shoal.Steps(16)}
    queued, captured = both(made, folder=tmp_path, checkpoint_every=100)
    assert same(captured) == same(queued)
    assert "35" in captured.error or any("35" in note for note in captured.notes)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in _OF_THE_CPU])
def test_what_cannot_be_captured_falls_back_with_the_reason(name: str) -> None:
    """Also where a capture has failed, after which torch's generators have to go on."""
    made, reason = REFUSED[name]
    queued, captured = both({"length": shoal.Steps(12), **made})
    assert same(captured) == same(queued)
    (told,) = said_of_graph(captured)
    assert reason in told, told
