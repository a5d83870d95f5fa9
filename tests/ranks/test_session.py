"""Loops of one's own: what a plain torch loop does, on one rank and on two, and how ranks come out of them together."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which a first optimizer imports: once here, not in each forked rank
from tests.usual import parametrize
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shoal
from shoal.errors import ExitCode, JobError, LaunchError, PeerError, UserCodeError
from shoal.launch.environment import Environment
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

BATCH, STEPS_AN_EPOCH, EPOCHS = 16, 4, 2
# Sums of 16 samples' float32 gradients in another order, over 8 updates; the tolerance of shoal verify for a loss.
CLOSE = {"rel": 1e-5, "abs": 1e-6}

Told = dict[str, Any]
# A loop, given a function that makes the Session's keyword arguments; it tells what it has seen as JSON.
Train = Callable[[], Told]


def in_ranks(world_size: int, train: Train, folder: Path) -> list[Told]:
    """What `train` tells on each rank. Raises: what a rank raised."""
    if world_size == 1:
        return [train()]

    def rank(environment: Environment) -> None:
        warnings.simplefilter("error")
        told = train()
        (folder / f"told-{environment.rank}.json").write_text(json.dumps(told))

    with forked(world_size, rank, folder) as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(world_size)]


def dataset(count: int = BATCH * STEPS_AN_EPOCH) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(1))


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def session(**changes: Any) -> shoal.Session:
    return shoal.Session(**{"global_batch": BATCH, "shuffle": False, **changes})


def cross_entropy(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


# ------------------------------------------------------------------------------------------------------ learning rates


class Rates:
    """What a user does with an optimizer in a loop: `after` each step, and `epoch` after each epoch."""

    def __init__(self, kind: str, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.model, self.optimizer = kind, model, optimizer
        self.schedulers: list[Any] = []
        if kind == "step":
            self.schedulers = [lr_scheduler.StepLR(optimizer, 3, gamma=0.5)]
        elif kind == "one cycle":
            self.schedulers = [lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=8)]
        elif kind == "plateau":
            self.schedulers = [lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)]
        elif kind == "several":
            first, second = (
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                lr_scheduler.CosineAnnealingLR(optimizer, 5),
            )
            self.schedulers = [lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[3])]
        elif kind in ("unfrozen", "added"):
            self.model[0].requires_grad_(False)
            if kind == "added":
                optimizer.param_groups[0]["params"][:] = list(self.model[2].parameters())

    def after(self, number: int, loss: float) -> None:
        if self.kind == "by hand":
            self.optimizer.param_groups[0]["lr"] *= 0.7
            self.optimizer.param_groups[0]["weight_decay"] = 0.1 * number
            self.optimizer.param_groups[0]["momentum"] = 0.5
        if self.kind in ("unfrozen", "added") and number == 3:
            self.model[0].requires_grad_(True)
            if self.kind == "added":
                self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.05})
        for scheduler in self.schedulers:
            scheduler.step(*([loss] if self.kind == "plateau" else []))

    def values(self) -> list[Any]:
        return [[group["lr"], group["momentum"], group["weight_decay"]] for group in self.optimizer.param_groups]


KINDS = ["step", "one cycle", "plateau", "by hand", "several", "unfrozen", "added"]
RARE_ON_TWO = [f"{kind}-2" for kind in ("step", "one cycle", "by hand", "unfrozen")]


def plain_rates(kind: str) -> Told:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    rates, told = Rates(kind, model, optimizer), {"losses": [], "values": []}
    loader = DataLoader(dataset(), batch_size=BATCH)
    number = 0
    for _ in range(EPOCHS):
        for batch in loader:
            number += 1
            total, count = cross_entropy(model, batch)
            optimizer.zero_grad()
            (total / count).backward()
            told["values"].append(rates.values())
            optimizer.step()
            told["losses"].append(total.item() / count)
            rates.after(number, told["losses"][-1])
    return told


def session_rates(kind: str, **changes: Any) -> Told:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    rates, told = Rates(kind, model, optimizer), {"losses": [], "values": [], "rates": []}
    with session(**changes) as own:
        back = own.prepare(model, *rates.schedulers, optimizer)
        assert [id(thing) for thing in back] == [id(thing) for thing in (model, *rates.schedulers, optimizer)]
        for step in own.steps(dataset(), epochs=EPOCHS):
            told["values"].append(rates.values())
            for batch in step:
                step.backward(*cross_entropy(model, batch))
            told["losses"].append(step.loss)
            told["rates"].append(step.learning_rate)
            rates.after(step.number, step.loss)
    return told


@parametrize(
    ("kind", "world_size"),
    product(KINDS, [1, 2]),
    rare=RARE_ON_TWO,
)
def test_rates_are_those_of_a_plain_loop(kind: str, world_size: int, tmp_path: Path) -> None:
    wanted = plain_rates(kind)
    for told in in_ranks(world_size, partial(session_rates, kind), tmp_path / "ranks"):
        assert told["values"] == wanted["values"]
        assert told["rates"] == [values[0][0] for values in wanted["values"]]
        assert told["losses"] == pytest.approx(wanted["losses"], **CLOSE)


def test_a_schedule_multiplies_what_the_groups_have() -> None:
    told = session_rates("step", schedule=lambda progress: 0.5)
    wanted = plain_rates("step")
    assert told["values"] == wanted["values"]  # a scheduler that multiplies what it finds finds its own
    assert told["rates"] == [0.5 * values[0][0] for values in wanted["values"]]


@parametrize("kind", ["step", "several", "by hand", "unfrozen", "added"], usual=["several", "added"])
def test_rates_of_a_loop_are_verified(kind: str) -> None:
    verdict = shoal.verify_session(partial(session_rates, kind), 2, steps=4)
    assert verdict.verified, verdict.render()
    assert verdict.num_steps == 4


def rates_by_rank() -> Told:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with session() as own:
        own.prepare(model, optimizer)
        for step in own.steps(dataset()):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
            optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * own.rank
    return {}


def test_rates_that_depend_on_the_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"group 0: lr = 0\.1 on rank 0 and 0\.2 on rank 1"):
        in_ranks(2, rates_by_rank, tmp_path / "ranks")


def exact_on_rank_0() -> Told:
    session(exact=os.environ["RANK"] == "0")
    return {}


def test_settings_that_depend_on_the_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 on .*: plan = \{'execution\.exact': False\}"):
        in_ranks(2, exact_on_rank_0, tmp_path / "ranks")


# ------------------------------------------------------------------------------------------- several models and updates


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
    return generator, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def noise_and_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*(torch.randn(BATCH * STEPS_AN_EPOCH, size, generator=generator) for size in (3, 6)))


def critic_loss(g: nn.Module, d: nn.Module, batch: Any, detached: bool = True) -> Tensor:
    fake = g(batch[0])
    fake = fake.detach() if detached else fake
    softplus = nn.functional.softplus
    return softplus(-d(batch[1])).sum() + softplus(d(fake)).sum()


def generator_loss(g: nn.Module, d: nn.Module, batch: Any) -> Tensor:
    return nn.functional.softplus(-d(g(batch[0]))).sum()


def optimizers(g: nn.Module, d: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(g.parameters(), lr=0.01, betas=(0.5, 0.9)), torch.optim.SGD(d.parameters(), lr=0.05)


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


def plain_gan(critics: int = 1) -> list[float]:
    g, d = pair()
    opt_g, opt_d = optimizers(g, d)
    losses = []
    for _ in range(EPOCHS):
        for batch in DataLoader(noise_and_samples(), batch_size=BATCH):
            for _ in range(critics):
                opt_d.zero_grad()
                loss = critic_loss(g, d, batch) / BATCH
                loss.backward()
                nn.utils.clip_grad_norm_(d.parameters(), 0.2)
                opt_d.step()
                losses.append(loss.item())
                if critics > 1:
                    clamp(d)
            opt_g.zero_grad()
            loss = generator_loss(g, d, batch) / BATCH
            loss.backward()
            nn.utils.clip_grad_norm_(g.parameters(), 0.2)
            opt_g.step()
            losses.append(loss.item())
    return losses


def session_gan(critics: int = 1, leave_at: int = 0, **changes: Any) -> Told:
    g, d = pair()
    opt_g, opt_d = optimizers(g, d)
    losses: list[float] = []
    with session(clip_norm=0.2, **changes) as own:
        own.prepare(g, d)
        own.prepare(opt_g, opt_d)
        for step in own.steps(noise_and_samples(), epochs=EPOCHS):
            for _ in range(critics):
                for batch in step.batches(opt_d):
                    step.backward(critic_loss(g, d, batch, detached=False), len(batch[0]))
                losses.append(step.loss)
                if critics > 1:
                    clamp(d)
            for batch in step.batches(opt_g):
                step.backward(generator_loss(g, d, batch), len(batch[0]))
            losses.append(step.loss)
            if step.number == leave_at:
                break
        with torch.no_grad():
            last = [[float(p.double().sum()) for p in model.parameters()] for model in (g, d)]
    return {"losses": losses, "last": last, "samples": own.samples}


@parametrize(("world_size", "critics"), product([1, 2], [1, 3]), usual=["1-1", "2-3"])
def test_two_models_and_two_optimizers(world_size: int, critics: int, tmp_path: Path) -> None:
    wanted = plain_gan(critics)
    for told in in_ranks(world_size, partial(session_gan, critics), tmp_path / "ranks"):
        assert told["losses"] == pytest.approx(wanted, **CLOSE)
        assert told["samples"] == BATCH * STEPS_AN_EPOCH * EPOCHS


@parametrize("critics", [1, 2], usual=["2"])
def test_two_models_are_verified(critics: int) -> None:
    verdict = shoal.verify_session(partial(session_gan, critics), 2, steps=2)
    assert verdict.verified, verdict.render()
    assert verdict.num_steps == 2 * (critics + 1)


@pytest.mark.parametrize("layout", ["data", "shard"])
def test_two_models_go_on_where_they_were_left(layout: str, tmp_path: Path) -> None:
    shard = {"level": "optimizer"} if layout == "shard" else {}
    plan = shoal.Plan().with_sections(layout={layout: 2}, shard=shard)
    whole = in_ranks(2, partial(session_gan, plan=plan), tmp_path / "whole")[0]
    kept: Told = {"checkpoints": str(tmp_path / "kept"), "plan": plan}
    first = in_ranks(2, partial(session_gan, leave_at=3, **kept), tmp_path / "first")[0]
    rest = in_ranks(2, partial(session_gan, resume=True, **kept), tmp_path / "rest")[0]
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert rest["last"] == whole["last"]
    assert rest["samples"] == whole["samples"]


def one_loss_two_optimizers(together: bool) -> Told:
    model = network()
    halves = [torch.optim.SGD(half.parameters(), lr=0.1) for half in (model[0], model[2])]
    losses = []
    with session() as own:
        if together:
            own.prepare(model, *halves)
        else:
            own.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in own.steps(dataset()):
            for batch in step.batches():
                step.backward(*cross_entropy(model, batch))
            losses.append(step.loss)
    return {"losses": losses}


def test_one_loss_for_two_optimizers() -> None:
    assert one_loss_two_optimizers(True) == one_loss_two_optimizers(False)


def draws(passes: int) -> list[list[float]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with session() as own:
        own.prepare(model, optimizer)
        for step in own.steps(dataset(BATCH)):
            for _ in range(passes):
                for batch in step.batches(optimizer):
                    found.append(torch.randn(BATCH).tolist())
                    step.backward(*cross_entropy(model, batch))
    return found


def test_each_pass_draws_its_own() -> None:
    first, second = draws(2)
    assert first != second
    assert draws(1) == [first]
    assert draws(2) == [first, second]


# ------------------------------------------------------------------------------------------------ leaving, and resuming


def train(
    kept: Path | None = None,
    leave: Callable[[int, int], None] = lambda rank, number: None,
    *,
    within: Callable[[int, int], None] = lambda rank, number: None,
    break_at: int = 0,
    evaluate: bool = False,
    data: Any = None,
    length: Any = None,
    **changes: Any,
) -> Told:
    """A loop with a scheduler, which may be left after a step or within."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=20)
    losses, rates = [], []
    with session(checkpoints=kept, resume=kept is not None, **changes) as own:
        own.prepare(model, optimizer, scheduler)
        steps = own.steps(
            dataset() if data is None else data(), *([length] if length else []), **({} if length else {"epochs": 2})
        )
        for step in steps:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.param_groups[0]["weight_decay"] += 0.01  # in each step's own body, before its batches
            for batch in step:
                within(own.rank, step.number)
                step.backward(*cross_entropy(model, batch))
            losses.append(step.loss)
            scheduler.step()
            leave(own.rank, step.number)
            if step.number == break_at:
                break
        if evaluate:
            del steps  # as where the loop was written over the call itself
            own.evaluate(dataset(), {})
    return {"losses": losses, "rates": rates, "decay": optimizer.param_groups[0]["weight_decay"]}


def raising(kind: type[BaseException], at: int, ranks: tuple[int, ...] = (0, 1)) -> Callable[[int, int], None]:
    def leave(rank: int, number: int) -> None:
        if number == at and rank in ranks:
            raise kind("the loop's own")

    return leave


@pytest.mark.parametrize("how", ["break", "exception", "within", "Ctrl-C within"])
def test_a_loop_that_is_left_goes_on_from_there(how: str, tmp_path: Path) -> None:
    whole = train()
    if how == "break":
        train(tmp_path, break_at=3)
    else:
        kind: type[BaseException] = KeyboardInterrupt if how == "Ctrl-C within" else ValueError
        left = raising(kind, 3) if how == "exception" else raising(kind, 4)
        with pytest.raises(kind, match="the loop's own"):
            train(tmp_path, **({"leave": left} if how == "exception" else {"within": left}))
    rest = train(tmp_path)
    assert rest["losses"] == whole["losses"][3:]
    assert rest["rates"] == whole["rates"][3:]
    assert rest["decay"] == pytest.approx(whole["decay"])


def fails_at(number: int) -> Callable[[shoal.Progress], float]:
    def schedule(progress: shoal.Progress) -> float:
        if progress.step == number:
            raise ValueError("the schedule's own")
        return 1.0

    return schedule


def test_a_schedule_that_raises_leaves_what_was_finished(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="the schedule's own"):
        train(tmp_path, schedule=fails_at(3))
    assert train(tmp_path)["losses"] == train()["losses"][3:]


def interrupted(number: signal.Signals, at: int) -> Callable[[int, int], None]:
    def leave(rank: int, step: int) -> None:
        if step == at:
            os.kill(os.getpid(), number)

    return leave


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        train(tmp_path, interrupted(number, 3))
    if number == signal.SIGTERM:
        assert ended.value.code == ExitCode.PREEMPTED
    assert signal.getsignal(number) is before
    assert train(tmp_path)["losses"] == train()["losses"][3:]


@parametrize("how", ["break", "exception", "within"], rare=["exception"])
def test_one_rank_that_leaves(how: str, tmp_path: Path) -> None:
    """The others end with an error that says so, and all that was finished is saved."""
    kept = tmp_path / "kept"

    def loop() -> Told:
        rank = int(os.environ["RANK"])
        told: Told = {}
        ways: dict[str, Any] = {
            "break": {"break_at": 3 if rank == 1 else 0},
            "exception": {"leave": raising(ValueError, 3, (1,))},
            "within": {"within": raising(ValueError, 4, (1,))},
        }
        try:
            train(kept, **ways[how])
        except (ValueError, PeerError) as error:
            told = {"kind": type(error).__name__, "text": str(error)}
        return told

    zero, one = in_ranks(2, loop, tmp_path / "ranks")
    assert zero["kind"] == "PeerError"
    assert "rank 1" in zero["text"]
    assert "left the loop" in zero["text"]
    assert one.get("text") == (None if how == "break" else "the loop's own")
    rest = in_ranks(2, partial(train, kept), tmp_path / "rest")
    assert rest[0]["losses"] == in_ranks(2, train, tmp_path / "whole")[0]["losses"][3:]


def test_one_rank_that_dies(tmp_path: Path) -> None:
    """Rank 0 has everything, and saves it."""
    kept = tmp_path / "kept"

    def die(rank: int, number: int) -> None:
        if rank == 1 and number == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    def loop() -> Told:
        with pytest.raises(PeerError, match=r"another rank is gone.*step 3 was saved"):
            train(kept, within=die)
        return {}

    with pytest.raises(shoal.ShoalError, match="ended with code -9"):
        in_ranks(2, loop, tmp_path / "ranks")
    assert len(train(kept)["losses"]) == 5


def test_a_step_left_between_its_updates_is_not_saved(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="left after the update of SGD and before its others"):
        left_between(tmp_path)
    assert not list(tmp_path.glob("step-*"))


def left_between(kept: Path) -> None:
    g, d = pair()
    opt_g, opt_d = optimizers(g, d)
    with session(checkpoints=kept) as own:
        own.prepare(g, d, opt_g, opt_d)
        for step in own.steps(noise_and_samples()):
            for batch in step.batches(opt_d):
                step.backward(critic_loss(g, d, batch), len(batch[0]))
            if step.number == 2:
                break
            for batch in step.batches(opt_g):
                step.backward(generator_loss(g, d, batch), len(batch[0]))


def clipped(**changes: Any) -> Told:
    """A loop that clips by itself, as a plain one does."""
    with session(**changes) as own:
        model = network()
        model, _ = own.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in own.steps(dataset()):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return {}


@parametrize("exact", [False, True], usual=["False"])
def test_clipping_within_the_batches_is_refused(exact: bool, tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"Session\(clip_norm=\.\.\.\)"):
        in_ranks(2, partial(clipped, exact=exact), tmp_path / "ranks")


def three_passes(kept: Path, leave_in: int) -> Told:
    """Rank 0 raises after the second of three updates: of the first step, or of one after a step of two updates."""
    g, d = pair()
    opt_g, opt_d = optimizers(g, d)
    with session(checkpoints=kept) as own:
        own.prepare(g, d, opt_g, opt_d)
        for step in own.steps(noise_and_samples()):
            for number, chosen in enumerate((opt_d, opt_g, opt_d)[: 3 if step.number == leave_in else 2]):
                for batch in step.batches(chosen):
                    loss = generator_loss(g, d, batch) if chosen is opt_g else critic_loss(g, d, batch)
                    step.backward(loss, len(batch[0]))
                if (own.rank, step.number, number) == (0, leave_in, 1):
                    raise ValueError("the loop's own")
    return {}


@parametrize("leave_in", [1, 2], usual=["1"])
def test_one_rank_that_leaves_between_updates(leave_in: int, tmp_path: Path) -> None:
    """Where rank 0 takes the step for finished the others know better, and nobody saves or waits."""
    kept = tmp_path / "kept"

    def loop() -> Told:
        if os.environ["RANK"] == "1":
            with pytest.raises(PeerError, match="rank 0 left the loop"):
                three_passes(kept, leave_in)
        else:
            words = "no step before it tells" if leave_in == 1 else "some before and some after"
            with pytest.warns(RuntimeWarning, match=words), pytest.raises(ValueError, match="the loop's own"):
                three_passes(kept, leave_in)
        return {}

    in_ranks(2, loop, tmp_path / "ranks")
    assert not list(kept.glob("step-*"))


@pytest.mark.parametrize("how", ["end", "break"])
def test_one_rank_that_is_asked_to_stop_in_the_last_step(how: str, tmp_path: Path) -> None:
    """All of them stop, before they do anything together after the loop."""
    kept = tmp_path / "kept"
    number, asked = (signal.SIGTERM, 8) if how == "end" else (signal.SIGINT, 3)

    def ask(rank: int, step: int) -> None:
        if rank == 1 and step == asked:
            os.kill(os.getpid(), number)

    def loop() -> Told:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            train(kept, ask, break_at=0 if how == "end" else asked, evaluate=True)
        return {"code": getattr(ended.value, "code", None)}

    codes = [told["code"] for told in in_ranks(2, loop, tmp_path / "ranks")]
    assert codes == [ExitCode.PREEMPTED, ExitCode.PREEMPTED if how == "end" else None]
    assert [path.name for path in kept.glob("step-*")] == [f"step-{asked:08}"]


def test_a_schedule_that_raises_on_one_rank(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def loop() -> Told:
        mine = os.environ["RANK"] == "1"
        error, words = (UserCodeError, "the schedule's own") if mine else (PeerError, "rank 1 on .*the schedule's own")
        with pytest.raises(error, match=words):
            train(kept, schedule=fails_at(3 if mine else -1))
        return {}

    in_ranks(2, loop, tmp_path / "ranks")
    assert [path.name for path in kept.glob("step-*")] == ["step-00000003"]


def test_an_evaluation_that_one_rank_cannot_begin(tmp_path: Path) -> None:
    def loop() -> Told:
        model = network()
        with session() as own:
            own.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(shoal.ShoalError) as ended:
                own.evaluate(dataset() if own.rank else None, {})
            return {"kind": type(ended.value).__name__}

    assert [told["kind"] for told in in_ranks(2, loop, tmp_path / "ranks")] == ["DataError", "PeerError"]


def test_a_batch_loop_that_is_left_for_the_next_step() -> None:
    with pytest.raises(UserCodeError, match="not iterated to its end"):
        first_batches()


def first_batches() -> None:
    model = network()
    with session() as own:
        own.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in own.steps(dataset()):
            for _ in step:
                break


# ----------------------------------------------------------------------------------------------------------------- data


class Stream(IterableDataset[Any]):
    """A dataset's samples one after the other."""

    def __iter__(self) -> Any:
        return iter(dataset())


@parametrize("world_size", [1, 2], usual=["2"])
def test_a_stream(world_size: int, tmp_path: Path) -> None:
    wanted = train(length=shoal.Steps(3))
    streamed: Told = {"data": Stream, "length": shoal.Steps(3), "shuffle": None}
    whole = in_ranks(world_size, partial(train, **streamed), tmp_path / "ranks")[0]
    assert whole["losses"] == pytest.approx(wanted["losses"], **CLOSE)
    kept = tmp_path / "kept"
    in_ranks(world_size, partial(train, kept, break_at=2, **streamed), tmp_path / "first")
    assert in_ranks(world_size, partial(train, kept, **streamed), tmp_path / "rest")[0]["losses"] == whole["losses"][2:]
    with pytest.warns(RuntimeWarning, match="the stream has ended after 4 of 9 steps"):
        ended = train(data=Stream, length=shoal.Steps(9), shuffle=None)
    assert len(ended["losses"]) == STEPS_AN_EPOCH


def test_a_stream_is_verified() -> None:
    verdict = shoal.verify_session(partial(train, data=Stream, length=shoal.Steps(4), shuffle=None), 2, steps=2)
    assert verdict.verified, verdict.render()


def test_a_data_loader_is_taken_apart() -> None:
    loaded = train(data=lambda: DataLoader(dataset(), batch_size=BATCH))
    assert loaded == train()


# ----------------------------------------------------------------------------------------------------------- statistics


def statistics(kept: Path, differ_at: int = 0) -> Told:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with session(checkpoints=kept, resume=True) as own:
        own.prepare(model, optimizer)
        for step in own.steps(dataset()):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
            if step.number == differ_at:
                optimizer.param_groups[0]["lr"] = 0.2 + 0.1 * own.rank
        return {"mean": model[1].running_mean.tolist(), "counted": int(model[1].num_batches_tracked)}


def test_statistics_are_those_after_the_last_finished_step(tmp_path: Path) -> None:
    whole = in_ranks(2, partial(statistics, tmp_path / "whole"), tmp_path / "first")
    with pytest.raises(JobError, match="group 0: lr"):
        in_ranks(2, partial(statistics, tmp_path / "kept", 2), tmp_path / "second")
    assert in_ranks(2, partial(statistics, tmp_path / "kept"), tmp_path / "third") == whole


# -------------------------------------------------------------------------------------- thawed and added in the loop


def thawing(kept: Path, leave_at: int = 0) -> Told:
    """The first layer is frozen, and is trained from step 3 on, in a group of its own."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.2, momentum=0.9)
    with session(checkpoints=kept, resume=True) as own, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a resume that thaws it
        own.prepare(model, optimizer)
        for step in own.steps(dataset()):
            if step.number == 3:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
            for batch in step:
                step.backward(*cross_entropy(model, batch))
            if step.number == leave_at:
                break
    return {"weights": [p.tolist() for p in model.parameters()], "groups": len(optimizer.param_groups)}


def test_a_resume_trains_what_the_loop_had_thawed(tmp_path: Path) -> None:
    whole = in_ranks(2, partial(thawing, tmp_path / "whole"), tmp_path / "first")
    in_ranks(2, partial(thawing, tmp_path / "kept", 4), tmp_path / "second")
    assert in_ranks(2, partial(thawing, tmp_path / "kept"), tmp_path / "third") == whole
    assert whole[0]["groups"] == 2
