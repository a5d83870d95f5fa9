"""What every algorithm shares: what it takes, and how values are combined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.distributed.collectives.base import DTYPES, OPERATIONS, check, check_parts, combine, reduce_in_order
from shoal.errors import CollectiveError


def test_what_is_taken() -> None:
    for dtype in DTYPES:
        check("all_reduce", [torch.zeros(3, dtype=dtype)])
    for wrong, said in (
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, 4).t(), "strides"),
        (torch.zeros(3, device="meta"), "device meta"),
    ):
        with pytest.raises(CollectiveError, match=said):
            check("all_reduce", [wrong])
    with pytest.raises(CollectiveError, match="op='mean'"):
        check("all_reduce", [torch.zeros(1)], "mean")


def test_parts_are_equal() -> None:
    check_parts("all_gather", torch.zeros(6), torch.zeros(2), 3)
    with pytest.raises(CollectiveError, match="give a whole tensor of 6 elements"):
        check_parts("all_gather", torch.zeros(5), torch.zeros(2), 3)
    with pytest.raises(CollectiveError):
        check_parts("all_gather", torch.zeros(6), torch.zeros(2, dtype=torch.float64), 3)


def reference(op: str, values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        combine(op, total, value, total)  # type: ignore[arg-type]
    return total


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("where", [None, 0, 1, 2, 3])
def test_the_order_is_that_of_the_values(op: str, where: int | None) -> None:
    """Also where the result overwrites one of them."""
    values = [torch.randn(50) * 10.0**i for i in range(4)]
    wanted = reference(op, values)
    out = torch.empty(50) if where is None else values[where]
    reduce_in_order(op, values, out)  # type: ignore[arg-type]
    assert torch.equal(out, wanted)


def test_narrow_sums_are_rounded_once() -> None:
    values = [torch.full((3,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    out = torch.empty_like(values[0])
    reduce_in_order("sum", values, out, torch.empty(8))
    assert out.tolist() == [258.0] * 3
    reduce_in_order("sum", values, out)
    assert out.tolist() == [256.0] * 3  # what rounding twice gives
