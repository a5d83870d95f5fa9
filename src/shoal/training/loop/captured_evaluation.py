"""Captured evaluation: one CUDA graph with the forwards and metrics of a chunk, which later chunks of its shape replay.

A metric returns a total and a weight, and is a function of model and batch. So a replay repeats all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.numerics.captured_draws import NotCapturableError
from shoal.numerics.generators import all_generators
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.training.loop.captured_step import TRIAL_TOLERANCE, CaptureRules, Recorder, Recording, addresses, reason_of

# Uncaptured chunks of a shape before a capture: a set of so few chunks gains nothing. Limit of captures.
_WARM_UPS, _MOST_CAPTURES = 3, 4


class CapturedChunks:
    """Graphs of the chunks of an evaluation set, one for each shape of a chunk and place of the model in memory.

    `why_not`: why no chunk is captured, or None.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, note: Callable[[str], None] | None = None) -> None:
        self.why_not: str | None = None
        self._model, self._recorder, self._note = model, recorder, note
        self._seen: Counter[Any] = Counter()
        # By kind of chunk: its input tensors, its graph, and for each number its value if the host knows it.
        self._graphs: dict[Any, tuple[list[Any], Recording, list[Any]]] = {}

    def __call__(self, batch: Any, compute: Callable[[Any], list[Any]]) -> list[Any]:
        """Return `compute(batch)`: numbers or tensors []. The tensors have their values until the next call."""
        leaves, spec = tree_flatten(batch)
        odd = any(not isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves)
        if odd or self.why_not is not None:
            return compute(batch)
        kinds = tuple((t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves)
        kind = spec, kinds, addresses([*self._model.parameters(), *self._model.buffers()])
        if kind not in self._graphs:
            self._seen[kind] += 1
            if self._seen[kind] <= _WARM_UPS:
                return compute(batch)
            self._capture(kind, leaves, compute)
            if self.why_not is not None:
                return compute(batch)
        inputs, recording, known = self._graphs[kind]
        for own, leaf in zip(inputs, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf)
        recording.replay()
        outputs = iter(recording.outputs)
        return [next(outputs) if number is None else number for number in known]

    def _capture(self, kind: Any, leaves: list[Any], compute: Callable[[Any], list[Any]]) -> None:
        inputs = [torch.empty_like(leaf).copy_(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        numbers: list[Any] = []

        def body() -> tuple[Tensor, ...]:
            numbers[:] = compute(tree_unflatten(inputs, kind[0]))
            return tuple(number.detach().double().reshape(()) for number in numbers if isinstance(number, Tensor))

        try:
            if len(self._graphs) == _MOST_CAPTURES:
                raise NotCapturableError("chunks have many shapes, or parameters are replaced again and again")
            before = all_generators()
            wanted = self._recorder.warm_up(body, CaptureRules())
            if all_generators() != before:
                raise NotCapturableError("a metric draws random numbers")
            recording = self._recorder.record(body)
            self._graphs[kind] = inputs, recording, [None if isinstance(n, Tensor) else n for n in numbers]
            recording.replay()
            pairs = zip(recording.outputs, wanted, strict=True)
            if not all(
                torch.allclose(own, value, rtol=TRIAL_TOLERANCE, atol=0.0, equal_nan=True) for own, value in pairs
            ):
                raise NotCapturableError("a trial of the graph gave other numbers than the metrics themselves")
        except Exception as error:  # an error of a metric recurs in the ordinary call, which reports it
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
            self.why_not = reason_of(error, self._model)
            if self._note is not None:
                self._note(f"execution.cuda_graph: evaluations run without a graph: {self.why_not}")
            self._graphs.clear()
