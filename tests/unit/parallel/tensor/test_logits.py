"""Logits that stay cut: what leaves them so, and the cross entropy of slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.tensor.heads import is_proven, sizes
from shoal.parallel.tensor.logits import Entropy, Head, Logits, Rows, divided

SIZES = (3, 4)
WHOLE = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Known(Head):
    """A head that knows the other rank's slice of `WHOLE`'s children by computing them again; counts nothing."""

    def whole(self, local: Tensor, dim: int, why: str) -> Tensor:
        raise AssertionError(f"gathered for {why}")


def logits() -> Logits:
    return divided(WHOLE[..., 3:].clone().requires_grad_(), 2, Known(TensorAxis(2, 1), SIZES))


LEFT: dict[str, Any] = {
    "flatten": lambda x: x.flatten(0, 1),
    "view": lambda x: x.view(-1, 7),
    "view by size": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: x.reshape(5, 2, 7),
    "all but the last": lambda x: x[..., :-1, :].contiguous(),
    "a position": lambda x: x[:, -1],
    "a mask": lambda x: x[torch.ones(2, 5, dtype=torch.bool)],
    "a list of rows": lambda x: x[torch.tensor([1, 0])],
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float64),
    "scaled": lambda x: x / 2 * 3,
    "soft cap": lambda x: torch.tanh(x / 30) * 30,
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "new dim": lambda x: x.unsqueeze(1),
}
GATHERED: dict[str, Any] = {
    "argmax": lambda x: x.argmax(-1),
    "one class": lambda x: x[..., 0],
    "every dim": lambda x: x[0, 0, 0],
    "some classes": lambda x: x[:, :, :5],
    "classes regrouped": lambda x: x.view(2, 35),
    "a tensor": lambda x: x * torch.ones(7),
    "softmax": lambda x: x.softmax(-1),
    "classes as rows": lambda x: F.cross_entropy(x.flatten(0, 1).t(), torch.zeros(7, dtype=torch.int64)),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), torch.ones(10, 7) / 7),
    "a list": lambda x: x[[1, 0]],
}


@pytest.mark.parametrize("name", LEFT)
def test_what_leaves_classes_alone_leaves_them_cut(name: str) -> None:
    found, wanted = LEFT[name](logits()), LEFT[name](WHOLE)
    assert isinstance(found, Logits)
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert torch.equal(found.local, wanted.narrow(found.dim_, 3, 4))
    assert found.requires_grad
    assert found.local.requires_grad


@pytest.mark.parametrize("name", GATHERED)
def test_everything_else_takes_all_of_them(name: str) -> None:
    with pytest.raises(AssertionError, match="gathered for"):
        GATHERED[name](logits())


def test_without_gradients_everything_is_gathered() -> None:
    with torch.no_grad(), pytest.raises(AssertionError, match="gathered for"):
        logits().flatten(0, 1)


def test_what_tells_of_a_tensor_gathers_nothing() -> None:
    found = logits()
    assert (found.shape, found.ndim, found.dtype, len(found)) == (WHOLE.shape, 3, torch.float32, 2)
    assert found.device == WHOLE.device
    assert found.is_floating_point()
    assert "local=[2, 5, 4]" in repr(found)


def test_a_hook_is_on_what_the_backward_goes_through() -> None:
    found, seen = logits(), []
    found.register_hook(lambda gradient: seen.append(gradient.shape))
    (found * 2).local.sum().backward()
    assert seen == [torch.Size((2, 5, 4))]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize(("size", "degree"), [(50257, 3), (7, 7)])
def test_every_option_is_torchs(weighted: bool, smoothing: float, ignored: int, size: int, degree: int) -> None:
    assert is_proven(Entropy(ignored, "mean", smoothing, weighted), size, degree)


def test_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.parallel.tensor import heads

    monkeypatch.setattr(heads, "Rows", lambda targets, ignored, smoothing, weights: Rows(targets, -100, 0.1))
    assert not is_proven(Entropy(-100, "mean", 0.0, False), 9, 2)


def test_sizes_need_not_divide() -> None:
    assert sizes(50257, 3) == (16752, 16752, 16753)


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        Rows(torch.tensor([-100, 3, 9]), -100).check(9)
