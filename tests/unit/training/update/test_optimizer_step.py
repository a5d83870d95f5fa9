"""From summed gradients to new parameters; or to none at all."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.state import optimizer_state
from shoal.distributed.mesh import alone
from shoal.errors import JobError, LossError, UserCodeError
from shoal.jobs.job import Job, Progress, warmup_cosine
from shoal.numerics.generators import all_generators
from shoal.numerics.precision import LossScale
from shoal.parallel.base import NUM_SUMS, TOTAL, WEIGHT, QueuedSums
from shoal.parallel.data.replicated import DataParallel
from shoal.parallel.model.parameter_hooks import ParameterHooks
from shoal.parallel.model.sharded_model import ShardedModel
from shoal.training.observer import Observer
from shoal.training.update.job_optimizer import Parameters, build_optimizer
from shoal.training.update.lr_schedule import Schedule
from shoal.training.update.optimizer_step import Stepper, Update, Updater, fused

START = Progress(0, 10, 0)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def with_gradients(factor: float = 1.0) -> tuple[nn.Module, Parameters]:
    made = model()
    (made(torch.linspace(-1, 1, 12).view(4, 3)).square().sum() * factor).backward()
    return made, Parameters(made)


def job(**options: Any) -> Job:
    return Job(model=model, loss=print, optimizer=print, train_data=[0], global_batch=1, **options)


def updater_of(
    optimizer: torch.optim.Optimizer, parameters: Parameters, of: Job, hooks: ParameterHooks | None = None
) -> Updater:
    model = ShardedModel(alone(torch.device("cpu")), nn.ParameterList(parameters), hooks=hooks)
    strategy = DataParallel(model, parameters, torch.float32, lambda span: None)
    return Updater(optimizer, of, Observer(), strategy, model)


def updater(parameters: Parameters, clip: float | None = None, schedule: Any = None) -> Updater:
    return updater_of(torch.optim.SGD(parameters, lr=0.1), parameters, job(clip_norm=clip, schedule=schedule))


def step(stepped: Updater, weight: float = 1.0, progress: Progress = START) -> Update:
    return stepped.step(1.0, weight, LossScale(), progress)


# ------------------------------------------------------------------------------------------------------------ updating


@pytest.mark.parametrize("clip", [None, 0.01, 1.0, 1e6])
@pytest.mark.parametrize(("weight", "factor"), [(1.0, 1.0), (4.0, 1.0), (4.0, 2.0**10)])
def test_a_step_equals_torchs_own(clip: float | None, weight: float, factor: float) -> None:
    made, parameters = with_gradients(factor)
    update = updater(parameters, clip).step(1.0, weight, LossScale(factor), START)
    other, theirs = with_gradients(1.0 / weight)
    norm = torch.nn.utils.clip_grad_norm_(theirs, clip if clip is not None else math.inf)
    torch.optim.SGD(theirs, lr=0.1).step()
    assert update.skipped is None
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for mine, reference in zip(made.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("limit", [1e-3, 0.1, 1e6])
@pytest.mark.parametrize(("weight", "factor"), [(1.0, 1.0), (4.0, 2.0**10)])
def test_a_step_that_clips_values_has_torchs_own_bits(limit: float, weight: float, factor: float) -> None:
    made, parameters = with_gradients(factor)
    told = updater_of(torch.optim.SGD(parameters, lr=0.1), parameters, job(clip_value=limit))
    update = told.step(1.0, weight, LossScale(factor), START)
    other, theirs = with_gradients(1.0 / weight)
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs])  # type: ignore[misc]
    torch.nn.utils.clip_grad_value_(theirs, limit)
    torch.optim.SGD(theirs, lr=0.1).step()
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-6), "before it is clipped"
    for mine, reference in zip(made.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    made, parameters = with_gradients()
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    before = [p.detach().clone() for p in parameters]
    parameters[1].grad[2] = bad  # type: ignore[index]
    update = step(updater_of(optimizer, parameters, job(clip_norm=1.0)), 4.0)
    assert update.skipped == "nonfinite"
    assert not math.isfinite(update.grad_norm)
    assert all(torch.equal(p, b) for p, b in zip(made.parameters(), before, strict=True))
    assert not optimizer.state


@pytest.mark.parametrize(("weight", "skipped"), [(0.0, "weightless"), (math.nan, "nonfinite")])
def test_a_step_without_weight_changes_nothing(weight: float, skipped: str) -> None:
    made, parameters = with_gradients()
    before = [p.detach().clone() for p in parameters]
    assert step(updater(parameters), weight).skipped == skipped
    assert all(torch.equal(p, b) for p, b in zip(made.parameters(), before, strict=True))


@pytest.mark.parametrize("weight", [math.inf, -1.0])
def test_a_weight_that_counts_nothing_is_refused(weight: float) -> None:
    made, parameters = with_gradients()
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(LossError, match="weight"):
        step(updater(parameters), weight)
    assert all(torch.equal(p, b) for p, b in zip(made.parameters(), before, strict=True))


def test_parameters_without_a_gradient_stay() -> None:
    _made, parameters = with_gradients()
    parameters[0].grad = None
    before = parameters[0].detach().clone()
    assert step(updater(parameters, clip=0.1)).skipped is None
    assert torch.equal(parameters[0], before)
    for parameter in parameters:
        parameter.grad = None
    assert step(updater(parameters)).grad_norm == 0.0


# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("tensor", [False, True])
def test_the_schedule_multiplies_every_groups_own_rate(tensor: bool) -> None:
    _made, parameters = with_gradients()
    rates = [0.5, 0.1]
    groups = [{"params": parameters[:2], "lr": rates[0]}, {"params": parameters[2:], "lr": rates[1]}]
    if tensor:
        groups = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
    optimizer = torch.optim.SGD(groups)
    schedule = warmup_cosine(0.5)
    stepped = updater_of(optimizer, parameters, job(schedule=schedule))
    for number in (0, 1, 7, 2):
        progress = Progress(number, 10, 0)
        update = step(stepped, progress=progress)
        expected = [rate * schedule(progress) for rate in rates]
        assert [float(g["lr"]) for g in optimizer.param_groups] == pytest.approx(expected)
        assert update.learning_rate == pytest.approx(expected[0])


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_schedule_gives_a_multiplier(value: float) -> None:
    _, parameters = with_gradients()
    with pytest.raises(UserCodeError, match=r"schedule\(0\) = "):
        step(updater(parameters, schedule=lambda progress: value))


@pytest.mark.parametrize(
    "schedule", [lambda progress: 1 / 0, lambda: 1.0, lambda progress: "fast", lambda progress: None]
)
def test_a_schedule_that_raises_is_told(schedule: Callable[..., Any]) -> None:
    _, parameters = with_gradients()
    with pytest.raises(UserCodeError, match="the schedule of this job; it raised"):
        step(updater(parameters, schedule=schedule))


# ----------------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor])
def test_ordinary_optimizers_are_taken(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    _, parameters = with_gradients()
    before = [p.detach().clone() for p in parameters]
    stepped = updater_of(build_optimizer(make, parameters), parameters, job())
    assert step(stepped, 4.0).skipped is None
    assert not any(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_an_optimizer_that_raises_in_a_step_is_told() -> None:
    class Raises(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("out of ideas")

    _, parameters = with_gradients()
    with pytest.raises(UserCodeError, match="it raised RuntimeError: out of ideas"):
        step(updater_of(Raises(parameters, lr=0.1), parameters, job()))


def test_an_optimizer_without_a_learning_rate() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                torch._foreach_add_([p.data for p in group["params"]], 1.0)

    _, parameters = with_gradients()
    before = [p.detach().clone() for p in parameters]
    assert step(updater_of(build_optimizer(Own, parameters), parameters, job())).skipped is None
    assert all(torch.equal(p, b + 1.0) for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize(
    ("loss", "scale", "skipped"),
    [
        (1.0, LossScale(2.0**16, dynamic=True), "overflow"),
        (1.0, LossScale(2.0**-10, dynamic=True), "nonfinite"),
        (1.0, LossScale(2.0**16), "nonfinite"),
        (math.nan, LossScale(2.0**16, dynamic=True), "nonfinite"),
    ],
)
def test_only_a_gradient_that_a_smaller_scale_may_mend_is_an_overflow(
    loss: float, scale: LossScale, skipped: str
) -> None:
    _, parameters = with_gradients()
    parameters[0].grad[0, 0] = math.inf  # type: ignore[index]
    assert updater(parameters).step(loss, 4.0, scale, START).skipped == skipped


def test_an_optimizer_that_draws_noise_draws_the_same_everywhere() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            add_noise(self)

    found = []
    for seed in (1, 2):
        _, parameters = with_gradients()
        torch.manual_seed(seed)  # what another rank, or another layout, would leave there
        step(updater_of(Noisy(parameters, lr=0.1), parameters, job()))
        found.append(parameters[0].detach().clone())
    assert torch.equal(*found)


def add_noise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        torch._foreach_add_([p.data for p in group["params"]], float(torch.rand(())))


def test_what_hooks_into_a_step_may_draw_as_well() -> None:
    found = []
    for seed in (1, 2):
        _, parameters = with_gradients()
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(add_noise)
        torch.manual_seed(seed)
        step(updater_of(optimizer, parameters, job()))
        found.append(parameters[0].detach().clone())
    assert torch.equal(*found)


def test_an_optimizer_that_draws_nothing_leaves_the_generators_alone() -> None:
    _, parameters = with_gradients()
    before = all_generators()
    step(updater(parameters))
    assert all_generators() == before


# --------------------------------------------------------------------------------------------------------------- fused

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **more),
    "Adam": lambda p, **more: torch.optim.Adam(p, lr=0.1, **more),
    "AdamW": lambda p, **more: torch.optim.AdamW(p, lr=0.1, **more),
    "Adagrad": lambda p, **more: torch.optim.Adagrad(p, lr=0.1, **more),
}


def stepped(make: Callable[..., torch.optim.Optimizer], fusing: bool) -> list[torch.Tensor]:
    made = model()
    optimizer = make(list(made.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        made(torch.linspace(-1, 1, 12).view(4, 3)).square().sum().backward()
        with fused(optimizer) if fusing else contextlib.nullcontext():
            if fusing:
                assert all(group["fused"] for group in optimizer.param_groups)
            optimizer.step()
    assert all(group["fused"] is None for group in optimizer.param_groups)
    return [p.detach() for p in made.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_kernels_compute_the_same(name: str) -> None:
    for one, other in zip(stepped(OPTIMIZERS[name], True), stepped(OPTIMIZERS[name], False), strict=True):
        torch.testing.assert_close(one, other)


def test_a_parameter_that_is_used_late_gets_its_first_momentum() -> None:
    """torch's fused SGD raises for a group in which some have one."""
    found = []
    for fusing in (True, False):
        early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9)
        for parameters in ([early], [early, late], [early, late]):
            for parameter in parameters:
                parameter.grad = torch.linspace(-1, 1, 3)
            with fused(optimizer) if fusing else contextlib.nullcontext():
                optimizer.step()
        found.append(torch.cat([early.detach(), late.detach()]))
    torch.testing.assert_close(*found)


class Own(torch.optim.SGD):
    """An optimizer of the user's own."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, fused=False),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: Own(p, lr=0.1),
    ],
)
def test_what_was_chosen_otherwise_is_not_fused(make: Callable[..., torch.optim.Optimizer]) -> None:
    _, parameters = with_gradients()
    optimizer = make(list(parameters))
    before = [group.get("fused") for group in optimizer.param_groups]
    with fused(optimizer):
        assert [group.get("fused") for group in optimizer.param_groups] == before


@pytest.mark.parametrize("odd", ["strided", "narrow", "sparse"])
def test_tensors_that_kernels_do_not_take_are_not_fused(odd: str) -> None:
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16 if odd == "narrow" else torch.float32))
    if odd == "strided":
        parameter = nn.Parameter(torch.zeros(4, 3).t())
    parameter.grad = torch.zeros_like(parameter)
    if odd == "sparse":
        parameter.grad = parameter.grad.to_sparse()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with fused(optimizer):
        assert not optimizer.param_groups[0]["fused"]


def test_nothing_is_multiplied_by_one() -> None:
    _, parameters = with_gradients()
    versions = [p.grad._version for p in parameters if p.grad is not None]
    step(updater(parameters))
    assert [p.grad._version for p in parameters if p.grad is not None] == versions
    step(updater(parameters), weight=2.0)
    assert [p.grad._version for p in parameters if p.grad is not None] != versions


class Two(torch.optim.Optimizer):
    """Two optimizers in one, whose own group has no rate."""

    def __init__(self, parameters: Any) -> None:
        self.parts = [torch.optim.SGD(parameters[:1], lr=0.2), torch.optim.Adam(parameters[1:], lr=0.02)]
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test_a_schedule_reaches_the_optimizers_within() -> None:
    def halves(progress: Progress) -> float:
        return 0.5

    steplr = Schedule(torch.optim.lr_scheduler.ConstantLR, factor=0.5)
    for schedule in (halves, steplr):
        optimizer = build_optimizer(Two, Parameters(nn.Linear(2, 2)))
        stepper = Stepper(optimizer, job(schedule=schedule))
        assert stepper.set_rates(Progress(1, 10, 1)) == 0.1
        assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.1, 0.01]  # type: ignore[attr-defined]


def test_a_group_that_is_added_in_a_job_is_refused() -> None:
    parameters = Parameters(nn.Linear(2, 2))
    optimizer = build_optimizer(lambda p: torch.optim.SGD(p[:1], lr=0.2), parameters)
    stepper = Stepper(optimizer, job())
    stepper.set_rates(Progress(0, 10, 0))
    optimizer.add_param_group({"params": parameters[1:]})
    with pytest.raises(JobError, match="SGD with 2 parameter groups, of 1 at the start"):
        stepper.set_rates(Progress(1, 10, 1))


def test_values_of_a_complex_parameter_are_not_clipped() -> None:
    parameters = Parameters(nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))
    with pytest.raises(JobError, match="clip_value=1 with the complex parameter 0"):
        updater_of(torch.optim.SGD(parameters, lr=0.1), parameters, job(clip_value=1.0))


def test_hooks_see_the_mean_gradient_before_it_is_clipped() -> None:
    _, parameters = with_gradients(4.0)
    seen: list[Tensor] = []
    hooks = ParameterHooks()
    stepped = updater_of(torch.optim.SGD(parameters, lr=0.1), parameters, job(clip_norm=1e-3), hooks)
    parameters[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    hooks.take(nn.ParameterList(parameters))
    step(stepped, weight=4.0)
    _, mean = with_gradients(1.0)
    torch.testing.assert_close(seen, [mean[0].grad])


def test_a_hook_is_not_called_where_nothing_has_a_weight() -> None:
    _, parameters = with_gradients(1.0)
    seen: list[Tensor] = []
    parameters[0].register_hook(seen.append)
    hooks = ParameterHooks(nn.ParameterList(parameters))
    step(updater_of(torch.optim.SGD(parameters, lr=0.1), parameters, job(), hooks), weight=0.0)
    assert seen == []


def test_a_parameter_that_is_replaced_after_some_steps_is_refused_by_its_name() -> None:
    made, parameters = with_gradients()
    mesh = alone(torch.device("cpu"))
    held = ShardedModel(mesh, made)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    strategy = DataParallel(held, parameters, torch.float32, lambda span: None)
    stepped = Updater(optimizer, job(), Observer(), strategy, held)
    step(stepped)
    made[2].weight = nn.Parameter(torch.zeros(2, 4))
    optimizer.zero_grad()
    made(torch.ones(4, 3)).sum().backward()
    with pytest.raises(JobError, match=r"in the place of the parameter 2\.weight"):
        step(stepped)
    with pytest.raises(JobError, match="the parameter 2 of the optimizer's group 0"):
        optimizer_state(optimizer, made)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("weight", "factor"), [(4.0, 1.0), (math.inf, 1.0), (0.0, 1.0), (-1.0, 1.0), (4.0, 1e25)])
def test_a_queued_update_is_masked_for_a_weight_or_a_norm_out_of_range(
    weight: float, factor: float, clip: float | None
) -> None:
    """Squares of a large gradient of 1e25 leave float32's range, so the norm is computed on the host."""
    made = nn.Linear(100, 100)
    made.weight.grad, made.bias.grad = torch.full((100, 100), factor), torch.ones(100)
    parameters = Parameters(made)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64)
    sums[TOTAL], sums[WEIGHT], bad = 2.0, weight, torch.zeros(())
    updater(parameters, clip).queue(QueuedSums(sums, torch.zeros(3), None, fails=False), bad, 1.0, lambda bad: None)
    assert bool(bad) is (weight != 4.0 or (factor > 1.0 and clip is not None))
