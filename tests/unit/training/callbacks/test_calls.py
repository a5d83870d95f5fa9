"""Callbacks on one process: called at their places, isolated from the training, named where they raise."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint import weights_sha256
from shoal.distributed.mesh import alone
from shoal.errors import JobError, UserCodeError
from shoal.plans.plan import Plan
from shoal.training.callbacks.calls import CallbackCalls
from shoal.training.loop.trainer import Outcome
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(X, X.sum(1, keepdim=True))


class Normed(nn.Module):
    """With batch statistics and dropout, so that a stray forward or draw is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def job(*callbacks: shoal.Callback, steps: int = 6, **changes: Any) -> shoal.Job:
    """Three steps an epoch."""
    said: dict[str, Any] = {
        "model": Normed,
        "loss": lambda model, batch: shoal.mse(model(batch[0]), batch[1]),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "train_data": ROWS,
        "eval_data": ROWS,
        "global_batch": 8,
        "grains": 2,
        "length": shoal.Steps(steps),
        "callbacks": callbacks,
    }
    return shoal.Job(**{**said, **changes})


def trained(
    wanted: shoal.Job, folder: Path | None = None, *, resume: bool = False, lines: list[str] | None = None
) -> tuple[str, Outcome, list[str]]:
    """The weights' hash, the outcome, and the lines for people."""
    options = Options(telemetry=False, checkpoints=folder, callbacks=tuple(wanted.callbacks), checkpoint_every=2)
    made = build(wanted, judged(wanted, Plan()).plan, alone(torch.device("cpu")), options)
    lines = lines if lines is not None else []
    try:
        state, complaints = made.load() if resume else (None, [])
        lines += complaints
        around = Surroundings(lines.append, lambda record, rank: None, lambda: False)
        outcome = made.trainer(state, made.order.num_steps, around, RecordWriter(None)).train()
        return weights_sha256(dict(made.model.state_dict())), outcome, lines
    finally:
        made.close()


class Told(shoal.Callback):
    """Notes each call, and asks for something after a step."""

    def __init__(self, step: int = 0, request: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.step, self.request, self.total = step, request, torch.zeros(2, dtype=torch.float64)

    def on_start(self, run: Any) -> None:
        self.calls.append(("start", run.step, run.num_steps, run.rank, run.world_size))

    def on_step(self, run: Any, record: shoal.StepRecord) -> None:
        self.calls.append(("step", record.step))
        self.total += record.loss
        if record.step == self.step:
            getattr(run, f"request_{self.request}")()

    def on_evaluation(self, run: Any, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", run.step, *metrics))

    def on_checkpoint(self, run: Any, folder: Path) -> None:
        self.calls.append(("checkpoint", folder.name))

    def on_end(self, run: Any, ending: Any) -> None:
        self.calls.append(("end", ending.status, ending.step, *ending.metrics))

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "calls": len(self.calls), "nested": {"a": [1, (2, None)]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["nested"] == {"a": [1, (2, None)]}
        self.total = state["total"]


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    told = Told()
    trained(job(told, steps=4), tmp_path)
    assert told.calls == [
        ("start", 0, 4, 0, 1),
        ("step", 1),
        ("step", 2),
        ("checkpoint", "step-00000002"),
        ("step", 3),
        ("evaluation", 3, "loss"),
        ("step", 4),
        ("checkpoint", "step-00000004"),
        ("evaluation", 4, "loss"),
        ("end", "completed", 4, "loss"),
    ]


def test_requests_count_at_their_step(tmp_path: Path) -> None:
    told = Told(5, "evaluation")
    trained(job(told), None)
    assert [call[1] for call in told.calls if call[0] == "evaluation"] == [3, 5, 6]
    told = Told(3, "evaluation")
    trained(job(told), None)
    assert [call[1] for call in told.calls if call[0] == "evaluation"] == [3, 6], "a step is evaluated once"
    told = Told(5, "checkpoint")
    trained(job(told), tmp_path)
    assert [call[1][-1] for call in told.calls if call[0] == "checkpoint"] == ["2", "4", "5", "6"]
    told = Told(4, "end")
    outcome = trained(job(told))[1]
    assert (outcome.status, outcome.state.step) == ("completed", 4)
    assert outcome.ended_by == {"callback": "Told", "reason": "", "step": 4}
    assert told.calls[-2:] == [("evaluation", 4, "loss"), ("end", "completed", 4, "loss")]


class Busy(shoal.Callback):
    """Draws from every generator, seeds them, runs the model in both modes, and leaves gradients behind."""

    def _work(self, run: Any) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = run.model
        with torch.enable_grad():
            model.train()(X).sum().backward()
        model.eval()(X)
        assert not torch.is_grad_enabled()

    def on_start(self, run: Any) -> None:
        self._work(run)

    def on_step(self, run: Any, record: Any) -> None:
        self._work(run)

    def on_evaluation(self, run: Any, metrics: Any) -> None:
        self._work(run)


def test_what_a_callback_computes_changes_nothing() -> None:
    with_it, without = trained(job(Busy())), trained(job())
    assert with_it[0] == without[0]
    assert with_it[1].metrics == without[1].metrics


class Keeps(shoal.Callback):
    """Keeps the model that it was given, and uses it in later hooks."""

    def on_start(self, run: Any) -> None:
        self.model = run.model

    def on_step(self, run: Any, record: Any) -> None:
        self.model.train()(X)
        self.model.eval()


def test_a_kept_model_changes_nothing() -> None:
    assert trained(job(Keeps()))[0] == trained(job())[0]


class Reaches(shoal.Callback):
    """Changes a parameter in a way that torch does not count."""

    def __init__(self, change: str) -> None:
        self.change = change

    def on_start(self, run: Any) -> None:
        self.parameters = dict(run.parameters())
        self.layer = run.model.inner[0]

    def on_step(self, run: Any, record: Any) -> None:
        if run.step != 2:
            return
        if self.change == "data":
            self.layer.weight.data.mul_(0.5)
        elif self.change == "parameters":
            self.parameters["inner.0.weight"].data.mul_(0.5)
        elif self.change == "frozen":
            self.layer.weight.requires_grad_(False)
        else:
            self.layer.weight = nn.Parameter(self.layer.weight.clone())


@pytest.mark.parametrize("change", ["data", "parameters", "frozen", "replaced"])
def test_changes_that_torch_does_not_count_end_the_run(change: str) -> None:
    with pytest.raises(JobError, match=r"callback Reaches, whose on_step changes inner\.0\.weight"):
        trained(job(Reaches(change)))


class Closes(shoal.Callback):
    """Changes a parameter of a model that it has by itself."""

    def on_step(self, run: Any, record: Any) -> None:
        next(run.model.parameters()).mul_(0.5)


def test_a_callback_that_changes_a_parameter_ends_the_run() -> None:
    with pytest.raises(JobError, match=r"callback Closes, whose on_step changes inner\.0\.weight"):
        trained(job(Closes()))


class Anneals(shoal.Callback):
    """Writes a buffer by hand, with a forward before it or without one."""

    def __init__(self, forward: bool) -> None:
        self.forward = forward

    def on_step(self, run: Any, record: Any) -> None:
        if self.forward:
            run.model(X)
        run.model.inner[1].running_mean.fill_(record.step)


def test_a_buffer_that_a_callback_writes_without_a_forward_ends_the_run() -> None:
    with pytest.raises(JobError, match=r"callback Anneals, whose on_step changes the buffer inner\.1\.running_mean"):
        trained(job(Anneals(forward=False)))
    assert trained(job(Anneals(forward=True)))[0] == trained(job())[0]


@pytest.mark.parametrize("starts", [False, True])
def test_an_attribute_that_a_callback_sets_is_told_of(starts: bool) -> None:
    class Sets(shoal.Callback):
        def on_step(self, run: Any, record: Any) -> None:
            run.model.beta = float(run.step)

    class Starts(Sets):
        def on_start(self, run: Any) -> None:
            run.model.beta = float(run.step)

    lines = trained(job((Starts if starts else Sets)()))[2]
    assert [line for line in lines if "sets beta of the model" in line] == ([] if starts else [lines[0]])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_learning_rate_that_a_callback_sets_ends_the_run(as_tensor: bool) -> None:
    made: list[torch.optim.Optimizer] = []

    class Decays(shoal.Callback):
        def on_step(self, run: Any, record: Any) -> None:
            made[-1].param_groups[0]["lr"] *= 0.5

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=torch.tensor(0.1) if as_tensor else 0.1, foreach=False))
        return made[-1]

    with pytest.raises(JobError, match="callback Decays, whose on_step changes a learning rate"):
        trained(job(Decays(), optimizer=make))


def test_a_rate_that_the_optimizers_own_step_changes_is_kept_over_a_resume(tmp_path: Path) -> None:
    class Decaying(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.param_groups[0]["lr"] *= 0.5

    own: dict[str, Any] = {"optimizer": lambda parameters: Decaying(parameters, lr=0.1)}
    halves = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    halved = trained(job(**halves, schedule=lambda progress: 0.5**progress.step))[0]  # type: ignore[attr-defined]
    assert trained(job(**own))[0] == halved
    trained(job(**own, steps=2), tmp_path)
    assert trained(job(**own), tmp_path, resume=True)[0] == halved
    with pytest.raises(JobError, match="optimizer Decaying, whose step changes a learning rate, and a schedule"):
        trained(job(**own, schedule=lambda progress: 1.0))


def scheduled(parameters: Any) -> torch.optim.Optimizer:
    """With a scheduler, and with a warm-up by a counter, in hooks of its step."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    seen, total = {"steps": 0}, 0

    def warm_up(*arguments: Any) -> None:
        nonlocal total
        seen["steps"] += 1
        total += 1
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.1 * min(1.0, (seen["steps"] + total) / 10)

    optimizer.register_step_pre_hook(warm_up)
    optimizer.register_step_post_hook(lambda *arguments: scheduler.step())
    return optimizer


def test_what_hooks_of_the_optimizer_count_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    undisturbed = trained(job(optimizer=scheduled))[0]
    trained(job(optimizer=scheduled, steps=4), tmp_path)
    assert trained(job(optimizer=scheduled), tmp_path, resume=True)[0] == undisturbed


@pytest.mark.parametrize(("first", "said"), [(0, "an optimizer function that sets requires_grad"), (2, "whose step")])
def test_an_optimizer_that_freezes_a_parameter_is_refused(first: int, said: str) -> None:
    class Freezing(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            self.num_steps = 0
            super().__init__(parameters, lr=0.1)
            self.freeze()

        def freeze(self) -> None:
            self.param_groups[0]["params"][0].requires_grad_(self.num_steps < first)

        def step(self, closure: Any = None) -> None:
            super().step()
            self.num_steps += 1
            self.freeze()

    with pytest.raises(JobError, match=said):
        trained(job(optimizer=Freezing))


def test_a_changed_parameter_is_in_no_checkpoint(tmp_path: Path) -> None:
    class Late(shoal.Callback):
        def on_step(self, run: Any, record: Any) -> None:
            if run.step == 5:
                next(run.model.parameters()).mul_(0.0)

    with pytest.raises(JobError, match="callback Late has changed the model; --resume goes on from step 4"):
        trained(job(Late()), tmp_path)
    assert not (tmp_path / "step-00000005").exists()
    assert (tmp_path / "step-00000004").exists()


class Raises(shoal.Callback):
    """Raises in a hook."""

    def __new__(cls, hook: str, required: bool = False) -> Raises:
        return super().__new__(type(cls.__name__, (cls,), {hook: cls._raise}))

    def __init__(self, hook: str, required: bool = False) -> None:
        self.required = required
        self.calls = 0

    def _raise(self, *arguments: Any) -> None:
        self.calls += 1
        raise ValueError("no such thing\nat all")


@pytest.mark.parametrize("name", ["on_step", "state_dict", "watches_only"])
def test_what_all_ranks_go_by_is_of_the_class(name: str) -> None:
    """Set on an object it may be of one rank alone, and the others would wait for it."""
    own = shoal.Callback()
    setattr(own, name, None)
    with pytest.raises(JobError, match=f"define {name} in the class"):
        CallbackCalls([own])


HOOKS = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end", "state_dict", "parameter_tensors")


@pytest.mark.parametrize("hook", HOOKS)
def test_one_that_raises_is_named_and_switched_off(hook: str, tmp_path: Path) -> None:
    raises = Raises(hook)
    found, _, lines = trained(job(raises), tmp_path / "a")
    assert raises.calls == 1
    said = [line for line in lines if "callback Raises raised in" in line]
    assert len(said) == 1
    assert f"{hook} after step" in said[0]
    assert "ValueError: no such thing at" in said[0]
    assert "switched off on all ranks" in said[0]
    assert found == trained(job(), tmp_path / "b")[0]


@pytest.mark.parametrize("hook", HOOKS)
def test_one_that_is_required_ends_the_run(hook: str, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"callback Raises; its .* raised ValueError: no such thing"):
        trained(job(Raises(hook, required=True)), tmp_path)


def test_a_watcher_may_not_ask() -> None:
    class Watches(Told):
        watches_only = True

    lines = trained(job(Watches(2, "end")))[2]
    assert any("which says watches_only = True" in line for line in lines)


def test_state_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    whole, first, second = Told(), Told(3, "end"), Told()
    trained(job(whole))
    trained(job(first), tmp_path)
    trained(job(second), tmp_path, resume=True)
    assert torch.equal(second.total, whole.total)
    assert second.calls[0] == ("start", 3, 6, 0, 1)


def test_states_without_a_taker_are_told_of(tmp_path: Path) -> None:
    trained(job(Told(2, "end")), tmp_path)
    lines = trained(job(shoal.EMA(0.9)), tmp_path, resume=True)[2]
    assert "callback EMA begins anew: the checkpoint has no state of it" in lines
    assert "the state of callback Told is left: this job has no such callback" in lines


class Opaque(shoal.Callback):
    """With a state that no checkpoint can have."""

    def __init__(self, required: bool = False, **kept: Any) -> None:
        self.required, self.kept = required, kept

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()} if not self.kept else {}

    def parameter_tensors(self) -> dict[str, Any]:
        return self.kept


UNSAVEABLE: list[tuple[dict[str, Any], str]] = [
    ({}, "UserCodeError: callback state Opaque/file of type object"),
    ({"gone": torch.zeros(3)}, "'gone' of shape [3]; no parameter has that name"),
    ({"inner.0.bias": torch.zeros(3)}, "'inner.0.bias' of shape [3]; that parameter has [4] here"),
    ({"inner.0.bias": 1.0}, "'inner.0.bias' of type float"),
]


@pytest.mark.parametrize(("kept", "said"), UNSAVEABLE)
def test_a_state_that_is_none_switches_the_callback_off_before_the_first_step(
    kept: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found, _, lines = trained(job(Opaque(**kept)), tmp_path)
    assert said in lines[0]
    assert "callback Opaque raised in" in lines[0]
    assert "after step 0 on rank 0" in lines[0]
    assert "shoal/checkpoint" not in lines[0], "no line of the user's"
    assert found == trained(job())[0]


def test_a_state_that_is_none_ends_the_run_where_it_is_required(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="callback state Opaque/file of type object"):
        trained(job(Opaque(required=True)), tmp_path)
    assert not list(tmp_path.iterdir()), "before the first step"


def test_an_on_end_that_raises_after_a_failure_is_named() -> None:
    class Ends(shoal.Callback):
        def on_end(self, run: Any, ending: Any) -> None:
            raise OSError("second")

    lines: list[str] = []
    with pytest.raises(UserCodeError, match="no such thing"):
        trained(job(Raises("on_step", required=True), Ends()), lines=lines)
    assert any("callback Ends raised in on_end on rank 0" in line and "OSError: second" in line for line in lines)


def test_the_whole_model_is_a_copy(tmp_path: Path) -> None:
    class Looks(shoal.Callback):
        def on_end(self, run: Any, ending: Any) -> None:
            self.model = run.whole_model()
            self.found = weights_sha256(self.model.state_dict())
            torch.nn.init.zeros_(next(self.model.parameters()))

    looks = Looks()
    assert trained(job(looks))[0] == looks.found
    assert not looks.model.training


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([Told], "a callback is an object with hooks"),
        ([print], "a callback is an object with hooks"),
        (Told(), "callbacks are a list"),
        ([shoal.EarlyStopping("perplexity")], "an evaluation gives loss"),
        ([shoal.KeepBest("loss"), shoal.KeepBest("loss", mode="max")], "one metric decides"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        job(callbacks=callbacks)


def test_two_averages_are_refused() -> None:
    with pytest.raises(JobError, match="2 callbacks EMA"):
        trained(job(shoal.EMA(0.9), shoal.EMA(0.99)))
