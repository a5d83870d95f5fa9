"""What a run says at its beginning of where it computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.cli.run.console import Reporter, conclude, introduce, tensor_cores
from shoal.jobs.job_file import JobRequest
from shoal.plans.plan import Plan
from shoal.runs.directory import RunDirectory
from shoal.runs.options import Course, Origin
from shoal.runs.request import RunRequest, What, Where


def said(plan: Plan, label: str = "devices", resumed: int | None = None, **settings: Any) -> str:
    notes: list[str] = []
    job = SimpleNamespace(global_batch=16, num_grains=8, grain_size=2, sampler=None)
    engine: Any = SimpleNamespace(
        plan=plan,
        mesh=SimpleNamespace(device=torch.device("cpu")),
        strategy=SimpleNamespace(compression=None),
        notes=(),
        num_train_samples=100,
        num_parameters=10,
        order=SimpleNamespace(num_steps=12),
        sharded_model=SimpleNamespace(division=SimpleNamespace(notes=())),
    )
    what, where = What(JobRequest(Path("job.py")), plan), Where(Path("out"))
    request = RunRequest(what, where, Course(resume=resumed is not None), 0.0, {"layout": Origin.FILE})
    loaded: Any = SimpleNamespace(job=job, function="job", settings=settings)
    reporter: Any = SimpleNamespace(note=notes.append)
    introduce(reporter, engine, loaded, request, resumed)
    return next((note for note in notes if note.startswith(f"  {label} ")), "")


def test_with_servers_it_is_the_workers_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Plan().with_sections(layout={"data": 2}, server={"mode": "synchronous"})
    served = served.with_sections(batch={"grains_per_microbatch": 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "4 processes on cpu, " in said(served)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "4 processes, the workers on cuda (as the plan says)" in said(served)
    assert "1 process on cpu, " in said(Plan().with_sections(batch={"grains_per_microbatch": 1}))


def test_the_layout_is_named() -> None:
    one = {"grains_per_microbatch": 1}
    assert said(Plan().with_sections(batch=one), "layout") == "  layout      one device"
    sharded = Plan().with_sections(layout={"data": 2, "shard": 2}, shard={"level": "gradients"}, batch=one)
    assert said(sharded, "layout") == "  layout      data 2, shard 2, ZeRO-2"
    served = Plan().with_sections(
        layout={"data": 3}, server={"mode": "bounded", "staleness": 2, "num_servers": 2}, batch=one
    )
    assert said(served, "layout") == "  layout      data 3, bounded (staleness 2) with 2 servers"


ONE = Plan().with_sections(batch={"grains_per_microbatch": 1})


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({"lr": 0.1, "epochs": 3}, "add --set epochs=6 (from Python: epochs=6), say"),
        ({"num_steps": 12}, "add --set num_steps=24 (from Python: num_steps=24), say"),
        ({"lr": 0.1, "epochs": "many"}, "give the job a larger length: Job(length=...)"),
        ({}, "give the job a larger length: Job(length=...)"),
    ],
)
def test_a_finished_run_says_how_to_go_on(settings: dict[str, Any], how: str) -> None:
    found = said(ONE, "length", 12, **settings)
    assert found == f"  length      nothing is left to do: all steps are trained; to go on, {how}"
    assert said(ONE, "length", 11, **settings) == ""


@pytest.mark.parametrize(("told_to_stop", "last"), [(True, "resume with: "), (False, "a checkpoint was written; ")])
def test_a_signal_comes_before_a_wish_for_other_processes(tmp_path: Path, told_to_stop: bool, last: str) -> None:
    lines: list[str] = []

    class Noted(Reporter):
        def note(self, text: str) -> None:
            lines.append(text)

    nothing = dict.fromkeys(("ended_early", "prediction", "server", "compile_seconds"))
    result: Any = SimpleNamespace(
        status="preempted", steps=3, wall_seconds=1.0, metrics={"share": None}, eval_samples=8, **nothing
    )
    what = What(JobRequest(Path("job.py")), Plan())
    request = RunRequest(what, Where(tmp_path, resizable=True), Course(), 0.0)
    RunDirectory(tmp_path).request_resize(2)
    conclude(Noted(), result, request, "job", told_to_stop=told_to_stop)
    assert lines[-1].startswith(last)
    assert "share nan  (8 samples evaluated)" in lines[0]


def test_a_float32_run_on_a_gpu_says_what_tensor_cores_would_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """In numbers where the planner knows them; nothing on a GPU without TF32, and no advice that is followed."""
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: tuple(capability))
    unknown = tensor_cores(Plan())
    assert "convolutions are TF32" in unknown
    assert "shoal plan predicts the gain" in unknown
    predicted = Plan().model_copy(
        update={"prediction": {"step_seconds": 2.0, "precisions": {"bf16": 1.0, "tf32": 1.6}}}
    )
    assert '"tf32" in the job (+25% samples a second' in tensor_cores(predicted)
    assert "--precision bf16 (+100% samples a second" in tensor_cores(predicted)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert "in the job" not in tensor_cores(predicted)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    capability[0] = 7
    assert tensor_cores(predicted) == ""


def test_the_end_of_a_compiled_run_names_what_ran_uncompiled(tmp_path: Path) -> None:
    lines: list[str] = []

    class Noted(Reporter):
        def note(self, text: str) -> None:
            lines.append(text)

    cuts = ["multinomial in block.0", "multinomial in block.1"]
    nothing = dict.fromkeys(("ended_early", "prediction", "server"))
    result: Any = SimpleNamespace(
        status="finished", steps=3, wall_seconds=1.0, metrics={}, compile_seconds=2.0, compile_cuts=cuts, **nothing
    )
    request = RunRequest(What(JobRequest(Path("job.py")), Plan()), Where(tmp_path), Course(), 0.0)
    conclude(Noted(), result, request, "job")
    assert f"  uncompiled between parts of a region: {', '.join(cuts)}" in lines
