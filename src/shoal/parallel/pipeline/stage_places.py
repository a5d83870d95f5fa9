"""Legal pipeline cuts of a model, by the engine's own rule, before any rank is started."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.parallel.pipeline.stage_cuts import candidates
from shoal.parallel.pipeline.stage_trace import ModuleCall
from shoal.parallel.pipeline.stages import Function, Stages


def places(model: nn.Module, function: Function, batch: Any) -> tuple[str, ...]:
    """The modules before which a model can be cut into stages, in the order in which they are called.

    `function`: the loss. `batch`: tells shapes only, nothing is computed; the model may be without data. Leaves the
    forwards of its modules as they go through a pipeline.
    Raises: UserCodeError where the function does not run without data, and no pipeline does.
    """
    stages = Stages(model, torch.device("cpu"), {})
    trace = stages.traced(function, batch)

    def is_refused(call: ModuleCall) -> bool:
        # An argument that is used once more after the call may get there past the cut: only trying tells.
        used = max((trace.lives[key][1] for key in call.argument_ids & trace.lives.keys()), default=0)
        return used > call.exit and stages.leaks(function, batch, trace, call.name)

    return tuple(call.name for call in candidates(model, trace) if not is_refused(call))
