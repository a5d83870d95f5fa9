"""Metrics of an evaluation: functions of (model, batch) for one or several of them, and values over all samples."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shoal.distributed.failures import user_error
from shoal.distributed.mesh import Mesh, decided_by_rank_0
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.errors import JobError, ShoalError
from shoal.jobs.job import MetricKey, names_of_metrics
from shoal.numerics.generators import seed_everything
from shoal.numerics.over_all import Frames, OverAll, begun, is_metric_object, over_all, sum_of_rows
from shoal.parallel.axis_collectives import is_without_data
from shoal.training.microbatch.loss_pair import check_pair


class MetricCall:
    """Function of (model, batch) that returns the total and the weight of each metric in `names`, one after the other.

    `rows`: those of metrics over all samples, by key. `over`: the metrics that take them.
    `pairs`: names of metrics that returned a total and a weight.
    """

    def __init__(
        self, keys: Sequence[MetricKey], compute: Callable[[Any, Any], Sequence[Any]], in_stages: bool
    ) -> None:
        """Create the call. `compute`: returns one result for each key. `in_stages`: only a last stage sees results."""
        self._keys, self._compute, self._in_stages = keys, compute, in_stages
        self.names = names_of_metrics(keys)
        self.what = "loss" if self.names == ["loss"] else f"metric {', '.join(map(repr, self.names))}"
        self.over: dict[MetricKey, Any] = {}
        self.pairs: set[str] = set()
        self.rows: list[dict[MetricKey, Any]] = []

    def __call__(self, model: Any, batch: Any) -> tuple[Tensor | float, ...]:
        """Return totals and weights. Raises: JobError or LossError for a result of another kind."""
        numbers: list[Tensor | float] = []
        rows: dict[MetricKey, Any] = {}
        for key, result in zip(self._keys, self._compute(model, batch), strict=True):
            by_name: Mapping[MetricKey, Any] = {key: result}
            if isinstance(key, tuple) and not isinstance(result, OverAll):
                by_name = _named(f"metrics[{key!r}]", key, result)
            for name, value in by_name.items():
                if not isinstance(value, OverAll):
                    self.pairs.add(str(name))
                    numbers += check_pair("loss" if name == "loss" else f"metric {name!r}", value)
                    continue
                if self._in_stages and name not in self.over:
                    raise JobError(
                        given=f"metric {name!r}, which returns shoal.over_all(...), in pipeline stages",
                        conflict="rank 0 computes it, and only the last stage calls the function that names it",
                        remedy=f"write metrics={{{name!r}: shoal.over_all(metric, outputs=..., targets=...)}}",
                    )
                self.over[name] = value.metric
                rows[name] = value.rows()
                numbers += [sum_of_rows(rows[name]), 1.0] * len(names_of_metrics([name]))
        if rows and not any(is_without_data(leaf) for leaf in tree_leaves(rows) if isinstance(leaf, Tensor)):
            self.rows.append(rows)  # unlike those of a stage's trace
        return tuple(numbers)


def metric_calls(
    metrics: Mapping[MetricKey, Callable[[Any, Any], Any]], predict: Callable[[Any, Any], Any], in_stages: bool
) -> list[MetricCall]:
    """Return the calls that compute the metrics. Metrics over all samples of the same `outputs` share one call."""
    calls: list[MetricCall] = []
    shared: dict[int, tuple[Callable[[Any, Any], Any], dict[MetricKey, OverAll]]] = {}
    for key, function in metrics.items():
        over = over_all(function) if is_metric_object(function) else function
        if isinstance(over, OverAll):
            outputs = over.outputs or predict
            shared.setdefault(id(outputs), (outputs, {}))[1][key] = over
        else:
            calls.append(MetricCall([key], functools.partial(_alone, function), in_stages))
    for outputs, group in shared.values():

        def of_group(model: Any, batch: Any, outputs: Any = outputs, group: Any = group) -> list[OverAll]:
            rows = outputs(model, batch)
            return [over.of(rows, batch) for over in group.values()]

        calls.append(MetricCall(list(group), of_group, in_stages))
        calls[-1].over.update({key: over.metric for key, over in group.items()})
    return calls


def _alone(function: Callable[[Any, Any], Any], model: Any, batch: Any) -> list[Any]:
    return [function(model, batch)]


def values_over_all(
    mesh: Mesh, calls: Iterable[MetricCall], own: Frames, *, rounds: int, seed: int, lenient: bool
) -> dict[str, float]:
    """Return the values of the metrics over all samples, computed on rank 0 from all rows in the samples' order.

    Args:
        mesh: of the ranks. Rank index % num_data_ranks has computed a chunk.
        calls: with the metrics, on rank 0.
        own: the rows of this rank's chunks.
        rounds: largest number of chunks of a rank.
        seed: of the functions' random numbers.
        lenient: whether a function that raises gives NaN, as for a small part of the samples.

    Raises: UserCodeError or JobError of rank 0, on every rank. Collective: all ranks, `rounds` gathers, one broadcast.
    """
    with contextlib.ExitStack() as files:
        every = files.enter_context(contextlib.closing(Frames()))
        for _, content in zip(range(rounds), itertools.chain(own, itertools.repeat(b"")), strict=False):
            for frame in mesh.send_to_first(content):
                if frame:
                    every.add(frame)

        def computed() -> dict[str, float]:
            seed_everything(seed)
            values: dict[str, float] = {}
            over = {key: metric for call in calls for key, metric in call.over.items()}
            metrics: dict[MetricKey, Any] = {}
            for frame in every:
                for rows in torch.load(io.BytesIO(frame), weights_only=True):
                    for key, part in rows.items():
                        if key not in metrics:
                            metrics[key] = begun(over[key], files)
                        _called(key, metrics[key].update, *part)
            for key, metric in metrics.items():
                try:
                    result = _called(key, metric.compute)
                except ShoalError:
                    if not lenient:
                        raise
                    result = dict.fromkeys(key, math.nan) if isinstance(key, tuple) else math.nan
                by_name = (
                    _named(f"metrics[{key!r}]", key, result, others=True) if isinstance(key, tuple) else {key: result}
                )
                values |= {str(name): _number(name, value) for name, value in by_name.items()}
            return values

        refused = own_collectives_refused("a metric over all samples, which rank 0 computes")
        with torch.no_grad(), refused if mesh.world_size > 1 else contextlib.nullcontext():
            return decided_by_rank_0(mesh, dict[str, float], computed)


def _called(key: MetricKey, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except ShoalError:
        raise
    except Exception as error:
        raise user_error(f"metric {key!r}, over all samples", error) from error


def _named(given: str, names: tuple[str, ...], result: Any, others: bool = False) -> dict[MetricKey, Any]:
    """Return the results by name. Raises: JobError unless they have these names, and no `others` unless allowed."""
    if not isinstance(result, Mapping) or not (set(result) >= set(names) if others else set(result) == set(names)):
        kind = ", ".join(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
        raise JobError(
            given=f"{given}, which returned {kind}",
            conflict="a metric under several names returns a dict with a value for each name",
            remedy='return {"accuracy": (right, count), "f1": shoal.over_all(f1, outputs, targets)}, say',
        )
    return {name: result[name] for name in names}


def _number(key: MetricKey, value: Any) -> float:
    if isinstance(value, Mapping):
        names = tuple(map(str, value))
        given, remedy = f"a dict of {', '.join(names)}", f"write metrics={{{names!r:.80}: ...}}, or some of these names"
    else:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            given, remedy = f"{value!r:.60}", "return a number"
    raise JobError(
        given=f"metric {key!r}, over all samples, which returned {given}",
        conflict="the value of a metric is one number",
        remedy=remedy,
    )
