"""Profile of one pass of a model over a batch: FLOPs, bytes moved and bytes saved, as values without torch.

Every quantity is an `Amount`, linear in the samples of a microbatch, so one profile serves every microbatch size and
every degree of the axes. `shoal.planner.profile` makes it from a model without weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

ALIGNED = 8  # 16-bit elements in 16 bytes, the alignment that tensor cores need for each row of a matrix


class OperationKind(StrEnum):
    """Limit of an operation, which selects the device's performance curve."""

    MATMUL = "matmul"  # (m x k) @ (k x n), `batch` times
    CONVOLUTION = "convolution"  # as an implicit matmul: m = output pixels, n = output channels, k = taps x channels
    ATTENTION = "attention"  # fused: scores never leave the chip
    MEMORY = "memory"  # elementwise, norms, softmax, copies, embeddings, losses: bytes only


class Phase(StrEnum):
    """Phase of the step in which an operation runs."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"  # leads to the gradient of the unit's input
    BACKWARD_WEIGHT = "backward_weight"  # leads only to gradients of weights: a zero-bubble schedule may postpone it


@dataclass(frozen=True, slots=True)
class Amount:
    """Linear amount, `fixed + per_sample * samples`; `samples` may be a fraction if an axis divides a sample."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: float) -> float:
        """Return the amount for a microbatch of `samples` samples."""
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
    SEQUENCE = "sequence"  # between column-row pairs: divided by t only under sequence parallelism


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of the forward or the backward, for a microbatch.

    `m`, `n`, `k`, `batch`: sizes of a matmul, or of a convolution as an implicit matmul (elements; 0 for others).
    `read_bytes`, `written_bytes`: bytes of the operands and of the results.
    `saved_bytes`: bytes that autograd saves for the backward and that no earlier operation of the unit saved.
    `selected_bytes`: the part of `saved_bytes` that selective recomputation also saves (decided as in the engine).
    `launches`: kernels started in eager mode.
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
    dtype: str = "float32"  # dtype of the product's operands, or of the result
    cut: TensorCut = TensorCut.NONE
    # For convolutions: input and output channels, taps per side, width of the forward's output, stride, padding.
    window: tuple[int, ...] = ()
    winograd: bool = False  # 3 x 3 taps at stride 1: float32 kernels need 2.25 times fewer products
    rows: tuple[str, ...] = ()  # for matmuls: the sizes ("m", "n", "k") along which rows of its matrices lie
    reread_bytes: Amount = NOTHING  # for softmaxes: operands that a GPU reads once more, since its blocks keep no row
    of_experts: bool = False  # works on rows of experts, which an expert axis exchanges


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collective on an activation, for tensor parallelism, after `phase` of a unit; `bytes` of the whole tensor."""

    kind: str  # "all_reduce" | "all_gather" | "reduce_scatter"
    phase: Phase
    bytes: Amount

    def kinds(self, sequence: bool) -> tuple[str, ...]:
        """Return the collectives; sequence parallelism splits an all_reduce into a reduce_scatter and an all_gather."""
        parts = sequence and self.kind == "all_reduce" and self.bytes.per_sample
        return ("reduce_scatter", "all_gather") if parts else (self.kind,)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, listed once even if shared: its shape, and the dim that tensor parallelism cuts, if any.

    `of_experts`: the parameter is of experts. `apart`: an expert axis divides it, so `shape` is a rank's part, and only
    the ranks with the same experts sum its gradient.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    trainable: bool = True
    tensor_dim: int | None = None
    of_experts: bool = False
    apart: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    def numel_of(self, tensor: int) -> int:
        """Return the number of elements of the largest of `tensor` parts."""
        if self.tensor_dim is None or tensor == 1:
            return self.numel
        size = self.shape[self.tensor_dim]
        return self.numel // size * -(-size // tensor)

    def shape_of(self, tensor: int) -> tuple[int, ...]:
        """Return the shape of the largest of `tensor` parts."""
        return tuple(-(-size // tensor) if dim == self.tensor_dim else size for dim, size in enumerate(self.shape))


class Dispatch(NamedTuple):
    """Exchange of a mixture of experts: the rows that a rank sends to experts, as often as experts compute a token.

    `num_bytes`: bytes of these rows, one way. `experts`: number of experts. `chosen`: number of experts that compute a
    token. `degree`: ranks that divide the experts.
    """

    num_bytes: Amount
    experts: int
    chosen: int
    degree: int = 1


@dataclass(frozen=True)
class Unit:
    """Region of the model that runs as a whole: one repeated block, or the layers before, between or after blocks.

    Equal blocks share one `body` object, so results can be cached by `id(unit.body)`.
    `name`: a module's qualified name if the unit is one module; a pipeline can cut before such a unit.
    """

    name: str
    body: Body


@dataclass(frozen=True, eq=False)
class Body:
    """Operations and weights of a unit, with the bytes from the previous unit and to the next."""

    operations: tuple[Operation, ...]
    weights: tuple[Weight, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    input_bytes: Amount = NOTHING
    output_bytes: Amount = NOTHING
    repeated: bool = False  # a block: the unit of recomputation and of fully_shard
    dispatches: tuple[Dispatch, ...] = ()  # of the mixtures of experts

    def flops(self, samples: float) -> float:
        """Return the FLOPs of forward and backward (two per multiply-add), without recomputation."""
        return sum(operation.flops.at(samples) for operation in self.operations)


@dataclass(frozen=True)
class Profile:
    """A model's step, unit by unit in the order of the forward.

    `sample_bytes`: bytes that the loader delivers for one sample.
    `state_bytes_per_element`: optimizer state for each trainable element (8 for Adam in float32).
    `optimizer_passes`: reads and writes of an element of parameter, gradient or state in one update.
    `optimizer_products`: matmuls of an update, of which `launches` says how often a step computes each.
    `optimizer_whole`: elements that an update needs in whole parameters.
    `tied`: pairs (weight, another unit that uses it).
    """

    units: tuple[Unit, ...]
    sample_bytes: int = 0
    state_bytes_per_element: float = 8.0
    optimizer_passes: float = 7.0
    optimizer_launches: int = 0
    optimizer_products: tuple[Operation, ...] = ()
    optimizer_whole: int = 0
    tied: tuple[tuple[str, str], ...] = ()
    heads: int | None = None  # the fewest heads of any attention, which tensor and context may divide
    saved_batch: Amount = NOTHING  # bytes of batch and buffers that autograd saves, in addition to all `saved_bytes`
    notes: tuple[str, ...] = ()

    @property
    def has_experts(self) -> bool:
        """True if the model has a mixture of experts, which an expert axis may divide."""
        return any(unit.body.dispatches for unit in self.units)

    @cached_property
    def num_parameters(self) -> int:
        """Number of elements of all weights, each counted once."""
        return sum(w.numel for unit in self.units for w in unit.body.weights)

    def flops(self, samples: float) -> float:
        """Return the FLOPs of forward and backward of one microbatch."""
        return sum(unit.body.flops(samples) for unit in self.units)
