"""Profile of one pass of a model over a batch: FLOPs, bytes moved and bytes kept, as values without torch.

Every quantity is an `Amount`, linear in the samples of a microbatch, so that one profile serves every microbatch size
and every degree of the axes. `shoal.planner.profile` makes it from a model without weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

ALIGNED = 8  # elements of 16 bits in 16 bytes, at which tensor cores want each row of a matrix to begin


class OperationKind(StrEnum):
    """Limit of an operation, and so the curve of the device that it follows."""

    MATMUL = "matmul"  # (m x k) @ (k x n), `batch` times
    CONVOLUTION = "convolution"  # as an implicit matmul: m = output pixels, n = output channels, k = taps x channels
    ATTENTION = "attention"  # fused: scores never leave the chip
    MEMORY = "memory"  # elementwise, norms, softmax, copies, embeddings, losses: bytes only


class Phase(StrEnum):
    """Phase of the step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"  # what leads to the gradient of the unit's input
    BACKWARD_WEIGHT = "backward_weight"  # gradients of weights alone: a zero-bubble schedule may put it off


@dataclass(frozen=True, slots=True)
class Amount:
    """`fixed + per_sample * samples` of something; `samples` may be a fraction where an axis divides a sample."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        """The amount for a microbatch of so many samples."""
        return self.fixed + self.per_sample * samples


NOTHING = Amount()


class TensorCut(StrEnum):
    """Effect of tensor parallelism of degree t on an operation."""

    NONE = "none"  # every rank does all of it
    M = "m"  # the named size is divided by t, and with it FLOPs and bytes in proportion
    N = "n"
    K = "k"
    BATCH = "batch"
    ALL = "all"  # elementwise work, or attention over heads: everything is divided by t
    SEQUENCE = "sequence"  # between the pairs: divided by t only under sequence parallelism


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of the forward or the backward, for a microbatch.

    `m`, `n`, `k`, `batch` are the sizes of a matmul or of a convolution as an implicit one (elements; 0 for others).
    `read_bytes` and `written_bytes` are its operands' and its results'. `saved_bytes` is what autograd keeps for the
    backward that nothing before it in the unit kept already; `selected_bytes` the part of that which
    selective recomputation keeps too (decided as the engine does). `launches`: kernels it starts in eager mode.
    """

    name: str  # the operator: "aten.addmm", "attention"
    module: str  # the qualified name of the module that called it
    kind: OperationKind
    phase: Phase
    flops: Amount = NOTHING
    read_bytes: Amount = NOTHING
    written_bytes: Amount = NOTHING
    m: Amount = NOTHING
    n: Amount = NOTHING
    k: Amount = NOTHING
    batch: Amount = Amount(1)
    saved_bytes: Amount = NOTHING
    selected_bytes: Amount = NOTHING
    launches: int = 1
    dtype: str = "float32"  # of the multiplication, or of the result
    cut: TensorCut = TensorCut.NONE
    # Of a convolution: channels in and out, taps a side, width of what the forward gives out, stride, padding.
    window: tuple[int, ...] = ()
    winograd: bool = False  # 3 x 3 taps at stride 1: float32 kernels do with 2.25 times fewer products
    rows: tuple[str, ...] = ()  # of a matmul: which of "m", "n", "k" a row of one of its matrices runs along


@dataclass(frozen=True, slots=True)
class Exchange:
    """An activation that tensor parallelism sums or gathers after `phase` of a unit: the whole tensor's bytes."""

    kind: str  # "all_reduce" | "all_gather" | "reduce_scatter"
    phase: Phase
    bytes: Amount

    def kinds(self, sequence: bool) -> tuple[str, ...]:
        """Collectives of these bytes: by sequence parallelism an all_reduce is a reduce_scatter and an all_gather."""
        parts = sequence and self.kind == "all_reduce" and self.bytes.per_sample
        return ("reduce_scatter", "all_gather") if parts else (self.kind,)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter (each once, however often it is shared): its shape, and which dim tensor parallelism cuts, if any."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    trainable: bool = True
    tensor_dim: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    def numel_of(self, tensor: int) -> int:
        """Elements of the largest of `tensor` parts."""
        if self.tensor_dim is None or tensor == 1:
            return self.numel
        size = self.shape[self.tensor_dim]
        return self.numel // size * -(-size // tensor)

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        """The shape of the largest of `tensor` parts."""
        return tuple(-(-size // tensor) if dim == self.tensor_dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class Unit:
    """Region of the model that runs as a whole: one repeated block, or the layers before, between or after them.

    Equal blocks have equal `body`s: whoever computes with one may keep the answer by `id(unit.body)`.
    `name` is a module's qualified name where the unit is one module: there a pipeline can cut before it.
    """

    name: str
    body: Body


@dataclass(frozen=True, eq=False)
class Body:
    """Operations and weights of a unit; `output_bytes` go to the next unit, `input_bytes` come from the one before."""

    operations: tuple[Operation, ...]
    weights: tuple[Weight, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    input_bytes: Amount = NOTHING
    output_bytes: Amount = NOTHING
    repeated: bool = False  # a block, which recomputation repeats and fully_shard makes a unit of

    def flops(self, samples: float) -> float:
        """FLOPs of forward and backward (a multiply-add counts two), without recomputation."""
        return sum(operation.flops.at(samples) for operation in self.operations)


@dataclass(frozen=True)
class Profile:
    """A model's step, unit by unit in the order of the forward.

    `sample_bytes`: what the loader hands over for one sample. `state_bytes_per_element`: what the optimizer keeps for
    each trainable element (8 for Adam in float32); `optimizer_passes`: how often its update reads or writes an
    element of parameter, gradient or state. `tied`: pairs of names (weight, the unit that uses it too).
    """

    units: tuple[Unit, ...]
    sample_bytes: int = 0
    state_bytes_per_element: float = 8.0
    optimizer_passes: float = 7.0
    optimizer_launches: int = 0
    tied: tuple[tuple[str, str], ...] = ()
    heads: int | None = None  # the fewest heads of any attention: what tensor and context may divide
    saved_batch: Amount = NOTHING  # bytes of batch and buffers that autograd keeps, beside all `saved_bytes`
    notes: tuple[str, ...] = ()

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all weights, each once."""
        return sum(w.numel for unit in self.units for w in unit.body.weights)

    def flops(self, samples: float) -> float:
        """FLOPs of forward and backward of one microbatch."""
        return sum(unit.body.flops(samples) for unit in self.units)
