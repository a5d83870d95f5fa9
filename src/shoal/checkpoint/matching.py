"""Matching of the names of two state dicts: the tensors that both have, and the differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.checkpoint.state_dicts import StoredWeights
from shoal.errors import CommandError, JobMismatchError
from shoal.runs.options import DIFFERENCES, NameRules

MOST_LINES = 20  # for each kind of difference in a message


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a model with all its names, the shape of the whole tensor, and whether a state dict has it."""

    names: tuple[str, ...]
    tensor: Tensor
    shape: tuple[int, ...]
    persistent: bool


@dataclass
class Matches:
    """The tensors of a model matched with the keys of a source. `wrong`: differences that no rule can allow."""

    pairs: list[tuple[NamedTensor, tuple[str, ...]]] = field(default_factory=list)  # several keys: equal values
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def refuse(self, weights: StoredWeights, rules: NameRules, remedy: Callable[[Collection[str]], str]) -> None:
        """Raise JobMismatchError with every difference that is not allowed. `remedy` receives the kinds."""
        kinds = {"wrong": self.wrong} | {kind: getattr(self, kind) for kind in DIFFERENCES if kind not in rules.allow}
        kinds = {kind: names for kind, names in kinds.items() if names}
        if not kinds:
            return
        of, hint = _place(weights), ""
        before = {"missing": f"missing in {of}: ", "unexpected": "unexpected, not in the model: "}
        lines = [line for kind, names in kinds.items() for line in short(names, before.get(kind, ""))]
        # A prefix to rename that would match most missing tensors. Wrappers leave such prefixes: `module.`,
        # `_orig_mod.`, `model0.` of a Session with several models.
        there, here = ({line.partition(" ")[0] for line in lines} for lines in (self.unexpected, self.missing))
        prefixes = Counter[tuple[str, str]]()
        prefixes.update((prefix, "") for key in there for prefix, rest in _cuts(key) if rest in here)
        prefixes.update(("", prefix) for name in here for prefix, rest in _cuts(name) if rest in there)
        for (old, new), count in prefixes.most_common(1):
            if 2 * count > len(here):
                what = f"begin with {old + '.'!r}" if old else f"in the model begin with {new + '.'!r}"
                rename = f'write --init-rename {old}={new}, or rename={{"{old}": "{new}"}} of shoal.load'
                hint = f"; names {'there ' if old else ''}{what}: {rename}"
        raise JobMismatchError(
            given=f"{weights.origin} for another model:\n" + "\n".join(lines),
            conflict=f"{sum(map(len, kinds.values()))} tensors differ; nothing was loaded",
            remedy=remedy(kinds.keys()) + hint,
        )


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Return each split of a dotted name into a prefix and a rest."""
    parts = name.split(".")
    return ((".".join(parts[:n]), ".".join(parts[n:])) for n in range(1, len(parts)))


def short(lines: list[str], before: str = "") -> list[str]:
    """Return the first lines, and the number of further ones."""
    more = [f"{before}... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [before + line for line in lines[:MOST_LINES]] + more


def named_tensors(
    model: nn.Module, shape: Callable[[str, Tensor], tuple[int, ...]] = lambda name, tensor: tuple(tensor.shape)
) -> list[NamedTensor]:
    """Return each parameter and buffer once. `shape` returns the shape of the whole tensor by its first name."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    saved = {key: value for key, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    for key, value in saved.items():  # a state dict may have another key for a tensor than its name
        if id(value) in names and key not in names[id(value)]:
            names[id(value)].append(key)
    persistent = {id(value) for value in saved.values()}
    return [
        NamedTensor(tuple(own), tensors[number], shape(own[0], tensors[number]), number in persistent)
        for number, own in names.items()
    ]


def match(tensors: Iterable[NamedTensor], weights: StoredWeights, rules: NameRules) -> Matches:
    """Match the tensors of a model with the tensors of a source. Raises: CommandError for a renaming without effect."""
    tensors, place = list(tensors), _place(weights)
    keys: dict[str, str] = {}  # the source's key for each name in the model
    used = set()
    for key in [*weights, *sorted(weights.all_names - set(weights))]:
        name, old = rules.renamed(key)
        used.add(old)
        if name in keys:
            raise CommandError(
                given=f"{keys[name]} and {key} of {weights.origin}",
                conflict=f"the renaming makes {name} of both",
                remedy="write prefixes that leave the names different",
            )
        keys[name] = key
    idle = next((f"{old}={new}" for old, new in rules.rename if old not in used), None)
    if idle is not None:
        some = ", ".join(list(weights)[:MOST_LINES])
        raise CommandError(
            given=f"renaming {idle}", conflict=f"no name there begins so: {some}", remedy="write one of their prefixes"
        )
    matches = Matches()
    for one in tensors:
        keys |= {n: keys[k] for n, k in ((n, weights.key_of(n)) for n in one.names) if n not in keys and k in keys}
        there = [name for name in one.names if name in keys]
        if not there:
            if one.persistent and weights.is_whole(one.names[0]):
                matches.missing.append(f"{one.names[0]} {list(one.shape)}")
            continue
        sources = tuple({weights.names.get(keys[name], keys[name]): keys[name] for name in there}.values())
        other = next((key for key in sources if weights.shape(key) != one.shape), None)
        if other is None:
            matches.pairs.append((one, sources))
        else:
            shapes = f"{list(weights.shape(other))} in {place}, {list(one.shape)} in the model"
            matches.mismatched.append(f"{there[0]}: {shapes}")
    mine = {keys[name] for one in tensors for name in one.names if name in keys}
    have = {weights.names.get(key, key) for key in mine}
    extra = sorted(key for name, key in weights.once().items() if name not in have)
    matches.unexpected = [f"{key} {list(weights.shape(key))}" for key in extra]
    matches.missing.sort()
    return matches


def value_of(weights: StoredWeights, keys: tuple[str, ...]) -> Tensor:
    """Return the whole value of a tensor that the source may store under several keys.

    Raises: JobMismatchError if the keys' values differ.
    """
    value = weights[keys[0]]
    for key in keys[1:]:
        if not torch.equal(value, weights[key]):
            raise JobMismatchError(
                given=f"{weights.origin} for another model:\n{', '.join(keys)}: one tensor in the model, several in "
                f"{_place(weights)}",
                conflict="their values differ; nothing was loaded",
                remedy="build the model without that tie",
            )
    return value


def _place(weights: StoredWeights) -> str:
    return "the checkpoint" if hasattr(weights, "step") else "the file"
