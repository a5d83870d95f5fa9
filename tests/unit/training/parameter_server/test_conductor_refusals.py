"""What goes with no servers is refused before any process is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import job

import shoal
from shoal.cli.verify import verify
from shoal.distributed.mesh import alone
from shoal.errors import JobError, PlanError
from shoal.jobs.job_file import JobRequest
from shoal.launch.environment import Environment
from shoal.runs.options import Course
from shoal.runs.request import RunRequest, What, Where
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.parameter_server.channel import listen
from shoal.training.parameter_server.conductor import Conductor
from shoal.training.parameter_server.members import Members, identity
from shoal.training.parameter_server.server import homes
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged


def served(mode: str = "synchronous", **server: Any) -> shoal.Plan:
    return shoal.Plan().with_sections(layout={"data": 2}, server={"mode": mode, **server})


def test_a_loop_of_ones_own() -> None:
    with pytest.raises(PlanError, match="a loop of your own updates the parameters itself"):
        shoal.Session(served(), global_batch=16)


def test_a_verification_of_what_is_not_meant_to_be_the_same(tmp_path: Path) -> None:
    what = What(JobRequest(tmp_path / "job.py", "job", ()), served("asynchronous"))
    request = RunRequest(what, Where(tmp_path / "out"), Course(), started_at=0.0)
    with pytest.raises(PlanError, match="its gradients are of older parameters"):
        verify(request, 3)


def test_more_servers_than_parameters() -> None:
    model = torch.nn.Linear(2, 2)
    assert homes(model, 2) == [["weight"], ["bias"]]
    with pytest.raises(PlanError, match=r"server.num_servers = 2 at most"):
        homes(model, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"on_nonfinite": "rollback"}, 'on_nonfinite="skip" or "stop"'),
        ({"train_data": lambda: iter([torch.zeros(6)] * 40), "length": shoal.Steps(2)}, "use a map-style dataset"),
    ],
)
def test_what_a_conductor_cannot_do(changes: dict[str, Any], said: str) -> None:
    asked = job(**changes)
    plan = judged(asked, served()).plan
    around = Surroundings(print, lambda record, rank: None, lambda: False)
    with listen() as listener:
        environment = Environment(0, 4, listen_fd=listener.fileno(), key="ab" * 32)
        with Members(environment, 1, identity(asked, plan)) as crew:
            engine = build(asked, plan, alone(torch.device("cpu")), Options())
            try:
                with pytest.raises(JobError) as caught:
                    Conductor(engine, around, engine.first_state(), 2, RecordWriter(None), crew=crew)
                assert said in caught.value.remedy
            finally:
                engine.close()
