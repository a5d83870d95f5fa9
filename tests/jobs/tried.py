"""Nets whose steps are tried in modes, in short turns by a clock that the job sets.

A step in the mode `fast` takes 0.5 s, another one 1 s; on rank 1 one in the mode `slow` takes 1 s more. With `fast` =
"real" the turns are measured. The end of step `dies` kills the process, once. `compiles`: compilation is tried.
`fails`: the loss fails on rank 1 in its third call with channels last. SHOAL_TEST_FAST is `fast` for an equal job.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pooled import Net
from tiny import images, mlp
from torch import Tensor, nn

import shoal
from shoal.runs import step_trial
from shoal.training.loop import step_modes
from shoal.training.loop.trainer import Trainer
from shoal.training.setup import step_choice

step_trial.WARM_UPS, step_trial.LEAST_STEPS, step_trial.LEAST_SECONDS, step_trial.FEWEST_STEPS = 1, 2, 0.0, 24
step_trial.MOST_OF_RUN = 1.0


SEEN: list[None] = []


def classify(fails: bool, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The summed cross entropy."""
    if fails and model.training and batch[0].stride()[1] == 1 and os.environ.get("RANK") == "1":
        SEEN.append(None)
        if len(SEEN) == 3:
            raise RuntimeError("not with channels last")
    return shoal.cross_entropy(model(batch[0]), batch[1])


def clocked(fast: str, slow: str, dies: int) -> None:
    """Sets the clock of all steps of this process."""
    now, take, advance = 0.0, step_modes.StepModes.take, Trainer._advance

    def taken(modes: step_modes.StepModes, step: int) -> None:
        nonlocal now
        now += 0.5 if modes._mode.name == fast else 1.0
        now += 1.0 if modes._mode.name == slow and os.environ.get("RANK") == "1" else 0.0
        take(modes, step)

    def advanced(trainer: Trainer, *arguments: Any, **more: Any) -> None:
        advance(trainer, *arguments, **more)
        mark = Path(os.environ.get("SHOAL_TEST_DIES", "/"))
        if trainer.state.step == dies and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer._advance = advanced  # type: ignore[method-assign]
    step_modes.StepModes.take = taken  # type: ignore[method-assign]
    step_modes.seconds_now = lambda: now


def job(
    fast: str = "eager, channels last",
    slow: str = "",
    steps: int = 30,
    dies: int = 0,
    way: str = "flatten",
    compiles: bool = False,
    fails: bool = False,
) -> shoal.Job:
    """200 images of 6 x 6, 16 a step."""
    fast = os.environ.get("SHOAL_TEST_FAST", fast)
    if fast != "real":
        clocked(fast, slow, dies)
    if compiles:
        step_choice.COMPILE_SECONDS = step_choice.COMPILE_AGAIN_SECONDS = 0.0
    return mlp(
        200,
        16,
        steps,
        model=partial(Net, way),
        loss=partial(classify, fails),
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        train_data=partial(images, 200),
        eval_data=partial(images, 60, 2),
    )
