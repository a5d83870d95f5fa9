"""Job: a training problem as a frozen value of callables and numbers, without torch or the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from shoal.errors import JobError, nearest
from shoal.numerics.buffer_names import BUFFER_RULES, balance_rate
from shoal.plans.grains import grain_size


@dataclass(frozen=True, slots=True)
class Epochs:
    """Training length in passes over the data. A fractional length ends inside a pass, at a whole step."""

    count: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Training length in optimizer steps."""

    count: int


@dataclass(frozen=True, slots=True)
class Samples:
    """Training length in samples. The last step is short if the batch size does not divide the length."""

    count: int


Length = Epochs | Steps | Samples


class Progress(float):
    """Fraction of the training that is done, as a float in [0, 1] with the step number.

    `step`: number of this step, from 0.
    `num_steps`: length of the whole job in steps.
    `samples`: number of samples before this step.
    """

    step: int
    num_steps: int
    samples: int

    def __new__(cls, step: int, num_steps: int, samples: int) -> Progress:
        """Create the progress before `step` (from 0) of `num_steps` steps."""
        self = super().__new__(cls, min(1.0, step / max(1, num_steps)))
        self.step, self.num_steps, self.samples = step, num_steps, samples
        return self


@dataclass(frozen=True, slots=True)
class WarmupCosine:
    """Learning-rate multiplier: linear from 0 over `warmup` of the run, then half a cosine down to `floor`.

    Source: Loshchilov and Hutter, SGDR (arXiv 1608.03983), with linear warm-up as in Goyal et al. (arXiv 1706.02677).
    The first step uses one step's worth of warm-up instead of zero, so that it is not wasted.
    """

    warmup: float = 0.0
    floor: float = 0.0

    def __call__(self, progress: float) -> float:
        """Return the multiplier at `progress` in [0, 1]."""
        one_step = 1.0 / getattr(progress, "num_steps", math.inf)
        if progress < self.warmup:
            return min(1.0, (progress + one_step) / self.warmup)
        rest = (progress - self.warmup) / max(1e-12, 1.0 - self.warmup)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * rest))


def warmup_cosine(warmup: float = 0.0, floor: float = 0.0) -> WarmupCosine:
    """Return a learning-rate schedule with linear warm-up and cosine decay.

    Args:
        warmup: fraction of the run, in [0, 1), over which the multiplier rises linearly.
        floor: multiplier at the end of the cosine, in [0, 1].

    Raises: JobError if an argument is out of range.
    """
    if not (0.0 <= warmup < 1.0 and 0.0 <= floor <= 1.0):
        raise JobError(
            given=f"warmup_cosine(warmup={warmup}, floor={floor})",
            conflict="warmup is a fraction of the run in [0, 1) and floor a multiplier in [0, 1]",
            remedy="write for example warmup_cosine(warmup=0.05)",
        )
    return WarmupCosine(warmup, floor)


_LEFT_OUT: Any = None  # by a job whose sampler sets the value


@dataclass(frozen=True, kw_only=True)
class Job:
    """Training problem: model, loss, optimizer, data, batch, length and seed.

    model: function that builds the module. Every rank calls it once, with generators seeded by `seed`.
    loss: (model, batch) -> (total, weight): the scalar sum over the batch's samples or tokens, and their number. With
        `outputs`: (outputs, batch) -> (total, weight), where both are those of the whole global batch in sample order.
    outputs: (model, batch) -> a tensor, or a tuple or dict of tensors, for a loss that compares the samples of the
        global batch. Each tensor has the samples as first dim, or is marked by `shoal.summed` as a sum over samples, or
        is a parameter of the model that the loss uses. Tensors of 16 bits reach the loss in float32. Default None.
    loss_by_rows: whether the loss with `outputs` is a sum over rows of the global batch, of which each rank computes
        its own: loss(outputs, batch, rows=slice) -> (total, weight) of these rows.
    batch_norm: samples over which BatchNorm normalises in training. "grain" (default): those of a grain. "batch": those
        of the global batch, on any number of devices, as in plain torch with the whole batch on one device. Then each
        rank computes its samples in one microbatch.
    optimizer: (parameters) -> torch optimizer. `parameters` is a list; `parameters.named` gives (name, parameter)
        pairs.
    train_data, eval_data: a map-style dataset, tensors (or a tuple or dict of tensors) with the same first dim, an
        iterable stream, or a function without arguments that returns one of these. eval_data may also be a dict of
        several sets by name, with metrics "NAME/accuracy" and "NAME/loss". A dict that has only tensors is one set.
    metrics: name -> (model, batch) -> (sum, count). Evaluation divides the sums over all samples. A tuple of names
        stands for a function that returns a dict with a pair for each name, from one forward; "loss" may be one. A
        metric of all outputs and targets is `shoal.over_all(...)` or a metric of torchmetrics.
    global_batch: number of samples in one optimizer step, for any number of devices.
    grains: number of groups in the global batch, which is also the largest number of data ranks. Default None: chosen
        from the job by `shoal.plans.grains.default_grains`.
    length: Epochs, Steps or Samples. Default: Epochs(1).
    schedule: function of progress in [0, 1] that returns a multiplier for every learning rate.
    clip_norm: largest global gradient norm, or None for no clipping.
    clip_value: largest magnitude of each element of the gradient (the mean over the batch), or None. At most one of
        clip_norm and clip_value may be set.
    seed: seed of all random numbers.
    collate: list of samples -> batch. Default None: torch's default.
    shuffle: whether each epoch has a new order. Default None: the setting of the DataLoader if the data are one, else
        True.
    sampler: another order of the samples: shoal.Weighted, shoal.Balanced, shoal.ByLength, shoal.TokenBudget,
        shoal.Curriculum or shoal.Mixture. A mixture has the datasets itself, and train_data is left out. A token budget
        sets the samples of a step, and global_batch is left out. Default None.
    on_nonfinite: action on a NaN or infinite loss or gradient. "skip" skips the step, "rollback" returns to the last
        checkpoint and continues without the bad step, and "stop" (default) ends the run.
    fuse: whether neighbouring grains may share a forward. Set False for losses that compare the samples of a batch.
    buffers: name -> rule, such as {"head.load": "sum"}, for buffers that a forward changes, if the rule inferred from
        the first batch is wrong. Names are from `named_buffers()`; * stands for one part. "mean" averages the
        microbatches' values, weighted by samples. "sum" adds up the microbatches' increments, "total" their values.
        "min", "max": smallest or largest value. "last": value after the last samples. "same": all microbatches leave
        the same value. "balance:0.001", of a router's bias: it moves by this rate after each step, up for experts
        with fewer tokens than the mean of the whole batch and down for those with more.
    watch: for example "accuracy:max" or "loss:min". After each best evaluation so far, the checkpoint is stored as
        checkpoints/best.
    callbacks: hooks into a run, each a shoal.Callback. Every process creates its own by loading the job file.
    allow_state: names of attributes and variables that change between forwards without effect on results. A name is the
        module's name joined with the attribute's: "encoder.cache", "blocks.*.calls"; `*` stands for one part.
    predict: (model, batch) -> outputs, for `shoal predict`: a tensor with one row per sample, or a dict of such
        tensors. Default None: `outputs` by sample if the job has them, else the model's output for the batch, or for
        its first part if the batch is a tuple.
    Raises: JobError that lists every mistake.
    """

    model: Callable[[], Any]
    loss: Callable[..., Any]
    optimizer: Callable[[Any], Any]
    train_data: Any = None
    global_batch: int = _LEFT_OUT
    eval_data: Any = None
    metrics: Mapping[Any, Callable[[Any, Any], Any]] = field(default_factory=dict)
    grains: int | None = None
    length: Length = Epochs(1)
    schedule: Callable[[Progress], float] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    seed: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    sampler: Any = None
    on_nonfinite: Literal["skip", "rollback", "stop"] = "stop"
    fuse: bool = True
    buffers: Mapping[str, str] = field(default_factory=dict)
    watch: str | None = None
    callbacks: Sequence[Any] = ()
    predict: Callable[[Any, Any], Any] | None = None
    outputs: Callable[[Any, Any], Any] | None = None
    loss_by_rows: bool = False
    batch_norm: Literal["grain", "batch"] = "grain"
    allow_state: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.train_data is None and callable(self.sampler):  # a mixture, which returns its datasets
            object.__setattr__(self, "train_data", self.sampler)
        if self.global_batch is None and getattr(self.sampler, "unequal", False):
            object.__setattr__(self, "global_batch", self.sampler.global_batch)
        mistakes = [m for check in (_callables, _numbers, _hooks, _others) for m in check(self)]
        if mistakes:
            raise JobError(
                given="Job(" + ", ".join(g for g, _, _ in mistakes) + ")",
                conflict="; ".join(c for _, c, _ in mistakes),
                remedy="; ".join(r for _, _, r in mistakes),
            )

    @property
    def num_grains(self) -> int:
        """Number of grains in the global batch. Raises: JobError if the job's default is not known yet."""
        if self.grains is None:
            raise JobError(
                given="Job(grains=None)",
                conflict="the number of grains is not known yet: shoal chooses it from the model and a few samples",
                remedy="write job = shoal.training.setup.job_model.with_grains(job), or for example Job(grains=8)",
            )
        return self.grains

    @property
    def grain_size(self) -> int:
        """Number of samples in a full grain. Raises: JobError as `num_grains`."""
        return grain_size(self.global_batch, self.num_grains)

    @property
    def watched(self) -> tuple[str, bool] | None:
        """The metric that selects the best checkpoint, and whether larger is better; None if none is watched."""
        return watched_by(self.callbacks, self.watch)

    @property
    def evaluation_sets(self) -> dict[str, Any]:
        """Evaluation data by name. A single set has the name ""; the dict is empty without evaluation data."""
        data = self.eval_data
        if not isinstance(data, Mapping) or not data or not all(isinstance(name, str) for name in data):
            return {} if data is None else {"": data}
        # A dict of tensors or arrays is one set: the fields of its samples, by name.
        return {"": data} if all(hasattr(value, "shape") for value in data.values()) else dict(data)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the values of an evaluation: the loss, the job's metrics, and metrics that callbacks add."""
        sets = self.evaluation_sets or {"": None}
        names = dict.fromkeys(["loss", *names_of_metrics(self.metrics)])
        own = tuple(named_metric(of, name) for of in sets for name in names)
        return own + tuple(name for callback in self.callbacks for name in callback.metric_names(own))

    def without_effect(self) -> list[str]:
        """Return one sentence for each setting that has no effect."""
        sentences = []
        if self.metrics and self.eval_data is None:
            names = ", ".join(map(str, names_of_metrics(self.metrics)))
            sentences.append(f"metrics ({names}) have no effect: there is no eval_data to evaluate")
        if self.watch is not None and self.eval_data is None:
            sentences.append(f"watch = {self.watch!r} has no effect: there is no eval_data to evaluate")
        if self.eval_data is None:
            watching = [type(c).__name__ for c in self.callbacks if getattr(c, "metric", None) is not None]
            sentences += [f"{name} has no effect: there is no eval_data to evaluate" for name in watching]
        if self.grains is not None and self.grains > self.global_batch:
            batch = self.global_batch
            sentences.append(f"grains = {self.grains}: no effect beyond {batch}, since a step has {batch} samples")
        return sentences

    def doubtful(self) -> list[str]:
        """Return one sentence for each setting that contradicts the usual direction of the metric it names."""
        sentences = []
        watches = [(repr(watch), *watch.rpartition(":")[::2]) for watch in [self.watch] if watch is not None]
        for callback in self.callbacks:
            metric, mode = getattr(callback, "metric", None), getattr(callback, "mode", None)
            if isinstance(metric, str) and isinstance(mode, str):
                watches.append((f"{type(callback).__name__}({metric!r}, mode={mode!r})", metric, mode))
        for what, metric, mode in watches:
            other = contradiction(metric, mode)
            if other is not None:
                least = "smallest" if mode == "min" else "largest"
                sentences.append(f"{what} takes the {least} {metric} for the best; of such a metric write {other!r}")
        return sentences

    def describe(self) -> dict[str, Any]:
        """Return the numbers that define the training, as JSON, for a resume to compare.

        `shuffle` is resolved when the data are opened (`shoal.data.source`). Until then None counts as True.
        """
        length = {"kind": type(self.length).__name__.lower(), "count": self.length.count}
        return {
            "global_batch": self.global_batch,
            "grains": self.grains,
            "length": length,
            "clip_norm": self.clip_norm,
            "clip_value": self.clip_value,
            "seed": self.seed,
            "shuffle": self.shuffle is not False,
            "on_nonfinite": self.on_nonfinite,
            "allow_state": sorted(self.allow_state),
            "buffers": dict(self.buffers),
            **({"batch_norm": self.batch_norm} if self.batch_norm != "grain" else {}),  # older runs have no such entry
            **({} if self.sampler is None else {"sampler": self.sampler.describe()}),
        }


def watched_by(callbacks: Sequence[Any], watch: str | None = None) -> tuple[str, bool] | None:
    """Return the metric that `watch` or a callback such as KeepBest watches, and whether larger is better, or None."""
    name, _, best = next(iter(_watches(callbacks, watch)), "").rpartition(":")
    return (name, best == "max") if name else None


def _watches(callbacks: Sequence[Any], watch: str | None = None) -> list[str]:
    said = [watch, *(getattr(callback, "watch", None) for callback in callbacks)]
    return list(dict.fromkeys(watch for watch in said if watch is not None))


MetricKey = str | tuple[str, ...]  # of one metric, or of several that one function computes


# What other trainers call a field of Job, and what to write.
_FIELDS = {
    **dict.fromkeys(("data", "dataset", "train_dataset", "train_loader", "dataloader"), "write train_data=..."),
    **dict.fromkeys(("val_data", "valid_data", "validation_data", "test_data", "eval_dataset"), "write eval_data=..."),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), "write length=shoal.Epochs(N)"),
    **dict.fromkeys(("steps", "num_steps", "max_steps"), "write length=shoal.Steps(N)"),
    **dict.fromkeys(("batch", "batch_size", "bs"), "write global_batch=N, of all devices together"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "write loss=function of (model, batch)"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule"), "write schedule=..."),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), "write optimizer=lambda parameters: ..., with it"),
    **dict.fromkeys(("accumulate", "grad_accum", "gradient_accumulation_steps"), "a plan has it (docs/layouts.md)"),
    **dict.fromkeys(("precision", "dtype", "device", "devices"), "give shoal run --precision or --devices"),
}


def meant_field(name: str) -> str:
    """Return what to write in place of an argument that Job does not have: its usual field, or the nearest."""
    known = [one.name for one in fields(Job)]
    return _FIELDS.get(name) or nearest(name, known).removeprefix("; ") or ", ".join(known)


def names_of_metrics(keys: Iterable[MetricKey]) -> list[str]:
    """Return the names of metrics in order."""
    return [name for key in keys for name in (key if isinstance(key, tuple) else (key,))]


def named_metric(evaluation_set: str, metric: str) -> str:
    """Return a metric's name with the evaluation set as a prefix, or the metric's own name for an unnamed set."""
    return f"{evaluation_set}/{metric}" if evaluation_set else metric


# Prefixes that other trainers give to the names of evaluation metrics.
_STAGES = ("val", "valid", "validation", "eval", "test", "dev")
_SMALLEST = ("loss", "error", "perplexity", "mse", "rmse", "mae", "wer", "cer")
_LARGEST = ("accuracy", "acc", "precision", "recall", "f1", "auc", "auroc", "bleu", "rouge", "r2", "iou", "dice")


def meant_metric(name: str, known: Sequence[str]) -> str:
    """Return the known metric that an unknown name most likely means, for example `loss` for `val_loss`."""
    import difflib

    stage, _, rest = name.replace("/", "_").partition("_")
    bare = rest if stage in _STAGES else name
    exact = next((own for own in known if bare in (own, own.rpartition("/")[2])), None)
    return exact or next(iter(difflib.get_close_matches(bare, known, n=1, cutoff=0.5)), known[-1])


def contradiction(metric: str, mode: str) -> str | None:
    """Return the mode that fits the metric's name if it differs from `mode`, else None."""
    words = metric.lower().replace("/", "_").replace("-", "_").split("_")
    best = "min" if any(w in _SMALLEST for w in words) else "max" if any(w in _LARGEST for w in words) else mode
    return best if best != mode else None


Mistake = tuple[str, str, str]


def _callables(job: Job) -> Iterator[Mistake]:
    wanted = {"model": True, "loss": True, "optimizer": True}
    wanted |= dict.fromkeys(("schedule", "collate", "predict", "outputs"), False)
    for name, required in wanted.items():
        value = getattr(job, name)
        if not callable(value) and (required or value is not None):
            hint = "a function" if name != "model" else "a function that builds the module, e.g. model=MyModel"
            yield f"{name}={value!r:.60}", f"{name} is called by the engine", f"give {hint}"
    if any(base.__name__ == "Module" and base.__module__.startswith("torch.nn") for base in type(job.model).__mro__):
        yield (
            f"model={type(job.model).__name__}(...)",
            "every rank builds its own copy from the same seed",
            "give a function that builds it: model=lambda: MyModel(...)",
        )
    if not isinstance(job.metrics, Mapping):
        yield f"metrics={job.metrics!r:.60}", "metrics have names", 'give {"accuracy": shoal.accuracy}'
    else:
        names = names_of_metrics(job.metrics)
        for name, metric in job.metrics.items():
            if not callable(metric):
                write = "give (model, batch) -> sums, or shoal.over_all(metric)"
                yield f"metrics[{name!r}]={metric!r:.40}", "a metric is called", write
            elif name == "loss":
                yield "metrics['loss']", "the job's own loss is reported under that name", "rename it"
            elif isinstance(name, tuple) and "loss" in name and job.outputs is not None:
                yield f"metrics[{name!r}] and outputs", "the loss sees the whole batch", "leave 'loss' out of the names"
        if twice := sorted({str(name) for name in names if names.count(name) > 1}):
            yield f"metrics with {', '.join(twice)} twice", "each metric has a name of its own", "rename one"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(job: Job) -> Iterator[Mistake]:
    for name in ("global_batch", "grains"):
        value = getattr(job, name)
        if name == "grains" and value is None:
            continue
        if not _is_int(value) or value < 1:
            yield f"{name}={value!r}", f"{name} counts at least one", f"write {name}=8, say"
    if not _is_int(job.seed) or job.seed < 0:
        yield f"seed={job.seed!r}", "a seed is an integer of at least 0", "write seed=0"
    for name, what in (("clip_norm", "a norm limit"), ("clip_value", "a limit of each element")):
        limit = getattr(job, name)
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 < limit < math.inf):
            yield f"{name}={limit!r}", f"{what} is positive and finite", f"write {name}=1.0 or None"
    if job.clip_norm is not None and job.clip_value is not None:
        given = f"clip_norm={job.clip_norm!r}, clip_value={job.clip_value!r}"
        yield given, "a gradient is clipped by its norm or by its elements", "keep one of clip_norm and clip_value"
    count = getattr(job.length, "count", None)
    if not isinstance(job.length, Epochs | Steps | Samples):
        wanted = "shoal.Epochs(3), shoal.Steps(1000) or shoal.Samples(10**6)"
        yield f"length={job.length!r}", "a length says what it counts", f"write {wanted}"
    elif not (_is_int(count) or (isinstance(job.length, Epochs) and isinstance(count, float))) or not (
        0 < float(count or 0) < math.inf
    ):
        yield f"length={job.length!r}", "a length is a positive number", "write shoal.Steps(1000), say"


_HOOKS = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end", "state_dict", "metric_names", "mistakes")


def callback_mistakes(callbacks: Any, watch: str | None = None) -> Iterator[Mistake]:
    """Yield the mistakes in a list of callbacks that do not depend on the metrics. `watch`: as in a Job."""
    if not isinstance(callbacks, Sequence):
        yield f"callbacks={callbacks!r:.60}", "callbacks are a list", "write callbacks=[shoal.EMA(0.999)], say"
        return
    for number, callback in enumerate(callbacks):
        if isinstance(callback, type) or not all(callable(getattr(callback, hook, None)) for hook in _HOOKS):
            what = f"callbacks[{number}]={callback!r:.60}"
            yield what, "a callback is an object with hooks", "derive its class from shoal.Callback, and give an object"
    if len(watches := _watches(callbacks, watch)) > 1:
        said = " and ".join(map(repr, watches))
        yield f"watch={said}", "one metric decides which checkpoint is the best", "keep one of watch and KeepBest"


def _hooks(job: Job) -> Iterator[Mistake]:
    mistakes = list(callback_mistakes(job.callbacks, job.watch))
    yield from mistakes
    if not mistakes and isinstance(job.metrics, Mapping):
        for callback in job.callbacks:
            yield from callback.mistakes(job)


def _others(job: Job) -> Iterator[Mistake]:
    if isinstance(job.allow_state, str) or not all(isinstance(name, str) and name for name in job.allow_state):
        yield f"allow_state={job.allow_state!r:.60}", "it lists names", 'write allow_state=("encoder.calls",), say'
    if job.train_data is None:
        yield "train_data=None", "a step needs samples", "give a dataset or a function that returns one"
    if job.sampler is not None:
        names = "shoal.Weighted, Balanced, ByLength, TokenBudget, Curriculum and Mixture"
        if isinstance(job.sampler, type) or not all(hasattr(job.sampler, name) for name in ("describe", "draws")):
            name = getattr(job.sampler, "__name__", type(job.sampler).__name__)
            yield f"sampler={name}", f"the samplers are {names}", "give one of them, such as shoal.Weighted(weights)"
        if job.shuffle is not None:
            yield f"sampler=..., shuffle={job.shuffle}", "both set the order of the samples", "leave shuffle out"
        if getattr(job.sampler, "unequal", False):
            if job.global_batch != job.sampler.global_batch:
                given = f"sampler=shoal.TokenBudget(...), global_batch={job.global_batch}"
                yield given, "both set the samples of a step", "leave global_batch out"
            if isinstance(job.length, Samples) or job.outputs is not None or job.batch_norm == "batch":
                given = f"sampler=shoal.TokenBudget(...) with length={job.length}, outputs or batch_norm='batch'"
                write = "give Epochs or Steps, and leave outputs and batch_norm out"
                yield given, "its steps have unequal numbers of samples", write
    if job.on_nonfinite not in ("skip", "rollback", "stop"):
        yield f"on_nonfinite={job.on_nonfinite!r}", "the policies are skip, rollback and stop", 'write "stop", say'
    usable = isinstance(job.metrics, Mapping) and not any(callback_mistakes(job.callbacks, None))
    known = list(job.metric_names) if usable else ["loss"]
    if job.watch is not None and job.watch not in [f"{name}:{best}" for name in known for best in ("min", "max")]:
        wanted = f"a metric ({', '.join(known)}) and which is best, min or max"
        name, _, best = str(job.watch).rpartition(":")
        meant = f"{meant_metric(name or str(job.watch), known)}:{best if best in ('min', 'max') else 'max'}"
        yield f"watch={job.watch!r:.60}", f"watch names {wanted}", f'write watch="{meant}", say'
    if "" in job.evaluation_sets and job.evaluation_sets[""] is not job.eval_data:
        yield "eval_data={'': ...}", "evaluation sets have names", 'write eval_data={"clean": ..., "noisy": ...}'
    if not isinstance(job.buffers, Mapping):
        yield f"buffers={job.buffers!r:.60}", "rules belong to names of buffers", 'write {"head.load": "sum"}, say'
    else:
        for name, rule in job.buffers.items():
            if not isinstance(name, str) or (rule not in BUFFER_RULES and not balance_rate(str(rule))):
                rules = ", ".join((*BUFFER_RULES, "balance:RATE"))
                yield f"buffers[{name!r}]={rule!r:.40}", f"the rules are {rules}", f'write {{"{name}": "sum"}}, say'
    if job.loss_by_rows and job.outputs is None:
        given = "loss_by_rows=True without outputs"
        yield given, "rows are those of the outputs of the global batch", "give outputs, or leave loss_by_rows out"
    if job.batch_norm not in ("grain", "batch"):
        yield f"batch_norm={job.batch_norm!r:.40}", "BatchNorm sees a grain or the batch", 'write "grain" or "batch"'
    elif job.batch_norm == "batch" and job.fuse is False:
        given = 'batch_norm="batch" with fuse=False'
        yield given, "grains with a forward of their own have no common statistics", "leave one of both out"
    for name in ("shuffle", "fuse", "loss_by_rows"):
        value = getattr(job, name)
        if not isinstance(value, bool) and not (name == "shuffle" and value is None):
            yield f"{name}={value!r}", f"{name} is True or False", f"write {name}=True"
