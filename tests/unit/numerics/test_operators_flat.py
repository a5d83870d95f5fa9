"""Rows and bytes of tensors of every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.numerics.operators import as_real, in_dtype, is_strided, real_numel, strided_parts, views_of
from shoal.numerics.precision import Precision
from shoal.plans.plan import PrecisionSection
from shoal.training.observe.trace.traces import fingerprint

X = torch.tensor([[0.0, 1, 2], [3, 0, 0], [0, 0, 0], [4, 5, 0]])
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda x: x,
    "coo": lambda x: x.to_sparse_coo(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 3)),
    "hybrid": lambda x: x.to_sparse_coo().to_dense().unsqueeze(2).to_sparse_coo(),
    "half": lambda x: x.half().to_sparse_coo(),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.quint8),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested"),
    pytest.mark.filterwarnings("ignore:torch.quantize"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_part_are_those_of_the_whole(layout: str) -> None:
    """Whatever grains a microbatch has, a grain's fingerprint is the same; another row has another one."""
    make = LAYOUTS[layout]
    whole = fingerprint(make(X), [1, 3])
    assert whole == [*fingerprint(make(X[:1]), [1]), *fingerprint(make(X[1:]), [3])]
    moved = X.clone()
    moved[3] = torch.tensor([0.0, 5, 4])
    assert fingerprint(make(moved), [1, 3])[1] != whole[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_strided_and_hold_all_numbers(layout: str) -> None:
    parts = strided_parts(LAYOUTS[layout](X))
    assert all(map(is_strided, parts))
    assert sum(float(part.double().sum()) for part in parts if part.is_floating_point()) == pytest.approx(15.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_inputs_of_a_model_in_another_dtype(layout: str) -> None:
    precision = Precision.of(PrecisionSection(parameters="bfloat16", compute="bfloat16"), torch.device("cpu"), True)
    (moved,) = precision.inputs([LAYOUTS[layout](X)])
    assert moved.dtype == (torch.quint8 if layout == "quantized" else torch.bfloat16)


def test_complex_tensors_are_pairs_wherever_they_lie() -> None:
    tensors = [torch.ones(3), torch.tensor([[1.0 + 2.0j, -3.0j]]), torch.tensor(2.0 - 1.0j).conj()]
    flat = torch.zeros(sum(map(real_numel, tensors)))
    for view, tensor in zip(views_of(flat, tensors), tensors, strict=True):
        view.copy_(as_real(tensor))
    assert flat.tolist() == [1, 1, 1, 1, 2, 0, -3, 2, 1]
    for view, tensor in zip(views_of(flat, tensors), tensors, strict=True):
        assert torch.equal(in_dtype(view, tensor), tensor)


def test_a_complex_vector_has_complex_pieces() -> None:
    (piece,) = views_of(torch.zeros(2, dtype=torch.complex64), [torch.zeros(2, 1, dtype=torch.complex64)])
    assert piece.shape == (2, 1)
