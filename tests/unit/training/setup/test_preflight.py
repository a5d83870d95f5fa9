"""A plan is judged against the loaded job and an outline of its model, and completed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.data.source import one_grain
from shoal.errors import JobError, PlanError
from shoal.jobs.job_file import JobRequest
from shoal.plans import Plan
from shoal.runs.options import Course
from shoal.runs.request import RunRequest, What, Where
from shoal.training.setup.job_model import outline
from shoal.training.setup.preflight import judged, judged_for, with_judged_grains


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.mix = nn.Linear(8, 24)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))


class Computing(nn.Module):
    """Looks at its values, which a model on meta does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        assert float(self.blocks[0].mix.weight.detach().sum()) != 0.0


def job(model: Any = Net, **changes: Any) -> shoal.Job:
    fields: dict[str, Any] = {
        "model": model,
        "loss": lambda model, batch: (model(batch), 1),
        "optimizer": lambda parameters: torch.optim.SGD(parameters),
        "train_data": (torch.zeros(20, 6, dtype=torch.long),),
        "global_batch": 16,
    }
    return shoal.Job(**{**fields, **changes})


def of(**sections: dict[str, Any]) -> Plan:
    return Plan().with_sections(**sections)


def test_the_plan_is_completed() -> None:
    found = judged(job(), of(layout={"data": 2}), max_microbatch=4)
    assert found.plan.batch.grains_per_microbatch == 2
    assert found.notes == ()
    assert judged(job(), of(layout={"pipeline": 3})).plan.batch.grains_per_microbatch == 3


def test_the_model_is_looked_at_where_the_layout_divides_it() -> None:
    with pytest.raises(PlanError, match=r"layout\.pipeline = 4 at most"):
        judged(job(), of(layout={"pipeline": 5}))
    assert "attention has 4 heads" in judged(job(), of(layout={"tensor": 8})).notes[0]
    built: list[int] = []
    judged(job(lambda: built.append(1), grains=8), of(layout={"data": 2}))
    assert built == []
    judged(job(lambda: built.append(1)), of(layout={"data": 2}))
    assert built, "the default number of grains takes a look at the model"


def test_grains_and_model_are_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        judged(job(), of(layout={"data": 9, "tensor": 99}))
    assert "grains=8" in caught.value.given
    assert "layout.tensor = 24 at most" in caught.value.remedy


def test_the_sequence_is_that_of_the_data() -> None:
    with pytest.raises(PlanError, match="longest has 6 tokens"):
        judged(job(), of(layout={"context": 8}))
    judged(job(train_data=iter([])), of(layout={"context": 4}))  # of a stream nothing is read


def test_context_needs_blocks() -> None:
    with pytest.raises(PlanError, match="repeats no blocks"):
        judged(job(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))), of(layout={"context": 2}))
    judged(job(), of(layout={"context": 2}))


def test_the_outline_has_no_values() -> None:
    model = outline(job())
    assert model is not None
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert outline(job(Computing)) is None
    assert outline(job(lambda: 3)) is None
    judged(job(Computing), of(layout={"pipeline": 4}))  # unknown: told when the model is built


def test_a_run_that_goes_on_keeps_its_number_of_grains() -> None:
    what = What(JobRequest(Path("job.py")), Plan(), recorded_grains=4)
    request = RunRequest(what, Where(Path("out")), Course(), 0.0)
    found = judged_for(request, job())
    assert (found.num_grains, found.why_grains) == (4, "as the run began")
    assert judged_for(request, job(grains=2)).num_grains == 2, "what the job says is compared with it later"
    assert judged_for(replace(request, what=replace(what, recorded_grains=None)), job()).num_grains == 8
    assert with_judged_grains(found, job()).num_grains == 4
    with pytest.raises(JobError, match="in this process"):
        with_judged_grains(found, job(grains=2))


def test_a_first_look_does_without_samples_that_cannot_be_read() -> None:
    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 0:
                raise OSError("gone")
            return torch.zeros(7)

    found = one_grain(job(train_data=Rows, grains=8))
    assert found.shape[1:] == (7,)
