"""Backward passes through the entry point of autograd's engine, whole or split.

torch dispatches torch.autograd.backward and grad to an active TorchFunctionMode, which is off while it handles a call.
Recomputation in the backward needs the mode (see numerics/grain_randomness.py) in force.

A split backward, for zero-bubble schedules, computes the gradients of the inputs first and those of the weights later.
The second part starts where the weights' paths join the inputs' path, with the gradients stored in the first part. No
gradient of an activation is computed twice. The method follows Qi et al., arXiv 2401.10241. torch's own split
(torch.distributed.pipelining) does not run under a TorchFunctionMode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    """Run autograd's engine and return the gradients of `inputs`, unless they are added to `.grad`.

    Args:
        roots: tensors or gradient edges from which the backward starts.
        gradients: the gradient of each root.
        inputs: tensors to differentiate by; by default all leaves.
        keep: do not free the graph.
        accumulate: add the gradients to `.grad` and return nothing.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    results = engine.run_backward(
        tuple(roots),
        tuple(gradients),
        keep,
        False,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return () if accumulate else tuple(results)


def run_backward(total: Tensor, factor: float = 1.0) -> None:
    """Run the backward of a total with `factor` as its initial gradient: no extra operation or graph node."""
    run_engine((total,), (torch.full_like(total, factor),))


@dataclass
class _Group:
    """Weights with shared joints (nodes at which their paths join the inputs' path) and the joints' gradients."""

    weights: list[Tensor]
    joints: list[Node]
    gradients: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)


@dataclass
class Weights:
    """Second part of a split backward: the gradients of the weights."""

    groups: list[_Group]
    roots: list[tuple[GradientEdge, Tensor]]  # outputs that depend on weights alone
    weights: list[Tensor]

    @property
    def in_turn(self) -> list[list[Tensor]]:
        """The groups of weights for which `backward_weight` adds gradients together, in its order."""
        return [group.weights for group in self.groups] + ([self.weights] if self.roots else [])


def backward_input(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Weights]:
    """Return the gradients of the inputs, None for an input without dependents, and the state for `backward_weight`."""
    # For each node that the roots depend on, the nodes that depend on it directly.
    children: dict[Node, list[Node]] = {edge.node: [] for edge in roots}
    queue = list(children)
    while queue:
        node = queue.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in children:
                children[below] = []
                queue.append(below)
            children[below].append(node)
    leaves = {get_gradient_edge(weight).node: weight for weight in weights}
    path = _upwards([get_gradient_edge(tensor).node for tensor in inputs], children)
    groups = _groups({node: w for node, w in leaves.items() if node in children}, path, children)
    # A hook stores what arrives at a joint in the gradients of its group.
    keep = [(joint, partial(group.gradients.__setitem__, joint)) for group in groups for joint in group.joints]
    handles = [joint.register_prehook(hook) for joint, hook in keep]
    on_path = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node in path]
    off_path = [(edge, gradient) for edge, gradient in zip(roots, gradients, strict=True) if edge.node not in path]
    results: tuple[Tensor | None, ...] = (None,) * len(inputs)
    try:
        if on_path:
            results = run_engine([e for e, _ in on_path], [g for _, g in on_path], inputs, keep=True, accumulate=False)
    finally:
        for handle in handles:
            handle.remove()
    return results, Weights(groups, off_path, list(leaves.values()))


def backward_weight(rest: Weights, turns: Iterator[None]) -> None:
    """Add the gradients of the weights to their `.grad`, as a whole backward does, hooks included.

    The function advances `turns` before each group of `in_turn`, and once at the end.
    """
    for group in rest.groups:
        next(turns)
        edges, gradients, handles = [], [], []
        for joint, stored in group.gradients.items():
            for number, gradient in enumerate(stored):
                if gradient is not None:
                    edges.append(GradientEdge(joint, number))
                    gradients.append(gradient)
            if len(group.joints) > 1:
                # One joint may be behind another: what it would receive from there is in its stored gradient already.
                handles.append(joint.register_prehook(lambda _, stored=stored: stored))
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


def _upwards(starts: Sequence[Node], children: dict[Node, list[Node]], stop: set[Node] | None = None) -> set[Node]:
    """Return the starts and all nodes that depend on them, up to and including the nodes of `stop`."""
    above: set[Node] = set()
    queue = [node for node in starts if node in children]
    while queue:
        node = queue.pop()
        if node in above:
            continue
        above.add(node)
        if stop is None or node not in stop:
            queue += children[node]
    return above


def _groups(leaves: dict[Node, Tensor], path: set[Node], children: dict[Node, list[Node]]) -> list[_Group]:
    """Return the weights grouped by the joints that they share."""
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
