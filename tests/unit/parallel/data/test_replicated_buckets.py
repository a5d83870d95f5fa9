"""Buckets on one process: gradients accumulate over microbatches in the reduce dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.parallel.base import Flags
from shoal.parallel.data.replicated import GradientBuckets
from shoal.plans.accounting.collectives import END_BUCKET_BYTES, GLOO_BUCKET_BYTES, divide_into_buckets

MIDDLE = 4 << 20


def accumulated(model: nn.Module, batches: list[Tensor], reduce: torch.dtype) -> list[Tensor | None]:
    parameters = list(model.parameters())
    buckets = GradientBuckets(parameters, reduce, world_size=1)
    try:
        buckets.begin()
        for number, batch in enumerate(batches):
            if number == len(batches) - 1:
                buckets.arm()
            model(batch).float().sum().backward()
        flags, extras = buckets.finish(Flags(errors=2, redo=1), torch.tensor([3.0, 4.0]))
        assert flags == Flags(errors=2, redo=1)
        assert extras.tolist() == [3.0, 4.0]
        return [None if p.grad is None else p.grad.clone() for p in parameters]
    finally:
        buckets.close()


def test_narrow_parameters_add_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: 512 microbatches of 1 after one of 256 would all be lost."""
    batches = [torch.full((1, 1), 256.0, dtype=torch.bfloat16)] + [torch.ones(1, 1, dtype=torch.bfloat16)] * 512
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    (wide,) = accumulated(model, batches, torch.float32)
    assert wide is not None
    assert wide.dtype == torch.bfloat16
    assert float(wide) == 768.0
    model.zero_grad()
    (narrow,) = accumulated(model, batches, torch.bfloat16)
    assert float(narrow) == 256.0  # type: ignore[arg-type]


@pytest.mark.parametrize("reduce", [torch.float32, torch.float64])
def test_gradients_are_those_of_the_sum(reduce: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = list(torch.randn(5, 2, 3))
    found = accumulated(model, batches, reduce)
    model.zero_grad()
    sum(model(b).sum() for b in batches).backward()  # type: ignore[union-attr]
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("reduce", [torch.float32, torch.float64])
def test_an_unused_parameter_has_no_gradient(reduce: torch.dtype) -> None:
    found = accumulated(Half(), [torch.ones(1, 2)] * 3, reduce)
    assert [g is None for g in found] == [False, False, True, True]
    assert found[0].tolist() == [[3.0, 3.0]]  # type: ignore[union-attr]


def test_a_step_begins_without_the_gradients_of_the_last() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    buckets = GradientBuckets(list(model.parameters()), torch.float32, 1)
    for _ in range(2):
        buckets.begin()
        assert model.weight.grad is None
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        buckets.finish(Flags(), torch.empty(0))
        assert float(model.weight.grad) == 1.0  # type: ignore[arg-type]
    buckets.begin()
    buckets.finish(Flags(), torch.empty(0))
    assert model.weight.grad is None
    buckets.close()
    model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None, "a hook is left"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_are_summed(dtype: torch.dtype) -> None:
    model = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    (found,) = accumulated(model, [torch.tensor([1, 1]), torch.tensor([3])], torch.float32)
    assert found is not None
    dense = found.to_dense() if found.is_sparse else found
    assert dense.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def test_sparse_gradients_become_dense_on_any_number_of_ranks() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    (found,) = accumulated(model, [torch.tensor([1, 1])], torch.float32)
    assert found is not None
    assert not found.is_sparse


@given(st.lists(st.sampled_from([4, 4096, END_BUCKET_BYTES // 3, END_BUCKET_BYTES, MIDDLE, 3 * MIDDLE]), min_size=1))
def test_small_buckets_first_and_last(sizes: list[int]) -> None:
    groups = divide_into_buckets(sizes, MIDDLE)
    assert [i for group in groups for i in group] == list(reversed(range(len(sizes))))
    assert all(groups)
    # Each would be too small without the parameter that closed it: at its end, for the last bucket at its start.
    for number, group in enumerate(groups[:-1]):
        limit = MIDDLE if number else END_BUCKET_BYTES
        assert sum(sizes[i] for i in group[:-1]) < limit
        assert number == len(groups) - 2 or sum(sizes[i] for i in group) >= limit
    assert sum(sizes[i] for i in groups[-1][1:]) < END_BUCKET_BYTES


def test_each_parameter_has_its_place_in_a_bucket() -> None:
    sizes = [END_BUCKET_BYTES // 4, 10, GLOO_BUCKET_BYTES // 8, END_BUCKET_BYTES // 4, 10]
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    buckets = GradientBuckets(parameters, torch.float32, 2)
    homes = [id(buckets._place[i][0]) for i in range(len(sizes))]
    assert [homes.index(home) for home in homes] == [0, 1, 1, 3, 3]
    assert all(buckets._place[i][1].shape == p.shape for i, p in enumerate(parameters))
    assert sum(b.flat.numel() for b in buckets._buckets) == sum(sizes) + 2 + len(sizes)
    buckets.close()
