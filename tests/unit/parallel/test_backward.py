"""The gradient that a backward begins with, which serves several of them."""

import torch

from shoal.parallel.backward import RootGradient, run_backward


def gradients(hook: bool = False, factors: tuple[float, ...] = (1.0, 1.0, 0.5)) -> tuple[list[float], int]:
    """Of a weight, after each of some backwards; and how many roots they began with."""
    begun: RootGradient | None = None
    found, roots = [], []
    for factor in factors:
        weight = torch.nn.Parameter(torch.ones(()))
        total = weight * 3.0
        if hook:
            total.register_hook(lambda gradient: gradient.mul_(2.0))
        begun = run_backward(total, factor, begun)
        roots.append(begun)
        assert weight.grad is not None
        found.append(float(weight.grad))
    return found, len(set(map(id, roots)))


def test_one_root_serves_backwards_with_the_same_factor() -> None:
    assert gradients() == ([3.0, 3.0, 1.5], 2)


def test_a_root_that_a_hook_has_written_to_serves_no_other() -> None:
    assert gradients(hook=True) == ([6.0, 6.0, 3.0], 3)


def test_a_total_that_is_a_parameter_gets_a_gradient_of_its_own() -> None:
    begun = None
    for _ in range(2):
        weight = torch.nn.Parameter(torch.ones(()))
        begun = run_backward(weight, 1.0, begun)
        assert weight.grad is not None
        weight.grad.mul_(5.0)
    assert float(begun.values) == 1.0


def test_a_root_is_of_the_totals_dtype() -> None:
    begun = None
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(torch.ones((), dtype=dtype))
        begun = run_backward(weight * 2.0, 1.0, begun)
        assert begun.values.dtype == dtype
