"""Evaluation: metrics as sums over all samples, each sample once, on any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from shoal.data.loader import DataRank
from shoal.data.source import MapSource, Opened, Source, collate_samples, digest_of_samples, raised
from shoal.data.stream import refuse_other_samples
from shoal.distributed.failures import user_error
from shoal.distributed.mesh import Mesh, collectively
from shoal.distributed.own_collectives import own_collectives_refused
from shoal.errors import JobError, ShoalError, UserCodeError
from shoal.jobs.job import Job, MetricKey, named_metric, names_of_metrics
from shoal.launch.supervise.heartbeat import Heartbeat
from shoal.numerics import device_reads
from shoal.numerics.generators import generators_kept, seed_everything
from shoal.numerics.no_trace import NoTrace, copy_of
from shoal.numerics.outputs import InPieces, most_pieces, num_rows, pieces_of
from shoal.numerics.over_all import Frames
from shoal.numerics.precision import Precision
from shoal.plans.grains import random_key
from shoal.runs.records import sample_rate
from shoal.training.microbatch.look import differ, distance, find_state
from shoal.training.microbatch.loss_pair import LossPair
from shoal.training.microbatch.metric_calls import MetricCall, metric_calls, values_over_all
from shoal.training.microbatch.predictions import predict_function
from shoal.training.microbatch.step import Evaluate

T = TypeVar("T")
# Messages of torch's autograd about a derivative under no_grad.
_NO_GRADIENT = ("does not require grad", "not have been used in the graph")

# (model, batch) -> outputs with a row per sample.
Predict = Callable[[Any, Any], Any]

# Seconds between two agreements of the ranks on whether to leave an evaluation, and between two lines on its progress.
_AGREE_SECONDS, _SHOW_SECONDS = 1.0, 10.0
_LEFT = "an evaluation is left"  # key in the ranks' store

# Maximum number of samples in one forward of an evaluation. The chunks must not depend on the layout.
MAX_CHUNK = 256
# The same if only some samples are evaluated: small, to have more than one chunk.
SAMPLED_CHUNK = 4


class EvaluationLeftError(Exception):
    """An evaluation was left between two chunks on all ranks, since a rank has to stop."""


@dataclass(frozen=True)
class BetweenChunks:
    """Functions that an evaluation calls between two chunks.

    `stop_requested`: whether this rank has to stop. `note`: takes lines on the progress.
    """

    stop_requested: Callable[[], bool] = lambda: False
    note: Callable[[str], None] = lambda line: None


class _Rounds:
    """Rounds of one evaluation. In each round a rank computes a chunk, and before it any rank may leave the evaluation.

    `meets`: the ranks communicate within chunks, so that all leave before the same round. They agree about once a
    second. Otherwise a rank leaves by itself, and tells the others through the store.
    """

    def __init__(self, mesh: Mesh, between: BetweenChunks, meets: bool) -> None:
        self._mesh, self._between, self._meets = mesh, between, meets
        self._began = self._shown = self._agreed = time.monotonic()
        self._round = self._agreed_round = self._next = 0
        self.left = False

    def leaves(self, done: int, total: int | None) -> bool:
        """Return True if this rank leaves before the next round. `done`: samples of all ranks in earlier rounds.

        Collective: all ranks, if they meet.
        """
        now = time.monotonic()
        if done and now - self._shown >= _SHOW_SECONDS:
            of = f" of {total:,}" if total is not None else ""
            self._between.note(f"evaluation: {done:,}{of} samples, {sample_rate(done, now - self._began)}")
            self._shown = now
        stops, store = self._between.stop_requested(), self._mesh.store
        if store is None:
            self.left = stops
        elif self._meets:
            if self._round == self._next:
                each = (now - self._agreed) / max(1, self._round - self._agreed_round)
                rows = self._mesh.all_gather([float(stops), each])
                self.left = bool(rows[:, 0].any())
                self._agreed, self._agreed_round = now, self._round
                self._next += max(1, int(_AGREE_SECONDS / max(1e-3, rows[:, 1].max()))) if self._round else 1
            self._round += 1
        elif stops:
            store.set(_LEFT, "")
            self.left = True
        elif now - self._agreed >= _AGREE_SECONDS:
            self._agreed, self.left = now, store.check([_LEFT])
        return self.left


class Evaluator:
    """Evaluation of a job's loss and metrics on its evaluation data.

    `captured`: returns the second argument's result for a batch, possibly by a graph; None for ranks that communicate.
    """

    captured: Callable[[Any, Callable[[Any], list[Any]]], list[Any]] | None = None

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        precision: Precision,
        data: Opened | None,
        metrics: Mapping[MetricKey, Callable[[Any, Any], Any]],
        *,
        most_samples: int | None = None,
        divided: bool = False,
        syncs_every_microbatch: bool = False,
        evaluate: Evaluate | None = None,
        heartbeat: Heartbeat | None = None,
        name: str = "eval_data",
    ) -> None:
        """Create the evaluator. `divided`: several ranks compute the model together. `name`: of the data, in messages.

        `syncs_every_microbatch`: ranks with different chunks communicate in each forward. `evaluate`: computes a
        metric's pair if the model's stages are on several ranks. `most_samples`: None for all samples.
        """
        self._evaluate, self._heartbeat = evaluate, heartbeat or Heartbeat(None)
        self._divided, self._syncs_every_microbatch = divided, syncs_every_microbatch
        self._job, self._mesh, self._precision = job, mesh, precision
        self.source = data.source if data is not None else None
        self._name = name
        self._collate = (data.collate if data is not None else None) or job.collate or default_collate
        self._metrics = dict(metrics)
        self._calls = metric_calls(metrics, predict_function(job), evaluate is not None)
        self._functions: dict[MetricCall, Any] = dict(zip(self._calls, self._calls, strict=True))
        if job.outputs is not None:  # whose chunks are whole batches
            self._functions |= {call: InPieces(call) for call in self._calls if call.what != "loss"}
        # Whether a call needs gradients, as its first use showed.
        self._differentiates: dict[str, bool] = {}
        self.without_value: dict[str, str] = {}  # metrics without a value in the last evaluation, and why
        self._most = most_samples
        self._first: list[Any] | None = None  # the samples of a stream's first chunk, which every rank reads
        most = MAX_CHUNK if most_samples is None else SAMPLED_CHUNK
        # A loss over the global batch sees as many samples as in training, in order, on whichever rank.
        self._chunk = min(job.global_batch, most) if job.outputs is None or not metrics else job.global_batch

    def evaluate(self, model: nn.Module, between: BetweenChunks | None = None) -> tuple[dict[str, float], int]:
        """Return each metric's total divided by its weight, and the number of samples.

        Raises: an error of any rank, on every rank; EvaluationLeftError, on every rank, if `between` of any rank stops.
        Collective: all ranks, one JSON gather; if ranks communicate in the model, an all-gather about once a second.
        """
        if self.source is None:
            return {}, 0
        self.without_value = {}
        rounds = None
        if between is not None:
            rounds = _Rounds(self._mesh, between, self._divided or self._syncs_every_microbatch)
        with contextlib.closing(Frames()) as rows:
            computed = collectively(self._mesh, self._divided, lambda: self._computed(model, rounds=rounds, rows=rows))
            kinds = {
                "pairs": [name for call in self._calls for name in call.pairs],
                "over": [name for call in self._calls for name in names_of_metrics(call.over)],
            }
            gathered = self._mesh.gather_json(
                {**computed, **kinds, "left": rounds is not None and rounds.left, "rows": len(rows)}
            )
            if any(part["left"] for part in gathered):
                raise EvaluationLeftError
            pairs, rowwise = ({name for part in gathered for name in part[kind]} for kind in kinds)
            if pairs & rowwise:
                raise JobError(
                    given=f"metric {', '.join(sorted(pairs & rowwise))}, which returned shoal.over_all(...) for some "
                    "batches and a pair for others",
                    conflict="its value would be of a part of the samples",
                    remedy="return shoal.over_all(...) for each batch, or a pair for each",
                )
            refuse_other_samples(self._name, [part["first"] for part in gathered])
            self._heartbeat.enter("away")
            over, most_rows = dict[str, float](), max(part["rows"] for part in gathered)
            if most_rows:
                seed, lenient = random_key(self._job.seed, "metrics over all samples"), self._most is not None
                over = values_over_all(self._mesh, self._calls, rows, rounds=most_rows, seed=seed, lenient=lenient)
        # fsum rounds once, so that the result does not depend on how the chunks were divided among the ranks.
        count = sum(len_ for part in gathered for len_ in part["samples"])
        metrics = {}
        for name in names_of_metrics(self._metrics):
            total = _fsum(t for part in gathered for t in part["sums"][name][0])
            weight = _fsum(w for part in gathered for w in part["sums"][name][1])
            metrics[name] = over[name] if name in over else total / weight if weight else math.nan
            if not math.isfinite(metrics[name]):
                why = "its weights sum to 0" if weight == 0 else "its sum is not finite"
                self.without_value[name] = f"its function returned {over[name]}" if name in over else why
        return metrics, count

    def rehearse(self, model: nn.Module) -> None:
        """Compute this rank's first chunk to detect errors of an evaluation early. It changes nothing.

        Streams are skipped. Raises: as `evaluate`; JobError for state that changes a metric. Collective: all ranks.
        """
        if not isinstance(self.source, MapSource):
            return
        mesh = self._mesh
        together = (lambda value: any(mesh.gather_json(value))) if self._divided else bool
        several = mesh.world_size > 1
        refused = own_collectives_refused("the loss or a metric") if several else contextlib.nullcontext()
        functions = {", ".join(names_of_metrics([key])): function for key, function in self._metrics.items()}
        with NoTrace(model, {**functions, self._name: self.source.data}) as no_trace, refused:

            def rehearsed() -> None:
                first = self.first_sums(model)
                written = no_trace.changed_buffers()
                if together(bool(written)):
                    again = self.first_sums(model)
                    no_trace.restore()
                    noise = distance(self.first_sums(model), first)  # of kernels that add in another order each time
                    if together(differ(again, first, 4 * noise)):
                        raise JobError(
                            given=f"a metric that depends on buffer {min(written, default='of another rank')}, which "
                            "the model writes while it is evaluated",
                            conflict="each rank evaluates other samples, so that the metric depends on the number of "
                            "devices",
                            remedy="write the buffer in training alone: if self.training: ...",
                        )
                # A data set that keeps samples would only be read again and again.
                if together(any(not change.name.startswith(f"{self._name}.") for change in no_trace.changes())):
                    find_state(
                        no_trace,
                        lambda: self.first_sums(model, 1),
                        lambda: self.first_sums(model),
                        first,
                        self._job.allow_state,
                        together=together,
                        divided=self._divided,
                    )

            collectively(mesh, self._divided, rehearsed)

    def use(self, precision: Precision) -> None:
        """Evaluate in another precision or memory format from now on."""
        self._precision = precision

    def first_sums(self, model: nn.Module, chunk: int = 0) -> tuple[float, ...]:
        """Return all metrics' totals and weights over the chunk of this rank with this index; empty for a stream."""
        if not isinstance(self.source, MapSource):
            return ()
        sums = self._computed(model, slice(chunk, chunk + 1))["sums"]
        return tuple(number for pair in sums.values() for numbers in pair for number in numbers)

    def _computed(
        self,
        model: nn.Module,
        chunks: slice = slice(None),
        rounds: _Rounds | None = None,
        rows: Frames | None = None,
    ) -> dict[str, Any]:
        """Return this rank's totals and weights by metric, with the numbers of samples. Raises: UserCodeError.

        `rows`: receives those of metrics over all samples, chunk by chunk.
        """
        names = [name for call in self._calls for name in call.names]
        sums: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
        samples: list[int] = []
        unread: list[Callable[[], list[float]]] = []  # totals and weights of each chunk
        place = DataRank(self._mesh.data_rank, self._mesh.num_data_ranks)
        self._heartbeat.enter("away")  # until the first chunk is read, so that its time counts as that of no chunk
        meets = self._syncs_every_microbatch and self._evaluate is None
        calls: list[bool] = []
        chunk_rows: list[Any] = []
        handle = model.register_forward_hook(lambda *_: calls.append(True)) if meets else None

        def pairs_of_call(own: MetricCall, copies: bool, batch: Any) -> Sequence[Any]:
            own.rows.clear()
            pairs: Any = LossPair(self._functions[own], self._precision, own.what, checks=False)
            batch = copy_of(batch) if copies else batch
            with self._precision.products():
                if self._evaluate is not None:
                    return self._evaluate(pairs, batch, 2 * len(own.names))
                return pairs(model, batch)  # type: ignore[no-any-return]

        def pairs_of(batch: Any) -> list[Any]:
            pairs: list[Any] = []
            chunk_rows.clear()
            for number, own in enumerate(self._calls, 1):
                calls.clear()
                # Other functions, and a second attempt of this function, need the batch as it was read.
                copies = number < len(self._calls) or own.what not in self._differentiates
                call = functools.partial(pairs_of_call, own, copies)
                pairs += self._called(own.what, model, functools.partial(call, batch))
                chunk_rows.extend(own.rows)
                # Other ranks wait in the model. If this chunk did not call it, compute the first chunk that does,
                # the same on all such ranks.
                with generators_kept() if meets else contextlib.nullcontext():  # a graph records nothing of generators
                    is_cut = meets and calls and self._job.outputs is not None and num_rows(batch) is not None
                    pieces = pieces_of(batch) if is_cut else []
                    for _ in range(
                        len(pieces), most_pieces(self._chunk) if is_cut else 0
                    ):  # of longer chunks elsewhere
                        self._called(own.what, model, functools.partial(call, pieces[0]))
                    for _, _, other in self._chunks(DataRank(0, 1)) if meets and not calls else ():
                        self._called(own.what, model, functools.partial(call, self._precision.inputs(other)))
                        if calls:
                            break
            return pairs

        training = model.training
        model.eval()
        try:
            for size, batch in itertools.islice(self._batches(place, rounds), chunks.start, chunks.stop):
                counted = self._mesh.counts_loss and size > 0
                if counted:
                    samples.append(size)
                # A graph cannot copy rows to the host.
                can_capture = not any(self._differentiates.get(own.what, True) or own.over for own in self._calls)
                pairs = self.captured(batch, pairs_of) if self.captured is not None and can_capture else pairs_of(batch)
                if counted:
                    unread.append(_read_later(pairs))
                if counted and rows is not None and chunk_rows:
                    buffer = io.BytesIO()
                    torch.save(chunk_rows, buffer)  # noqa: TID251  (read with weights_only: data, no code)
                    rows.add(buffer.getvalue())
        finally:
            model.train(training)
            if handle is not None:
                handle.remove()
        for numbers in (read() for read in unread):
            for (totals, weights), total, weight in zip(sums.values(), numbers[::2], numbers[1::2], strict=True):
                totals.append(total)
                weights.append(weight)
        self._heartbeat.enter("exposed_communication")  # the next exchange waits for the other ranks
        return {"samples": samples, "sums": sums, "first": digest_of_samples(self._first)}

    def _batches(self, place: DataRank, rounds: _Rounds | None = None) -> Iterator[tuple[int, Any]]:
        """Yield this rank's chunks as (number of samples, batch on the device). Seed the generators for each chunk."""
        for number, size, batch in self._chunks(place, rounds):
            self._heartbeat.enter("evaluation")
            batch = self._precision.inputs(batch)
            seed_everything(random_key(self._job.seed, "evaluation of chunk", number))
            yield size, batch

    def predict(self, model: nn.Module, function: Predict, take: Callable[[int, Any], None]) -> None:
        """Call `take` with the number of samples and the `function`'s output for each of this rank's chunks, in order.

        This process must have the whole model, which is in eval mode without gradients. Raises: UserCodeError.
        """
        training = model.training
        model.eval()
        try:
            for size, batch in self._batches(DataRank(self._mesh.data_rank, self._mesh.num_data_ranks)):

                def predicted(batch: Any = batch) -> Any:
                    with self._precision.products(), self._precision.autocast():
                        try:
                            return function(model, batch)
                        except ShoalError:
                            raise
                        except Exception as error:
                            raise user_error("predict", error, batch) from error

                take(size, self._called("predict", model, predicted))
        finally:
            model.train(training)

    def _called(self, name: str, model: nn.Module, call: Callable[[], T]) -> T:
        """Return the result of a metric's `call`, without gradients unless the metric differentiates.

        If the first call raises without gradients, repeat it with them, from the same buffers and generators. Ranks
        that compute one model together repeat it only if torch's error reports missing gradients: then all ranks raise.
        Gradients that the call accumulates in parameters are discarded.
        """
        device = self._mesh.device
        known = self._differentiates.get(name)
        if known is None:
            try:
                with _as_before_errors(model, device), torch.no_grad():
                    result = call()
            except UserCodeError as error:
                alike = any(sign in error.conflict for sign in _NO_GRADIENT) and self._evaluate is None
                if self._divided and not alike:  # stages of a pipeline never raise alike
                    raise
                known = True
            else:
                self._differentiates[name] = False
                return result
        if not known:
            with torch.no_grad():
                return call()
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        try:
            for parameter, _ in gradients:  # the metric may run a backward
                parameter.grad = None
            with torch.enable_grad():
                result = tree_map_only(Tensor, Tensor.detach, call())
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
        self._differentiates[name] = True
        return result

    def _read(self, stream: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield the chunks of a stream. Seed the generators for each chunk, so that all ranks read the same samples."""
        samples: Iterator[Any] | None = None
        for number in itertools.count():
            seed_everything(random_key(self._job.seed, "evaluation read", number))
            try:
                samples = samples or iter(itertools.islice(stream, self._most))
                chunk = list(itertools.islice(samples, self._chunk))
            except Exception as error:
                raise raised(self._name, "the stream", error, "mend the stream") from error
            if not chunk:
                return
            yield chunk

    def _chunks(self, place: DataRank, rounds: _Rounds | None = None) -> Iterator[tuple[int, int, Any]]:
        """Yield this rank's chunks as (index, number of samples, batch). Rank index % num_ranks computes a chunk."""
        if isinstance(self.source, MapSource):
            count = min(len(self.source), self._most or len(self.source))
            for begin in range(0, count, place.num_ranks * self._chunk):
                if rounds is not None and rounds.leaves(begin, count):
                    return
                start = begin + place.rank * self._chunk
                if start >= count:
                    if self._syncs_every_microbatch:  # an empty chunk, to have as many as other ranks
                        yield 0, 0, self.source.fetch([np.zeros(1, np.int64)], [random_key(self._job.seed, "filler")])
                    continue
                ids = np.arange(start, min(start + self._chunk, count), dtype=np.int64)
                key = random_key(self._job.seed, "evaluation", start)
                yield start // self._chunk, len(ids), self.source.fetch([ids], [key])
        else:
            own, number, first = 0, -1, None
            for number, samples in enumerate(self._read(self.source or ())):
                first = self._first = first or samples
                if rounds is not None and not number % place.num_ranks and rounds.leaves(number * self._chunk, None):
                    return
                if number % place.num_ranks == place.rank:
                    own += 1
                    seed_everything(random_key(self._job.seed, "evaluation", number))
                    yield number, len(samples), collate_samples(self._collate, samples, self._name)
            if self._syncs_every_microbatch and own < -(-(number + 1) // place.num_ranks):
                yield 0, 0, collate_samples(self._collate, first or [], self._name)


def _read_later(numbers: Sequence[Any]) -> Callable[[], list[float]]:
    """Queue a copy of numbers, some of which may be on a device. Return the function that reads the copy."""
    late = [isinstance(number, Tensor) and device_reads.waits(number.device) for number in numbers]
    queued = [number.detach().double().reshape(()) for number, is_late in zip(numbers, late, strict=True) if is_late]
    here = [0.0 if is_late else float(number) for number, is_late in zip(numbers, late, strict=True)]
    if not queued:
        return lambda: here
    reading = device_reads.LateNumbers(torch.stack(queued))

    def read() -> list[float]:
        own = iter(reading.numbers().tolist())
        return [next(own) if is_late else number for number, is_late in zip(here, late, strict=True)]

    return read


class EvaluationSets:
    """Evaluators of a job's evaluation sets by name. Metrics are `NAME/METRIC`, or `METRIC` for an unnamed set."""

    def __init__(self, by_name: Mapping[str, Evaluator]) -> None:
        self._by_name = dict(by_name)

    @property
    def sources(self) -> dict[str, Source]:
        """Data sources of the sets, by name."""
        return {name: own.source for name, own in self._by_name.items() if own.source is not None}

    def evaluate(self, model: nn.Module, between: BetweenChunks | None = None) -> tuple[dict[str, float], int]:
        """Return the metrics of all sets, and the number of samples in all sets.

        Raises: as `Evaluator.evaluate`. Collective: all ranks.
        """
        metrics: dict[str, float] = {}
        count = 0
        for name, evaluator in self._by_name.items():
            own_metrics, own = evaluator.evaluate(model, between)
            metrics |= {named_metric(name, metric): value for metric, value in own_metrics.items()}
            count += own
        return metrics, count

    def capture(self, make: Callable[[], Callable[[Any, Callable[[Any], list[Any]]], list[Any]] | None]) -> None:
        """Give each evaluator its `captured`, from one call of `make` each."""
        for evaluator in self._by_name.values():
            evaluator.captured = make()

    @property
    def without_value(self) -> dict[str, str]:
        """Metrics of all sets without a value in the last evaluation, and why."""
        sets = self._by_name.items()
        return {named_metric(name, metric): why for name, one in sets for metric, why in one.without_value.items()}

    def rehearse(self, model: nn.Module) -> None:
        """Rehearse the evaluation of each set, as `Evaluator.rehearse` does. Collective: all ranks."""
        for evaluator in self._by_name.values():
            evaluator.rehearse(model)

    def use(self, precision: Precision) -> None:
        """Evaluate all sets in another precision or memory format from now on."""
        for evaluator in self._by_name.values():
            evaluator.use(precision)

    def first_sums(self, model: nn.Module) -> tuple[float, ...]:
        """Return the first sums of all sets, as `Evaluator.first_sums` does."""
        return tuple(number for evaluator in self._by_name.values() for number in evaluator.first_sums(model))


@contextlib.contextmanager
def _as_before_errors(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and generators if the body of the context raises, for a second attempt."""
    buffers = [
        (module._buffers, name, value, value._version, value.detach().clone())
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None
    ]
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    except Exception:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        with torch.no_grad():
            for home, name, value, version, clone in buffers:
                home[name] = value
                if value._version != version and not value.is_meta:
                    value.copy_(clone)
        raise


def _fsum(values: Iterable[float]) -> float:
    numbers: Sequence[float] = list(values)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan
