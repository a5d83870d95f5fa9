"""Model and optimizer become tensors and JSON, and come back to the bit."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.state import (
    load_model,
    load_optimizer,
    merged_optimizers,
    model_tensors,
    optimizer_state,
    weights_sha256,
)
from shoal.errors import JobMismatchError, UserCodeError

Make = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Linear(3, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width)
        self.tied = self.a
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)) * self.scale


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, amsgrad=True),
    "lr tensor": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "AdamW groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.ndim <= 1], "lr": 0.01, "betas": (0.5, 0.6)},
        ]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_training_goes_on_bit_for_bit(name: str) -> None:
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    trained(model, optimizer, range(3))
    weights = model_tensors(model)
    tensors, document = optimizer_state(optimizer, model)
    document = json.loads(json.dumps(document))
    trained(model, optimizer, range(3, 6))  # the saved state is its own, not the living one

    other = Model()
    fresh = OPTIMIZERS[name](other)
    trained(other, fresh, range(7, 9))
    load_model(other, weights)
    load_optimizer(fresh, other, tensors, document)
    assert repr(fresh.param_groups[0].keys()) == repr(optimizer.param_groups[0].keys())
    trained(other, fresh, range(3, 6))
    assert weights_sha256(other.state_dict()) == weights_sha256(model.state_dict())
    assert fresh.param_groups[-1].get("betas") == optimizer.param_groups[-1].get("betas")


def test_a_tensor_of_two_names_is_kept_once_and_hidden_buffers_too() -> None:
    assert sorted(model_tensors(Model())) == sorted(
        [
            "a.weight",
            "a.bias",
            "scale",
            "hidden",
            "norm.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        ]
    )


def test_saved_tensors_are_copies() -> None:
    model = Model()
    saved = model_tensors(model)
    with torch.no_grad():
        model.scale.fill_(9)
    assert float(saved["scale"]) == 1.5
    restored = Model()
    load_model(restored, saved)
    with torch.no_grad():
        restored.scale.fill_(9)
    assert float(saved["scale"]) == 1.5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("scale"), "scale: not in the checkpoint"),
        (lambda t: t.update(more=torch.zeros(1)), "more: not in the model"),
        (lambda t: t.update({"a.bias": torch.zeros(5)}), r"a.bias: torch.float32 [5] in the checkpoint"),
        (lambda t: t.update({"a.bias": torch.zeros(4).double()}), "a.bias: torch.float64 [4] in the checkpoint"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(change: Callable[[Any], Any], complaint: str) -> None:
    model = Model()
    tensors = {name: t + 1 for name, t in model_tensors(model).items()}
    before = weights_sha256(model.state_dict())
    change(tensors)
    with pytest.raises(JobMismatchError) as caught:
        load_model(model, tensors)
    assert complaint in caught.value.given
    assert "1 names, shapes or dtypes differ" in caught.value.conflict
    assert weights_sha256(model.state_dict()) == before, "a refused checkpoint changes nothing"


def test_other_parameter_groups_are_refused() -> None:
    model = Model()
    tensors, document = optimizer_state(OPTIMIZERS["AdamW groups"](model), model)
    with pytest.raises(JobMismatchError, match="parameter groups hold other parameters"):
        load_optimizer(OPTIMIZERS["Adam"](model), model, tensors, document)


def test_state_that_would_be_code_is_refused() -> None:
    model = Model()
    optimizer = OPTIMIZERS["SGD"](model)
    optimizer.state[model.scale]["fn"] = print
    with pytest.raises(UserCodeError, match="optimizer state scale/fn of type builtin_function_or_method"):
        optimizer_state(optimizer, model)


def test_the_hash_is_over_sorted_names_and_raw_bytes() -> None:
    tensors = {
        "b": torch.tensor([1.0, -2.0]).bfloat16(),
        "a.c": torch.tensor(3, dtype=torch.int64),
        "a": torch.arange(6.0).view(2, 3).t(),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0),
        "half": torch.tensor([1.0]).half(),
    }
    expected = hashlib.sha256()
    expected.update(torch.arange(6.0).view(2, 3).t().contiguous().numpy().tobytes())
    expected.update((3).to_bytes(8, "little"))
    expected.update(bytes.fromhex("803f00c0"))  # 1 and -2 in bfloat16
    expected.update(bytes([1, 0]))
    expected.update(bytes.fromhex("003c"))  # 1 in float16
    assert weights_sha256(tensors) == expected.hexdigest()
    assert weights_sha256(dict(reversed(tensors.items()))) == expected.hexdigest()
    assert weights_sha256({**tensors, "extra": {"not": "a tensor"}}) == expected.hexdigest()
    assert weights_sha256({**tensors, "half": torch.tensor([-0.0]).half()}) != expected.hexdigest()


# ------------------------------------------------------------------------------------------- documents of many ranks


def test_groups_are_put_together_by_their_values() -> None:
    """Stages whose parameters the job groups by name have groups of different numbers."""
    first = {"state": {"a": 1}, "groups": [{"params": ["a"], "values": {"wd": 0.1}}]}
    second = {
        "state": {"b": 2, "a": 3},
        "groups": [{"params": ["b"], "values": {"wd": 0.0}}, {"params": ["a", "c"], "values": {"wd": 0.1}}],
    }
    found = merged_optimizers([first, second])
    assert found["state"] == {"a": 1, "b": 2}
    assert found["groups"] == [
        {"params": ["a", "c"], "values": {"wd": 0.1}},
        {"params": ["b"], "values": {"wd": 0.0}},
    ]


def grouped(model: nn.Module, decays: dict[str, float]) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": decays[name]} for name, p in model.named_parameters()]
    return torch.optim.SGD(groups, lr=0.1)


def test_each_group_finds_its_own_values_again() -> None:
    model = nn.Linear(2, 1)
    _, document = optimizer_state(grouped(model, {"weight": 0.3, "bias": 0.0}), model)
    swapped = {**document, "groups": document["groups"][::-1]}
    fresh = grouped(model, {"weight": 0.0, "bias": 0.0})
    load_optimizer(fresh, model, {}, swapped)
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.3, 0.0]
    with pytest.raises(JobMismatchError):
        load_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, {}, swapped)
