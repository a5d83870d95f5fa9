"""One copy of parameters and optimizer state for all ranks of a host: the run is the run without it, to the bit."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import job as small
from tests.conformance.cases import mlp
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.ranks.test_session import BATCH, cross_entropy, dataset, network
from tests.ranks.test_session import in_ranks as loops
from tests.sharing import Shared
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.errors import JobError, UserCodeError
from shoal.launch.environment import Environment
from shoal.parallel.shard.one_copy import SharedParameters, open_shared
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Engine, Options, build
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'halfway.py'}:gpt"  # AdamW with groups, tied weights, dropout, clipping, a schedule
SAME = ("weights_sha256", "sample_digest", "metrics", "train_loss", "steps", "samples")
ONE_COPY: dict[str, Any] = {"memory": {"shared": True}, "collectives": {"all_reduce": "shared_memory"}}


def plan(folder: Path, ranks: int, *, exact: bool = True, shared: bool = True) -> tuple[str, ...]:
    path = folder / f"{ranks}-{exact}-{shared}.toml"
    sections = {**ONE_COPY, "memory": {"shared": shared}, "layout": {"data": ranks}, "execution": {"exact": exact}}
    lines = [f"[{name}]\n{key} = {json.dumps(value)}\n" for name, own in sections.items() for key, value in own.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return ("--plan", str(path))


@pytest.fixture(scope="module")
def alone(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


def assert_same(ended: Ended, wanted: Ended) -> None:
    ended.expect(0)
    assert {key: ended.result[key] for key in SAME} == {key: wanted.result[key] for key in SAME}


@parametrize("ranks", [2, 3, 4], usual=["3"])
def test_one_hash_on_any_number_of_ranks(ranks: int, alone: Ended, tmp_path: Path) -> None:
    ended = run(Run(JOB, tmp_path / "run", None, arguments=(*plan(tmp_path, ranks), "--check-replicas", "2")))
    assert_same(ended, alone)
    assert "--check-replicas 2: no effect, since the ranks share one copy of the model" in ended.output
    for rank in ended.result["memory"]["ranks"]:
        known = {name: value for name, value in rank["predicted"].items() if value is not None}
        assert {name: rank["measured"][name] for name in known} == known
        assert rank["measured"]["optimizer"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_fast_mode_has_the_bits_of_a_copy_for_each_rank(ranks: int, tmp_path: Path) -> None:
    wanted = [plan(tmp_path, ranks, exact=False, shared=shared) for shared in (True, False)]
    ended = run_all([Run(JOB, tmp_path / str(number), None, arguments=own) for number, own in enumerate(wanted)])
    assert_same(*ended)


@parametrize(("before", "after"), [((2, True), (3, False)), ((1, True), (2, True)), ((3, True), (2, True))], usual=[])
def test_resumed_under_another_layout(
    before: tuple[int, bool], after: tuple[int, bool], alone: Ended, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = plan(tmp_path, before[0], shared=before[1])
    run(Run(JOB, out, None, arguments=(*first, "--steps", "7"))).expect(0)
    then = plan(tmp_path, after[0], shared=after[1])
    assert_same(run(Run(JOB, out, None, arguments=(*then, "--resume", "--steps", "16"))), alone)


@pytest.mark.timeout(900)
@parametrize(
    ("kills", "settings", "updates"), [(2, {}, (1, 1, 2)), (20, {"steps": 44}, (3, 4))], ids=["2", "20"], usual=["2"]
)
def test_killed_in_the_midst_of_an_update(
    kills: int, settings: dict[str, int], updates: tuple[int, ...], shared: Shared, tmp_path: Path
) -> None:
    """Whatever part of the parameters is updated then, what goes on is a state between two updates.

    Many kills are each after a new checkpoint: where a start brings no new step, the next one waits twice as long.
    """
    folder, draw = tmp_path / "halfway", random.Random(kills)
    folder.mkdir()
    for number in range(kills):
        when = draw.choice(("before", "after"))
        (folder / f"{number:02}-{draw.randrange(2)}-{when}-{draw.choice(updates)}").touch()
    arguments = (*plan(tmp_path, 2), "--checkpoint-every", "2")
    before = set(Path("/dev/shm").iterdir())
    environment = {"TEST_HALFWAY": str(folder)}
    alone = Run(JOB, Path(), 1, exact=True, settings=settings)
    wanted = Run(JOB, tmp_path / "run", None, settings=settings, arguments=arguments, environment=environment)
    wanted = replace(wanted, restarts=kills)
    ended = run(wanted, 600.0) if kills > 2 else run(wanted)
    assert_same(ended, shared.run(alone))
    assert not list(folder.iterdir())
    assert ended.result["restarts"] == kills
    assert not {path for path in set(Path("/dev/shm").iterdir()) - before if "shoal" in path.name}


# --------------------------------------------------------------------------------------------- from inside of the ranks


def in_ranks(
    job: Any, folder: Path, look: Any, ranks: int = 2, steps: int = 2, shared: bool = True, **options: Any
) -> list[Any]:
    """Trains on forked ranks that share memory; what `look` finds of each rank's engine."""
    sections = ONE_COPY | {"memory": {"shared": shared}}

    def work(environment: Environment) -> None:
        made = job()
        wanted = judged(made, shoal.Plan().with_sections(layout={"data": ranks}, **sections)).plan
        around = Surroundings(lambda line: None, lambda record, rank: None, lambda: False, evaluate_every=2)
        with open_mesh(environment, wanted.layout) as mesh:
            engine = build(made, wanted, mesh, Options(telemetry=False, callbacks=made.callbacks, **options))
            try:
                engine.trainer(None, steps, around, RecordWriter(None)).train()
                (folder / f"told-{mesh.rank}.json").write_text(json.dumps(look(engine)))
            finally:
                engine.close()

    with forked(ranks, work, folder) as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(ranks)]


def owned(engine: Engine) -> Any:
    """The parameters that this rank has state of."""
    state = engine.updater.optimizer.state
    return [name for name, p in engine.sharded_model.parameters() if p in state]


def test_each_parameter_has_its_state_on_one_rank(tmp_path: Path) -> None:
    told = in_ranks(partial(small, optimizer=partial(torch.optim.AdamW, lr=0.01)), tmp_path / "ranks", owned)
    assert sorted(told[0] + told[1]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert all(told)


class Kinds(nn.Module):
    """Strided, of no elements, under two names, in one memory, frozen, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Parameter(torch.randn(5, 3).t())
        self.empty = nn.Parameter(torch.empty(0))
        self.tied = self.strided
        both = torch.randn(8)
        self.first, self.last = nn.Parameter(both[:4]), nn.Parameter(both[2:])
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())


def test_shared_memory_keeps_what_parameters_are(tmp_path: Path) -> None:
    def work(environment: Environment) -> None:
        with open_mesh(environment, shoal.Plan().with_sections(layout={"data": 2}).layout) as mesh:
            torch.manual_seed(mesh.rank)  # rank 0's values are everybody's
            model, collective = Kinds(), open_shared(mesh)
            shapes = [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in model.parameters()]
            SharedParameters(model, collective)
            assert shapes == [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in model.parameters()]
            torch.manual_seed(0)
            for wanted, shared in zip(Kinds().parameters(), model.parameters(), strict=True):
                assert torch.equal(wanted, shared)
            collective.close()

    with forked(2, work, tmp_path / "ranks") as wait:
        wait()


def test_what_a_rank_writes_is_its_own_until_it_publishes(tmp_path: Path) -> None:
    def work(environment: Environment) -> None:
        with open_mesh(environment, shoal.Plan().with_sections(layout={"data": 2}).layout) as mesh:
            model, collective = nn.Linear(600, 3), open_shared(mesh)
            shared = SharedParameters(model, collective)
            first = [p.detach().clone() for p in model.parameters()]
            assert not shared.is_written()
            with torch.no_grad():
                model.weight.data.fill_(2.0 + mesh.rank)
                model.bias.data = torch.full((3,), 4.0 + mesh.rank)
            assert shared.is_written()
            collective.barrier()
            assert [p.mean().item() for p in model.parameters()] == [2.0 + mesh.rank, 4.0 + mesh.rank]
            if mesh.rank == 1:
                shared.publish(lambda parameter: parameter is model.bias)
            collective.barrier()
            assert [p.mean().item() for p in model.parameters()] == [2.0 + mesh.rank, 4.0 + mesh.rank]
            shared.renew()
            assert not shared.is_written()
            assert torch.equal(model.weight, first[0])
            assert model.bias.tolist() == [5.0] * 3
            collective.barrier()
            if mesh.rank == 0:
                with shared.writable([model.weight]), torch.no_grad():
                    model.weight[1, 7] = 9.0
            collective.barrier()
            assert model.weight[1, 7] == 9.0
            assert not shared.is_written()
            collective.barrier()
            collective.close()

    with forked(2, work, tmp_path / "ranks") as wait:
        wait()


class Own(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        return None


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(("optimizer", "named"), [(Own, "optimizer Own"), (hooked, "an optimizer with hooks")])
def test_an_optimizer_that_may_write_anywhere_is_refused(optimizer: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="each may write to its own part of them alone") as caught:
        in_ranks(partial(small, optimizer=optimizer), tmp_path / "ranks", owned)
    assert caught.value.given == f"{named}, with memory.shared = true"


class Normalised(nn.Sequential):
    """Normalises a weight in place before it is used, by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__(*mlp())
        self.how = how

    def forward(self, input: Tensor) -> Tensor:
        weight = self[0].weight
        if self.how == "counted":
            with torch.no_grad():
                weight.div_(weight.norm())
        elif self.how == "not counted":
            weight.data.div_(weight.data.norm())
        else:
            weight.data = weight.data / weight.data.norm()
        return super().forward(input)


class Follower(nn.Module):
    """A frozen copy of the model follows it, as in BYOL, and is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(), mlp().requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.data.lerp_(other.data, 0.5)
        return self.online(input) + self.target(input)


def everything(engine: Engine) -> Any:
    """All values to the bit, and the metrics, of averaged weights too."""
    metrics, _ = engine.evaluator.evaluate(engine.model)
    average = engine.callbacks.average
    if average is not None:
        with average.in_place():
            metrics = {"mean": metrics, **engine.evaluator.evaluate(engine.model)[0]}
    return [metrics, *(t.detach().view(torch.uint8).tolist() for _, t in engine.sharded_model.parameters())]


@parametrize(
    "changes",
    [
        {"model": partial(Normalised, "counted")},
        {"model": partial(Normalised, "not counted")},
        {"model": partial(Normalised, "replaced")},
        {"model": Follower},
        {"callbacks": [shoal.EMA(0.5)]},
    ],
    ids=["in the forward", "uncounted", "replaced", "frozen", "EMA"],
    usual=["uncounted", "EMA"],
)
def test_who_else_writes_to_parameters_writes_to_its_own(changes: dict[str, Any], tmp_path: Path) -> None:
    """The values are those that ranks with a copy each have."""
    job = partial(small, **changes)
    found = [in_ranks(job, tmp_path / str(shared), everything, steps=4, shared=shared) for shared in (True, False)]
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


class Fails(torch.optim.SGD):
    """Raises where it updates the largest parameter, which only one rank does."""

    def step(self, closure: Any = None) -> Any:
        largest = max((p for g in self.param_groups for p in g["params"]), key=Tensor.numel)
        if largest.grad is not None:
            raise ValueError("this matrix is too large for me")
        return super().step()


Fails.__module__ = "torch.optim.fails"  # passes for one of torch's own


def test_an_update_that_fails_on_one_rank_ends_all_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="this matrix is too large for me"):
        in_ranks(partial(small, optimizer=partial(Fails, lr=0.1)), tmp_path / "ranks", owned, ranks=3)


def session_loop(
    folder: Path | None, ranks: int, *, exact: bool = True, stop: int = 0, writes: bool = False, **changes: Any
) -> dict[str, Any]:
    """The weights after a loop of one's own, on ranks that share one copy of them if there are several."""
    model = network()
    own_plan = shoal.Plan().with_sections(layout={"data": ranks}, **(ONE_COPY if ranks > 1 else {}))
    settings = {"global_batch": BATCH, "grains": 4, "exact": exact, "checkpoints": folder, "clip_norm": 1.0}
    with shoal.Session(own_plan, **{**settings, **changes}) as session:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        session.prepare(model, optimizer, scheduler)
        losses = []
        for step in session.steps(dataset(), epochs=2):
            for batch in step:
                step.backward(*cross_entropy(model, batch))
            scheduler.step()
            losses.append(step.loss)
            if writes:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.2, 0.2)
                    model[2].bias.data.mul_(0.9)
            if step.number == stop:
                break
        metrics, _ = session.evaluate(dataset(20), {"accuracy": shoal.accuracy})
    return {"weights": shoal.weights_sha256(model.state_dict()), "losses": losses, "metrics": metrics}


@pytest.mark.parametrize("writes", [False, True])
def test_a_session_trains_the_same_as_on_one_process(writes: bool, tmp_path: Path) -> None:
    one = session_loop(None, 1, writes=writes)
    both = loops(2, lambda: session_loop(None, 2, writes=writes), tmp_path / "ranks")
    assert both == [one, one]


def test_a_session_in_fast_mode_and_across_a_resume(tmp_path: Path) -> None:
    one = session_loop(None, 1)
    loops(2, lambda: session_loop(tmp_path / "run", 2, stop=5), tmp_path / "first")
    rest = loops(2, lambda: session_loop(tmp_path / "run", 2, resume=True), tmp_path / "second")
    assert [own["weights"] for own in rest] == [one["weights"]] * 2
    fast, other = loops(2, lambda: session_loop(None, 2, exact=False), tmp_path / "fast")
    assert fast == other
    assert fast["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_what_a_session_with_one_copy_refuses(tmp_path: Path) -> None:
    def train() -> dict[str, Any]:
        model = network()
        own_plan = shoal.Plan().with_sections(layout={"data": 2}, **ONE_COPY)
        with shoal.Session(own_plan, global_batch=BATCH) as session:
            session.prepare(model, *(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])))
            with pytest.raises(JobError, match=r"2 optimizers, with memory\.shared = true"):
                session.steps(dataset())
        return {}

    loops(2, train, tmp_path / "ranks")


class Viewed(nn.Sequential):
    """Has another name for a weight's memory."""

    def __init__(self) -> None:
        super().__init__(*wide())
        self.rows = self[0].weight.data[:2]


class Mine(shoal.Callback):
    """A callback of a job's own."""


def wide(width: int = 40000) -> nn.Module:
    return mlp(width)  # 1.6 MB


def chosen(engine: Engine) -> Any:
    return [engine.plan.memory.shared, engine.sharded_model.divides_state, list(engine.notes)]


COPIES = "each rank has a copy of the model and the optimizer's state: "


@parametrize(
    ("changes", "options", "shared", "told"),
    [
        ({}, {}, True, None),
        ({"callbacks": [shoal.EMA(0.9)]}, {}, True, None),
        ({"model": partial(wide, 16)}, {}, False, None),
        ({"model": partial(wide, 16), "optimizer": Own}, {}, False, None),
        ({"optimizer": Own}, {}, False, "optimizer Own: all ranks have"),
        ({"optimizer": hooked}, {}, False, "an optimizer with hooks: all ranks have"),
        ({"model": Viewed}, {}, False, "parameter 0.weight, which is a view or has one: its memory is moved"),
        ({"callbacks": [Mine()]}, {}, False, "callback Mine: it may ask on one rank alone"),
        ({}, {"check_replicas": 1}, False, "--check-replicas: it compares the copies"),
    ],
    ids=["one copy", "EMA", "small", "small, own optimizer", "own optimizer", "hooks", "view", "callback", "checked"],
    usual=["one copy", "small", "own optimizer"],
)
def test_where_nobody_says_ranks_have_copies_where_the_job_needs_them(
    changes: dict[str, Any], options: dict[str, Any], shared: bool, told: str | None, tmp_path: Path
) -> None:
    job = partial(small, **{"model": wide, **changes})
    first, second = in_ranks(job, tmp_path / "ranks", chosen, may_copy=True, **options)
    assert first == second
    assert first[:2] == [shared, shared]
    notes = [note for note in first[2] if note.startswith(COPIES)]
    assert len(notes) == (told is not None)
    assert all(note.startswith(f"{COPIES}{told}") for note in notes)


def test_a_view_of_a_parameter_is_refused_where_one_copy_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="what else refers to it would stay behind") as caught:
        in_ranks(partial(small, model=Viewed), tmp_path / "ranks", owned)
    assert caught.value.given == "parameter 0.weight, which is a view or has one, with memory.shared = true"


def test_ranks_of_several_hosts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere() -> list[int]:
        import os

        return [1, int(os.environ["RANK"]), 1]

    monkeypatch.setattr("shoal.distributed.collectives.shared_memory.all_reduce.place_of_process", elsewhere)
    with pytest.raises(Exception, match="where memory could be shared"):
        in_ranks(small, tmp_path / "ranks", owned)
