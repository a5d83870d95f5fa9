"""Integers that follow from shapes are computed without values; what anything unknown has a part in is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily

from shoal.parallel.model.value_free import ValueFree, construction


def test_masks_and_positions_have_values() -> None:
    with ValueFree().running():
        positions = torch.arange(4).expand(2, -1)
        mask = positions[:, None, :] <= positions[:, :, None]
        mask[0, 0, 3] = True
        assert int(positions.max()) == 3
        assert mask.sum().item() == 21
        assert (mask.cumsum(-1) == 0).nonzero().tolist() == []
        assert bool((torch.diff(positions) == 1).all())


def test_floats_have_shapes_alone() -> None:
    with ValueFree().running():
        made = torch.arange(4).float()
        assert isinstance(made, FakeTensor)
        with pytest.raises(DataDependentOutputException):
            made.sum().item()


WITHOUT_VALUES: dict[str, Any] = {
    "random numbers": lambda floats: torch.randint(4, (2,)),
    "numbers drawn in place": lambda floats: torch.zeros(2, dtype=torch.int64).random_(4),
    "indices of floats": lambda floats: floats.argmax(-1),
    "what they are added to": lambda floats: torch.arange(2) + floats.argmax(-1),
    "what they are written into": lambda floats: torch.zeros(2, dtype=torch.int64).copy_(floats.argmax(-1)),
    "a view of what they are written into": lambda floats: _written(floats)[:1],
    "more than memory is spent on": lambda floats: torch.zeros(1 << 26, dtype=torch.int64),
}


def _written(floats: Tensor) -> Tensor:
    found = torch.zeros(2, dtype=torch.int64)
    found[floats.argmax()] = 1
    return found


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_what_is_not_known_is_not_read(name: str) -> None:
    value_free = ValueFree()
    with value_free.running(), pytest.raises(DataDependentOutputException):
        WITHOUT_VALUES[name](value_free.fake(torch.ones(2, 3))).sum().item()


def test_an_expanded_mask_is_no_memory() -> None:
    with ValueFree().running():
        mask = torch.ones(1, 1 << 14, 1 << 14, dtype=torch.bool).expand(64, -1, -1)
        assert not isinstance(mask, FakeTensor)


def test_integers_of_a_batch_are_copies() -> None:
    batch = torch.arange(3)
    value_free = ValueFree()
    with value_free.running():
        shown = value_free.fake_or_integers(batch)
        assert isinstance(value_free.fake_or_integers(torch.ones(3)), FakeTensor)
        shown.zero_()
    assert batch.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_experts_have_shapes(dtype: torch.dtype) -> None:
    """Of any dtype and width, forward and backward, as the kernels of CPUs take them."""
    weight, offsets = nn.Parameter(torch.ones(3, 5, 7, dtype=dtype)), torch.tensor([2, 2, 4], dtype=torch.int32)
    value_free = ValueFree()
    with value_free.running():
        fake = nn.Parameter(value_free.fake(weight))
        rows = value_free.fake(torch.ones(4, 5, dtype=dtype)).requires_grad_()
        found = F.grouped_mm(rows, fake, offs=offsets)
        assert found.shape == (4, 7)
        found.sum().backward()
        assert fake.grad is not None
        assert rows.grad is not None
        assert (fake.grad.shape, rows.grad.shape) == (weight.shape, rows.shape)


def test_masks_within_attention_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def counted() -> Any:
        computed.append(True)
        return unset_fake_temporarily()

    monkeypatch.setattr("shoal.parallel.model.value_free.unset_fake_temporarily", counted)
    with ValueFree().running():
        queries = torch.zeros(1, 2, 16, 4)
        attended = F.scaled_dot_product_attention(queries, queries, queries, is_causal=True, dropout_p=0.1)
        assert attended.shape == queries.shape
        assert not computed
        assert torch.ones(3, 3, dtype=torch.bool).tril().sum().item() == 6
        assert computed


def test_a_module_computes_in_place_without_values_and_has_its_own_tensors_again() -> None:
    """Tensors that two modules share are one fake tensor, and the run leaves nothing in the module."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    weight, value_free = model[0].weight, ValueFree("meta")
    with value_free.in_place(model, {}) as named:
        assert named["0.weight"] is named["1.weight"]
        assert isinstance(model[0].weight, FakeTensor)
        rows, same = value_free.fakes_of([batch := torch.ones(2, 4), batch])
        assert rows is same
        with value_free.running():
            assert model(rows).shape == (2, 4)
    assert model[0].weight is model[1].weight is weight


def test_a_constructor_draws_nothing_on_the_meta_device() -> None:
    before = torch.get_rng_state()
    with construction():
        model = nn.Linear(4, 4)
    assert model.weight.is_meta
    assert torch.equal(torch.get_rng_state(), before)
