"""Places where a model can be cut into stages, for a plan, before any rank is started."""

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
    """The modules before which a model can be cut into stages, in the order in which they are called.

    By the engine's own rule. `function`: the loss. `batch`: tells shapes only, nothing is computed; the model may be
    without data. Leaves the forwards of its modules as they go through a pipeline.
    Raises: UserCodeError where the function does not run without data, and no pipeline does.
    """
    stages, found = Stages(model, torch.device("cpu"), {}), []
    trace = shared_trace(stages, model, function, batch)
    for call in candidates(model, trace):
        # An argument that is used once more after the call may get there past the cut: only trying tells.
        used = max((trace.lives[key][1] for key in call.argument_ids & trace.lives.keys()), default=0)
        with contextlib.suppress(LeakError):
            if used > call.exit:
                stages.check(function, batch, programs(trace, [call.name]))
            found.append(call.name)
    return tuple(found)


def shared_trace(stages: Stages, model: nn.Module, function: Function, batch: Any) -> StageTrace:
    """The trace, for which of equal blocks one is run where it is known that they are equal, and else all."""
    forwards = {id(model.get_submodule(name).forward): forward for name, forward in stages.forwards.items()}
    with contextlib.suppress(ShoalError):
        return stages.traced(function, batch, functools.partial(RepeatTracer, model, forwards))
    return stages.traced(function, batch)
