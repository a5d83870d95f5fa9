"""torch's compiler is not loaded by an optimizer, and still there for those who compile."""

import sys

import torch

from shoal.checkpoint.whole_optimizer import compiler_deferred, step_optimizer


def test_a_loaded_compiler_stays() -> None:
    before = sys.modules.get("torch._dynamo")
    sys.modules["torch._dynamo"] = stand_in = before or sys
    try:
        with compiler_deferred():
            assert sys.modules["torch._dynamo"] is stand_in
        assert sys.modules["torch._dynamo"] is stand_in
    finally:
        if before is None:
            del sys.modules["torch._dynamo"]


def test_a_step_is_in_a_profile_and_calls_what_is_hooked_to_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    step_optimizer(optimizer)
    with torch.autograd.profiler.profile() as profile:
        step_optimizer(optimizer)
    assert any("Optimizer.step#SGD.step" in event.name for event in profile.function_events)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step_optimizer(optimizer)
    assert called == ["after"]
    assert parameter.tolist() == [-0.5, -0.5]
