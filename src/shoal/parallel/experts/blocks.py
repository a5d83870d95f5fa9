"""Mixtures of experts in a model, recognised by their structure on any device, also meta."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.errors import JobError
from shoal.numerics.buffer_names import matches

_SIGN = "expert"  # in the name of a module, its class, or its attribute with the number of experts


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


def expert_blocks(model: nn.Module, named: Sequence[str] = ()) -> list[ExpertBlock]:
    """Return the experts of all layers, in the model's order.

    Args:
        model: a model on any device.
        named: names of modules that contain experts but whose structure alone does not show it; * stands for one part.

    Raises:
        JobError: If a pattern in `named` matches no module that can be divided.
    """
    blocks: list[ExpertBlock] = []
    used = set[str]()
    for name, module in model.named_modules():
        if blocks and name.startswith(f"{blocks[-1].name}."):
            continue
        patterns = {pattern for pattern in named if matches(pattern, name)}
        block = _listed(name, module, bool(patterns)) or _stacked(name, module, bool(patterns))
        if block is not None:
            blocks.append(block)
            used |= patterns
    unknown = [pattern for pattern in named if pattern not in used]
    if unknown:
        raise JobError(
            given=f'experts=["{unknown[0]}"]',
            conflict="the model has no module of this name with experts that can be divided: a ModuleList of modules "
            "of one class and shape, or a module whose own parameters have the experts as first dim and whose forward "
            "takes hidden states, indices of experts and weights",
            remedy="name it as model.named_modules() does; * stands for one part of the name",
        )
    return blocks


def _stacked(name: str, module: nn.Module, is_named: bool) -> ExpertBlock | None:
    own = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    counts = {parameter.shape[0] for parameter in own.values() if parameter.ndim > 1}
    if len(counts) != 1 or any(p.ndim < 2 for p in own.values()) or all(p.ndim < 3 for p in own.values()):
        return None
    (count,) = counts
    num_arguments = positional(module)
    if count < 2 or num_arguments not in (1, 3) or any(True for child in module.children() for _ in child.parameters()):
        return None
    signs = (name.rpartition(".")[2], type(module).__name__, *expert_counts(module, count))
    if not is_named and not any(_SIGN in sign.lower() for sign in signs):
        return None
    return ExpertBlock(name, _full(name, own), count, "routed" if num_arguments == 3 else "sorted")


def _listed(name: str, module: nn.Module, is_named: bool) -> ExpertBlock | None:
    if not isinstance(module, nn.ModuleList) or len(module) < 2 or not name:
        return None
    if not is_named and _SIGN not in name.rpartition(".")[2].lower():
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


def refuse_dependent(model: nn.Module, block: ExpertBlock) -> None:
    """Raise JobError for experts in which a row's result depends on other rows or on random numbers."""
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
