"""Modules before which a model can be cut into stages, for a plan, before any rank starts."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.parallel.pipeline.stage_cuts import candidates
from shoal.parallel.pipeline.stage_program import LeakError, programs
from shoal.parallel.pipeline.stage_repeats import RepeatTracer
from shoal.parallel.pipeline.stage_trace import StageTrace
from shoal.parallel.pipeline.stages import Function, Stages


def places(model: nn.Module, function: Function, batch: Any) -> tuple[str, ...]:
    """Return the modules before which a model can be cut into stages, in the order of their calls.

    The rule is the engine's own. `function`: the loss. `batch`: for shapes only. Nothing is computed, so the model may
    be without data. The modules' forwards remain wrapped, as in a pipeline.
    Raises: UserCodeError if the function does not run without data, and thus in no pipeline.
    """
    stages, found = Stages(model, torch.device("cpu"), {}), []
    trace = shared_trace(stages, model, function, batch)
    for call in candidates(model, trace):
        # An argument with a use after the call may bypass the cut: only a trial shows whether it does.
        used = max((trace.lives[key][1] for key in call.argument_ids & trace.lives.keys()), default=0)
        with contextlib.suppress(LeakError):
            if used > call.exit:
                stages.check(function, batch, programs(trace, [call.name]))
            found.append(call.name)
    return tuple(found)


def shared_trace(stages: Stages, model: nn.Module, function: Function, batch: Any) -> StageTrace:
    """Return the trace. It runs one of several equal blocks if they are known to be equal, else all."""
    forwards = {id(model.get_submodule(name).forward): forward for name, forward in stages.forwards.items()}
    with contextlib.suppress(ShoalError):
        return stages.traced(function, batch, functools.partial(RepeatTracer, model, forwards))
    return stages.traced(function, batch)
