"""A training in this process whose reads of device values are counted, CPU tensors standing for those of a device."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint import weights_sha256
from shoal.checkpoint.state import optimizer_state
from shoal.distributed.mesh import Mesh, alone
from shoal.errors import ShoalError
from shoal.plans.plan import Plan
from shoal.runs.records import StepRecord
from shoal.training.loop.late_reads import LateReads
from shoal.training.loop.step_modes import RunTrial
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged

DATA = TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)
STEPS, STEADY = 8, 3
PACKAGE = str(Path(shoal.__file__).parent) + os.sep
# What is on the host whatever the device: states of torch's own generator and what it draws there.
OF_THE_HOST = (
    "numerics/grain_randomness.py next",
    "numerics/generators.py torch_generator",
)


def read_by() -> str:
    """Where in the package the read is; empty where it is not there."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename.removeprefix(PACKAGE)} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Scalars(TorchDispatchMode):
    """Counts numbers that are taken out of tensors: item, float, bool."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense and read_by() not in OF_THE_HOST:
            self._found[read_by()] += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the host, which are none of a tensor that is there and which torch does not tell of."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = func in (Tensor.cpu, Tensor.tolist) and args[0].numel()
        if copies and read_by() not in OF_THE_HOST:
            self._found[read_by()] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting(found: Counter[str]) -> Iterator[None]:
    """A context in which every read of a tensor's value counts."""
    with Scalars(found), Copies(found):
        yield


@contextlib.contextmanager
def waiting(late: bool, long_step_seconds: float = math.inf) -> Iterator[None]:
    """A context in which tensors of the CPU count as those of a device; `late`: steps are queued there.

    Steps that are longer than `long_step_seconds` are read at once. On a busy machine any step may be a long one.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("shoal.numerics.device_reads.waits", return_value=True))
        stack.enter_context(mock.patch("shoal.training.loop.late_reads.LONG_STEP_SECONDS", long_step_seconds))
        if not late:
            stack.enter_context(mock.patch.object(LateReads, "apply", return_value=False))
        yield


def job(**changes: Any) -> shoal.Job:
    said: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        "loss": lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "train_data": DATA,
        "global_batch": 16,
        "length": shoal.Steps(STEPS),
    }
    return shoal.Job(**{**said, **changes})


@dataclass
class Course:
    """What came of a training: all that has to be the same whenever steps are read, and what may differ."""

    weights: str = ""  # and what the optimizer keeps, of this rank
    state: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str = ""
    reads: Counter[str] = field(default_factory=Counter)  # of the steps after the first ones
    order: list[tuple[str, int]] = field(default_factory=list)  # forwards and records, by step

    @property
    def result(self) -> tuple[Any, ...]:
        """What has to be the same."""
        return self.weights, self.state, self.records, self.notes, self.error


_OF_TIME = ("seconds", "spans", "memory_bytes", "at", "ranks", "host", "after", "by_rank")


def trained(
    wanted: shoal.Job,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    folder: Path | None = None,
    stops: Callable[[int], bool] = lambda step: False,
    callbacks: Sequence[shoal.Callback] = (),
    counts_reads: bool = False,
    trial: RunTrial | None = None,
    **options: Any,
) -> Course:
    """The course of a training; `stops` is asked with the steps that are recorded so far.

    Counting takes as long as a small model's operations do.
    """
    course, mesh, seen = Course(), mesh or alone(torch.device("cpu")), list[StepRecord]()

    def on_step(record: StepRecord, rank: int) -> None:
        seen.append(record)
        course.order.append(("record", record.step))
        if len(seen) == STEADY:
            course.reads.clear()

    chosen = Options(folder, telemetry=False, callbacks=callbacks, **options)
    made = build(wanted, judged(wanted, plan or Plan()).plan, mesh, chosen)
    if chosen.observer.has_hooks:
        chosen.observer.attach(made.sharded_model, made.updater.optimizer, made.strategy)
    begin = made.strategy.begin

    def begun(step: int = 0, factor: float = 1.0) -> None:
        course.order.append(("forward", step + 1))
        begin(step, factor)

    around = Surroundings(course.notes.append, on_step, lambda: stops(len(seen)))
    with mock.patch.object(made.strategy, "begin", begun), contextlib.closing(made):
        trainer = made.trainer(None, wanted.length.count, around, RecordWriter(None), trial)
        try:
            with counting(course.reads) if counts_reads else contextlib.nullcontext():
                trainer.train()
        except ShoalError as error:
            course.error = f"{type(error).__name__}: {error.given}; {error.conflict}"
        course.state = {key: value for key, value in trainer.state.to_json().items() if key != "best"}
        held = {name: tensor for name, (_, tensor) in made.sharded_model.state_dict().items()}
        kept, _ = optimizer_state(made.updater.optimizer, made.model, copy=False)
        course.weights = weights_sha256({**held, **{f"optimizer/{path}": tensor for path, tensor in kept.items()}})
    course.records = [{k: v for k, v in vars(record).items() if k not in _OF_TIME} for record in seen]
    return course
