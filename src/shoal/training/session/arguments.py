"""Arguments of a Session: its settings, and the models, optimizers and schedulers to prepare, with their errors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Required, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from shoal.checkpoint.whole_optimizer import begin, groups, to_train
from shoal.data.order import Sampler
from shoal.errors import JobError, nearest
from shoal.jobs.job import Job, Progress, callback_mistakes, watched_by
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.structure import refuse_wrapped
from shoal.training.callbacks.base import Callback
from shoal.training.update.closure import needs_closure
from shoal.training.update.job_optimizer import without_optimizer

_PLACES = ("plan", "exact", "precision")

# Arguments of other trainers, and their equivalents here.
_ELSEWHERE = {
    "accelerator": "nothing: the device is a GPU where torch sees one",
    "accumulate_grad_batches": "nothing: global_batch is the batch of one update, however it is accumulated",
    "log_with": 'callbacks=[shoal.track("tensorboard")]',
    "logger": 'callbacks=[shoal.track("tensorboard")]',
    "loggers": 'callbacks=[shoal.track("tensorboard")]',
    "track": 'callbacks=[shoal.track("tensorboard")]',
    "trackers": 'callbacks=[shoal.track("tensorboard")]',
    "batch_size": "global_batch, of all processes together",
    "devices": "torchrun --nproc-per-node N train.py, or a plan",
    "gradient_accumulation_steps": "nothing: global_batch is the batch of one update, however it is accumulated",
    "gradient_clip_val": "clip_norm, or clip_value where gradient_clip_algorithm is value",
    "clipvalue": "clip_value",
    "max_grad_norm": "clip_norm",
    "max_steps": "session.steps(dataset, shoal.Steps(N))",
    "mixed_precision": "precision",
    "num_processes": "torchrun --nproc-per-node N train.py, or a plan",
    "split_batches": "global_batch, of all processes together",
    "strategy": "plan",
}

# Methods and attributes of other trainers, and their equivalents here.
_METHODS = {
    "accumulate": "nothing: global_batch is the batch of one update, however it is accumulated",
    "autocast": "shoal.Session(precision=...): the loop over a step's batches is in its context",
    "backward": "step.backward(total, weight) for each batch",
    "clip_gradients": "shoal.Session(clip_norm=...)",
    "clip_grad_norm_": "shoal.Session(clip_norm=...)",
    "clip_grad_value_": "shoal.Session(clip_value=...)",
    "gather": "step.loss, or session.evaluate(dataset, metrics), which are of all ranks",
    "gather_for_metrics": "session.evaluate(dataset, metrics)",
    "is_local_main_process": "session.rank == 0",
    "is_main_process": "session.rank == 0",
    "num_processes": "session.world_size",
    "print": "if session.rank == 0: print(...)",
    "save": "shoal.Session(checkpoints=...)",
    "save_state": "shoal.Session(checkpoints=...)",
    "setup": "session.prepare(model, optimizer)",
    "unwrap_model": "nothing: prepare gives back the model itself",
    "wait_for_everyone": "nothing: ranks meet at each step",
}
# Packages that wrap the objects they prepare.
_TRAINERS = ("accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "ignite", "composer")


def missing_attribute(name: str) -> AttributeError:
    """Return the error for an unknown attribute of a Session, with the equivalent of another trainer's name."""
    hint = f"; write {_METHODS[name]}" if name in _METHODS else ""
    return AttributeError(f"a Session has no {name}{hint}", name=name)


class TrainingKeywords(TypedDict, total=False):
    """Keyword arguments of a Session for editors and type checkers: the fields of `Training`."""

    global_batch: Required[int]
    grains: int | None
    seed: int
    clip_norm: float | None
    clip_value: float | None
    schedule: Callable[[Progress], float] | None
    collate: Callable[[list[Any]], Any] | None
    shuffle: bool | None
    sampler: Sampler | None
    fuse: bool
    buffers: Mapping[str, str]
    skip_nonfinite: bool
    callbacks: Sequence[Callback]
    checkpoints: str | os.PathLike[str] | None
    checkpoint_every: int | None
    keep_checkpoints: int | Literal["all"]
    no_source: bool
    resume: bool
    allow_state: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Numerical settings of a Session.

    Fields that a Job has, too, are described there. `grains`: None chooses a number that fits model and dataset.
    `fuse`: whether neighboring grains may share a forward; write False for losses that compare the samples of a batch.
    `callbacks`: hooks into the training, such as shoal.EMA, and trackers: shoal.track("tensorboard").
    `checkpoints`: their directory, or None for no checkpoints. The newest `keep_checkpoints` are kept.
    `checkpoint_every`: steps between checkpoints; None chooses an interval of low cost. `resume`: resume from the
    newest good checkpoint. `no_source`: do not record git commit, uncommitted changes, packages and command there.
    """

    global_batch: int
    grains: int | None = None
    seed: int = 0
    clip_norm: float | None = None
    clip_value: float | None = None
    schedule: Callable[[Progress], float] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    sampler: Sampler | None = None
    fuse: bool = True
    buffers: Mapping[str, str] = field(default_factory=dict)
    skip_nonfinite: bool = False
    callbacks: Sequence[Callback] = ()
    checkpoints: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int | Literal["all"] = 3
    no_source: bool = False
    resume: bool = False
    allow_state: Sequence[str] = ()

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> Training:
        """Construct the settings from a Session's keyword arguments. Raises: JobError for unknown or missing ones."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in arguments if name not in known]
        if unknown:
            hints = [_ELSEWHERE.get(name) for name in unknown]
            said = [f"for {name} write {hint}" for name, hint in zip(unknown, hints, strict=True) if hint]
            close = "" if said else nearest(unknown[0], [*_PLACES, *known])
            raise JobError(
                given="Session(" + ", ".join(f"{name}={arguments[name]!r:.40}" for name in unknown) + ")",
                conflict=f"a Session has no argument {', '.join(map(repr, unknown))}{close}",
                remedy="; ".join([*said, f"the arguments are {', '.join([*_PLACES, *known])}"]),
            )
        needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in needed if name not in arguments]
        if missing:
            raise JobError(
                given=f"a Session without {', '.join(missing)}",
                conflict="the samples of one update define the training, whatever the number of processes",
                remedy="write shoal.Session(global_batch=256), say",
            )
        return cls(**arguments)

    def job(self) -> Job:
        """Return the settings as a Job, which checks them. Raises: JobError."""
        if self.resume and self.checkpoints is None:
            raise JobError(
                given="resume=True without checkpoints",
                conflict="there is no directory to resume from",
                remedy='write checkpoints="runs/mine" too, the directory that the first run kept them in',
            )
        for name, none, write in (("checkpoint_every", None, "500"), ("keep_checkpoints", "all", '3 or "all"')):
            value = getattr(self, name)
            if self.checkpoints is None and value != getattr(type(self), name):
                raise JobError(
                    given=f"{name}={value!r:.40} without checkpoints",
                    conflict="none are written",
                    remedy='write checkpoints="runs/mine" too',
                )
            if value != none and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise JobError(
                    given=f"Session({name}={value!r:.40})",
                    conflict=f"{name} is a whole number of at least 1",
                    remedy=f"write {name}={write}, say",
                )
        mistake = next(callback_mistakes(self.callbacks), None)
        best = None if mistake or self.checkpoints is not None else watched_by(self.callbacks)
        if best is not None:
            mistake = ("KeepBest without checkpoints", "none are written", 'write checkpoints="runs/mine" too')
        if mistake is not None:
            given, conflict, remedy = mistake
            raise JobError(given=f"Session({given})", conflict=conflict, remedy=remedy)

        def unused(*_: Any) -> Any:
            raise AssertionError("a Session's loop computes its own loss")

        own = (
            "global_batch",
            "grains",
            "seed",
            "clip_norm",
            "clip_value",
            "schedule",
            "collate",
            "shuffle",
            "sampler",
            "fuse",
            "buffers",
            "allow_state",
        )

        if getattr(self.sampler, "unequal", False):
            raise JobError(
                given="Session(sampler=shoal.TokenBudget(...))",
                conflict="a Session's steps have global_batch samples",
                remedy="write sampler=shoal.ByLength(lengths), or train a shoal.Job",
            )
        fields_of_job = {name: getattr(self, name) for name in own}
        return Job(model=unused, loss=unused, optimizer=unused, train_data=(), **fields_of_job)


class Prepared:
    """Objects that were passed to `prepare`, in order."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []

    def take(self, objects: Sequence[Any]) -> tuple[list[Any], list[nn.Module]]:
        """Add objects; return them, with Keras models adapted, and the new models. Raises: JobError for others."""
        if not objects:
            raise _refused(
                "nothing", "prepare() without arguments prepares nothing", "give the model and the optimizer"
            )
        prepared = [adapted(thing) for thing in objects]
        for thing in prepared:
            refuse(thing)
        counts = Counter(map(id, [*self.models, *self.optimizers, *self.schedulers, *prepared]))
        twice = next((thing for thing in prepared if counts[id(thing)] > 1), None)
        if twice is not None:
            raise _refused(
                f"the same {type(twice).__name__} twice",
                "what is prepared is on its device, and has rank 0's values, already",
                "give each model, optimizer and scheduler once",
            )
        models = [thing for thing in prepared if isinstance(thing, nn.Module)]
        self.models += models
        for optimizer in [thing for thing in prepared if isinstance(thing, Optimizer)]:
            to_train(optimizer)
            begin(optimizer)
            self.optimizers.append(optimizer)
        self.schedulers += [thing for thing in prepared if isinstance(thing, LRScheduler)]
        return prepared, models

    def root(self) -> nn.Module:
        """Return the model, or one module of several models under the names model0, model1 and so on."""
        if len(self.models) == 1:
            return self.models[0]
        return nn.ModuleDict({f"model{number}": model for number, model in enumerate(self.models)})

    def check(self) -> None:
        """Raise JobError if something is missing or unrelated to the rest."""
        if not self.models or not self.optimizers:
            missing = "the model" if not self.models else "the optimizer"
            raise JobError(
                given="session.steps() before session.prepare()" if not self.models else "prepare() of no optimizer",
                conflict=f"the session does not know {missing}",
                remedy="write: model, optimizer = session.prepare(model, optimizer)",
            )
        self.check_parameters()
        for scheduler in self.schedulers:
            if not any(scheduler.optimizer is optimizer for optimizer in self.optimizers):
                raise _refused(
                    f"a {type(scheduler).__name__} of an optimizer that is not prepared",
                    "it changes learning rates that no update of this session reads",
                    "give prepare() its optimizer too, and build the scheduler from that",
                )

    def unprepared(self) -> list[str]:
        """Return the names of optimizers with a torch scheduler that was not prepared."""
        known = {id(scheduler.optimizer) for scheduler in self.schedulers}
        return [
            type(optimizer).__name__
            for optimizer in self.optimizers
            if id(optimizer) not in known and any("initial_lr" in group for group in optimizer.param_groups)
        ]

    def check_parameters(self) -> None:
        """Raise JobError if an optimizer has parameters of no prepared model, or of another optimizer."""
        known = {id(p) for model in self.models for p in model.parameters()}
        homes: dict[int, Optimizer] = {}
        for optimizer in self.optimizers:
            kind = type(optimizer).__name__
            own: list[Tensor] = [p for group in groups(optimizer) for p in group["params"]]
            strangers = [p for p in own if id(p) not in known]
            if strangers:
                raise _refused(
                    f"{kind} with {len(strangers)} of {len(own)} parameters, the first of shape "
                    f"{list(strangers[0].shape)}, that belong to no prepared model",
                    "their gradients would be summed on no rank",
                    "give prepare() the module that has them (wrap a bare parameter in one), and build the optimizer "
                    "from the modules that you give",
                )
            shared = next((p for p in own if homes.setdefault(id(p), optimizer) is not optimizer), None)
            if shared is not None:
                raise _refused(
                    f"a parameter of shape {list(shared.shape)} in two optimizers, {type(homes[id(shared)]).__name__} "
                    f"and {kind}",
                    "a checkpoint keeps one state for each parameter",
                    "give what is shared an optimizer of its own, and update both in one pass: "
                    "step.batches(shared_optimizer, optimizer)",
                )

    def without_optimizer(self) -> list[str]:
        """Return sentences on parameters without an optimizer, in models that are otherwise trained."""
        known = {id(p) for optimizer in self.optimizers for group in groups(optimizer) for p in group["params"]}
        trained = [model for model in self.models if any(id(p) in known for p in model.parameters())]
        return [text for model in trained for text in without_optimizer(self.optimizers, model.named_parameters())]

    def index(self, optimizer: Any) -> int:
        """Return the index of a prepared optimizer. Raises: JobError."""
        position = next((number for number, own in enumerate(self.optimizers) if own is optimizer), None)
        if position is None:
            raise JobError(
                given=f"step.batches() with a {type(optimizer).__name__} that was not prepared",
                conflict="a pass over the batches updates optimizers of this session",
                remedy="write step.batches(optimizer) with what prepare() has given",
            )
        return position


def refuse(thing: Any) -> None:
    """Raise JobError for an object that `prepare` does not take, with advice."""
    name, package = type(thing).__name__, type(thing).__module__.partition(".")[0]
    bases = {base.__name__ for base in type(thing).__mro__}
    if package in _TRAINERS:
        conflict = f"{package} has wrapped it, and would sum gradients or step a second time"
        raise _refused(f"a {name} of {package}", conflict, "give the object itself, as it was before that")
    if isinstance(thing, nn.Module):
        refuse_wrapped(thing, "session.prepare()")
    if "OptimizedModule" in bases:
        raise _refused(
            "a model that torch.compile has wrapped",
            "what belongs to grains (dropout, batch statistics) has to stay outside of the graphs",
            'give the model itself, and shoal.Plan().with_sections(execution={"compile": "default"}) as the plan',
        )
    if isinstance(thing, Optimizer):
        if needs_closure(thing):
            raise _refused(
                f"an optimizer {name}, whose step() needs a closure",
                "a closure computes the loss again, which a loop of your own computes once for each batch",
                "use it in a Job(optimizer=...), which evaluates the loss as often as it asks",
            )
        if isinstance(thing, SparseAdam):
            raise _refused(
                "an optimizer SparseAdam",
                "it takes sparse gradients only, and the gradients of a Session are dense",
                "use torch.optim.Adam or SGD, or a Job(optimizer=...)",
            )
        return None
    if isinstance(thing, nn.Module | LRScheduler):
        return None
    if isinstance(thing, DataLoader):
        conflict = "its batches are of one process, and a step's batches are this rank's part of the global batch"
        raise _refused("a DataLoader", conflict, "give the DataLoader to session.steps(loader, epochs=3)")
    if isinstance(thing, Dataset):
        raise _refused("a dataset", "its order is the steps'", "give it to session.steps(dataset, epochs=3)")
    if name == "GradScaler":
        conflict = "a Session scales its losses itself"
        raise _refused("a GradScaler", conflict, 'leave it out, and write shoal.Session(precision="fp16")')
    if thing is None:
        raise _refused("None", "there is nothing to prepare", "leave it out")
    given = f"a {'class ' + thing.__name__ if isinstance(thing, type) else name}"
    raise _refused(given, "it is no model, optimizer or scheduler of torch", "give the objects themselves, one by one")


def _refused(given: str, conflict: str, remedy: str) -> JobError:
    return JobError(given=f"session.prepare() of {given}", conflict=conflict, remedy=remedy)
