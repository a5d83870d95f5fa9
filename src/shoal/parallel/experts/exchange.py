"""Experts divided over ranks: the forward of a block sends each row to the rank that has the row's expert.

The number of rows for each expert travels first, then the rows, and their results travel back. All ranks of the axis
take part in each of the three all-to-alls and in those of the backward, also with no rows. The module's own forward
computes a rank's experts, so a user's module keeps its activation, its biases and its layout of weights.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.generators import torch_generator
from shoal.numerics.operators import tensors_in
from shoal.parallel.axis_collectives import TensorAxis, gather, is_without_data, slice_of, through
from shoal.parallel.experts.blocks import ExpertBlock, ExpertLoads, expert_counts, refuse_dependent
from shoal.parallel.tensor.layers import with_base


def divide_block(
    model: nn.Module,
    block: ExpertBlock,
    axis: TensorAxis,
    tensor: TensorAxis | None = None,
    loads: ExpertLoads | None = None,
) -> None:
    """Make a block compute as the rank at `axis.place`, which has `count / degree` consecutive experts. Mutates it.

    Afterwards stacked parameters must have the rank's experts alone; of a ModuleList the other experts are not called.
    The forwards and backwards communicate over the axis, and over `tensor`.

    Args:
        model: the model, on any device.
        block: one of the model's `expert_blocks`.
        axis: the ranks that together have all experts of the block.
        tensor: ranks with equal tokens, each of which sends a part of them. None: tokens of ranks differ.
        loads: counts the rows that training forwards send.

    Raises:
        JobError: If a row's result in an expert depends on other rows or on random numbers.
    """
    module = model.get_submodule(block.name)
    refuse_dependent(model, block)
    exchange = _Exchange(block, axis, tensor if tensor is not None and tensor.degree > 1 else None, loads)
    if block.form == "listed":
        parent = model.get_submodule(block.name.rpartition(".")[0])
        parent.listed_experts = _ListedExperts(exchange, module)  # type: ignore[assignment, arg-type]
        with_base(parent, _DividedParent)
        for place, expert in enumerate(module.children()):
            expert.listed_place = parent, place  # type: ignore[assignment]
            with_base(expert, _ListedExpert)
        return
    for key in expert_counts(module, block.count):
        setattr(module, key, block.count // axis.degree)
    module.expert_exchange = exchange  # type: ignore[assignment]
    with_base(module, _RoutedExperts if block.form == "routed" else _SortedExperts)


@dataclass(eq=False)
class _Exchange:
    """Exchange of one block's rows over the axis."""

    block: ExpertBlock
    axis: TensorAxis
    tensor: TensorAxis | None
    loads: ExpertLoads | None = None

    def computed(self, compute: Callable[..., Tensor], counts: Tensor, *tensors: Tensor) -> Tensor:
        """Return the experts' results of rows that are sorted by expert.

        Args:
            compute: (counts by rank and expert, the same as int64 [ranks, experts], rows of each tensor) -> results of
                the rows, which are sorted by rank and then by expert.
            counts: int64 [experts of the block], rows of each expert; rows after these have no expert.
            tensors: tensors of [rows, ...].

        Returns:
            A tensor of [rows with an expert, ...].

        Collective: the axis, an all-to-all of the counts, of each tensor, and of the result.
        """
        axis, table = self.axis, counts.view(self.axis.degree, -1)
        once = (1,) * axis.degree
        received = axis.all_to_all(table, once, once)
        sent, arriving = torch.stack([table, received]).tolist()  # the only wait for the device
        there, here = [sum(row) for row in sent], [sum(row) for row in arriving]
        if self.loads is not None and torch.is_grad_enabled():
            self.loads.add(there)
        arrived = [self._travelled(tensor[: sum(there)], there, here) for tensor in tensors]
        return self._travelled(compute(arriving, received, *arrived), here, there)

    def _travelled(self, tensor: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        there = partial(self.axis.all_to_all, num_sent=num_sent, num_received=num_received)
        return through(tensor, there, partial(self.axis.all_to_all, num_sent=num_received, num_received=num_sent))


class _Idle(torch.autograd.Function):
    """Autograd function of experts without rows: the empty results, and gradients of zero for all parameters."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, *inputs: Tensor) -> Tensor:
        ctx.inputs = inputs
        return results.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.zeros_like(one) if is_needed else None for one, is_needed in needed)


class _RoutedExperts(nn.Module):
    """First base of the class of divided experts that are called with hidden states, indices and weights."""

    expert_exchange: _Exchange

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum over each token's experts. Collective: the axis, and the tensor axis."""
        own: Any = super().forward
        hidden, index, weights = inspect.signature(own).bind(*args, **kwargs).args if kwargs else args
        if hidden.is_meta or is_without_data(hidden):
            shape: Tensor = hidden + weights.sum(-1).view(*hidden.shape[:-1], 1).to(hidden.dtype)
            return shape
        exchange, degree = self.expert_exchange, index.shape[-1]
        if index.is_floating_point() or weights.shape != index.shape:
            raise JobError(
                given=f"the experts {exchange.block.name}, not called with (tokens, index, weights)",
                conflict="with layout.expert > 1 tokens go by whole numbers [tokens, k], with a weight for each",
                remedy="take the arguments in this order, or use layout.expert = 1",
            )
        index = index.masked_fill(index < 0, exchange.block.count)  # slots without an expert come last
        tokens, index, weights = hidden.flatten(0, -2), index.view(-1, degree), weights.view(-1, degree)
        tensor, sizes = exchange.tensor, _even(len(tokens), 1)
        if tensor is not None:
            sizes = _even(len(tokens), tensor.degree)
            tokens, weights = (slice_of(whole, tensor, 0, sizes) for whole in (tokens, weights))
            index = tensor.own(index, 0, sizes)
        experts, order = index.flatten().sort(stable=True)  # by expert, then token, then slot
        edges = torch.searchsorted(experts, torch.arange(exchange.block.count + 1, device=experts.device))
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

        def to_tokens(gradient: Tensor) -> Tensor:
            return gradient[places].view(-1, degree, gradient.shape[-1]).sum(1)

        rows = through(tokens, lambda tokens: tokens[order // degree], to_tokens)
        # In Transformers weights multiply an expert's result, which therefore needs no weights and arrives unrounded.
        multiplies_result = hasattr(self, "is_concatenated")
        kind = rows.device.type
        if multiplies_result and rows.dtype == torch.float32 and torch.is_autocast_enabled(kind):
            rows = rows.to(torch.get_autocast_dtype(kind))  # as the first product would do
        implementation = getattr(getattr(self, "config", None), "_experts_implementation", None)
        if (kind, rows.dtype, implementation) == ("cpu", torch.float32, "grouped_mm"):
            # There it takes 7 times as long as a loop over the experts (torch 2.13).
            own = partial(own.__wrapped__, self)

        def compute(arriving: Any, received: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
            if not len(rows):
                with torch.no_grad():  # results have the width and dtype of those on other ranks
                    first = index.new_zeros(1, 1)
                    one: Tensor = own(rows.new_zeros(1, rows.shape[1]), first, rows.new_ones(1, 1))
                inputs = (p for p in (rows, *self._parameters.values(), weights) if p is not None)
                idle: Tensor = _Idle.apply(one[:0], *inputs)  # type: ignore[no-untyped-call]
                return idle
            experts = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
            experts = experts.repeat_interleave(received.flatten(), output_size=len(rows))
            weights = rows.new_ones(len(rows), 1) if weights is None else weights
            result: Tensor = own(rows, experts[:, None], weights)
            return result

        if multiplies_result:
            results = exchange.computed(compute, edges.diff(), rows)
        else:
            sorted_weights = through(weights.flatten(), lambda w: w[order], lambda gradient: gradient[places])
            results = exchange.computed(compute, edges.diff(), rows, sorted_weights[:, None])
        if len(results) < len(order):  # slots without an expert
            results = torch.cat([results, results.new_zeros(len(order) - len(results), results.shape[-1])])
        results = through(results, lambda results: results[places], lambda gradient: gradient[order])
        results = results.view(-1, degree, results.shape[-1])
        whole = (results * weights[..., None] if multiplies_result else results).sum(1).to(hidden.dtype)
        if tensor is not None:
            whole = gather(whole, tensor, 0, sizes)
        return whole.view(*hidden.shape[:-1], whole.shape[-1])


def _even(length: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of consecutive parts that differ by at most one."""
    return tuple(length * (part + 1) // parts - length * part // parts for part in range(parts))


class _SortedExperts(nn.Module):
    """First base of the class of divided experts that are called with all tokens for each expert, in this order.

    In Llama 4 a token that an expert is not chosen for is zero there, and so are its result and its gradient. Only
    other rows travel. The rank multiplies its experts' rows together, with zeros after the rows of each expert.
    """

    expert_exchange: _Exchange

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the experts' results, [experts * tokens, width]. Collective: the axis, and the tensor axis."""
        own: Any = super().forward
        if hidden.is_meta or is_without_data(hidden):
            return hidden * 1
        exchange = self.expert_exchange
        count, tensor = exchange.block.count, exchange.tensor
        tokens = hidden.view(count, -1, hidden.shape[-1])
        sizes = _even(tokens.shape[1], 1)
        if tensor is not None:
            sizes = _even(tokens.shape[1], tensor.degree)
            tokens = slice_of(tokens, tensor, 1, sizes)
        rows = tokens.flatten(0, 1)
        are_zeros_skipped = set(self._parameters) == {"gate_up_proj", "down_proj"}
        is_chosen = (rows.detach() != 0).any(-1) if are_zeros_skipped else torch.ones(len(rows), dtype=torch.bool)
        counts = is_chosen.view(count, -1).sum(1).to(hidden.device)
        (chosen,) = is_chosen.to(hidden.device).nonzero(as_tuple=True)

        def compute(arriving: list[list[int]], received: Tensor, rows: Tensor) -> Tensor:
            longest = max(1, *(sum(of) for of in zip(*arriving, strict=True)))
            before = received.cumsum(0) - received + longest * torch.arange(received.shape[1], device=rows.device)
            first = received.flatten().cumsum(0).view_as(received) - received
            places = (before - first).flatten().repeat_interleave(received.flatten(), output_size=len(rows))
            places = places + torch.arange(len(rows), device=rows.device)
            padded = rows.new_zeros(longest * received.shape[1], rows.shape[1]).index_copy(0, places, rows)
            result: Tensor = own(padded)[places]
            return result

        results = exchange.computed(compute, counts, rows[chosen])
        whole = results.new_zeros(len(rows), results.shape[-1]).index_copy(0, chosen, results)
        if tensor is not None:
            whole = gather(whole.view(count, -1, whole.shape[-1]), tensor, 1, sizes).flatten(0, 1)
        return whole


@dataclass(eq=False)
class _ListedExperts:
    """Experts of a ModuleList. Their parent's forward runs twice: to learn each expert's rows, and with the results.

    So any code may choose and combine experts, if no expert's input depends on the result of another one.
    `calls`: during a forward, the inputs of each expert, and then their results, beside `inputs`.
    `mode`: "own", "learn" or "use".
    """

    exchange: _Exchange
    modules: nn.ModuleList
    mode: str = "own"
    calls: list[list[Tensor]] = field(default_factory=list)
    inputs: list[list[Tensor]] = field(default_factory=list)
    shapes: dict[Any, tuple[int, torch.dtype]] = field(default_factory=dict)  # of results, by inputs

    def learn(self, parent: nn.Module, forward: Callable[[], Any]) -> None:
        """Store the experts' inputs in `calls`. Raises: JobError if the forward draws random numbers."""
        homes = [(part._buffers, key, value) for part in parent.modules() for key, value in part._buffers.items()]
        copies = [(home, key, value, value.clone()) for home, key, value in homes if value is not None]
        before = torch_generator()
        self.mode, self.calls = "learn", [[] for _ in self.modules]
        try:
            forward()
        finally:
            self.mode = "own"
        for home, key, value, copied in copies:
            home[key] = value
            if not torch.equal(value, copied):
                value.copy_(copied)
        if torch_generator() != before:
            raise JobError(
                given=f"{type(parent).__name__}, which draws random numbers and calls the experts {self.name}",
                conflict="with layout.expert > 1 its forward runs twice, to learn which tokens an expert gets",
                remedy="draw the random numbers outside of this module, or use layout.expert = 1",
            )

    @property
    def name(self) -> str:
        return self.exchange.block.name

    def results(self) -> None:
        """Replace the inputs in `calls` by the experts' results. Collective: the axis, and the tensor axis."""
        exchange, inputs = self.exchange, self.calls
        lengths = [[call.shape[:-1].numel() for call in of] for of in inputs]
        flat = [call.flatten(0, -2) for of in inputs for call in of]
        if not flat or len({(rows.shape[-1], rows.dtype) for rows in flat}) > 1:
            raise JobError(
                given=f"the experts {self.name}, called with inputs of several widths or dtypes, or not called at all",
                conflict="with layout.expert > 1 all their rows travel in one message, which each rank takes part in",
                remedy="call experts in each forward, with rows [..., width] of one dtype; or use layout.expert = 1",
            )
        rows = torch.cat(flat)
        per_expert = [sum(of) for of in lengths]
        tensor, sizes = exchange.tensor, _even(len(rows), 1)
        if tensor is not None:
            sizes = _even(len(rows), tensor.degree)
            rows = slice_of(rows, tensor, 0, sizes)
            ends = list(itertools.accumulate(per_expert))
            low = sum(sizes[: tensor.place])
            high = low + sizes[tensor.place]
            per_expert = [max(0, min(end, high) - max(end - n, low)) for end, n in zip(ends, per_expert, strict=True)]
        experts = self.modules[self.first : self.first + len(self.modules) // exchange.axis.degree]

        def compute(arriving: list[list[int]], received: Tensor, rows: Tensor) -> Tensor:
            parts = rows.split([number for of in arriving for number in of])
            of_expert = [parts[place :: len(experts)] for place in range(len(experts))]
            self.mode = "own"
            split: dict[int, Sequence[Tensor]] = {}
            for place, (expert, of) in enumerate(zip(experts, of_expert, strict=True)):
                # An expert that its parent does not call gets no gradient, which is not the same as zeros.
                if any(map(len, of)) or inputs[self.first + place]:
                    split[place] = expert(torch.cat(of)).split([len(part) for part in of])
            if not split:
                width, dtype = self.shapes[rows.shape[-1], rows.dtype, torch.is_autocast_enabled(rows.device.type)]
                idle: Tensor = _Idle.apply(rows.new_zeros(0, width, dtype=dtype), rows)  # type: ignore[no-untyped-call]
                return idle
            return torch.cat([split[place][rank] for rank in range(len(arriving)) for place in split])

        counts = torch.tensor(per_expert, device=rows.device)
        whole = exchange.computed(compute, counts, rows)
        if tensor is not None:
            whole = gather(whole, tensor, 0, sizes)
        parts = iter(whole.split([number for of in lengths for number in of]))
        self.calls = [[next(parts).view(*call.shape[:-1], whole.shape[-1]) for call in of] for of in inputs]
        self.inputs = [[call.detach() for call in of] for of in inputs]

    @property
    def first(self) -> int:
        """The number of this rank's first expert."""
        return len(self.modules) // self.exchange.axis.degree * self.exchange.axis.place


class _DividedParent(nn.Module):
    """First base of the class of a module that calls the experts of a divided ModuleList."""

    listed_experts: _ListedExperts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's own forward with the experts' results. Collective: the axis, and the tensor axis."""
        own, listed = super().forward, self.listed_experts
        if any(tensor.is_meta or is_without_data(tensor) for tensor in tensors_in((args, kwargs))):
            return own(*args, **kwargs)
        try:
            given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
            listed.learn(self, lambda: own(*args, **kwargs))
            if any(tensor._version != version for tensor, version in given):
                raise _unequal(listed.name)
            listed.results()
            listed.mode = "use"
            result = own(*args, **kwargs)
        finally:
            listed.mode, left, listed.calls, listed.inputs = "own", listed.calls, [], []
        if any(left):
            raise _unequal(listed.name)
        return result


class _ListedExpert(nn.Module):
    """First base of the class of an expert in a divided ModuleList."""

    listed_place: tuple[Any, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Store the input or return the result that its rank has computed, as the mode of the list says."""
        parent, place = self.listed_place
        listed: _ListedExperts = parent.listed_experts
        if listed.mode == "own":
            return super().forward(*args, **kwargs)
        calls = listed.calls[place]
        if listed.mode == "use":
            learned = listed.inputs[place].pop(0) if calls else None
            if learned is None or not torch.equal(learned.nan_to_num(), args[0].detach().nan_to_num()):
                raise _unequal(listed.name)
            return calls.pop(0)
        rows = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(rows, Tensor) or rows.ndim < 2:
            raise JobError(
                given=f"an expert of {listed.name} that is not called with one tensor of rows [..., width]",
                conflict="with layout.expert > 1 the rows travel to the rank of their expert, and nothing else does",
                remedy="call the expert with one tensor, or use layout.expert = 1",
            )
        calls.append(rows)
        key = rows.shape[-1], rows.dtype, torch.is_autocast_enabled(rows.device.type)
        if key not in listed.shapes:
            expert = listed.modules[listed.first]
            listed.mode = "own"
            with torch.no_grad():
                result = expert(rows.new_zeros(1, rows.shape[-1]))
            listed.mode = "learn"
            listed.shapes[key] = result.shape[-1], result.dtype
        width, dtype = listed.shapes[key]
        return rows.new_zeros(*rows.shape[:-1], width, dtype=dtype)


def _unequal(name: str) -> JobError:
    return JobError(
        given=f"the experts {name}, whose parent calls them with other rows the second time",
        conflict="with layout.expert > 1 the parent's forward runs twice, and no expert's input may depend on the "
        "result of another one or on state that the forward changes",
        remedy="keep that state outside of this module, or use layout.expert = 1",
    )
