"""Rules of buffers: the value that a step gives to a buffer which several microbatches have changed.

A rule yields the value that one forward of the whole batch leaves. `explaining` infers it from forwards of some grains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from shoal.errors import JobError
from shoal.numerics.buffer_names import BUFFER_RULES, matches

# Rules that select the value of one microbatch, which ranks exchange bit by bit.
TAKEN = ("last", "same", "min", "max")
# Number of grains to observe: enough to tell the last of several values from the largest.
LOOKED_GRAINS = 4


@dataclass(frozen=True)
class Observed:
    """Values of one buffer `before` some grains, after a forward of them `together`, and after each alone (`apart`).

    `sizes`: samples of each grain. All forwards start from the same buffers.
    """

    before: Tensor
    together: Tensor
    apart: Sequence[Tensor]
    sizes: Sequence[int]

    @property
    def moves(self) -> bool:
        """True if any of the forwards left another value, or the same value in another dtype."""
        after = (self.together, *self.apart)
        return not all(self.before.dtype == value.dtype and _equal(self.before, value) for value in after)


@dataclass(frozen=True)
class Rounding:
    """Largest difference by rounding between two forwards, relative to a value's size and to its change."""

    of_value: float
    of_move: float


# Rounding of observations in float64, some parts of which may compute in float32; and of observations in float32.
FINE, COARSE = Rounding(64 * torch.finfo(torch.float32).eps, 1e-5), Rounding(1e-4, 1e-3)


def defined_rules(model: nn.Module) -> dict[str, str]:
    """Return {buffer: rule} for buffers of torch's own layers: running statistics, and vectors of power iterations."""
    rules: dict[str, str] = {}
    for prefix, module in model.named_modules():
        own: dict[str, str] = {}
        if isinstance(module, _NormBase):  # statistics of a grain: see normalised_by_grain
            own = {"running_mean": "mean", "running_var": "mean", "num_batches_tracked": "same"}
        elif isinstance(module, _SpectralNorm):
            own = {"_u": "same", "_v": "same"}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                own |= {f"{hook.name}_u": "same", f"{hook.name}_v": "same"}
        rules |= {f"{prefix}.{key}" if prefix else key: rule for key, rule in own.items()}
    return rules


def declared_rules(given: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return rules by buffer name from patterns that a job gives. Raises: JobError if a pattern matches no buffer."""
    known, rules = list(names), dict[str, str]()
    for pattern, rule in given.items():
        matching = [name for name in known if matches(pattern, name)]
        if not matching:
            few = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise JobError(
                given=f'buffers={{"{pattern}": "{rule}"}}',
                conflict=f"the model has no such buffer; its buffers are {few}" if known else "the model has no buffer",
                remedy="name it as model.named_buffers() does; * stands for one part of the name",
            )
        rules |= dict.fromkeys(matching, rule)
    return rules


def explaining(observed: Sequence[Observed], rounding: Rounding, scale: float = 0.0) -> tuple[str, ...]:
    """Return the rules that explain all observations of a buffer, the best first.

    `scale`: size of the largest value in the buffer's module. Changes below the rounding error of that value mean
    nothing.

    If several rules fit, the first is right for most other data that the buffer may see. Unchanged values, and the
    extremes of equal values, fit both `max` and `same`: `max` comes first. A value that the same batch moves again is
    no maximum: a counter is `same`.
    """
    is_bool, is_complex = observed[0].before.dtype == torch.bool, observed[0].before.is_complex()
    is_float = observed[0].before.is_floating_point()
    observed = [
        Observed(_wide(one.before), _wide(one.together), [_wide(value) for value in one.apart], one.sizes)
        for one in observed
    ]
    distances: dict[str, float] = {}

    def holds(name: str, rule: Callable[[Observed], Tensor]) -> bool:
        values = [rule(one) for one in observed]
        if not all(_close(value, one, rounding) for value, one in zip(values, observed, strict=True)):
            return False
        far = (_distance(value, one, rounding) for value, one in zip(values, observed, strict=True))
        distances[name] = max(far) if is_float or is_complex else 0.0
        return True

    rules = []
    for name, rule, sign in (("max", _max, 1), ("min", _min, -1)) if not is_complex else ():
        # A bound: no grain moves the value against its direction, and a repeated batch moves nothing.
        if not holds(name, rule):
            continue
        limits = [_limit(one, rounding) for one in observed]
        beyond = (
            bool((sign * (one.before - value) > (limit if value.is_floating_point() else 0.0)).any())
            for one, limit in zip(observed, limits, strict=True)
            for value in one.apart
        )
        repeated = [one for one in observed[1:] if _equal(one.before, observed[0].together)]
        if not any(beyond) and all(_close(one.before, one, rounding) for one in repeated):
            rules.append(name)
    if not is_bool:
        rules += ["sum"] if holds("sum", lambda one: one.before + _total(one, one.before)) else []
    if all(_equal(one.together, value) for one in observed for value in one.apart):
        rules.append("same")
        distances["same"] = 0.0
    if not is_bool:
        rules += ["total"] if holds("total", _total) else []
    rules += ["last"] if holds("last", lambda one: one.apart[-1]) else []
    if not is_complex:
        rules += [name for name, rule in (("max", _max), ("min", _min)) if name not in rules and holds(name, rule)]
    if is_float or is_complex:
        # Means of values that cancel, such as the outputs of a norm, are only rounding.
        moves = (float((value - one.before).abs().max()) for one in observed for value in (one.together, *one.apart))
        is_rounding = not rules and max(moves) < torch.finfo(torch.float32).eps * scale
        rules += ["mean"] if holds("mean", _mean) or is_rounding else []
    # If grains differ by little more than rounding, the closest rules come first. If none is exact, `mean` is the
    # likeliest of them: a moving mean with a small momentum.
    nearest = min((distances[name] for name in rules if name in distances), default=0.0)
    far = {name for name in rules if distances.get(name, 0.0) > 10 * nearest + 1e-3}
    return tuple(sorted(rules, key=lambda name: (name in far, nearest > 0 and name != "mean")))


def _wide(value: Tensor) -> Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value.long()


def is_in_order(one: Observed) -> bool:
    """Return True if all grains together leave the new values that each leaves alone, as a queue of samples does."""
    together = one.together[one.together != one.before]
    apart = torch.cat([value[value != one.before] for value in one.apart])
    if not len(together) or len(together) != len(apart) or together.is_complex() or together.dtype == torch.bool:
        return False
    a, b = together.double().sort().values, apart.double().sort().values
    return bool(((a - b).abs() <= FINE.of_value * b.abs().max()).all())


def _max(one: Observed) -> Tensor:
    return torch.stack(list(one.apart)).amax(0)


def _min(one: Observed) -> Tensor:
    return torch.stack(list(one.apart)).amin(0)


def _total(one: Observed, since: Tensor | int = 0) -> Tensor:
    return torch.stack([value - since for value in one.apart]).sum(0)


def _mean(one: Observed) -> Tensor:
    return torch.stack([value * size for value, size in zip(one.apart, one.sizes, strict=True)]).sum(0) / sum(one.sizes)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same values; NaN equals NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _limit(one: Observed, rounding: Rounding) -> float:
    """Return the largest difference from `one.together` that rounding may explain."""
    values = torch.stack([value.abs().double() for value in (one.together, *one.apart)])
    moves = torch.stack([(value - one.before).abs().double() for value in (one.together, *one.apart)])
    sizes = [float(each[each.isfinite()].max()) if each.isfinite().any() else 0.0 for each in (values, moves)]
    return rounding.of_value * sizes[0] + rounding.of_move * sizes[1]


def _close(value: Tensor, one: Observed, rounding: Rounding) -> bool:
    if _equal(value, one.together):
        return True
    if not (value.is_floating_point() or value.is_complex()):
        return False
    near = (value - one.together).abs() <= _limit(one, rounding)
    return bool((near | (value == one.together) | ((value != value) & (one.together != one.together))).all())


def _distance(value: Tensor, one: Observed, rounding: Rounding) -> float:
    """Return the largest finite difference from `one.together`, relative to what rounding may explain."""
    off = (value - one.together).abs()
    off = off[off.isfinite()]
    return float(off.max()) / max(_limit(one, rounding), 1e-300) if off.numel() else 0.0


def in_words(rules: Mapping[str, str]) -> str:
    """Render rules with the names of their buffers for a message; numbers in names become *."""
    by_rule: dict[str, dict[str, None]] = {}
    for name, rule in sorted(rules.items()):
        by_rule.setdefault(rule, {})[".".join("*" if part.isdigit() else part for part in name.split("."))] = None
    return "; ".join(f"{rule} of {', '.join(names)}" for rule, names in sorted(by_rule.items()))


def without_rule(name: str) -> JobError:
    """Build the error for a buffer of a Session that has no known rule."""
    return JobError(
        given=f"buffer {name}, which a forward changes, in a Session without a rule for it",
        conflict="a step is computed in microbatches, and what they leave in a buffer becomes one value by a rule",
        remedy=f'write Session(buffers={{"{name}": "sum"}}) for a count or a sum over samples, "mean" for a mean over '
        'samples, "min", "max", "last", or "same" where every forward leaves the same value, as a counter of calls',
    )


def no_rule(kinds: Mapping[str, str], *, ordered: bool = False, seen: bool = True, rarely: bool = False) -> JobError:
    """Build the error for buffers that no rule explains. `kinds`: types of their modules by buffer name.

    `ordered`: a buffer stores samples in their order. `seen`: some rank had several grains to observe. `rarely`: the
    observed grains moved none of these buffers, but other grains of the step did.
    """
    it = "it" if len(kinds) == 1 else "one of them"
    if ordered:
        cause = f"{it} keeps samples in their order, and each microbatch would put its own in the same place"
    elif rarely:
        cause = (
            "its first grains move no such buffer, where others do: how the parts of a batch make its value is not seen"
        )
    elif seen:
        cause = (
            f"the value that a batch leaves in {it} does not follow from the values that parts of the batch leave: it "
            "is not their mean, sum, minimum, maximum or the last of them"
        )
    else:
        cause = "each rank reads one grain of this stream: none can see how the parts of a batch make its value"
    said = ", ".join(f"{name} of {kind}" if kind else name for name, kind in kinds.items())
    declared = ", ".join(f'"{name}": "last"' for name in kinds)
    return JobError(
        given=f"buffer{'s' if len(kinds) > 1 else ''} {said}, which a forward changes",
        conflict=f"a step is computed in microbatches, and {cause}",
        remedy="keep sums over samples in buffers (a count, a sum, a sum of squares) and compute the value from them; "
        "or write Job(grains=1), which computes a batch in one "
        f"forward; or declare a rule that is good enough: Job(buffers={{{declared}}}), say, "
        f"of {', '.join(BUFFER_RULES)}",
    )
