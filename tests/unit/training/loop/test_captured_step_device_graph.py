"""The rules of a capture, and what of torch's interface the recorder for CUDA devices uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import PlanError
from shoal.numerics.captured_draws import CapturedScope, NotCapturableError
from shoal.plans.grains import Grain
from shoal.training.loop.captured_step import CaptureRules, refuse_uncapturable

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
FORBIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: X.sum().item(), "reads a number"),
    "a branch": (lambda: bool(X.sum() > 0), "reads a number"),
    "nonzero": (lambda: X.nonzero(), "shapes depend on values"),
    "a boolean index": (lambda: X[X > 0], "shapes depend on values"),
    "a draw": (lambda: torch.randn(3), "no grain's"),
    "dropout past the scope": (lambda: torch.native_dropout(X, 0.5, True), "no grain's"),
    "a copy to the device": (lambda: X.to("meta"), "brings values of the host"),
    "numbers of the host": (lambda: torch.empty(3, device="meta").copy_(X[0]), "brings values of the host"),
}


def scope() -> CapturedScope:
    found = CapturedScope(0, (Grain(0, 0, 4),), torch.device("cpu"))
    found.seed(0)
    return found


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_replay_would_not_repeat_is_refused(name: str) -> None:
    call, reason = FORBIDDEN[name]
    with pytest.raises(NotCapturableError, match=reason), CaptureRules():
        call()


def test_what_it_repeats_is_not() -> None:
    """Backwards, grains' draws, and attention that drops nothing."""
    draws, weight = scope(), torch.randn(3, 3, requires_grad=True)
    with CaptureRules(), draws:
        found: Tensor = F.dropout(F.alpha_dropout(X @ weight, 0.5, training=True), 0.5)
        found = F.scaled_dot_product_attention(found[None], found[None], found[None])
        found.sum().backward()
    assert weight.grad is not None


def test_torch_has_what_the_recorder_for_cuda_calls() -> None:
    """By name, in the declarations that a build for the CPU has too."""
    inspect.signature(torch.cuda.graph.__init__).bind(None, None, stream=None, capture_error_mode="thread_local")
    declared = (Path(torch.__path__[0]) / "_C" / "__init__.pyi").read_text()
    for name in ("graphsafe_get_state", "graphsafe_set_state"):
        assert f"def {name}(" in declared, name


def test_devices_and_data_without_graphs_are_refused() -> None:
    with pytest.raises(PlanError, match=r"execution\.cuda_graph = true, with the device cpu"):
        refuse_uncapturable(torch.device("cpu"), mapped=True)
    with pytest.raises(PlanError, match="a stream of samples"):
        refuse_uncapturable(torch.device("cuda"), mapped=False)
    refuse_uncapturable(torch.device("cuda"), mapped=True)
