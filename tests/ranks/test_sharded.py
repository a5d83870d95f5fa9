"""The shard axis: what is divided is not whole anywhere, and the run is the run of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import job as small
from tests.launching import JOBS, Ended, Run, run
from tests.sharing import Shared
from tests.usual import parametrize
from torch import Tensor, nn

import shoal
from shoal.distributed.mesh import open_mesh
from shoal.errors import JobError, UserCodeError
from shoal.launch.environment import Environment
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.setup.engine import Options, build
from shoal.training.setup.preflight import judged
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'tiny.py'}:gpt"  # AdamW with groups, tied weights, dropout, clipping, a schedule
LAYOUTS = {"shard 2": (1, 2), "shard 3": (1, 3), "2 x 2": (2, 2)}
SAME = ("weights_sha256", "sample_digest", "metrics", "train_loss", "steps", "samples")


def plan(folder: Path, data: int, shard: int) -> tuple[str, ...]:
    path = folder / f"{data}x{shard}.toml"
    layout = f"[layout]\ndata = {data}\nshard = {shard}\n"
    path.write_text(f'schema = 1\n{layout}[shard]\nlevel = "optimizer"\n[execution]\nexact = true\n')
    return ("--plan", str(path))


@pytest.fixture(scope="module")
def alone(shared: Shared) -> Ended:
    return shared.run(Run(JOB, Path(), 1, exact=True))


@pytest.mark.slow
def test_parameters_kept_on_the_host_change_nothing(tmp_path: Path) -> None:
    ended = []
    for offload in ("false", "true"):
        path = tmp_path / f"{offload}.toml"
        path.write_text(f'[layout]\nshard = 2\n[shard]\nlevel = "parameters"\noffload = {offload}\n')
        wanted = Run(JOB, tmp_path / offload, None, arguments=("--plan", str(path), "--steps", "4"))
        ended.append(run(wanted).expect(0))
    assert_same(ended[1], ended[0])


def assert_same(ended: Ended, wanted: Ended) -> None:
    ended.expect(0)
    assert {key: ended.result[key] for key in SAME} == {key: wanted.result[key] for key in SAME}


@parametrize("name", LAYOUTS, usual=["2 x 2"])
def test_one_hash_under_any_layout(name: str, alone: Ended, tmp_path: Path) -> None:
    assert_same(run(Run(JOB, tmp_path / "run", None, arguments=plan(tmp_path, *LAYOUTS[name]))), alone)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [((1, 2), (3, 1)), ((3, 1), (1, 2)), ((2, 2), (1, 3))])
def test_resumed_under_another_layout(
    before: tuple[int, int], after: tuple[int, int], alone: Ended, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(Run(JOB, out, None, arguments=(*plan(tmp_path, *before), "--steps", "7"))).expect(0)
    ended = run(Run(JOB, out, None, arguments=(*plan(tmp_path, *after), "--resume", "--steps", "16")))
    assert_same(ended, alone)


# --------------------------------------------------------------------------------------------- from inside of the ranks


def in_ranks(
    job: Callable[[], shoal.Job], layout: dict[str, int], folder: Path, level: str = "optimizer", steps: int = 2
) -> list[Any]:
    """Trains some steps on forked ranks; each rank's elements of optimizer state and of parameters."""

    def work(environment: Environment) -> None:
        made = job()
        sections: dict[str, Any] = {"layout": layout, "shard": {"level": level}}
        wanted = judged(made, shoal.Plan().with_sections(**sections)).plan
        around = Surroundings(lambda line: None, lambda record, rank: None, lambda: False)
        with open_mesh(environment, wanted.layout) as mesh:
            engine = build(made, wanted, mesh, Options(telemetry=False))
            try:
                engine.trainer(None, steps, around, RecordWriter(None)).train()
                state = engine.updater.optimizer.state
                counted = [sum(v.numel() for v in s.values() if isinstance(v, Tensor)) for s in state.values()]
                told = {"state": sum(counted), "parameters": engine.num_parameters}
                (folder / f"told-{mesh.rank}.json").write_text(json.dumps(told))
            finally:
                engine.close()

    world_size = layout.get("data", 1) * layout["shard"]
    with forked(world_size, work, folder) as wait:
        wait()
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(world_size)]


@parametrize(
    "optimizer",
    [partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.Adagrad, lr=0.01)],
    ids=["AdamW", "Adagrad"],
    usual=["AdamW"],
)
@parametrize("layout", [{"shard": 2}, {"data": 2, "shard": 2}], usual=["{'data': 2, 'shard': 2}"])
def test_each_rank_holds_the_state_of_its_own_parameters(
    optimizer: Any, layout: dict[str, int], tmp_path: Path
) -> None:
    told = in_ranks(partial(small, optimizer=optimizer), layout, tmp_path / "ranks")
    tensors = 2 if optimizer.func is torch.optim.AdamW else 1
    whole = tensors * told[0]["parameters"] + 4  # and a step counter for each of the four parameters
    halves = [rank["state"] for rank in told]
    assert [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)] == [whole] * (len(halves) // 2)
    assert max(halves) < 0.8 * whole


class Noisy(torch.optim.SGD):
    """Adds noise, as Langevin dynamics does."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def test_an_optimizer_that_draws_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the random numbers for a part would depend on the layout"):
        in_ranks(partial(small, optimizer=partial(Noisy, lr=0.1)), {"shard": 2}, tmp_path / "ranks")


class Fails(torch.optim.SGD):
    """Raises where it updates the largest parameter, which only one rank does."""

    def step(self, closure: Any = None) -> Any:
        largest = max((p for g in self.param_groups for p in g["params"]), key=Tensor.numel)
        if largest.grad is not None:
            raise ValueError("this matrix is too large for me")
        return super().step()


def test_an_update_that_fails_on_one_rank_ends_all_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="this matrix is too large for me"):
        in_ranks(partial(small, optimizer=partial(Fails, lr=0.1)), {"shard": 3}, tmp_path / "ranks")


def test_parameters_of_any_kind_arrive(tmp_path: Path) -> None:
    """Large and small, strided and of one element, more owners than parameters of a size."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(6, 50_000)
            self.strided = nn.Parameter(torch.randn(50_000, 3).t() / 100)
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.unused = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.tanh(self.wide(x)) @ self.strided.t() * self.scale
            return out

    job = small(model=Kinds, optimizer=partial(torch.optim.AdamW, lr=0.001))
    sections: dict[str, Any] = {"layout": {"shard": 4}, "shard": {"level": "optimizer"}}
    verdict = shoal.verify(job, shoal.Plan().with_sections(**sections), steps=2)
    assert verdict.verified, verdict.render()


# ------------------------------------------------------------------------------------------------------ what is refused


def by_parts(model: Any, batch: Any) -> Any:
    return shoal.cross_entropy(model[2](torch.tanh(model[0](batch[0]))), batch[1])


def test_a_loss_that_calls_parts_of_a_sharded_model_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="uses parameters or parts of the model by themselves") as caught:
        in_ranks(partial(small, loss=by_parts), {"shard": 2}, tmp_path / "ranks", "parameters", 1)
    assert "call the whole model" in caught.value.remedy


def replacing(model: nn.Module, batch: Any) -> Any:
    model[2].weight = nn.Parameter(torch.zeros(4, 8))
    return shoal.cross_entropy(model(batch[0]), batch[1])


def test_a_parameter_that_the_loss_replaces_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"in the place of the parameter 2\.weight"):
        in_ranks(partial(small, loss=replacing), {"shard": 2}, tmp_path / "ranks", "parameters", 1)


class Rows(torch.optim.SGD):
    """Keeps a number a row: of a parameter cut by rows not the parameter's part."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("rows", torch.zeros(parameter.shape[0]))
        return super().step()


def test_state_that_cannot_be_cut_is_refused_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="this rank holds a part of shape"):
        in_ranks(partial(small, optimizer=partial(Rows, lr=0.1)), {"shard": 2}, tmp_path / "ranks", "gradients", 1)


def test_a_stream_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter([(torch.zeros(6), torch.tensor(0))] * 40)

    job = partial(small, train_data=Stream(), length=shoal.Steps(2))
    with pytest.raises(JobError, match="of a stream none knows the others' share"):
        in_ranks(job, {"shard": 2}, tmp_path / "ranks", "parameters", 0)  # not one step


class Frozen(nn.Sequential):
    """The first half is not trained: in two stages, the first one has nothing to train."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 3))
        for part in list(self)[:2]:
            part.requires_grad_(False)


@parametrize("shard", [{}, {"level": "parameters"}], ids=["optimizer", "parameters"], usual=["parameters"])
def test_a_stage_without_anything_to_train(shard: dict[str, Any]) -> None:
    job = small(model=Frozen, optimizer=partial(torch.optim.AdamW, lr=0.01), clip_norm=0.1)
    layout = {"pipeline": 2, "shard": 2 if shard else 1}
    plan = shoal.Plan().with_sections(layout=layout, shard=shard, pipeline={"split": ["2"]})
    verdict = shoal.verify(job, plan, steps=2)
    assert verdict.verified, verdict.render()


def in_sequences() -> nn.Module:
    """Its output is a view: a linear layer with a bias computes [B, T, 3] as rows."""
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def changed_in_place(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch[0])
    logits *= 0.5
    return shoal.cross_entropy(logits.sum(1), batch[1])


def test_an_output_may_be_changed_in_place() -> None:
    job = small(model=in_sequences, loss=changed_in_place, eval_data=None, metrics={})
    verdict = shoal.verify(job, shoal.Plan().with_sections(layout={"shard": 2}), 2)
    assert verdict.verified, verdict.render()


class Padded(nn.Module):
    """A weight of no rows beside another, as Transformers' MobileBERT has one where two widths are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.more = nn.Parameter(torch.zeros(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.nn.functional.linear(x, torch.cat([self.first.weight, self.more]), self.first.bias))


def test_a_parameter_without_elements_stays_whole() -> None:
    job = small(model=Padded, eval_data=None, metrics={})
    verdict = shoal.verify(job, shoal.Plan().with_sections(layout={"shard": 2}), 1)
    assert verdict.verified, verdict.render()


class Encoded(nn.Module):
    """Gives what its first half has made, too, as encoder-decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.encoder(x)
        return self.decoder(torch.tanh(encoded)), encoded


def first_output(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return shoal.cross_entropy(model(batch[0])[0], batch[1])


def test_an_output_of_an_earlier_stage_is_not_looked_for_in_the_last() -> None:
    job = small(model=Encoded, loss=first_output, eval_data=None, metrics={})
    plan = shoal.Plan().with_sections(layout={"pipeline": 2}, pipeline={"split": ["decoder"]})
    verdict = shoal.verify(job, plan, 1)
    assert verdict.verified, verdict.render()
