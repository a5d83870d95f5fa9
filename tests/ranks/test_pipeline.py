"""Pipeline stages by themselves, without the engine: what P ranks compute is what one process computes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT, ResNet18
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.distributed.failures import is_lost_peer
from shoal.distributed.mesh import open_mesh
from shoal.errors import PeerError
from shoal.launch.environment import Environment
from shoal.numerics.grain_randomness import GrainScope
from shoal.parallel.pipeline.pipeline import Pipeline, StageMessages, Work
from shoal.parallel.pipeline.stage_units import StageUnits
from shoal.parallel.pipeline.stages import Stages
from shoal.plans.grains import Grain
from shoal.plans.plan import Layout
from shoal.verification.forked import forked

pytestmark = pytest.mark.ranks

# The same operations on the same values; sums of microbatches' gradients are in the same order under every schedule.
RELATIVE_TOLERANCE = 1e-6
SCHEDULES = (("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))


@dataclass(frozen=True)
class Case:
    """A model, its loss, and a batch of so many samples; `counts` of microbatches are tried."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    batch: Callable[[int], Any]
    counts: tuple[int, ...] = (1, 3, 8)
    autocast: bool = False


def next_token(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    tokens, targets = batch
    out = model(tokens)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel()


def classes(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def tokens(size: int) -> Any:
    return torch.randint(0, 256, (size, 12)), torch.randint(0, 256, (size, 12))


def images(size: int) -> Any:
    return torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, vocab_size=256, **sizes))
    return model


class Encoder(nn.Module):
    """torch's own encoder, with dropout within its layers and a dropout that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embed, self.drop = nn.Embedding(256, 16), nn.Dropout(0.1)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(16, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.encoder(self.drop(self.embed(tokens)))))


GPT_CASE = Case(partial(GPT, layers=8, width=16, heads=2, block=12, dropout=0.1), next_token, tokens)
CASES = {
    "gpt": GPT_CASE,
    "gpt in bfloat16": Case(GPT_CASE.model, next_token, tokens, (3,), autocast=True),
    "resnet": Case(ResNet18, classes, images, (2,)),
    "llama": Case(llama, next_token, tokens, (4,)),
    "encoder": Case(Encoder, next_token, tokens, (3,)),
}


def made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def batches(case: Case, count: int) -> list[Any]:
    """Microbatches of two samples, the last of one."""
    torch.manual_seed(1)
    return [case.batch(1 if m == count - 1 else 2) for m in range(count)]


def scope(model: nn.Module, batch: Any, m: int) -> GrainScope:
    names = {module: name for name, module in model.named_modules()}
    return GrainScope(7, 3, [Grain(m, 2 * m, len(batch[0]))], names)


class Whole:
    """A scope that nothing leaks from, entered as often as needed."""

    def __init__(self, model: nn.Module, batch: Any, m: int) -> None:
        self._scope = scope(model, batch, m)

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, kind: Any, *error: object) -> None:
        leaked = self._scope.leaked()
        self._scope.__exit__(kind, *error)
        assert kind or not leaked, "randomness past the grain's generator"


def precision(case: Case) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext()


def function(case: Case) -> Callable[[nn.Module, Any], Any]:
    def loss(model: nn.Module, batch: Any) -> Any:
        with precision(case):
            return case.loss(model, batch)

    return loss


def keep_only(model: nn.Module, held: set[str]) -> None:
    """Leaves data in these parameters and buffers alone."""
    names = {id(t): n for n, t in reversed([*model.named_parameters(), *model.named_buffers()])}
    metas: dict[int, Any] = {id(b): b.to("meta") for b in model.buffers()}
    metas |= {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()}  # tied ones stay tied
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for key, value in home.items():
                if value is not None and names[id(value)] not in held:
                    home[key] = metas[id(value)]


def alone(case: Case, count: int) -> dict[str, Tensor]:
    """One process: gradients, buffers and losses."""
    model = made(case)
    start = {name: b.clone() for name, b in model.named_buffers()}
    told = {}
    for m, batch in enumerate(batches(case, count)):
        with scope(model, batch, m):
            total, _ = function(case)(model, batch)
            total.backward()
        told[f"loss/{m}"] = total.detach()
        for name, buffer in model.named_buffers():
            told[f"buffer/{m}/{name}"] = buffer.clone()
            buffer.copy_(start[name])
    told |= {f"gradient/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        told["evaluated"] = torch.tensor([float(v) for v in function(case)(model, batches(case, 1)[0])])
    return told


class Ranked:
    """A case on this rank of a pipeline: its stages, cut once."""

    def __init__(self, case: Case, per_rank: int, wires: StageMessages, alone: bool = True) -> None:
        self.case, self.per_rank, self.wires, self.alone = case, per_rank, wires, alone
        self.model, self.loss = made(case), function(case)
        self.stages = Stages.build(self.model, self.loss, case.batch(2), num_stages=wires.num_ranks * per_rank)
        keep_only(self.model, set().union(*self.pipeline("gpipe").used.values()))
        self.start = {name: b.clone() for name, b in self.model.named_buffers() if not b.is_meta}

    def pipeline(self, schedule: str) -> Pipeline:
        units = StageUnits(self.model, {}, keep=False, late=False)
        return Pipeline(self.stages, self.wires, schedule, self.per_rank, torch.device("cpu"), units, self.alone)

    def trained(self, schedule: str, count: int) -> dict[str, Tensor]:
        """What `alone` tells, of this rank's stages."""
        given = batches(self.case, count)
        told: dict[str, Tensor] = {}
        for parameter in self.model.parameters():
            parameter.grad = None

        def forwarded(m: int, result: Any) -> Tensor | None:
            for name, value in self.model.named_buffers():
                if not value.is_meta and not torch.equal(value, self.start[name]):
                    told[f"buffer/{m}/{name}"] = value.clone()
                    value.copy_(self.start[name])
            if result is None:
                return None
            told[f"loss/{m}"] = result[0].detach().clone()
            total: Tensor = result[0]
            return total

        work = Work(self.loss, given, lambda m: Whole(self.model, given[m], m), lambda m: None, forwarded)
        self.pipeline(schedule).run(work)
        return told | {f"gradient/{n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def evaluated(self) -> dict[str, Tensor]:
        self.model.eval()
        pair = self.pipeline("gpipe").evaluate(self.loss, batches(self.case, 1)[0])
        self.model.train()
        return {"evaluated": torch.tensor(pair)}


def assert_same(ranks: list[dict[str, Tensor]], wanted: dict[str, Tensor], tolerance: float, what: str) -> None:
    for key, value in wanted.items():
        if key == "evaluated":
            if key not in ranks[0]:
                continue
            assert all(torch.equal(rank[key], ranks[0][key]) for rank in ranks)
            found = ranks[0][key]
        else:
            parts = [rank[key] for rank in ranks if key in rank]
            if not parts and key.startswith("buffer"):
                continue  # it did not change
            found = sum(parts) if key.startswith("gradient") else parts[0]  # type: ignore[assignment]
        scale = value.abs().max().item() or 1.0
        assert (found - value).abs().max().item() <= tolerance * scale, (what, key)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As each rank has: convolutions on two sum in another order, which is up to 1.3e-6 of the largest gradient."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [*((name, 2) for name in CASES), ("gpt", 4), ("llama", 4)])
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_gradients_are_those_of_one_process(name: str, num_ranks: int, tmp_path: Path) -> None:
    case = CASES[name]
    counts = case.counts if num_ranks == 2 else case.counts[-1:]
    if name == "llama":
        pytest.importorskip("transformers", reason="transformers is not installed")

    def work(environment: Environment) -> None:
        with open_mesh(environment, Layout(pipeline=num_ranks)) as mesh:
            # Four ranks exchange copies in the host's memory, as ranks that share a GPU do.
            wires = StageMessages.open([list(range(num_ranks))], mesh.rank, through_host=num_ranks == 4)
            of = {per_rank: Ranked(case, per_rank, wires) for per_rank in (1, 2)}
            for schedule, per_rank in SCHEDULES:
                for count in case.counts:
                    told = of[per_rank].trained(schedule, count)
                    if schedule == "gpipe":
                        told |= of[per_rank].evaluated()
                    save_file(told, tmp_path / f"{schedule}-{per_rank}-{count}-{mesh.rank}.safetensors")

    with forked(num_ranks, work, tmp_path / "ranks") as wait:
        wait()
    for count in counts:
        wanted = alone(case, count)
        for schedule, per_rank in SCHEDULES:
            files = [tmp_path / f"{schedule}-{per_rank}-{count}-{rank}.safetensors" for rank in range(num_ranks)]
            assert_same([load_file(f) for f in files], wanted, RELATIVE_TOLERANCE, f"{schedule} {per_rank} {count}")


def test_a_failure_on_one_rank_leaves_the_other_in_step(tmp_path: Path) -> None:
    """Rank 0 fails in its second microbatch; both come to the end of the schedule, and of an evaluation."""

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("planted")

    calls: list[int] = []

    def work(environment: Environment) -> None:
        with open_mesh(environment, Layout(pipeline=2)) as mesh:
            ranked = Ranked(GPT_CASE, 1, StageMessages.open([[0, 1]], mesh.rank))
            if mesh.rank == 0:
                ranked.model.get_submodule("blocks.0").register_forward_pre_hook(fail)
            for schedule in ("gpipe", "1f1b", "zero_bubble"):
                calls.clear()
                with pytest.raises(ValueError, match="planted") if mesh.rank == 0 else contextlib.nullcontext():
                    ranked.trained(schedule, 4)
            ranked.evaluated()
            calls[:] = [1]
            with pytest.raises(ValueError if mesh.rank == 0 else PeerError):
                ranked.evaluated()

    with forked(2, work, tmp_path / "ranks") as wait:
        wait()


def test_an_error_after_the_last_message_is_told_to_the_other_rank(tmp_path: Path) -> None:
    """Rank 1's metric fails in stages that other ranks compute too: rank 0 learns of it, and the next one is well."""

    def failing(model: nn.Module, batch: Any) -> Any:
        pair = next_token(model, batch)
        if type(batch[0]) is Tensor:  # not in the run without data
            raise ValueError("planted")
        return pair

    def work(environment: Environment) -> None:
        with open_mesh(environment, Layout(pipeline=2)) as mesh:
            ranked = Ranked(GPT_CASE, 1, StageMessages.open([[0, 1]], mesh.rank), alone=False)
            ranked.evaluated()
            loss, ranked.loss = ranked.loss, failing
            error = (ValueError, "planted") if mesh.rank == 1 else (PeerError, "another rank's failed")
            with pytest.raises(error[0], match=error[1]):
                ranked.evaluated()
            ranked.loss = loss
            ranked.evaluated()

    with forked(2, work, tmp_path / "ranks") as wait:
        wait()


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_cannot_take_part_does_not_let_the_other_wait(alone: bool, tmp_path: Path) -> None:
    """Rank 1 cannot trace an evaluation, so it neither receives nor sums: its error ends it, and rank 0 sees that."""

    def work(environment: Environment) -> None:
        with open_mesh(environment, Layout(pipeline=2)) as mesh:
            ranked = Ranked(GPT_CASE, 1, StageMessages.open([[0, 1]], mesh.rank), alone)
            if mesh.rank == 1:
                ranked.stages.traced = refuse  # type: ignore[method-assign]
                with pytest.raises(ValueError, match="planted"):
                    ranked.evaluated()
                os._exit(0)
            with pytest.raises(RuntimeError) as caught:
                ranked.evaluated()
            assert is_lost_peer(caught.value)

    def refuse(*_: Any) -> Any:
        raise ValueError("planted")

    with forked(2, work, tmp_path / "ranks") as wait:
        wait()
