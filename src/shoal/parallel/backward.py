"""Backward passes through the entry point of autograd's engine, whole or split.

torch.autograd.backward and grad are dispatched to an active TorchFunctionMode, which is off while it handles a call;
recomputation in the backward needs the mode (see numerics/grain_randomness.py) in force.

A split backward, of zero-bubble schedules, gives first the gradients of the inputs, later those of the weights. The
second part begins where the paths of the weights meet that of the inputs, with the gradients kept from the first, so
that no gradient of an activation is computed twice. After Qi et al., arXiv 2401.10241; torch's own
(torch.distributed.pipelining) does not run under a TorchFunctionMode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def run_engine(
    roots: Sequence[Any],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
    *,
    keep: bool = False,
    accumulate: bool = True,
) -> tuple[Tensor | None, ...]:
    """Adds the gradients of `inputs`, or of all leaves, to their `.grad`; gives them instead where not `accumulate`.

    `keep`: the graph is not freed.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    found = engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return () if accumulate else tuple(found)


def run_backward(total: Tensor, factor: float = 1.0) -> None:
    """Backward of a total times a factor, which the gradient begins with: no operation, and no node in the graph."""
    run_engine((total,), (torch.full_like(total, factor),))


@dataclass
class _Group:
    """Weights, and the nodes on the inputs' path where theirs join it, with the gradients that came there."""

    weights: list[Tensor]
    joints: list[Node]
    gradients: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class Weights:
    """Second half of a backward: the gradients of the weights."""

    groups: list[_Group]
    roots: list[tuple[GradientEdge, Tensor]]  # outputs that depend on weights alone
    weights: list[Tensor]

    @property
    def in_turn(self) -> list[list[Tensor]]:
        """The weights whose gradients `backward_weight` adds together, in its order."""
        return [group.weights for group in self.groups] + ([self.weights] if self.roots else [])


def backward_input(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Weights]:
    """The gradients of the inputs, None where nothing depends on one, and what `backward_weight` needs."""
    children = _children([edge.node for edge in roots])
    leaves = {get_gradient_edge(weight).node: weight for weight in weights}
    path = _upwards([get_gradient_edge(tensor).node for tensor in inputs], children)
    groups = _groups({node: w for node, w in leaves.items() if node in children}, path, children)
    # A hook puts what comes to a joint into its group's gradients.
    keep = [(joint, partial(group.gradients.__setitem__, joint)) for group in groups for joint in group.joints]
    handles = [joint.register_prehook(hook) for joint, hook in keep]
    on_path = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node in path]
    off_path = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node not in path]
    found: tuple[Tensor | None, ...] = (None,) * len(inputs)
    try:
        if on_path:
            found = run_engine([e for e, _ in on_path], [g for _, g in on_path], inputs, keep=True, accumulate=False)
    finally:
        for handle in handles:
            handle.remove()
    return found, Weights(groups, off_path, list(leaves.values()))


def backward_weight(rest: Weights, turns: Iterator[None]) -> None:
    """Adds the gradients of the weights to their `.grad`, as a whole backward does, hooks included.

    `turns` is asked for its next before those of each `in_turn`, and once more after all.
    """
    for group in rest.groups:
        next(turns)
        edges, gradients, handles = [], [], []
        for joint, kept in group.gradients.items():
            for number, gradient in enumerate(kept):
                if gradient is not None:
                    edges.append(GradientEdge(joint, number))
                    gradients.append(gradient)
            if len(group.joints) > 1:
                # One joint may lie behind another: what comes to it from there is in its gradient already.
                handles.append(joint.register_prehook(_put(kept)))
        try:
            if edges:
                run_engine(edges, gradients, group.weights)
        finally:
            for handle in handles:
                handle.remove()
    if rest.roots:
        next(turns)
        run_engine([edge for edge, _ in rest.roots], [gradient for _, gradient in rest.roots], rest.weights)
    next(turns)


def _put(kept: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda _: kept


def _children(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Of each node that the roots depend on, those that depend on it directly."""
    found: dict[Node, list[Node]] = {node: [] for node in roots}
    queue = list(found)
    while queue:
        node = queue.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in found:
                found[below] = []
                queue.append(below)
            found[below].append(node)
    return found


def _upwards(starts: Sequence[Node], children: dict[Node, list[Node]], stop: set[Node] | None = None) -> set[Node]:
    """The starts and all nodes that depend on them; where there is a `stop`, up to its nodes and with them."""
    found: set[Node] = set()
    queue = [node for node in starts if node in children]
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        if stop is None or node not in stop:
            queue += children[node]
    return found


def _groups(leaves: dict[Node, Tensor], path: set[Node], children: dict[Node, list[Node]]) -> list[_Group]:
    """The weights by the joints that they share."""
    groups: dict[int, _Group] = {}
    of_joint: dict[Node, int] = {}
    members: dict[int, list[Node]] = defaultdict(list)
    for number, (leaf, weight) in enumerate(leaves.items()):
        joints = [node for node in _upwards([leaf], children, path) if node in path]
        merged = {of_joint[joint] for joint in joints if joint in of_joint}
        group = _Group([weight], [])
        members[number] = list(joints)
        for other in merged:
            group.weights += groups.pop(other).weights
            members[number] += [joint for joint in members.pop(other) if joint not in members[number]]
        for joint in members[number]:
            of_joint[joint] = number
        group.joints = members[number]
        groups[number] = group
    return [group for group in groups.values() if group.joints]
