"""Proof of a divided block: equal to the whole one, on all ranks together, in float64 on random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shoal.errors import ShoalError
from shoal.parallel.axis_collectives import TensorAxis
from shoal.parallel.model.trial import Values, first_line
from shoal.parallel.sequence.layers import BlockWrapper
from shoal.parallel.sequence.plan import BlockPlan, ContextPlan
from shoal.parallel.sequence.positions import Stream, refusal, surround
from shoal.parallel.sequence.trace import BlockTrace
from shoal.parallel.sequence.trial import OF_PARAMETER, BlockTrial, computed

_WHY = (
    "something in it mixes positions other than F.scaled_dot_product_attention (a convolution, a recurrence, a shift "
    "or a statistic over time), or looks at the number of positions"
)


class Prover:
    """Prover for the blocks of one model with its own `values`, on `device`."""

    def __init__(self, model: nn.Module, values: Values, axis: TensorAxis, device: torch.device) -> None:
        self._model, self._values, self._axis, self._device = model, values, axis, device

    def prove(self, plan: ContextPlan, traces: Mapping[str, BlockTrace]) -> None:
        """Tries one block of each kind. Collective: the axis. Raises: JobError naming the block."""
        seen = set()
        for name, block in plan.blocks.items():
            trace = traces[name]
            kind = repr(self._model.get_submodule(name)), tuple(trace.operations), tuple(trace.shapes.items())
            if kind not in seen:
                seen.add(kind)
                self._prove(name, block, trace)

    def _prove(self, name: str, plan: BlockPlan, trace: BlockTrace) -> None:
        trial = BlockTrial.of(self._model, name, self._values, trace, self._device)
        role = BlockWrapper(name, replace(plan, opens=True, closes=True), Stream(self._axis))
        surround(trial.divided, role)
        try:
            split = computed(trial.divided, trial.arguments).values
        except ShoalError:
            raise
        except Exception as error:
            what = f"it raised {type(error).__name__} on a part of the positions: {first_line(error)}"
            raise _refused(name, trace, what) from error
        for key, found in split.items():
            if key.startswith(OF_PARAMETER):
                dist.all_reduce(found, group=self._axis.group)
        for key, wanted in trial.whole.values.items():
            if not trial.is_same(key, split[key], wanted):
                raise _refused(name, trace, f"{key} is another where each rank has a part of the positions")


def _refused(name: str, trace: BlockTrace, what: str) -> ShoalError:
    remedy = "use context = 1, or a block whose positions meet in F.scaled_dot_product_attention only"
    if "scaled_dot_product_attention" not in trace.operations:
        remedy += ' (in Transformers attn_implementation="sdpa")'
    return refusal(name, f"{what}: {_WHY}", remedy)
