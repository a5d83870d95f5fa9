"""Owners of parameters that an optimizer updates whole, in layouts that cut them: ZeRO-2, ZeRO-3 and the tensor axis.

Muon and other optimizers compute with whole matrices. Each such parameter has an owner among the ranks that share its
parts. In an update the owner receives values and gradients of all parts, steps the whole parameter as one process does,
and returns each part. The optimizer's state of the parameter lies with the owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.checkpoint.whole_optimizer import groups, parts
from shoal.distributed.mesh import new_group, raise_together, together
from shoal.numerics.operators import raw_bytes
from shoal.parallel.model.sharded_model import ShardedModel, local, slices_by_rank
from shoal.parallel.shard.update_division import error_of
from shoal.plans.accounting.collectives import divide, matrix_cost
from shoal.training.update.job_optimizer import Parameters, build_optimizer

# An exchange sends this many bytes of whole parameters at a time, or one larger parameter.
BUCKET_BYTES = 128 << 20

Named = Sequence[tuple[str, nn.Parameter]]


class MatrixOwners:
    """Owners of parameters that an optimizer updates whole, and the exchange of values and gradients with them."""

    def __init__(self, model: ShardedModel, names: Iterable[str], mark: Callable[[str], None]) -> None:
        """Choose the owners, and store them in the model's division.

        The most expensive parameter, by its shape, goes first, to the rank with least. `names`: of the parameters; it
        is the same on every rank and may contain other stages' names.
        Collective: all ranks, new groups.
        """
        self._mesh, self._model, self._mark = model.mesh, model, mark
        every = [list(ranks) for ranks in self._mesh.layout.groups("shard", "tensor")]
        self._group, ranks = new_group(every), next(ranks for ranks in every if self._mesh.rank in ranks)
        wanted, shapes = set(names), model.shapes()
        self._named = [(name, p) for name, p in model.parameters() if name in wanted]
        numbers = divide([matrix_cost(shapes[name]) for name, _ in self._named], len(ranks))
        self._owners = {name: ranks[number] for (name, _), number in zip(self._named, numbers, strict=True)}
        model.division.owners.update(self._owners)
        of_name = {name: slices_by_rank(model, name, shapes[name]) for name, _ in self._named}
        self._slices = {name: {rank: by_rank[rank] for rank in ranks} for name, by_rank in of_name.items()}
        # The first rank with each part.
        self._sources = {
            name: {part: rank for rank, part in reversed(of_rank.items())} for name, of_rank in self._slices.items()
        }
        # The parameters that optimizers step. They have values only on the owner, and only in an update.
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}
        for name, p in self._named:
            whole = self._wholes[p] = nn.Parameter(local(p).new_zeros(()).expand(shapes[name]))
            # Some jobs group by these; a DTensor has others beside them.
            vars(whole).update(vars(p) if type(p) is nn.Parameter else model.division.marks.get(name, {}))

    def build(self, make: Callable[[Any], Any]) -> Any:
        """Return the optimizer that `make` builds from whole parameters; its groups have the model's own ones.

        Collective: the ranks of the shard and tensor axes, an exchange; all ranks, a JSON gather.
        Raises: as `build_optimizer`.
        """
        model, whole = self._model.model, self._wholes
        self._collect(self._named, gradients=False)
        named = [(name, whole.get(p, p)) for name, p in self._model.parameters() if p.requires_grad]
        optimizer = together(self._mesh, lambda: build_optimizer(make, Parameters(model, named)))
        _replace(optimizer, {whole: p for p, whole in whole.items()})
        self._release()
        return optimizer

    def step(self, optimizer: Any, step: Callable[[], None]) -> None:
        """Call the optimizer's `step` with whole parameters on their owners, and give every rank its new parts.

        Collective: the ranks of the shard and tensor axes, two exchanges; all ranks, a JSON gather.
        Raises: on every rank, if `step` raised on any.
        """
        updated = [(name, p) for name, p in self._named if p.grad is not None]
        self._mark("exposed_communication")
        self._collect(updated, gradients=True)
        self._mark("optimizer")
        for _, p in updated:
            p.grad = None
        _replace(optimizer, self._wholes)
        error = error_of(step)
        _replace(optimizer, {whole: p for p, whole in self._wholes.items()})
        self._mark("exposed_communication")
        self._return(updated)
        self._release()
        raise_together(self._mesh, error)
        self._mark("optimizer")

    @torch.no_grad()
    def _collect(self, named: Named, *, gradients: bool) -> None:
        """Put the whole parameters together on their owners."""
        for members in self._buckets(named):
            sent, expected, targets = self._lists(), self._lists(), []
            for name, p in members:
                owner, own = (
                    self._owners[name],
                    [local(p), *([local(p.grad)] if gradients and p.grad is not None else [])],
                )
                if self._mesh.rank == owner:
                    whole = self._wholes[p]
                    wholes = [torch.empty(whole.shape, dtype=t.dtype, device=t.device) for t in own]
                    whole.data, whole.grad = wholes[0], wholes[1] if gradients else None
                for part, source in self._sources[name].items():
                    if self._mesh.rank == source:
                        sent[owner] += own
                    if self._mesh.rank == owner:
                        received = [t.new_empty(part.local_shape) for t in own]
                        expected[source] += received
                        targets += [(part, target, t) for target, t in zip(wholes, received, strict=True)]
            self._exchange(sent, expected)
            for part, target, received_part in targets:
                part.put(target, received_part)

    @torch.no_grad()
    def _return(self, named: Named) -> None:
        """Give every rank its parts of the owners' new values."""
        for members in self._buckets(named):
            sent, expected = self._lists(), self._lists()
            for name, p in members:
                if self._mesh.rank == self._owners[name]:
                    for rank, part in self._slices[name].items():
                        sent[rank].append(part.take(self._wholes[p]))
                expected[self._owners[name]].append(local(p))
            self._exchange(sent, expected)

    def _lists(self) -> dict[int, list[Tensor]]:
        return {rank: [] for rank in dist.get_process_group_ranks(self._group)}

    def _exchange(self, sent: Mapping[int, list[Tensor]], expected: Mapping[int, list[Tensor]]) -> None:
        """Send tensors to each rank, and receive the expected ones. Collective: the group, one all-to-all of bytes."""
        outgoing = [raw_bytes(t) for tensors in sent.values() for t in tensors]
        inputs, outputs = ([sum(t.nbytes for t in tensors) for tensors in of.values()] for of in (sent, expected))
        device = torch.device("cpu") if self._mesh.through_host else next(p for _, p in self._named).device
        received = torch.empty(sum(outputs), dtype=torch.uint8, device=device)
        message = torch.cat(outgoing).to(device) if outgoing else received.new_empty(0)
        dist.all_to_all_single(received, message, outputs, inputs, group=self._group)
        targets = [t for tensors in expected.values() for t in tensors]
        for target, own in zip(targets, received.split([t.nbytes for t in targets]), strict=True):
            target.copy_(own.clone().view(target.dtype).view(target.shape))  # a view of it may not be aligned

    def _buckets(self, named: Named) -> Iterator[Named]:
        members: list[tuple[str, nn.Parameter]] = []
        for name, p in named:
            members.append((name, p))
            if sum(self._wholes[one].nbytes for _, one in members) >= BUCKET_BYTES:
                yield members
                members = []
        if members:
            yield members

    def _release(self) -> None:
        """Free the whole parameters."""
        for whole in self._wholes.values():
            whole.data, whole.grad = whole.new_zeros(()).expand(whole.shape), None


def _replace(optimizer: Any, by_old: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in the groups of an optimizer and its inner optimizers, and the keys of their state."""
    for group in groups(optimizer):
        group["params"] = [by_old.get(p, p) for p in group["params"]]
    for part in parts(optimizer).values():
        for old in [p for p in part.state if p in by_old]:
            part.state[by_old[old]] = {
                k: local(v) if isinstance(v, Tensor) else v for k, v in part.state.pop(old).items()
            }
