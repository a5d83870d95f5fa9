"""Sparse gradients of embeddings stay sparse on data ranks: plain torch's numbers, and traffic by touched rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import JobError, PlanError
from shoal.numerics.checksum import bits_checksum
from shoal.parallel.data.sparse_rows import SparseRows
from shoal.plans.resolve import complete
from shoal.training.observe.trace.traces import StepTrace, read
from shoal.training.setup.job_model import seeded_model
from shoal.verification.forked import trace_forked

pytestmark = pytest.mark.ranks

ROWS, WIDTH = 50, 4


class Both(torch.optim.Optimizer):
    """SparseAdam for tables, SGD for the other parameters."""

    def __init__(self, parameters: Any) -> None:
        tables = [p for p in parameters if p.shape == (ROWS, WIDTH)]
        self.tables = torch.optim.SparseAdam(tables, lr=0.1)
        self.others = torch.optim.SGD([p for p in parameters if p.shape != (ROWS, WIDTH)], lr=0.1)
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.tables.step()
        self.others.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
    "both": Both,
}


class Words(nn.Module):
    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Identity() if alone else nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1))


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Sentences of 3 words, of which word 7 comes twice in each, and others never."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, rows // 2, (24, 3), generator=draw)
    words[:, :2] = 7
    return words, torch.randn(24, WIDTH, generator=draw)


def job_of(kind: str, **changes: Any) -> shoal.Job:
    job = shoal.Job(
        model=Words,
        loss=lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), len(batch[0])),
        optimizer=OPTIMIZERS[kind],
        train_data=data(),
        global_batch=8,
        grains=4,
        shuffle=False,
        clip_norm=0.5,
    )
    return replace(job, **changes)


def traced(job: shoal.Job, folder: Path, ranks: int = 1, **sections: dict[str, Any]) -> list[StepTrace]:
    whole = complete(shoal.Plan().with_sections(layout={"data": ranks}, **sections), job.num_grains, job.grain_size)
    trace_forked(lambda: job, whole, folder, 3)
    return [read(folder / "parallel", step, ranks) for step in range(3)]


def plain(job: shoal.Job) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain torch; clip_grad_norm_ raises for sparse gradients, so this clips their values."""
    model = seeded_model(job)
    optimizer = job.optimizer(list(model.parameters()))
    losses = []
    for start in range(0, 24, 8):
        optimizer.zero_grad()
        total, weight = job.loss(model, tuple(tensor[start : start + 8] for tensor in job.train_data))
        (total / weight).backward()
        losses.append(float(total.detach()) / weight)
        for p in model.parameters():
            p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
        values = [p.grad.values() if p.grad.is_sparse else p.grad for p in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in values]))
        for value in values:
            value.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        with torch.sparse.check_sparse_tensor_invariants(False):  # else Adagrad's step warns
            optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@parametrize("optimizer", OPTIMIZERS, usual=["adagrad", "both"])
def test_plain_torch_on_any_number_of_ranks(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give = SparseRows.give

    def checked(rows: SparseRows, num_leaves: int) -> None:
        give(rows, num_leaves)
        (table,) = rows.parameters
        assert table.grad is not None
        assert table.grad.is_sparse
        assert table.grad.is_coalesced()
        assert table.grad._nnz() < ROWS // 2

    monkeypatch.setattr(SparseRows, "give", checked)
    job = job_of(optimizer)
    losses, weights = plain(job)
    hashes = set()
    for ranks in (1, 2, 3):
        for exact in (True, False):
            steps = traced(job, tmp_path / f"{ranks}{exact}", ranks, execution={"exact": exact})
            assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
            for name, value in weights.items():
                torch.testing.assert_close(steps[-1].parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)
            end = steps[-1].parameters
            hashes |= {bits_checksum([end[name] for name in sorted(end)])} if exact else set()
    assert len(hashes) == 1


def test_a_model_of_one_table_trains(tmp_path: Path) -> None:
    job = job_of("sgd", model=lambda: Words(alone=True))
    losses, _ = plain(job)
    for exact in (True, False):
        steps = traced(job, tmp_path / str(exact), 2, execution={"exact": exact})
        assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)


def test_verified_with_sparse_adam() -> None:
    assert shoal.verify(job_of("both"), shoal.Plan().with_sections(layout={"data": 2})).verified


@parametrize(
    ("optimizer", "sections", "words"),
    [
        (lambda p: torch.optim.Adam(p), {}, "Adam with table.weight, whose gradient is sparse"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), {}, "weight decay"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), {}, "nesterov"),
        (lambda p: torch.optim.SparseAdam(p), {}, "SparseAdam with head.weight, whose gradient is dense"),
        (Both, {"collectives": {"compression": "bfloat16"}}, "SparseAdam with table.weight, whose gradient is dense"),
        (
            Both,
            {"layout": {"shard": 2}, "shard": {"level": "optimizer"}},
            "SparseAdam with table.weight, whose gradient is dense with layout.shard > 1",
        ),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"execution": {"compile": "default"}}, "torch compiles no backward"),
    ],
    ids=["Adam", "decay", "nesterov", "SparseAdam", "compressed", "ZeRO-1", "compiled"],
)
def test_what_torch_cannot_step_is_refused(
    optimizer: Any, sections: dict[str, dict[str, Any]], words: str, tmp_path: Path
) -> None:
    job = job_of("sgd", optimizer=optimizer)
    plan = shoal.Plan().with_sections(**{"layout": {"data": 2}, **sections})
    with pytest.raises((JobError, PlanError), match=words):
        trace_forked(lambda: job, complete(plan, job.num_grains, job.grain_size), tmp_path, 1)


def test_a_table_with_other_uses_has_a_dense_gradient(tmp_path: Path) -> None:
    class Tied(Words):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(WIDTH, ROWS, bias=False)
            self.out.weight = self.table.weight

    job = job_of("sgd", model=Tied, optimizer=lambda p: torch.optim.Adam(p))
    traced(job, tmp_path, 2)
