"""Sparse gradients of embeddings: the rows that a step touches, added over grains and ranks in one order.

A rank sends the touched rows with their numbers, and every rank adds all rows in a fixed tree over grains (exact mode)
or ranks. So traffic and memory of a gradient depend on the touched rows and not on the table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.collectives.fixed_tree import evaluate
from shoal.distributed.mesh import Mesh
from shoal.plans.plan import Plan


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained weights by name that embeddings with `sparse=True` have, and no other modules."""
    homes: dict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                homes[parameter].append(module)
    embeddings = nn.Embedding, nn.EmbeddingBag
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and homes[parameter]
        and all(isinstance(module, embeddings) and module.sparse for module in homes[parameter])
    }


def shared_tables(model: nn.Module, sparse: Mapping[str, Tensor]) -> list[str]:
    """Return a note on each embedding with `sparse=True` whose weight another module has, too."""
    known = set(map(id, sparse.values()))
    return [
        f"{name}.weight: its gradient is dense in spite of sparse=True, since another module has the same weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if module.weight.requires_grad and id(module.weight) not in known
    ]


def why_dense(plan: Plan) -> str | None:
    """Return the setting of a plan under which the gradients of all embeddings are dense, or None."""
    axes = [axis for axis in ("shard", "tensor", "pipeline", "context", "expert") if getattr(plan.layout, axis) > 1]
    if axes:
        return f"layout.{axes[0]} > 1"
    if plan.serves:
        return f'server.mode = "{plan.server.mode}"'
    if plan.collectives.compression != "none":
        return f'collectives.compression = "{plan.collectives.compression}"'
    if plan.execution.cuda_graph:
        return "execution.cuda_graph = true"
    return "memory.shared = true" if plan.shares_memory else None


class SparseRows:
    """Sums of sparse gradients over the leaves of a tree: the grains of a step, or its ranks."""

    def __init__(self, parameters: Sequence[Tensor], mesh: Mesh, dtype: torch.dtype) -> None:
        """Set the parameters with sparse gradients. `dtype`: that of the sums."""
        self.parameters, self._mesh, self._dtype = list(parameters), mesh, dtype
        self._own: list[dict[int, Tensor]] = [{} for _ in self.parameters]  # by leaf, coalesced

    def begin(self) -> None:
        """Clear the gradients and start a step."""
        for parameter, own in zip(self.parameters, self._own, strict=True):
            parameter.grad = None
            own.clear()

    def take(self, leaf: int) -> None:
        """Take the parameters' gradients as those of a leaf of this rank."""
        for parameter, own in zip(self.parameters, self._own, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # a function of torch may use the weight, too, which gives a dense gradient
                gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
                own[leaf] = _rows(gradient.indices()[0], gradient.values().to(self._dtype), parameter)

    def give(self, num_leaves: int) -> None:
        """Give each parameter the sum of all leaves, a coalesced sparse tensor, or None if no leaf has a gradient.

        Collective: all ranks, an all-gather of two numbers for each parameter, and of the rows of each used parameter.
        """
        if not self.parameters:
            return
        sizes = [[float(len(own)), float(sum(rows._nnz() for rows in own.values()))] for own in self._own]
        table = self._mesh.all_gather([number for pair in sizes for number in pair])
        for place, (parameter, own) in enumerate(zip(self.parameters, self._own, strict=True)):
            counts = [int(count) for count in table[:, 2 * place + 1]]
            parameter.grad = None
            if not table[:, 2 * place].any():
                continue
            leaves = own if self._mesh.world_size == 1 else self._gathered(parameter, own, counts)
            total = evaluate(
                {(leaf, leaf + 1): rows for leaf, rows in leaves.items()}, num_leaves, lambda a, b: (a + b).coalesce()
            )
            if total is None:  # no leaf has touched a row
                total = _rows(torch.empty(0, dtype=torch.int64, device=parameter.device), parameter[:0], parameter)
            parameter.grad = _rows(total.indices()[0], total.values().to(parameter.dtype), parameter)
            own.clear()

    def _gathered(self, parameter: Tensor, own: dict[int, Tensor], counts: list[int]) -> dict[int, Tensor]:
        """Return the rows of all ranks by leaf. `counts`: the number of rows of each rank. Collective: all ranks."""
        numbers = torch.zeros(max(counts), 2, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(max(counts), *parameter.shape[1:], dtype=self._dtype, device=parameter.device)
        start = 0
        for leaf, rows in own.items():
            stop = start + rows._nnz()
            numbers[start:stop, 0], numbers[start:stop, 1] = leaf, rows.indices()[0]
            values[start:stop] = rows.values()
            start = stop
        all_numbers = [torch.empty_like(numbers) for _ in counts]
        all_values = [torch.empty_like(values) for _ in counts]
        dist.all_gather(all_numbers, numbers)
        dist.all_gather(all_values, values)
        leaves = {}
        for there, theirs, count in zip(all_numbers, all_values, counts, strict=True):
            for leaf in there[:count, 0].unique().tolist():
                chosen = there[:count, 0] == leaf
                leaves[leaf] = _rows(there[:count][chosen, 1], theirs[:count][chosen], parameter)
        return leaves

    def memory(self) -> list[Tensor]:
        """Return the rows that this rank has, and those of the gradients."""
        given = [p.grad for p in self.parameters if p.grad is not None and p.grad.is_sparse]
        return [rows._values() for rows in (*given, *(rows for own in self._own for rows in own.values()))]


def _rows(numbers: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Return a sparse tensor of the shape of `like`. `numbers`: of its rows, ascending, each once."""
    return torch.sparse_coo_tensor(numbers[None], values, like.shape, is_coalesced=True, check_invariants=False)
