"""Buffers that the forward changes (batch statistics, counters): one update per step, the same on any layout.

Every microbatch starts from the step's buffers. A buffer's rule combines the values that the microbatches leave into
the new value. For BatchNorm's running statistics, which are linear in the batch's, that is the mean over grains.

All contributions of microbatches are added up in one vector. The terms of a mean are values times samples. Increments
of integers are digits: sums of digits are exact in float32 too. For a rule that takes the value of one
microbatch (`last`, `same`, `min`, `max`) a rank has a slot of 16-bit words, to which other ranks add zeros. After each
microbatch the rank adds the change of its slot, so the sum is its newest value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.buffer_names import balance_rate
from shoal.numerics.buffer_rules import TAKEN, declared_rules, defined_rules
from shoal.numerics.expert_balance import COUNTS, balanced_routers, count_choices, move_biases
from shoal.numerics.operators import views_of
from shoal.numerics.precision import numbers
from shoal.numerics.python_state import same_bits

_RUNNING, _WEIGHTS = ("running_mean", "running_var"), ("weight", "bias")
# Arguments of torch's function, in order.
BATCH_NORM = ("input", *_RUNNING, *_WEIGHTS, "training", "momentum", "eps")


def normalised_by_grain(parts: Sequence[Tensor], given: Mapping[str, Any]) -> Tensor:
    """Apply batch normalisation to each grain's rows separately; `given` are the arguments of torch's function.

    Running statistics become the mean of the statistics that the grains produce, weighted by rows.
    """
    running = {name: given[name] for name in _RUNNING if given.get(name) is not None}
    if len(parts) == 1:
        # torch counts no version of this write. Autograd keeps aliases, so that later writes are no error of its.
        whole = F.batch_norm(**{**given, **{name: value.data for name, value in running.items()}})
        torch.autograd.graph.increment_version(running.values())
        return whole
    own = {name: value.expand(len(parts), *value.shape).clone() for name, value in running.items()}
    input, grains = given["input"], len(parts)
    if _is_launch_bound(input, parts):  # one call, which treats each grain's channels as separate channels
        rows, channels, *rest = parts[0].shape
        beside = input.view(grains, rows, channels, *rest).transpose(0, 1).reshape(rows, grains * channels, *rest)
        flat = {name: values.view(-1) for name, values in own.items()}
        flat |= {name: given[name].expand(grains, -1).reshape(-1) for name in _WEIGHTS if given.get(name) is not None}
        normal = F.batch_norm(**{**given, "input": beside, **flat})
        whole = normal.view(rows, grains, channels, *rest).transpose(0, 1).reshape(input.shape)
    else:
        outputs = [
            F.batch_norm(**{**given, "input": part, **{name: values[place] for name, values in own.items()}})
            for place, part in enumerate(parts)
        ]
        whole = torch.cat(outputs)
    for name, values in own.items():  # the backward reads the values, so nothing writes them
        if len(set(map(len, parts))) == 1:
            torch.mean(values, 0, out=running[name])
        else:
            shares = torch._foreach_mul(values.unbind(), [len(part) / len(input) for part in parts])
            running[name].copy_(torch.stack(shares).sum(0))
    return whole


def normalised_alone(given: Mapping[str, Any]) -> Tensor:
    """Apply batch normalisation with the running statistics, so that no sample sees another; then update these.

    A look at a few samples computes so what training normalises over the global batch.
    """
    input, running = given["input"], [given.get(name) for name in _RUNNING]
    with torch.no_grad():
        variance, mean = torch.var_mean(input, [dim for dim in range(input.ndim) if dim != 1], correction=0)
    before = [torch.zeros_like(mean), torch.ones_like(mean)]
    before = [fill if own is None else own.clone() for own, fill in zip(running, before, strict=True)]
    normal = F.batch_norm(**{**given, **dict(zip(_RUNNING, before, strict=True)), "training": False})
    for own, value in zip(running, (mean, variance), strict=True):
        if own is not None:
            own.lerp_(value.to(own.dtype), given.get("momentum", 0.1))
    return normal


def _is_launch_bound(input: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return True if one call for all grains is faster than one per grain, because a launch outlasts its kernel.

    Channels-last inputs return False: one call would convert them to another format and back.
    """
    return input.is_cuda and input.is_contiguous() and len(set(map(len, parts))) == 1


def normalised_at_once(sizes: Sequence[int], given: Mapping[str, Any]) -> Tensor:
    """Apply batch normalisation as `normalised_by_grain` does, in operations that torch.compile fuses.

    `sizes`: rows of each grain. Equal grains in sequence share their operations.
    """
    if len(sizes) == 1:
        return F.batch_norm(**given)
    input, runs = given["input"], [(size, len(list(run))) for size, run in groupby(sizes)]
    weight, bias = (None if given.get(name) is None else given[name].view(1, 1, -1, 1) for name in _WEIGHTS)
    outputs, statistics = [], []
    # A split, even into one part, keeps Inductor from fusing what is before it.
    parts = [input] if len(runs) == 1 else input.split([size * grains for size, grains in runs])
    for (size, grains), part in zip(runs, parts, strict=True):
        x = part.reshape(grains, size, input.shape[1], -1)
        x = x.float() if x.itemsize < torch.float32.itemsize else x
        variance, mean = torch.var_mean(x, (1, 3), correction=0, keepdim=True)
        x = (x - mean) * torch.rsqrt(variance + given.get("eps", 1e-5))
        x = x if weight is None else x * weight
        x = x if bias is None else x + bias
        outputs.append(x.to(input.dtype).view(part.shape))
        share, unbiased = size * grains / len(input), 1.0 / (1.0 - 1.0 / (size * x.shape[3]))
        statistics.append([mean.detach().mean((0, 1, 3)) * share, variance.detach().mean((0, 1, 3)) * share * unbiased])
    with torch.no_grad():
        for name, values in zip(_RUNNING, zip(*statistics, strict=True), strict=True):
            if given.get(name) is not None:
                given[name].lerp_(functools.reduce(torch.add, values), given.get("momentum", 0.1))
    return outputs[0] if len(runs) == 1 else torch.cat(outputs)


# Base of the digits of integers. The highest digit is not limited: see parallel.data.replicated.to_limbs.
_BASE, _NUM_DIGITS = 4096, 4


@dataclass(frozen=True, eq=False)
class _Block:
    """Buffers of one rule and dtype, consecutive in the vector.

    `is_whole`: True if the values are integers. `lengths`: elements of each buffer. `index`: int64, for each element
    the buffer's place among `names`. `size`: number of values in the vector.
    """

    rule: str
    dtype: torch.dtype
    is_whole: bool
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    slots: int
    index: Tensor
    size: int


class ModelBuffers:
    """Buffers of a model, found in the dicts of its modules each time, since a forward may replace a tensor."""

    def __init__(self, model: nn.Module) -> None:
        # Walking the modules each time is slow.
        self.homes: dict[str, tuple[dict[str, Any], str]] = {}
        # Parameters without gradient, such as a teacher that the forward averages.
        self.frozen: dict[str, tuple[dict[str, Any], str]] = {}
        for prefix, module in model.named_modules():
            for key, value in module._buffers.items():
                if value is not None:
                    self.homes[f"{prefix}.{key}" if prefix else key] = module._buffers, key
            for key, value in module._parameters.items():
                if value is not None and not value.requires_grad:
                    self.frozen[f"{prefix}.{key}" if prefix else key] = module._parameters, key
        # A stage of a pipeline may have no parameter.
        devices = (p.device for p in (*model.parameters(), *model.buffers()) if not p.is_meta)
        self.device = next(devices, torch.device("cpu"))

    def now(self, name: str) -> Tensor:
        """Return a buffer's current tensor."""
        home, key = self.homes[name]
        value: Tensor | None = home[key]
        assert value is not None, f"buffer {name} was removed"
        return value

    def version(self, name: str) -> tuple[int, int]:
        """Return a value that differs once a buffer was written or replaced."""
        value = self.now(name)
        return id(value), value._version

    def values(self) -> dict[str, Tensor]:
        """Return copies of all buffers on this rank by name."""
        tensors = {name: self.now(name).detach() for name in self.homes}
        return {name: value.clone() for name, value in tensors.items() if not value.is_meta}

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set buffers to a result of `values()`. Raises: JobError if a forward has changed a buffer's shape."""
        for name, value in values.items():
            if self.now(name).shape != value.shape:
                raise _reshaped(name, self.now(name).shape, value.shape)
        _copy([(self.now(name), value) for name, value in values.items()])


class StepBuffers:
    """Changing buffers of a model. Ranks agree on `names` and rules, so that their vectors match."""

    def __init__(
        self,
        model: nn.Module,
        counts: Callable[[str], bool] = lambda name: True,
        *,
        declared: Mapping[str, str] | None = None,
        slots: int = 1,
        slot: int = 0,
        last_grain: Callable[[int], int] | None = None,
    ) -> None:
        """Collect the model's buffers. Raises: JobError if a declared pattern matches no buffer.

        `counts`: returns True if the sum over ranks includes this rank's value of a name. Of equal values it includes
        one. `declared`: a job's rules by patterns of names. `slots`: number of ranks with different grains. `slot`:
        this rank's number among them. `last_grain`: returns a step's last grain, if that is known before the step is
        read.
        """
        count_choices(model, declared or {})
        self.model = now = ModelBuffers(model)
        homes = now.homes
        self.names: tuple[str, ...] = ()
        self.num_values = 0  # number of values that a microbatch contributes
        rules = declared_rules(declared or {}, homes)
        # A forward leaves a balanced bias as it is; its router counts.
        self.declared = {name: "same" if balance_rate(rule) else rule for name, rule in rules.items()}
        self.routers = list(balanced_routers(model))
        self.declared |= {name: "sum" for name in homes if self.routers and name.rpartition(".")[2] == COUNTS}
        # The rules of buffers that torch defines or the job declares.
        self.settled = {name: rule for name, rule in defined_rules(model).items() if name in homes} | self.declared
        self.slot = slot
        self._counts, self._slots, self._last_grain = counts, slots, last_grain
        self._blocks: list[_Block] = []
        # Keys and values in this rank's slot, for each block with values of one microbatch.
        self._in_slot: dict[_Block, tuple[list[int], Tensor]] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self.saved: dict[str, Tensor] = {}  # values at the beginning of the step; none after its end
        # Versions and values of buffers that are not known to change, in case a forward changes them after all.
        self._still: dict[str, tuple[tuple[int, int], Tensor]] = {}
        self._shapes = {name: now.now(name).shape for name in homes}  # the same on all ranks
        self._kinds = {name: now.now(name).dtype for name in homes}
        self.is_empty = not homes  # the model has none
        self.nothing = torch.zeros(0, dtype=torch.float64, device=now.device)  # the contribution without buffers

    def watch(self, names: Iterable[str] | None = None, rules: Mapping[str, str] | None = None) -> None:
        """Set the names of the buffers that change (None: all buffers), and the rules that were inferred for them."""
        homes, frozen = self.model.homes, self.model.frozen
        for name in frozen.keys() & set(names or ()) - homes.keys():
            homes[name] = frozen[name]
            self._shapes[name], self._kinds[name] = self.model.now(name).shape, self.model.now(name).dtype
        self.is_empty = not homes
        self.names = tuple(sorted(homes if names is None else names))
        groups: dict[tuple[str, torch.dtype], list[str]] = {}
        for name in self.names:
            rule = self.settled.get(name) or (rules or {}).get(name, "mean")
            groups.setdefault((rule, self._kinds[name]), []).append(name)
        self._in_slot, self._blocks = {}, []
        for (rule, kind), own in groups.items():
            is_whole = not (kind.is_floating_point or kind.is_complex)
            slots = 1 if rule in ("last", "same") and self._last_grain is not None else self._slots
            lengths = tuple(self._shapes[name].numel() for name in own)
            if rule in TAKEN:  # each slot has a key for each buffer, then the values
                size = slots * (len(own) + sum(lengths) * max(1, kind.itemsize // 2))
            else:
                size = sum(lengths) * (_NUM_DIGITS if is_whole and rule != "mean" else 1 + kind.is_complex)
            index = torch.repeat_interleave(torch.tensor(lengths)).to(self.model.device)
            self._blocks.append(_Block(rule, kind, is_whole, tuple(own), lengths, slots, index, size))
        self.num_values = sum(block.size for block in self._blocks)
        # Whether `assign` computes from one microbatch's terms, bit for bit, what its forward has left.
        self.keeps = not self.routers and all(
            b.is_whole or b.rule in TAKEN or (b.rule == "mean" and b.dtype.itemsize < 8) for b in self._blocks
        )

    def begin(self) -> None:
        """Save the values of the buffers at the beginning of a step."""
        model = self.model
        if not model.homes:
            return
        now = {name: model.now(name).detach() for name in self.names if not model.now(name).is_meta}
        self.saved = {name: torch.empty_like(value) for name, value in now.items()}
        _copy([(self.saved[name], value) for name, value in now.items()])
        self._still = {name: copy for name, copy in self._still.items() if name not in self.saved}
        self._versions = {name: model.version(name) for name in model.homes}
        for name in model.homes.keys() - self.saved.keys():
            value, version = model.now(name), self._versions[name]
            if not value.is_meta and (name not in self._still or self._still[name][0] != version):
                self._still[name] = version, value.detach().clone()
        self._changed, self._in_slot = set(), {}

    def changed(self) -> set[str]:
        """Return the names of the buffers that were written or replaced since `begin`."""
        return self._changed | self.written()

    def written(self) -> set[str]:
        """Return the names of the buffers that were written or replaced since `begin` or the last `restore`."""
        return {name for name, version in self._versions.items() if self.model.version(name) != version}

    def moved(self, *, every: bool = False) -> set[str]:
        """Return buffers that are not known to change but have another value since `begin`; waits for the device.

        `every`: also compare buffers without a recorded write, because torch's own batch_norm records none.
        """
        written = (set(self.model.homes) if every else self.changed()).difference(self.names)
        return {n for n in written if n in self._still and not same_bits(self.model.now(n), self._still[n][1])}

    def weighted(
        self, num_samples: int, *, step: int = 0, grain: int = 0, again: bool = False, is_alone: bool = False
    ) -> Tensor:
        """Return the contribution of a microbatch of `num_samples`, flat float64 [num_values]. Mutates the slots.

        `grain`: the microbatch's last grain. `again`: True for a later stage on this rank; the first stage's
        contribution already counts the other buffers. `is_alone`: the step has no other microbatch. Its buffers stay as
        they are, and the contribution is empty. Raises: JobError if a forward has changed a buffer's shape.
        """
        if not self.names:
            return self.nothing
        for name in self.names:
            value = self.model.now(name)
            if value.shape != self._shapes[name]:
                raise _reshaped(name, self._shapes[name], value.shape)
            if is_alone and value.dtype != self._kinds[name]:  # which a forward under autocast may leave
                home, key = self.model.homes[name]
                home[key] = value.detach().to(self._kinds[name])
        if is_alone:
            return self.nothing
        parts = []
        for block in self._blocks:
            if block.rule in TAKEN:
                parts.append(self._slotted(block, step, grain, again))
                continue
            is_exact = block.is_whole and block.rule != "mean"
            wide = Tensor.long if is_exact else numbers
            values = wide(self._flat(block))
            if block.rule == "sum" or again:
                values = values - wide(self._flat(block, self.saved))
            if is_exact:  # integers, int64 [n], become digits, float64 [_NUM_DIGITS * n]
                digits = []
                for _ in range(_NUM_DIGITS - 1):
                    digits.append(values.remainder(_BASE))
                    values = values.div(_BASE, rounding_mode="floor")
                values = torch.cat([*digits, values]).double()
            else:
                values = values.flatten()
            parts.append(values * num_samples if block.rule == "mean" else values)
        return torch.cat(parts)

    def zeros(self) -> Tensor:
        """Return the contribution of a microbatch of weight zero."""
        if not self.names:
            return self.nothing
        return torch.zeros(self.num_values, dtype=torch.float64, device=self.model.device)

    def _flat(self, block: _Block, of: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return a block's values in its dtype, with zero for buffers that another rank has or counts."""
        parts = []
        for name, length in zip(block.names, block.lengths, strict=True):
            now = self.model.now(name) if of is None else of.get(name)
            if now is None or now.is_meta or not self._counts(name):
                parts.append(torch.zeros(length, dtype=block.dtype, device=self.model.device))
            else:
                parts.append(now.detach().flatten().to(block.dtype))
        return torch.cat(parts)

    def _slotted(self, block: _Block, step: int, grain: int, again: bool) -> Tensor:
        """Return a microbatch's changes to this rank's slot: keys of the buffers, and their values as words."""
        count, table = len(block.names), torch.zeros(block.size, dtype=torch.float64, device=self.model.device)
        zeros = torch.zeros(sum(block.lengths), dtype=block.dtype, device=self.model.device)
        old_keys, old = self._in_slot.get(block, ([0] * count, zeros))
        is_one = block.rule in ("last", "same")
        if is_one:  # another microbatch may give the last value: of the step, or of this rank so far
            last_grain = self._last_grain
            if grain != last_grain(step) if last_grain is not None else grain + 1 < max(old_keys):
                return table
        keys, chosen = list(old_keys), []
        pieces = zip(block.names, self._flat(block).split(block.lengths), old.split(block.lengths), strict=True)
        for place, (name, now, before) in enumerate(pieces):
            is_written = self._counts(name) and not self.model.now(name).is_meta
            if is_written and (again or not is_one) and self.model.version(name) == self._versions.get(name):
                saved = self.saved.get(name)  # a write through `.data` counts no version
                is_written = saved is not None and not same_bits(self.model.now(name), saved)
            if not is_written:
                chosen.append(before)
                continue
            chosen.append(now if is_one or not keys[place] else _extreme(block.rule, now, before))
            keys[place] = grain + 1 if is_one else 1
        flat = torch.cat(chosen)
        self._in_slot[block] = keys, flat
        row = table.view(block.slots, -1)[self.slot if block.slots > 1 else 0]
        changes = [key - before for key, before in zip(keys, old_keys, strict=True)]
        if len(set(changes)) == 1:
            row[:count].fill_(changes[0])
        else:
            for place, change in enumerate(changes):
                row[place].fill_(change)
        row[count:] = _words(flat) - _words(old)
        return table

    def restore(self, *, in_graph: bool = False) -> None:
        """Restore the step's values. Raises: JobError if a forward has changed a buffer's shape.

        `in_graph`: a later backward may need the values that a forward has left, so new tensors get the step's values.
        """
        model = self.model
        if not model.homes:
            return
        self._changed = self.changed()
        started = {name: self._still[name][1] for name in self._changed & self._still.keys()} | self.saved
        same: list[tuple[Tensor, Tensor]] = []
        for name, value in started.items():
            now = model.now(name)
            if now.shape != value.shape:
                raise _reshaped(name, value.shape, now.shape)
            # Autograd refuses a tensor that it needs if its version has changed. A write that counts no version passes.
            is_needed = in_graph and model.version(name) != self._versions.get(name)
            if now.dtype == value.dtype and (isinstance(now, nn.Parameter) or not is_needed):
                same.append((now, value))
            else:  # also for another dtype, which a forward under autocast may leave
                home, key = model.homes[name]
                home[key] = value.clone()
        _copy(same)
        self._versions = {name: model.version(name) for name in model.homes}

    def assign(
        self, contributed: npt.NDArray[np.float64], num_samples: int, since: Mapping[str, Tensor] | None = None
    ) -> None:
        """Set the buffers, which have the step's values, from the sum of contributions over microbatches and ranks.

        `since`: the values at the beginning of the step, if other steps were applied since then.
        """
        if num_samples:
            self.queue_assign(torch.from_numpy(contributed), torch.tensor(float(num_samples)), None, since)

    def queue_assign(
        self,
        contributed: Tensor,
        num_samples: Tensor,
        good: Tensor | None,
        since: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Queue `assign` on the device; the step's values stay if `good`, bool [], is False."""
        if not self.names:
            return
        now = self.model.now
        for block, part in zip(self._blocks, contributed.split([block.size for block in self._blocks]), strict=True):
            here = [not now(name).is_meta for name in block.names]
            if not any(here):
                continue
            old = torch.cat(
                [
                    now(name).detach().flatten() if own else torch.zeros(length, dtype=block.dtype)
                    for name, own, length in zip(block.names, here, block.lengths, strict=True)
                ]
            )
            new = _decided(block, part.to(old.device), old, num_samples)
            if since is not None and block.rule in ("mean", "last", "same"):
                began = torch.cat([since[name].flatten() for name in block.names]).to(old.device)
                new = torch.where(old == began, new, new + (old - began)) if block.dtype != torch.bool else new
            if since is not None and block.rule in ("min", "max"):
                new = _extreme(block.rule, new, old)
            if good is not None:
                new = torch.where(good, new, old)
            buffers = [now(name) for name, own in zip(block.names, here, strict=True) if own]
            if not all(here):
                pieces = new.split(block.lengths)
                new = torch.cat([piece for piece, own in zip(pieces, here, strict=True) if own])
            _copy(list(zip(buffers, views_of(new, buffers), strict=True)))
        move_biases(self.routers)
        self.saved = {}  # the step is over: nothing is left to restore


def _decided(block: _Block, part: Tensor, old: Tensor, num_samples: Tensor) -> Tensor:
    """Return a block's new values, flat in its dtype, from the sum of the microbatches' contributions."""
    if block.rule in TAKEN:
        table = part.view(block.slots, -1).round()
        keys, words, kind = table[:, : len(block.names)], table[:, len(block.names) :], block.dtype
        bits = words.reshape(-1).to(torch.int16 if kind.itemsize > 1 else torch.uint8)
        if kind.is_complex:
            real = bits.view(torch.float32 if kind == torch.complex64 else torch.float64)
            values = torch.view_as_complex(real.view(-1, 2)).view(len(words), -1)
        else:
            values = bits.view(kind).view(len(words), -1)
        keys = keys.index_select(1, block.index.to(keys.device))  # has a known shape, as a captured step requires
        if block.rule in ("last", "same"):
            new = values.gather(0, keys.argmax(0, keepdim=True))[0] if block.slots > 1 else values[0]
        else:
            new = values[0]
            for slot in range(1, block.slots):
                either = torch.where(keys[:slot].amax(0) > 0, _extreme(block.rule, new, values[slot]), values[slot])
                new = torch.where(keys[slot] > 0, either, new)
        return torch.where(keys.amax(0) > 0, new, old)
    if block.is_whole and block.rule != "mean":
        digits = part.round().long().view(_NUM_DIGITS, -1)
        added = torch.stack([digits[place] * _BASE**place for place in range(_NUM_DIGITS)]).sum(0)
        return (added + old.long() if block.rule == "sum" else added).to(old.dtype)
    if block.rule == "mean":
        part = part / num_samples.to(part.device)
    elif block.rule == "sum":
        part = part + numbers(old).flatten()
    part = part.to(old.device)
    if old.is_complex():
        return torch.view_as_complex(part.view(-1, 2)).to(old.dtype)
    return (part if old.is_floating_point() else part.round()).to(old.dtype)


def _extreme(rule: str, one: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(one, other) if rule == "max" else torch.minimum(one, other)


def _words(values: Tensor) -> Tensor:
    """Convert the bits of flat values to numbers of 16 bits, or of 8 bits for 1-byte dtypes, in float64."""
    values = values.resolve_conj().resolve_neg().contiguous()
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    return values.view(torch.int16 if values.itemsize > 1 else torch.uint8).double()


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, all tensors of a dtype at once."""
    with torch.no_grad():
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for pair in pairs:
            by_kind.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
        for alike in by_kind.values():
            # Foreach copies accept no conjugate or negative views.
            if any(tensor.is_conj() or tensor.is_neg() for tensor in chain.from_iterable(alike)):
                for into, value in alike:
                    into.copy_(value)
            else:
                torch._foreach_copy_([into for into, _ in alike], [value for _, value in alike])


def _reshaped(name: str, before: torch.Size, after: torch.Size) -> JobError:
    given = f"buffer {name} of shape {list(before)}, which a forward gives the shape {list(after)}"
    if 0 in before:  # not reached by a forward yet
        return JobError(
            given=given,
            conflict="the first forward gives the buffer its shape, as an observer of quantization does; a step makes "
            "one value of what its microbatches leave in a buffer, so that all have to begin with one shape",
            remedy="give it its shape in model(): call the module there once with a sample, or register the buffer "
            f"with the shape {list(after)}",
        )
    return JobError(
        given=given,
        conflict="a step makes one value of what its microbatches leave in a buffer: all have to be of one shape",
        remedy="build it for the longest sample (in Transformers a larger max_position_embeddings or "
        "max_source_positions), or keep what a forward can compute again in a plain attribute",
    )
