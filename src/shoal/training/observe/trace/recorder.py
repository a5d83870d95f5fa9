"""Trace recorder: an observer that writes the trace of a run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.checkpoint.state import merged_optimizers, optimizer_state
from shoal.data.loader import Microbatch
from shoal.numerics.operators import is_strided
from shoal.parallel.base import Strategy
from shoal.parallel.model.sharded_model import ShardedModel, TensorSlices, local, state_slices, whole_tensors
from shoal.training.observe.trace.traces import MicrobatchTrace, StepTrace, digest, fingerprint, state_by_key, write
from shoal.training.observer import Observer

INPUT = "(batch)"
# Function from a module's output on this rank to the whole model's output.
Whole = Callable[[Tensor], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


class ForwardRecorder:
    """Recorder of fingerprints of each module's output, one per grain; for the engine and the reference."""

    def __init__(
        self,
        model: nn.Module,
        outputs: Mapping[str, Callable[[Tensor], Tensor] | None] | None = None,
        is_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """Register the hooks. `outputs` and `is_elsewhere`: of a divided model, as in ModelDivision."""
        self._is_elsewhere = is_elsewhere
        self.fingerprints: dict[str, dict[int, list[float]]] = {}
        self._outputs = outputs or {}
        self._microbatch: Microbatch | None = None
        self._calls: Counter[str] = Counter()
        names = {module: name or "(model)" for name, module in model.named_modules()}
        self._handles = [m.register_forward_hook(functools.partial(self._called, n)) for m, n in names.items()]

    def begin(self, microbatch: Microbatch, batch: Any) -> None:
        """Assign forwards to this microbatch until `end`."""
        self._microbatch, self._calls = microbatch, Counter()
        self._note(INPUT, batch)

    def end(self) -> None:
        """End the forward: later calls are recomputation."""
        self._microbatch = None

    def _called(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return  # tensors within a transform of torch.func have no values
        whole = self._outputs.get(name, _same)
        # Only the output of a compiled block is visible, not its inner modules.
        if self._microbatch is not None and whole is not None and not torch.compiler.is_compiling():
            self._calls[name] += 1
            call = self._calls[name]
            if not self._is_elsewhere():
                self._note(name if call == 1 else f"{name}#{call}", output, whole)

    def _note(self, call: str, value: Any, whole: Whole = _same) -> None:
        microbatch = self._microbatch
        assert microbatch is not None
        rows = [grain.size for grain in microbatch.grains]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for number, leaf in enumerate(tree_leaves(value)):
                # Tensors without a dim of samples cannot be compared by grain.
                if (
                    not isinstance(leaf, Tensor)
                    or leaf.ndim == 0
                    or leaf.size(0) != sum(rows)
                    or (
                        is_strided(leaf)
                        and leaf.numel() > 1
                        and not any(leaf.stride())
                        and bool(leaf.view(-1)[0].isnan())
                    )
                ):
                    continue
                name = call if number == 0 else f"{call}[{number}]"
                for grain, numbers in zip(microbatch.grains, fingerprint(whole(leaf), rows), strict=True):
                    self.fingerprints.setdefault(name, {})[grain.index] = numbers

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class OwnGradients:
    """Gradients of each parameter on this rank, accumulated over microbatches before any other hook sees them."""

    def __init__(self, parameters: list[tuple[str, nn.Parameter]]) -> None:
        self.sums: dict[str, Tensor] = {}
        self.listens = True  # False while a loss differentiates, since torch calls the parameters' hooks then, too
        self._before: dict[str, Tensor | None] = {}  # with hooks of the job: the part of the sum that `.grad` lacks
        self._handles = []
        for name, parameter in parameters:
            hooks = parameter._post_accumulate_grad_hooks or {}
            engine = {  # hooks of shoal's own functions
                key: hook
                for key, hook in hooks.items()
                if getattr(getattr(hook, "func", hook), "__module__", "").startswith("shoal.")
            }
            changes = len(engine) < len(hooks)  # the job's hooks change what was accumulated
            before, after = self._hooks(name, parameter, changes)
            self._handles.append(parameter.register_hook(before))
            if changes:
                self._handles.append(parameter.register_post_accumulate_grad_hook(after))
                for key, hook in engine.items():  # torch calls hooks in order: move the engine's hooks behind this one
                    del hooks[key]
                    hooks[key] = hook

    def _hooks(self, name: str, parameter: nn.Parameter, changes: bool) -> tuple[Any, Any]:
        """Return hooks for a parameter's gradient and, if the job's hooks change it, for what was accumulated."""

        def before(gradient: Tensor) -> None:
            if not self.listens:
                return
            with torch._C.DisableTorchFunction(), torch.no_grad():
                if changes:
                    if parameter.grad is None:
                        self._before[name] = self.sums.get(name)
                    return
                wide = _widened(gradient)
                total = self.sums.get(name)
                self.sums[name] = wide.clone() if total is None else total.add_(wide)

        def after(parameter: Tensor) -> None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                if parameter.grad is not None:
                    earlier, wide = self._before[name], _widened(parameter.grad)
                    self.sums[name] = wide.clone() if earlier is None else earlier + wide

        return before, after

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _widened(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.to(torch.promote_types(dense.dtype, torch.float32))


class TraceRecorder(Observer):
    """Recorder of this rank's part of every step of an engine, in a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def attach(self, sharded_model: ShardedModel, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        """Watch a model and its optimizer, and write their state. Collective: as `whole_tensors`."""
        self._sharded_model, self._optimizer, self._strategy = sharded_model, optimizer, strategy
        self._named = [(name, p) for name, p in sharded_model.parameters() if p.requires_grad]
        # In a divided model a local gradient is not the gradient of this rank's grains.
        self._own = OwnGradients([] if sharded_model.divided else self._named)
        division = sharded_model.division
        self._forward = ForwardRecorder(sharded_model.model, division.outputs, division.is_elsewhere)
        self._trace = StepTrace(-1)
        self._state()
        write(self._folder, self._trace, self._rank)

    def begin(self, step: int, factor: float) -> None:
        self._trace = StepTrace(step, factor=factor)
        self._forward.fingerprints = {}
        self._own.sums = {}

    def microbatch(self, microbatch: Microbatch, batch: Any) -> None:
        self._microbatch, self._own.listens = microbatch, False
        self._forward.begin(microbatch, batch)

    def forwarded(self) -> None:
        self._forward.end()

    def loss(self, total: Tensor, weight: Tensor | float) -> None:
        self._own.listens = True
        self._forward.end()
        microbatch = self._microbatch
        if not self._sharded_model.mesh.counts_loss:
            return
        ids = tuple(tuple(ids.tolist()) for ids in microbatch.ids)
        grains = tuple(grain.index for grain in microbatch.grains)
        self._trace.parts.append(MicrobatchTrace(self._rank, grains, ids, float(total), float(weight)))

    def reduced(self, loss: float, weight: float, scale: float) -> None:
        trace = self._trace
        trace.loss, trace.weight, trace.forward = loss, weight, self._forward.fingerprints
        if not self._sharded_model.divided:
            used = {name for name, p in self._named if p.grad is not None}  # others are of another optimizer
            trace.gradients[self._rank] = {name: g * scale for name, g in self._own.sums.items() if name in used}
        self._gradients("reduction", scale)

    def clipped(self, norm: float) -> None:
        self._trace.norm = norm
        self._gradients("clipping", 1.0)

    def updated(self, skipped: str | None) -> None:
        self._trace.skipped = skipped
        self._state()
        write(self._folder, self._trace, self._rank)

    def _gradients(self, phase: str, scale: float) -> None:
        gradients = [
            (name, p.grad.to_dense() if p.grad.is_sparse else p.grad) for name, p in self._named if p.grad is not None
        ]
        self._keep({f"{phase}/{name}": (self._sharded_model.part(name, g), local(g) * scale) for name, g in gradients})

    def _state(self) -> None:
        sharded_model = self._sharded_model
        tensors, self._trace.optimizer = optimizer_state(self._optimizer, sharded_model.model)
        if sharded_model.divides_state:
            self._trace.optimizer = merged_optimizers(sharded_model.mesh.gather_json(self._trace.optimizer))
        self._trace.divided = sharded_model.divided
        if sharded_model.divided:
            names = sharded_model.mesh.gather_json(list(sharded_model.division.owners))
            self._trace.owned = sorted(set().union(*names))
        if not sharded_model.divided and sharded_model.divides_state:
            updates = self._strategy.update_division.updates
            self._trace.updates[self._rank] = [name for name, p in self._named if updates(p)]
        parameters = {name for name, _ in sharded_model.model.named_parameters()}
        self._keep(state_by_key(sharded_model.tensors(), parameters, state_slices(sharded_model, tensors)))

    def _keep(self, tensors: TensorSlices) -> None:
        """Store digests of this rank's tensors, and on rank 0 whole tensors with digests of those that are cut.

        Collective: as `whole_tensors`.
        """
        own = self._trace.digests.setdefault(self._rank, {})
        for key, (part, tensor) in tensors.items():
            own[key if part.is_whole else f"{key} {part.to_json()}"] = digest(tensor)
        for key, whole in whole_tensors(self._sharded_model, tensors):
            if whole is not None:
                self._trace.tensors[key] = whole.detach().clone()
                if key not in own:
                    own[key] = digest(whole)

    def close(self) -> None:
        """Remove the hooks."""
        self._forward.close()
        self._own.close()
