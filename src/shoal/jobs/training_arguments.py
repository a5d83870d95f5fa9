"""Job from a `transformers.TrainingArguments`. Each argument moves to the job, to a call or plan, or is refused."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.jobs.job import Epochs, Job, Length, Progress, Steps, names_of_metrics
from shoal.numerics.losses import cross_entropy, mse

IGNORED = -100
_LABELS = ("labels", "label", "label_ids")
_TOKENS = ("ForMaskedLM", "ForTokenClassification")
_CLASSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")


@dataclass(frozen=True)
class ModelLook:
    """Properties of a Transformers model: task, arguments of forward, parameters with weight decay, kind of labels."""

    task: str | None
    columns: frozenset[str]
    decayed: frozenset[str]
    problem: str | None
    num_labels: int | None


class TransformersModel:
    """A job's `model` that records the Transformers class and task of the built module, to choose the loss."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self._look: ModelLook | None = None

    def __call__(self) -> Any:
        """Build the module. Raises: what the function raises."""
        model = self.make()
        if not isinstance(model, nn.Module):
            return model
        of_peft: Any = getattr(model, "get_base_model", None)
        base: Any = of_peft() if of_peft is not None else model
        config, name = getattr(base, "config", None), type(base).__name__
        task = getattr(base, "loss_type", None)
        if not task:  # the class's name does not contain it, such as GPT2LMHeadModel
            known = importlib.import_module("transformers.models.auto.modeling_auto")
            is_masked = name in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
            is_causal = name in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            task = "ForCausalLM" if is_causal else "ForMaskedLM" if is_masked else None
        trainer = importlib.import_module("transformers").Trainer
        self._look = ModelLook(
            task,
            frozenset((*inspect.signature(base.forward).parameters, *_LABELS)),
            frozenset(trainer.get_decay_parameter_names(None, model)),
            getattr(config, "problem_type", None),
            getattr(config, "num_labels", None),
        )
        return model

    @property
    def look(self) -> ModelLook:
        """Properties of the model that was built last."""
        assert self._look is not None, "the engine builds the model before its optimizer and its losses"
        return self._look

    @property
    def columns(self) -> frozenset[str] | None:
        """The names that forward accepts, and the labels; None before a model was built."""
        return self._look.columns if self._look is not None else None

    def __reduce__(self) -> Any:
        return TransformersModel, (self.make,), {"_look": self._look}


@dataclass(frozen=True)
class LabelsLoss:
    """Loss (model, batch) -> (total, weight) of a batch with `labels`. A label of -100 does not count.

    For a causal language model the logits at a position are compared with the label at the next one.
    `smoothing`: label smoothing of cross entropies.
    """

    source: TransformersModel
    smoothing: float = 0.0

    def __call__(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum and the weight. Raises: JobError for a task that needs a custom loss."""
        look = self.source.look
        labels = next((batch[name] for name in _LABELS if name in batch), None)
        if labels is None:
            raise _no_loss("a batch without labels", f"its names are {', '.join(map(str, batch))}")
        inputs = {name: value for name, value in batch.items() if name not in _LABELS}
        if "use_cache" in look.columns:
            inputs.setdefault("use_cache", False)
        logits = model(**inputs).logits
        if look.task == "ForCausalLM":  # each token predicts the next label; the last has none
            labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            return self._cross_entropy(logits.flatten(0, 1), labels.flatten())
        if look.task in _TOKENS:
            return self._cross_entropy(logits.flatten(0, 1), labels.flatten())
        if look.task in _CLASSES:
            if look.problem == "regression" or (look.problem is None and look.num_labels == 1):
                return mse(logits.float(), labels.view_as(logits).float())
            if look.problem == "single_label_classification" or not labels.is_floating_point():
                return self._cross_entropy(logits, labels.flatten())
            total = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            return total, torch.tensor(labels.numel(), device=logits.device)
        raise _no_loss(f"a model for {look.task}", "what its loss counts is not known")

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.smoothing:
            return cross_entropy(logits, labels)
        total = F.cross_entropy(
            logits.float(), labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self.smoothing
        )
        return total, (labels != IGNORED).sum()


def _no_loss(given: str, conflict: str) -> JobError:
    return JobError(
        given=given,
        conflict=f"{conflict}, and a loss here is a sum and how many it sums over",
        remedy="give loss=..., a function (model, batch) -> (total, weight)",
    )


# Name in TrainingArguments -> the setting to use instead.
_ELSEWHERE = {
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "gradient_checkpointing": '[memory] recompute = "full" in the plan',
    "activation_checkpointing": '[memory] recompute = "full" in the plan',
    "torch_compile": '[execution] compile = "default" in the plan',
    "torch_compile_mode": "[execution] compile in the plan",
    "fsdp": "[layout] shard and [shard] level in the plan",
    "deepspeed": "[layout] shard and [shard] level in the plan",
    "parallelism_config": "[layout] in the plan",
    "dataloader_num_workers": "--workers",
    "auto_find_batch_size": "--max-microbatch",
    "output_dir": "--out",
    "save_strategy": "--checkpoint-every",
    "save_steps": "--checkpoint-every",
    "resume_from_checkpoint": "--resume",
    "full_determinism": "--exact",
    "use_cpu": "--devices",
    "push_to_hub": "shoal export",
}
_IN_JOB = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor", "seed"),
    *("remove_unused_columns", "train_sampling_strategy", "label_names"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
)
# Without effect on the trained weights, or implemented in shoal's own way. A trailing _ matches any name with that
# prefix.
_WITHOUT = (
    *(
        "log_",
        "logging_",
        "report_to",
        "run_name",
        "project",
        "trackio_",
        "hub_",
        "disable_tqdm",
        "debug",
        "skip_memory_",
    ),
    *(
        "eval_",
        "do_",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "batch_eval_metrics",
        "include_",
        "bf16_full_",
    ),
    *("fp16_full_", "predict_with_generate", "generation_", "save_only_model", "save_on_each_node", "save_total_limit"),
    *("enable_jit_checkpoint", "restore_callback_", "ignore_data_skip", "dataloader_pin_memory", "use_cache"),
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("dataloader_in_order", "length_column_name", "ddp_", "fsdp_config", "local_rank", "torch_empty_cache_steps"),
    *("average_tokens_across_devices", "tf32", "torch_compile_backend", "gradient_checkpointing_", "data_seed"),
    *("activation_checkpointing_",),
)
_REFUSED = {
    "dataloader_drop_last": ("every sample of an epoch is trained", "leave it out, or give a torch Subset"),
    "neftune_noise_alpha": (
        "noise is added by a hook of the Trainer",
        "add the noise in model() or in a loss of yours",
    ),
    "use_liger_kernel": ("the Trainer changes the model for it", "apply liger's kernels in model()"),
    "liger_kernel_config": ("the Trainer changes the model for it", "apply liger's kernels in model()"),
    "optim_target_modules": ("it is of optimizers that are not taken over", "give optimizer=..."),
    "accelerator_config": ("the global batch and the order of samples are the job's", "leave it out"),
}
_SAMPLING = {"random": True, "sequential": False}


@dataclass(frozen=True, kw_only=True)
class TransformersJob(Job):
    """Job with settings from a TrainingArguments. `arguments`: a message on the arguments that were not defaults."""

    arguments: str = ""

    def without_effect(self) -> list[str]:
        """Return the messages of a Job, and which TrainingArguments the job does not contain."""
        return [*super().without_effect(), *([self.arguments] if self.arguments else [])]


def from_training_arguments(
    args: Any,
    *,
    model: Callable[[], Any],
    train_dataset: Any,
    devices: int | None = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    eval_dataset: Any = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    compute_metrics: Any = None,
) -> Job:
    """Return a job that trains as a `transformers.Trainer` with these `TrainingArguments` does on `devices` devices.

    Args:
        args: a `transformers.TrainingArguments`.
        devices: number of devices for which the arguments were written. global_batch = per_device_train_batch_size x
            gradient_accumulation_steps x devices, from then on a fixed number on any devices.
        model: function that builds the module, as of a Job.
        train_dataset, eval_dataset: as of a Job; a `datasets.Dataset` too.
        data_collator: list of samples -> batch; by default that of Transformers.
        loss, optimizer, metrics: as of a Job; by default from the model's `labels` and the arguments.

    The run and `job.without_effect()` report once what the job does not contain, such as bf16, an option of a call.
    Raises: JobError that lists every argument that cannot move to the job.
    """
    mistakes = list(_mistakes(args, devices, optimizer, compute_metrics, metrics or {}))
    if mistakes:
        given, conflict, remedy = ("; ".join(dict.fromkeys(m[i] for m in mistakes)) for i in range(3))
        raise JobError(given=f"TrainingArguments({given})", conflict=conflict, remedy=remedy)
    assert devices is not None, "or it was a mistake"
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * devices
    epochs = float(args.num_train_epochs)
    length: Length
    if args.max_steps > 0:
        length = Steps(args.max_steps)
    elif epochs.is_integer() or not hasattr(train_dataset, "__len__"):
        length = Epochs(int(epochs) if epochs.is_integer() else epochs)
    else:  # as the Trainer counts: a fraction of an epoch ends with the next whole step
        length = Steps(math.ceil(epochs * -(-len(train_dataset) // batch)))
    source = TransformersModel(model)
    evaluated = eval_dataset is not None
    return TransformersJob(
        model=source,
        loss=loss or LabelsLoss(source, args.label_smoothing_factor),
        optimizer=optimizer
        or functools.partial(_grouped, *_trainers_optimizer(args), float(args.weight_decay), source),
        train_data=train_dataset,
        eval_data=eval_dataset,
        metrics=metrics or {},
        global_batch=batch,
        length=length,
        schedule=_schedule(args),
        clip_norm=float(args.max_grad_norm) if args.max_grad_norm else None,
        seed=args.seed,
        collate=KnownColumns(source if args.remove_unused_columns else None, data_collator),
        shuffle=_SAMPLING[_name(args.train_sampling_strategy)],
        watch=_watch(args) if evaluated and args.load_best_model_at_end else None,
        arguments=_account_of(args),
    )


def _name(value: Any) -> str:
    return str(getattr(value, "value", value))


# ---------------------------------------------------------------------------------------------------------- judgement


def _written(args: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults."""
    kind = type(args)
    try:
        usual = kind()
    except TypeError:  # a subclass with fields that have no default
        usual = next(base for base in kind.__mro__ if base.__name__ == "TrainingArguments")()
    names = [field.name for field in fields(args)]
    return {n: getattr(args, n) for n in names if getattr(args, n) != getattr(usual, n, None)}


def _is_without(name: str) -> bool:
    return any(name == other or (other[-1] == "_" and name.startswith(other)) for other in _WITHOUT)


def _mistakes(
    args: Any, devices: int | None, optimizer: Any, compute_metrics: Any, metrics: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield each argument that a job cannot express as (given, conflict, remedy)."""
    if not isinstance(devices, int) or devices < 1:
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps
        yield (
            f"per_device_train_batch_size={args.per_device_train_batch_size}, "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}, devices={devices}",
            "how many samples a step has is a number in a job, and here it depends on the number of devices",
            f"write devices=N, how many these arguments are for: devices=1 makes global_batch={each}, devices=8 "
            f"{8 * each}; the job is then the same on any number",
        )
    for name in _written(args):
        if name in _REFUSED:
            conflict, remedy = _REFUSED[name]
            yield f"{name}={getattr(args, name)!r:.80}", conflict, remedy
        elif name not in _IN_JOB and name not in _ELSEWHERE and not _is_without(name):
            yield f"{name}={getattr(args, name)!r:.80}", "this version of shoal does not know it", "leave it out"
    strategy = _name(args.train_sampling_strategy)
    if strategy not in _SAMPLING:
        conflict = "the order of samples is a function of seed, epoch and step"
        by_length = "replace(job, shuffle=None, sampler=shoal.ByLength(lengths))" if "length" in strategy else ""
        remedy = 'write "random" or "sequential"' + (by_length and f'; for batches by length "random" and {by_length}')
        yield f"train_sampling_strategy={strategy!r}", conflict, remedy
    if optimizer is None:
        try:
            kind, _ = _trainers_optimizer(args)
            is_known = kind.__module__.partition(".")[0] in ("torch", "transformers")
            conflict = f"its {kind.__name__} is stepped by the Trainer in a way of its own"
        except Exception as error:
            is_known, conflict = False, str(error)[:200]
        if not is_known:
            yield (
                f"optim={_name(args.optim)!r}",
                conflict,
                "choose adamw_torch, sgd or adafactor, or give optimizer=...",
            )
    try:
        _schedule(args)(Progress(0, 10, 0))
    except Exception as error:
        yield (
            f"lr_scheduler_type={_name(args.lr_scheduler_type)!r}",
            f"it is no function of the step alone ({str(error)[:120]})",
            "choose linear, cosine, constant_with_warmup or another that is",
        )
    if compute_metrics is not None:
        yield (
            "compute_metrics=...",
            "it is given an EvalPrediction, and a metric here is a sum over samples and their number, or a function of "
            "all outputs and targets",
            'write metrics={"f1": shoal.over_all(f1, outputs=..., targets=...)} with f1(outputs, targets), say',
        )
    known = {"loss", *names_of_metrics(metrics)}
    if args.load_best_model_at_end and _watch(args).rpartition(":")[0] not in known:
        yield (
            f"metric_for_best_model={args.metric_for_best_model!r}",
            f"what is evaluated is {', '.join(sorted(known))}",
            "name one of these, or give it in metrics={...}",
        )


def _watch(args: Any) -> str:
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    largest = args.greater_is_better if args.greater_is_better is not None else name != "loss"
    return f"{name}:{'max' if largest else 'min'}"


def _account_of(args: Any) -> str:
    """Return one message on what became of the arguments that were not defaults; empty if all are in the job."""
    written = _written(args)
    elsewhere = [f"{name} ({_ELSEWHERE[name]})" for name in written if name in _ELSEWHERE]
    without = [name for name in written if name not in _ELSEWHERE and _is_without(name)]
    if not elsewhere and not without:
        return ""
    in_job = [name for name in written if name in _IN_JOB]
    return "; ".join(
        f"{what}: {', '.join(names)}"
        for what, names in (
            ("TrainingArguments in the job", in_job or ["none that differ from the defaults"]),
            ("not in the job, to be written where the run is started", elsewhere),
            ("without effect here", without),
        )
        if names
    )


# --------------------------------------------------------------------------------------------------- parts of the job


def _trainers_optimizer(args: Any) -> tuple[Any, dict[str, Any]]:
    """Return the Trainer's optimizer class and arguments, without `fused`: the run fuses in fast mode."""
    kind, arguments = importlib.import_module("transformers").Trainer.get_optimizer_cls_and_kwargs(args)
    return kind, {name: value for name, value in arguments.items() if name != "fused"}


def _grouped(
    kind: Any, arguments: dict[str, Any], decay: float, source: TransformersModel, parameters: Any
) -> torch.optim.Optimizer:
    """Build the optimizer with the Trainer's two groups: biases and norms have no weight decay."""
    decayed = source.look.decayed
    named: Sequence[tuple[str, nn.Parameter]] = list(parameters.named)
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = kind(groups, **arguments)  # on a pipeline stage a group may be empty
    return optimizer


def _schedule(args: Any) -> TrainerSchedule:
    options = json.dumps(args.lr_scheduler_kwargs or {})
    return TrainerSchedule(_name(args.lr_scheduler_type), float(args.warmup_steps), options)


@dataclass(frozen=True)
class TrainerSchedule:
    """Multiplier of the learning rate by one of Transformers' schedules.

    The warm-up is a number of steps or a fraction.
    """

    name: str
    warmup_steps: float
    options: str = "{}"  # JSON

    def __call__(self, progress: Progress) -> float:
        """Return the multiplier at `progress`."""
        return _multipliers(self.name, self.warmup_steps, self.options, progress.num_steps)(progress.step)


@functools.lru_cache(maxsize=8)
def _multipliers(name: str, warmup_steps: float, options: str, num_steps: int) -> Callable[[int], float]:
    """Return a Transformers schedule as a function of the step. Raises: ValueError if it needs more than the step."""
    warmup = int(warmup_steps) if warmup_steps >= 1 else math.ceil(num_steps * warmup_steps)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = importlib.import_module("transformers").get_scheduler(
        name, optimizer, warmup, num_steps, scheduler_specific_kwargs=json.loads(options)
    )
    if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        raise ValueError(f"{type(scheduler).__name__} looks at more than the step")
    return scheduler.lr_lambdas[0]


class KnownColumns:
    """Collate function that drops the columns that the model's forward does not accept, as the Trainer does.

    Nothing is dropped before the model is built, or if `source` is None.
    """

    def __init__(self, source: TransformersModel | None, collate: Callable[[list[Any]], Any] | None) -> None:
        self.source, self.collate = source, collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the samples as a batch."""
        known = self.source.columns if self.source is not None else None
        if known is not None:
            samples = [
                {name: value for name, value in sample.items() if name in known}
                if isinstance(sample, Mapping)
                else sample
                for sample in samples
            ]
        collate = self.collate or importlib.import_module("transformers").default_data_collator
        return collate(samples)
