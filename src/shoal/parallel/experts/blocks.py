"""Mixtures of experts in a model, recognised by their structure on any device, also meta."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import JobError

_SIGN = "expert"  # in the name of a module, its class, or its attribute with the number of experts


@dataclass
class ExpertLoads:
    """Rows that this rank sends to divided experts, summed over exchanges: to the busiest rank, and to a mean one.

    `counts`: True while a microbatch of a step is computed, but not a filler, an evaluation or a look at the model.
    """

    busiest: float = 0.0
    mean: float = 0.0
    counts: bool = False

    def add(self, rows: Sequence[int]) -> None:
        """Count the rows of one exchange, by the rank that receives them."""
        if not self.counts:
            return
        self.busiest += max(rows)
        self.mean += sum(rows) / len(rows)

    def imbalance(self) -> float | None:
        """Return the busiest rank's rows over the mean since the last call, or None if no row was sent."""
        busiest, mean, self.busiest, self.mean = self.busiest, self.mean, 0.0, 0.0
        return busiest / mean if mean else None


@dataclass(frozen=True)
class ExpertBlock:
    """Experts of one layer.

    name: the module that contains the experts, such as "model.layers.0.mlp.experts".
    parameters: full names: stacked parameters with one expert per index of dim 0, or all parameters of a ModuleList.
    count: number of experts.
    form: how the module is called. "routed": (hidden [tokens, width], index [tokens, k], weights [tokens, k]), as most
        models in Transformers 5 do. "sorted": (hidden [experts * tokens, width]), all tokens for each expert, as
        Llama 4 does. "listed": a ModuleList, of which the parent calls each expert with rows [..., width].
    """

    name: str
    parameters: tuple[str, ...]
    count: int
    form: Literal["routed", "sorted", "listed"]

    @property
    def listed(self) -> bool:
        """True for a ModuleList of experts, False for stacked parameters."""
        return self.form == "listed"

    def of_expert(self, expert: int) -> str:
        """Return the full name of an expert in a ModuleList."""
        return f"{self.name}.{expert}"


def expert_blocks(model: nn.Module) -> list[ExpertBlock]:
    """Return the experts of all layers, in the order of the model, on any device.

    Stacked experts are a module's own parameters of one first dim, at least one of them with three dims, if its forward
    takes one or three arguments and `expert` is in the name of the module, of its class, or of an attribute that is
    their number. A ModuleList with `expert` in its name has experts if its members have one class and equal shapes.
    """
    blocks: list[ExpertBlock] = []
    for name, module in model.named_modules():
        if blocks and name.startswith(f"{blocks[-1].name}."):
            continue
        block = _listed(name, module) or _stacked(name, module)
        if block is not None:
            blocks.append(block)
    return blocks


def _stacked(name: str, module: nn.Module) -> ExpertBlock | None:
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    counts = {parameter.shape[:1] for parameter in own.values()}
    if len(counts) != 1 or min(p.ndim for p in own.values()) < 2 or max(p.ndim for p in own.values()) < 3:
        return None
    ((count,),) = counts
    num_arguments = positional(module)
    is_sorted = num_arguments == 1 and set(own) == {"gate_up_proj", "down_proj"}  # as Llama 4 names them
    if (
        count < 2
        or not (is_sorted or num_arguments == 3)
        or any(True for c in module.children() for _ in c.parameters())
    ):
        return None
    signs = (name.rpartition(".")[2], type(module).__name__, *expert_counts(module, count))
    if not any(_SIGN in sign.lower() for sign in signs):
        return None
    return ExpertBlock(name, _full(name, own), count, "routed" if num_arguments == 3 else "sorted")


def _listed(name: str, module: nn.Module) -> ExpertBlock | None:
    if not isinstance(module, nn.ModuleList) or len(module) < 2 or _SIGN not in name.rpartition(".")[2].lower():
        return None
    shapes = {(type(e), tuple((n, p.shape) for n, p in e.named_parameters())) for e in module}
    if len(shapes) > 1 or not any(True for _ in module.parameters()):
        return None
    return ExpertBlock(name, _full(name, (n for n, _ in module.named_parameters())), len(module), "listed")


def _full(name: str, keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}.{key}" if name else key for key in keys)


def positional(module: nn.Module) -> int:
    """Return the number of arguments that a module's forward takes by position."""
    forward: Any = type(module).forward
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(forward).parameters.values()) - 1


def expert_counts(module: nn.Module, count: int) -> list[str]:
    """Return the module's attributes that give the number of experts, such as `num_experts`."""
    return [key for key, value in vars(module).items() if _SIGN in key and type(value) is int and value == count]


def refuse_adapted(model: nn.Module, block: ExpertBlock) -> None:
    """Raise JobError for experts that peft adapts."""
    around = model.get_submodule(block.name.rpartition(".")[0])
    if hasattr(around, "parameter_name") and hasattr(around, "base_layer"):
        raise JobError(
            given=f"adapters of peft on the parameters of {block.name} (target_parameters), with layout.expert > 1",
            conflict="they have factors of all experts, of which a rank has a part",
            remedy="use layout.expert = 1, or adapt other layers by target_modules",
        )


def refuse_mixed(model: nn.Module, block: ExpertBlock, blocks: Sequence[ExpertBlock], *, gathers: bool) -> None:
    """Raise JobError for experts that are trained in part, and for two blocks that one forward computes.

    `gathers`: ranks gather a block's experts, which are in memory for one block at a time.
    """
    trained = {(name.rpartition(".")[2], model.get_parameter(name).requires_grad) for name in block.parameters}
    if block.listed and len(trained) > len({key for key, _ in trained}):
        raise JobError(
            given=f"experts of {block.name} of which some are trained and others frozen, with layout.expert > 1",
            conflict="ranks that store frozen experts alone would not take part in the sums of the others",
            remedy="freeze all of them alike, or use layout.expert = 1",
        )
    around, _, _ = block.name.rpartition(".")
    inside = [one for one in blocks if one is not block and one.name.startswith(f"{around}." if around else "")]
    if gathers:
        other = next(iter(inside), None)
    else:
        other = next((one for one in inside if one.listed and one.name.rpartition(".")[0] == around), None)
    if block.listed and other is not None:
        raise JobError(
            given=f"the experts {block.name} and {other.name}, with layout.expert > 1",
            conflict=f"the forward of {around or 'the model'} computes both, and ranks exchange one block at a time",
            remedy=f"call {block.name} in a module of its own, or use layout.expert = 1",
        )


def refuse_dependent(model: nn.Module, block: ExpertBlock) -> None:
    """Raise JobError for experts whose rows depend on other rows or on random numbers."""
    for name, module in model.get_submodule(block.name).named_modules():
        where = f"{block.name}.{name}" if name else block.name
        buffer = next(iter(module._buffers), None)
        if buffer is not None:
            raise JobError(
                given=f"experts with the buffer {where}.{buffer}, with layout.expert > 1",
                conflict="an expert computes the tokens of several ranks together, so what it keeps of them depends on "
                "the layout",
                remedy="keep such values outside of the experts, or use layout.expert = 1",
            )
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise JobError(
                given=f"dropout of {module.p:g} in the experts, {where}, with layout.expert > 1",
                conflict="an expert computes the tokens of several ranks together, so the random numbers of a token "
                "would depend on the layout",
                remedy="apply dropout to the result of the experts, set it to 0, or use layout.expert = 1",
            )
