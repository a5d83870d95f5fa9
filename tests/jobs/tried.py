"""Nets whose steps are tried in modes, in short turns by a clock that the job sets: a step takes what `fast` says.

A step in the mode `fast` takes 0.5 s, another one 1 s; on rank 1 one in the mode `slow` takes 1 s more. With
"real" the turns are measured. The forward of step `dies`, counted in each process, kills its process, once.
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

step_trial.WARM_UPS, step_trial.LEAST_STEPS, step_trial.LEAST_SECONDS, step_trial.FEWEST_STEPS = 1, 2, 0.0, 24
step_trial.MOST_OF_RUN = 1.0
_clock = {"now": 0.0, "steps": 0}


def classify(fast: str, slow: str, dies: int, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The summed cross entropy; it moves the clock of a training step."""
    if torch.is_grad_enabled() and model.training:
        last = batch[0].stride()[1] == 1
        mode = "channels last" if last else "eager"
        _clock["now"] += 0.5 if fast == mode else 1.0
        _clock["now"] += 1.0 if os.environ.get("RANK") == "1" and slow == mode else 0.0
        _clock["steps"] += 1
        mark = Path(os.environ.get("SHOAL_TEST_DIES", "/"))
        if _clock["steps"] == dies and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return shoal.cross_entropy(model(batch[0]), batch[1])


def job(fast: str = "channels last", slow: str = "", steps: int = 30, dies: int = 0, way: str = "flatten") -> shoal.Job:
    """200 images of 6 x 6, 16 a step."""
    if fast != "real":
        step_modes.seconds_now = lambda: _clock["now"]
    return mlp(
        200,
        16,
        steps,
        model=partial(Net, way),
        loss=partial(classify, fast, slow, dies),
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        train_data=partial(images, 200),
        eval_data=partial(images, 60, 2),
    )
