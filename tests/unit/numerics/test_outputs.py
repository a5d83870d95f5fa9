"""Outputs for a loss over the global batch: their kinds, refusals, and the losses that stand for the job's own."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.launching import EXAMPLES
from torch import Tensor, nn

import shoal
from shoal.errors import JobError
from shoal.numerics.outputs import (
    BY_SAMPLE,
    PARAMETER,
    SUM,
    BatchLoss,
    GivenGradients,
    GrainOutputs,
    InPieces,
    RowsOfOutputs,
    SurrogateLoss,
    num_rows,
    pieces_of,
)

sys.path.append(str(EXAMPLES))
import global_losses as examples

K = torch.arange(1, 33, dtype=torch.float64)
X = (K * K).sin().view(8, 4)
Y = X + 0.5 * (K * K + K).cos().view(8, 4)
U, V = F.normalize(X, dim=1), F.normalize(Y, dim=1)
LABELS = torch.tensor([0, 1, 0, 1, 2, 0, 2, 1])


def mean(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] / pair[1]


def balanced() -> Tensor:
    probabilities = (3 * X).softmax(1)
    counts = F.one_hot(probabilities.topk(2).indices, 4).sum((0, 1)).double()
    return examples.balance(counts, probabilities.sum(0), torch.tensor(8.0))


# Computed with plain torch 2.13 in float64.
VALUES = {
    "CLIP": (lambda: examples.clip_loss(U, V, 10.0), 0.424633),
    "NT-Xent": (lambda: examples.nt_xent(U, V, 0.1), 0.706000),
    "SupCon": (lambda: mean(examples.sup_con(U, LABELS, 0.1)), 2.997663),
    "batch-hard": (lambda: mean(examples.batch_hard(U, LABELS, 0.3)), 0.437657),
    "VICReg": (lambda: examples.vicreg_loss(X, Y), 10.445563),
    "Barlow": (lambda: examples.barlow_twins({n: s.tensor for n, s in examples.barlow_sums(X, Y).items()}), 0.067848),
    "balance": (balanced, 1.045862),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_examples_compute_the_published_losses(name: str) -> None:
    compute, value = VALUES[name]
    assert float(compute()) == pytest.approx(value, abs=1e-6)


def test_kinds_of_outputs() -> None:
    scale = nn.Parameter(torch.ones(()))
    found = GrainOutputs.of({"rows": X, "gram": shoal.summed(X.T @ X), "scale": scale, "none": None}, 8)
    assert found.kinds[:3] == (BY_SAMPLE, SUM, PARAMETER)
    assert found.tree(found.leaves)["gram"].shape == (4, 4), "the loss receives the tensor without its mark"


@pytest.mark.parametrize(
    ("outputs", "given"),
    [
        ({"z": X, "mean": X.mean()}, r"outputs\['mean'\] of shape \[\] for 8 samples"),
        ({"z": X, "gram": X.T @ X}, r"outputs\['gram'\] of shape \[4, 4\] for 8 samples"),
        ((X, 3.0), r"outputs\[1\] of type float"),
        (None, "returned no tensor"),
    ],
)
def test_a_leaf_of_no_known_kind_is_refused_by_name(outputs: Any, given: str) -> None:
    with pytest.raises(JobError, match=given):
        GrainOutputs.of(outputs, 8)


def test_summed_takes_tensors() -> None:
    with pytest.raises(JobError, match=r"shoal.summed\(3\)"):
        shoal.summed(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int16])
def test_summed_integers_do_not_overflow(kind: torch.dtype) -> None:
    assert shoal.summed(torch.tensor([1, 0]).to(kind)).tensor.dtype == torch.int64


def test_the_surrogate_shows_outputs_that_mix_samples() -> None:
    def apart(outputs: Any) -> tuple[float, float]:
        loss = SurrogateLoss(outputs)
        whole, parts = loss(None, X), [loss(None, part) for part in X.split(2)]
        assert whole[1] == sum(float(weight) for _, weight in parts) == 8
        return float(whole[0]), float(sum(total for total, _ in parts))

    for outputs in (lambda m, x: x, lambda m, x: (x, shoal.summed(x.T @ x)), lambda m, x: x.argmax(1)):
        assert apart(outputs)[0] == pytest.approx(apart(outputs)[1], rel=1e-12)
    mixed = apart(lambda m, x: x - x.mean(0))  # whose sum over samples is zero for any batch
    assert mixed[0] != pytest.approx(mixed[1], rel=1e-3)


def test_given_gradients_are_scaled_and_have_the_dtype_of_their_tensors() -> None:
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    total = GivenGradients.apply(torch.tensor(7.0), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], one, two)
    (0.5 * total).backward()
    assert float(total.detach()) == 7.0
    assert one.grad is not None
    assert one.grad.tolist() == [0.5, 1.0]
    assert two.grad is not None
    assert two.grad.dtype == torch.bfloat16
    assert two.grad.tolist() == [1.5, 2.0]


def test_large_batches_are_evaluated_in_pieces() -> None:
    rows, sizes = torch.randn(600, 4, generator=torch.Generator().manual_seed(1)), list[int]()

    def outputs(model: Any, batch: Any) -> Any:
        sizes.append(len(batch[0]))
        return {"z": batch[0], "gram": shoal.summed(batch[0].T @ batch[0])}

    def loss(found: Any, batch: Any) -> Any:
        torch.testing.assert_close(found["gram"], batch[0].T @ batch[0], rtol=1e-4, atol=1e-4)
        return found["z"].sum(), len(batch[0])

    total, weight = BatchLoss(outputs, loss)(None, (rows,))
    assert (float(total), weight, sizes) == (float(rows.sum()), 600, [256, 256, 88])
    assert InPieces(lambda model, batch: (len(batch[0]), 1))(None, (rows,)) == (600, 3)


@pytest.mark.parametrize(("batch", "rows"), [((X, LABELS), 8), ((X, "text"), None), ((X, LABELS[:2]), None)])
def test_a_batch_with_other_parts_has_no_rows(batch: Any, rows: int | None) -> None:
    assert num_rows(batch) == rows
    assert pieces_of(batch) == [batch]


def test_predictions_are_the_outputs_by_sample() -> None:
    assert RowsOfOutputs(lambda m, x: x)(None, X) is X
    named = RowsOfOutputs(lambda m, x: {"z": x, "gram": shoal.summed(x.T @ x)})(None, X)
    assert list(named) == ["z"]


def test_rows_need_outputs() -> None:
    with pytest.raises(JobError, match="loss_by_rows=True without outputs"):
        shoal.Job(**{**vars(examples.clip()), "outputs": None, "loss_by_rows": True})


def test_job_refuses_outputs_that_are_no_function() -> None:
    with pytest.raises(JobError, match="outputs=3"):
        shoal.Job(**{**vars(examples.clip()), "outputs": 3})
