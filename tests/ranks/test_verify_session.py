"""A loop of one's own is verified like a job; what its author does wrong by rank is found."""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which a first optimizer imports: once here, not in each forked rank
from tests.conformance.cases import convolutions, dropping, images, vectors
from tests.usual import parametrize
from torch import nn

import shoal
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, LaunchError, NotDeterministicError, UserCodeError

pytestmark = pytest.mark.ranks


def train(
    by_rank: float = 0.0,
    convolutional: bool = False,
    unseeded: bool = False,
    checkpoints: Path | None = None,
    plan: shoal.Plan | None = None,
) -> None:
    """A loop; `by_rank` is the mistake: it scales the loss by the rank."""
    torch.manual_seed(0)
    model: nn.Module = convolutions() if convolutional else dropping()
    data = images(40) if convolutional else vectors(40)
    dataset = torch.utils.data.TensorDataset(*data)
    session = shoal.Session(
        plan,
        global_batch=16,
        clip_norm=1.0,
        schedule=shoal.warmup_cosine(0.2),
        checkpoints=checkpoints,
        resume=checkpoints is not None,
    )
    model, _ = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    with session:
        for step in session.steps(dataset, epochs=3):
            for inputs, labels in step:
                total, weight = shoal.cross_entropy(model(inputs), labels)
                if unseeded:
                    total = total * (1.0 + os.urandom(1)[0] / 256)
                step.backward(total * (1.0 + by_rank * session.rank), weight)


@parametrize(("devices", "convolutional"), product([2, 3], [False, True]), usual=["2-True"])
def test_verified(devices: int, convolutional: bool) -> None:
    verdict = shoal.verify_session(partial(train, convolutional=convolutional), devices)
    assert verdict.verified, verdict.render()
    assert verdict.num_steps == 3
    assert {check.phase for check in verdict.checks} >= {"data", "forward", "loss", "reduction", "clipping", "update"}


@parametrize("layout", [{"data": 3}, {"shard": 3}, {"data": 2, "shard": 2}], usual=["{'shard': 3}"])
def test_a_plan_of_ones_own_is_verified(layout: dict[str, int]) -> None:
    plan = shoal.Plan().with_sections(layout=layout, shard={"level": "optimizer"})
    verdict = shoal.verify_session(partial(train, plan=plan), plan.layout.world_size)
    assert verdict.verified, verdict.render()


def test_a_loss_that_depends_on_the_rank() -> None:
    verdict = shoal.verify_session(partial(train, by_rank=0.1), 2)
    assert not verdict.verified
    assert (verdict.failed[0].phase, verdict.failed[0].rank) == ("loss", 1)
    assert "1.1 times the loss of these grains on one process" in verdict.render()


def test_values_that_depend_on_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "broadcast", lambda mesh, tensors: [t.add_(mesh.rank) for t in tensors if t.ndim])
    verdict = shoal.verify_session(train, 2)
    assert verdict.failed[0].phase in ("data", "forward")
    assert verdict.failed[0].rank == 1


def test_a_loop_that_does_not_repeat_itself() -> None:
    with pytest.raises(NotDeterministicError, match="computed twice in the same way"):
        shoal.verify_session(partial(train, unseeded=True), 2)


def test_a_loop_without_a_session() -> None:
    with pytest.raises(JobError, match="it made no steps"):
        shoal.verify_session(lambda: None, 2)


def test_nothing_compared_is_nothing_verified(tmp_path: Path) -> None:
    for devices, steps in ((0, 3), (2, 0)):
        with pytest.raises(JobError, match="nothing would be compared"):
            shoal.verify_session(train, devices, steps)
    with pytest.raises(JobError, match="call the job function"):
        shoal.verify(lambda: None, shoal.Plan())  # type: ignore[arg-type]


def test_the_users_checkpoints_are_left_alone(tmp_path: Path) -> None:
    verdict = shoal.verify_session(partial(train, checkpoints=tmp_path / "ckpt"), 2)
    assert verdict.verified
    assert not (tmp_path / "ckpt").exists()


def fails() -> None:
    raise ValueError("my own mistake")


def test_what_the_loop_raises_is_told_as_its_own() -> None:
    with pytest.raises(UserCodeError, match="my own mistake"):
        shoal.verify_session(fails, 2)
    with pytest.raises(UserCodeError, match=r"sys\.exit"):
        shoal.verify_session(sys.exit, 2)


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="it starts its ranks itself"):
        shoal.verify_session(train, 2)
