"""The plan that a trained model is evaluated with: the run's, without what is about updates."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.trained_engine import EvaluateRequest
from shoal.jobs.job_file import JobRequest
from shoal.plans.plan import Plan, plan_text


def test_a_captured_step_is_no_matter_of_an_evaluation(tmp_path: Path) -> None:
    """A model that was trained on a GPU with a CUDA graph of its step is evaluated on any device."""
    plan = Plan().with_sections(execution={"cuda_graph": True, "channels_last": True})
    (tmp_path / "plan.toml").write_text(plan_text(plan))
    found = EvaluateRequest(job=JobRequest(Path("job.py")), run=tmp_path).plan(2)
    assert found.layout.data == 2
    assert found.execution.channels_last
    assert not found.execution.cuda_graph
