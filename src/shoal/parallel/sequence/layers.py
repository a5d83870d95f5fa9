"""Context-parallel blocks: the user's own modules on some positions of a sequence, with their names and hooks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.parallel.axis_collectives import enter
from shoal.parallel.sequence.attention import Sliced
from shoal.parallel.sequence.plan import BlockPlan
from shoal.parallel.sequence.positions import BlockRole, Path, Span, Surrounded, refusal, tensors_by_path


@dataclass
class BlockWrapper(BlockRole):
    """Role of a block under context parallelism: two all-to-alls for each attention inside."""

    plan: BlockPlan

    def dropouts(self, span: Span, ndim: int) -> AbstractContextManager[Any]:
        """Attention, and dropout as the plan says."""
        return Sliced(span, self.stream.axis, self.name, self.plan.dropouts)

    def begin(self) -> None:
        """Forgets the sequence before, of which a rank that computes a stage of the model may not see the next."""
        self.stream.span = None

    def stubbed(self, args: Any, kwargs: Any) -> None:
        """Takes note of the sequence where another stage computes the block."""
        hidden = dict(tensors_by_path([args, kwargs])).get(self.plan.hidden)
        if self.plan.opens and hidden is not None:
            self.stream.open(hidden)

    def argument(self, path: Path, tensor: Tensor, span: Span) -> Tensor:
        """A slice of what is as long as the sequence. Collective in the backward: the axis."""
        dim = self.plan.cuts.get(path)
        if dim is not None and tensor.ndim > dim and tensor.shape[dim] == 1 != span.length:
            dim = None  # the same for all positions
        elif dim is not None and (tensor.ndim <= dim or tensor.shape[dim] != span.length):
            raise refusal(
                self.name,
                f"an argument of shape {list(tensor.shape)} is not as long as the sequence of {span.length}",
                "use context = 1: only attention within one sequence is divided",
            )
        elif dim is None and path not in self.plan.kept and not _is_without_data(tensor):
            raise refusal(
                self.name,
                f"it is given a tensor of shape {list(tensor.shape)} that it was not in the first batch",
                "call it with the same arguments in training and in evaluation",
            )
        axis = self.stream.axis
        return enter(tensor, axis) if dim is None else span.scatter(tensor, dim, axis)


def _is_without_data(tensor: Tensor) -> bool:
    """Whether a model is only being followed: transformers make masks then that they do without for real tensors."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def roles(model: nn.Module) -> dict[str, BlockWrapper]:
    """The divided blocks' by their names."""
    return {name: m.sequence_role for name, m in model.named_modules() if isinstance(m, Surrounded)}
