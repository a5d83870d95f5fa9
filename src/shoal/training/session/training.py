"""Numerical settings of a Session's training, and the errors for unknown names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from shoal.errors import JobError, nearest
from shoal.job import Job, Progress

_PLACES = ("plan", "exact", "precision")

# What other trainers call it, and what to write here.
_ELSEWHERE = {
    "accelerator": "nothing: the device is a GPU where torch sees one",
    "accumulate_grad_batches": "nothing: global_batch is the batch of one update, however it is accumulated",
    "batch_size": "global_batch, of all processes together",
    "devices": "torchrun --nproc-per-node N train.py, or a plan",
    "gradient_accumulation_steps": "nothing: global_batch is the batch of one update, however it is accumulated",
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "max_steps": "session.steps(dataset, shoal.Steps(N))",
    "mixed_precision": "precision",
    "num_processes": "torchrun --nproc-per-node N train.py, or a plan",
    "split_batches": "global_batch, of all processes together",
    "strategy": "plan",
}

# Methods and attributes that other trainers' objects have, and what to write here.
_METHODS = {
    "accumulate": "nothing: global_batch is the batch of one update, however it is accumulated",
    "autocast": "shoal.Session(precision=...): the loop over a step's batches is in its context",
    "backward": "step.backward(total, weight) for each batch",
    "clip_gradients": "shoal.Session(clip_norm=...)",
    "clip_grad_norm_": "shoal.Session(clip_norm=...)",
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


def missing_attribute(name: str) -> AttributeError:
    """The error for what a Session does not have: with what to write, where another trainer has it."""
    hint = f"; write {_METHODS[name]}" if name in _METHODS else ""
    return AttributeError(f"a Session has no {name}{hint}", name=name)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Numerical settings of a Session; the fields are a Job's, see there.

    `fuse`: whether neighbouring grains may share a forward; False for losses that compare the samples of a batch.
    `checkpoints`: a directory for them, or None; `resume`: go on from the newest good one there.
    """

    global_batch: int
    grains: int = 8
    seed: int = 0
    clip_norm: float | None = None
    schedule: Callable[[Progress], float] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    fuse: bool = True
    skip_nonfinite: bool = False
    checkpoints: str | os.PathLike[str] | None = None
    resume: bool = False

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> Training:
        """From a Session's keyword arguments. Raises: JobError for one that there is not, or that is missing."""
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
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in arguments]
        if missing:
            raise JobError(
                given=f"a Session without {', '.join(missing)}",
                conflict="the samples of one update define the training, whatever the number of processes",
                remedy="write shoal.Session(global_batch=256), say",
            )
        return cls(**arguments)

    def job(self) -> Job:
        """The numbers as a Job, which checks them. Raises: JobError."""
        if self.resume and self.checkpoints is None:
            raise JobError(
                given="resume=True without checkpoints",
                conflict="there is no directory to resume from",
                remedy='write checkpoints="runs/mine" too, the directory that the first run kept them in',
            )

        def unused(*_: Any) -> Any:
            raise AssertionError("a Session's loop computes its own loss")

        return Job(
            model=unused,
            loss=unused,
            optimizer=unused,
            train_data=(),
            global_batch=self.global_batch,
            grains=self.grains,
            seed=self.seed,
            clip_norm=self.clip_norm,
            schedule=self.schedule,
            collate=self.collate,
            shuffle=self.shuffle,
        )
