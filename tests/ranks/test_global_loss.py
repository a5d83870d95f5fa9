"""Losses over the global batch: plain torch's numbers with the whole batch, on any layout that divides the batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.launching import EXAMPLES, Run, run_all
from tests.usual import needs_zero23, parametrize
from torch import Tensor, nn

import shoal
from shoal.errors import JobError, PlanError, ShoalError
from shoal.numerics import outputs as numerics_outputs
from shoal.numerics.batch_statistics import StepBuffers
from shoal.numerics.outputs import Summed
from shoal.plans.resolve import complete
from shoal.training.microbatch import global_loss
from shoal.training.microbatch.global_loss import GlobalLoss
from shoal.training.microbatch.step import ForwardBackward
from shoal.training.observe.trace.traces import StepTrace, read
from shoal.training.setup.job_model import seeded_model
from shoal.verification.forked import trace_forked
from shoal.verification.judge import Verdict, judge_traces

sys.path.append(str(EXAMPLES))
import global_losses as examples

pytestmark = pytest.mark.ranks

JOBS = (
    "clip",
    "simclr",
    "supcon",
    "triplets",
    "vicreg",
    "barlow",
    "experts",
    "clip_by_rows",
    "siglip",
    "router_logits",
)


def plan(layout: dict[str, int], **sections: dict[str, Any]) -> shoal.Plan:
    return shoal.Plan().with_sections(layout=layout, **sections)


def job_of(name: str, **settings: Any) -> shoal.Job:
    """Without dropout, whose masks plain torch does not draw."""
    job: shoal.Job = getattr(examples, name)(**settings)
    build = job.model

    def without_dropout() -> nn.Module:
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return replace(job, model=without_dropout, shuffle=False)


def traced(job: shoal.Job, wanted: shoal.Plan, folder: Path) -> StepTrace:
    """The first step of the ranks."""
    whole = complete(wanted, job.num_grains, job.grain_size)
    trace_forked(lambda: job, whole, folder, 1)
    return read(folder / "parallel", 0, whole.layout.world_size)


def plain(job: shoal.Job) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the first step in plain torch, of the whole batch at once."""
    model = seeded_model(job)
    model.train()
    batch = tuple(tensor[: job.global_batch] for tensor in job.train_data)
    assert job.outputs is not None
    leaves = job.outputs(model, batch)
    outputs = torch.utils._pytree.tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Summed) else leaf, leaves)
    rows = {"rows": slice(0, job.global_batch)} if job.loss_by_rows else {}
    total, weight = job.loss(outputs, batch, **rows)
    (total / weight).backward()
    return float((total / weight).detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_plain(job: shoal.Job, trace: StepTrace) -> None:
    loss, gradients = plain(job)
    assert trace.loss == pytest.approx(loss, rel=1e-5)
    found = trace.phase("reduction")
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@parametrize("name", JOBS, usual=["clip", "barlow"])
@parametrize("ranks", [1, 2, 3], usual=["2"])
def test_plain_torch_on_the_whole_batch(name: str, ranks: int, tmp_path: Path) -> None:
    job = job_of(name)
    assert_plain(job, traced(job, plan({"data": ranks}), tmp_path))


@parametrize("name", JOBS, usual=["barlow"])
def test_plain_torch_where_outputs_are_computed_twice(name: str, tmp_path: Path) -> None:
    job = job_of(name)
    assert_plain(job, traced(job, plan({"data": 2}, batch={"grains_per_microbatch": 1}), tmp_path))


def published() -> tuple[Tensor, Tensor]:
    k = torch.arange(1, 33, dtype=torch.float64)
    x = (k * k).sin().view(8, 4)
    return x.float(), (x + 0.5 * (k * k + k).cos().view(8, 4)).float()


def test_the_published_values_on_ranks_that_see_only_a_half(tmp_path: Path) -> None:
    """CLIP's mean of both halves is 0.335195, and of four quarters 0.128564; SigLIP's 1.562770 and 1.490306."""
    x, y = published()

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(10.0))

    job = shoal.Job(
        model=Same,
        outputs=lambda m, b: (F.normalize(b[0] * (m.scale / 10), dim=1), F.normalize(b[1], dim=1), m.scale),
        loss=lambda outputs, b: (examples.clip_loss(*outputs) * 8, 8),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=(x, y),
        global_batch=8,
        grains=4,
    )
    for ranks in (2, 4):
        trace = traced(job, plan({"data": ranks}), tmp_path / str(ranks))
        assert trace.loss == pytest.approx(0.424633, abs=2e-6)
    job = replace(job, loss=lambda outputs, b: (examples.siglip_loss(*outputs, -10.0), 8))
    assert traced(job, plan({"data": 2}), tmp_path / "siglip").loss == pytest.approx(1.593711, abs=2e-6)


@parametrize("ranks", [2, 3, 4], usual=["3"])
def test_a_centre_moves_once_by_the_whole_batch(ranks: int, tmp_path: Path) -> None:
    """Column 1 of the centre of x; by halves in turn it is -0.005227."""

    def build() -> nn.Module:
        model = examples.SelfDistilled(nn.Identity, 4)
        model.student = nn.Linear(4, 4)  # something to train
        return model

    job = replace(examples.dino(batch=8), model=build, train_data=(published()[0],) * 2, eval_data=None, shuffle=False)
    trace = traced(job, plan({"data": ranks}), tmp_path)
    assert float(trace.phase("buffers")["centre"][0]) == pytest.approx(-0.003267, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("grains", [0, 1])
def test_teacher_and_centre_are_those_of_plain_torch(grains: int, tmp_path: Path) -> None:
    """After three steps of the whole batch at once; the teacher is a frozen part of the model."""
    job = job_of("dino")
    model = seeded_model(job)
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for start in (0, 64, 128):
        optimizer.zero_grad()
        total, weight = job.loss(model, tuple(tensor[start : start + 64] for tensor in job.train_data))
        (total / weight).backward()
        optimizer.step()
        losses.append(float(total.detach() / weight))
    whole = complete(plan({"data": 3}, batch={"grains_per_microbatch": grains}), job.num_grains, job.grain_size)
    trace_forked(lambda: job, whole, tmp_path, 3)
    steps = [read(tmp_path / "parallel", step, 3) for step in range(3)]
    assert [step.loss for step in steps] == pytest.approx(losses, rel=1e-5)
    found = {**steps[-1].parameters, **steps[-1].phase("buffers")}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


PLANS = {
    "ZeRO-1": plan({"shard": 2}, shard={"level": "optimizer"}),
    "ZeRO-2": plan({"shard": 2}, shard={"level": "gradients"}),
    "ZeRO-3, uneven": plan({"shard": 3}, shard={"level": "parameters"}, batch={"grains_per_microbatch": 2}),
    "bfloat16": plan({"data": 2}, precision={"compute": "bfloat16"}, batch={"grains_per_microbatch": 2}),
    "float16": plan({"data": 2}, precision={"compute": "float16", "loss_scale": "dynamic"}),
    "three ranks, accumulated": plan({"data": 3}, batch={"grains_per_microbatch": 1}),
    "exact": plan({"data": 3}, execution={"exact": True}),
    "by rows": plan({"data": 3}, batch={"grains_per_microbatch": 2}),
    "by rows, exact": plan({"data": 2}, execution={"exact": True}),
}


@parametrize(
    "name",
    [pytest.param(n, id=n, marks=needs_zero23()) if n[:6] in ("ZeRO-2", "ZeRO-3") else n for n in PLANS],
    rare=["ZeRO-2", "float16", "three ranks, accumulated", "by rows, exact"],
)
def test_verified_on_each_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, which both passes have to draw alike, and evaluations in unequal numbers of pieces."""
    monkeypatch.setattr(numerics_outputs, "_PIECE", 16)
    job = examples.clip_by_rows if "by rows" in name else examples.clip
    verdict = shoal.verify(job(epochs=1), PLANS[name], steps=2)
    assert verdict.verified, verdict.render()


@parametrize("name", ["clip", "barlow", "clip_by_rows", "dino"], usual=["clip_by_rows"])
def test_one_hash_on_any_number_of_devices(name: str, tmp_path: Path) -> None:
    settings = {"epochs": 1.0, "batch": 48}
    ends = run_all(
        [
            Run(f"{EXAMPLES / 'global_losses.py'}:{name}", tmp_path / f"{name}{n}", n, exact=True, settings=settings)
            for n in (1, 2, 3, 4)
        ]
    )
    results = [ended.expect(0).result for ended in ends]
    for key in ("weights_sha256", "metrics", "train_loss", "sample_digest"):
        assert len({str(result[key]) for result in results}) == 1, (name, key)


# ---------------------------------------------------------------------------------------------------------- planted


def verdict_on(patched: pytest.MonkeyPatch, folder: Path, job: shoal.Job, wanted: shoal.Plan) -> Verdict:
    """The ranks have what is patched, and the references have not."""
    whole = complete(wanted, job.num_grains, job.grain_size)
    trace_forked(lambda: job, whole, folder, 2)
    patched.undo()
    return judge_traces(job, whole, folder)


def solved(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Changes the solution of every step."""
    meet = GlobalLoss._meet

    def met(self: GlobalLoss) -> None:
        meet(self)
        change(self, self._step.solution)

    patch.setattr(GlobalLoss, "_meet", met)


def divided_by_the_ranks(patch: pytest.MonkeyPatch) -> None:
    """The whole loss on each rank, gathered without gradient, and DDP's mean."""

    def change(self: GlobalLoss, solution: Any) -> None:
        solution.gradients = [None if g is None else g / 2 for g in solution.gradients]

    solved(patch, change)


def temperature_times_the_ranks(patch: pytest.MonkeyPatch) -> None:
    """The customary cure of the bug above: the loss times the number of ranks."""

    def change(self: GlobalLoss, solution: Any) -> None:
        solution.gradients[-1] = solution.gradients[-1] * 2

    solved(patch, change)


def gathered_without_gradient(patch: pytest.MonkeyPatch) -> None:
    """Each rank's loss is that of its own rows against all columns; no gradient comes back from others' rows."""
    pair = global_loss.LossPair.__call__

    def own_rows(self: Any, outputs: Any, batch: Any) -> Any:
        total, weight = pair(self, outputs, batch)
        if isinstance(outputs, tuple) and total.requires_grad:
            half = len(outputs[0]) // 2
            kept = slice(0, half) if torch.distributed.get_rank() == 0 else slice(half, None)
            scores = 5.0 * outputs[0] @ outputs[1].T
            part = F.cross_entropy(scores[kept], torch.arange(len(scores))[kept], reduction="sum")
            total = part + (total - part).detach()
        return total, weight

    patch.setattr(global_loss.LossPair, "__call__", own_rows)


def filled_with_the_first(patch: pytest.MonkeyPatch) -> None:
    rows = global_loss._Gathering.rows

    def filled(self: Any, places: Any) -> Any:
        found = rows(self, places)
        for tensor in found:
            tensor[-1] = tensor[0]
        return found

    patch.setattr(global_loss._Gathering, "rows", filled)


def other_masks_in_the_second_pass(patch: pytest.MonkeyPatch) -> None:
    forward = ForwardBackward.forward

    def elsewhere(self: ForwardBackward, loaded: Any, request: Any) -> None:
        microbatch = loaded.microbatch
        step, microbatch.step = microbatch.step, microbatch.step + 1000
        try:
            forward(self, loaded, request)
        finally:
            microbatch.step = step

    patch.setattr(ForwardBackward, "forward", elsewhere)


def centred_by_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Centre and teacher move with each microbatch, and the next one has them."""
    patch.setattr(StepBuffers, "restore", lambda self, **_: None)


def one_way() -> shoal.Job:
    """InfoNCE in one direction, on two towers without dropout."""

    def loss(outputs: Any, data: Any) -> Any:
        scores = 5.0 * outputs[0] @ outputs[1].T
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores)

    return replace(job_of("simclr"), loss=loss)


@pytest.mark.parametrize(
    ("plant", "make"),
    [
        (divided_by_the_ranks, lambda: job_of("clip")),
        (temperature_times_the_ranks, lambda: job_of("clip")),
        (gathered_without_gradient, one_way),
        (filled_with_the_first, lambda: job_of("clip")),
        pytest.param(centred_by_microbatch, lambda: job_of("dino"), marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", "job"),
)
def test_verify_catches(plant: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    by_one = {"grains_per_microbatch": 1} if plant is centred_by_microbatch else {}
    verdict = verdict_on(monkeypatch, tmp_path, make(), plan({"data": 2}, batch=by_one))
    assert not verdict.verified, verdict.render()
    assert verdict.failed[0].phase in (("forward",) if by_one else ("loss", "backward")), verdict.render()


def test_dropout_that_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself refuses it; without that check verify catches it."""
    job, wanted = examples.simclr(epochs=1), plan({"data": 2}, batch={"grains_per_microbatch": 1})
    with monkeypatch.context() as patch:
        other_masks_in_the_second_pass(patch)
        with pytest.raises(ShoalError, match="other values when the same microbatch is computed again"):
            verdict_on(patch, tmp_path / "refused", job, wanted)
    with monkeypatch.context() as patch:
        other_masks_in_the_second_pass(patch)
        patch.setattr(global_loss, "_refuse_other", lambda first, again: None)
        verdict = verdict_on(patch, tmp_path / "caught", job, wanted)
    assert not verdict.verified, verdict.render()


# --------------------------------------------------------------------------------------------------------- refusals


def test_layouts_that_have_no_whole_model_are_refused_before_the_first_step() -> None:
    for axis in ("tensor", "pipeline", "context"):
        with pytest.raises(PlanError, match=rf"layout.{axis} = 2"):
            shoal.verify(examples.clip(), plan({axis: 2}), steps=1)
    with pytest.raises(PlanError, match=r"execution.compile"):
        shoal.verify(examples.clip(), plan({}, execution={"compile": "default"}), steps=1)


def test_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    """Raised in the first pass and, with one microbatch a rank, in the only one."""

    def outputs(model: nn.Module, data: Any) -> Any:
        if bool((data[2] == 99).any()):
            raise ValueError("an odd sample")
        return model(data[0])

    job = job_of("supcon")
    labels = job.train_data[2].clone()
    labels[60] = 99  # in the last grain of the first step
    job = replace(job, outputs=outputs, train_data=(*job.train_data[:2], labels), eval_data=None)
    for grains in (0, 1):
        with pytest.raises(ShoalError, match="an odd sample"):
            traced(job, plan({"data": 2}, batch={"grains_per_microbatch": grains}), tmp_path / str(grains))


def test_a_loss_by_rows_that_draws_is_refused(tmp_path: Path) -> None:
    job = job_of("clip_by_rows")

    def noisy(outputs: Any, data: Any, rows: slice) -> Any:
        total, weight = job.loss(outputs, data, rows=rows)
        return total * (1.0 + 0.1 * torch.rand(())), weight

    with pytest.raises(JobError, match="loss_by_rows=True that draws random numbers"):
        traced(replace(job, loss=noisy), plan({"data": 2}), tmp_path)


def test_rows_of_other_shapes_are_refused(tmp_path: Path) -> None:
    def outputs(model: nn.Module, data: Any) -> Any:
        return model(data[0])[:, : 4 if bool((data[2] == 99).any()) else 8]

    job = job_of("supcon")
    labels = job.train_data[2].clone()
    labels[60] = 99
    job = replace(job, outputs=outputs, train_data=(*job.train_data[:2], labels), eval_data=None, fuse=False)
    with pytest.raises(JobError, match="another shape or dtype in another grain"):
        traced(job, plan({"data": 2}), tmp_path)


def test_only_what_the_loss_reads_of_a_batch_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    batch = global_loss._Gathering.batch

    def noted(self: Any, places: Any) -> Any:
        seen.extend(places)
        return batch(self, places)

    def loss(outputs: Any, data: Any) -> Any:
        if 0 in seen or 1 in seen:
            raise ValueError("images were gathered")
        return examples.sup_con(outputs[: len(data[0])], data[2], 0.2)

    monkeypatch.setattr(global_loss._Gathering, "batch", noted)
    job = replace(job_of("supcon"), loss=loss, eval_data=None)
    assert traced(job, plan({"data": 2}), tmp_path).weight > 0


def test_the_outputs_of_all_ranks_have_the_same_names(tmp_path: Path) -> None:
    job = job_of("supcon")
    labels = torch.zeros_like(job.train_data[2])
    labels[32:64] = 1  # the second rank's in the first step

    def outputs(model: nn.Module, data: Any) -> Any:
        rows = model(data[0])
        return (rows, rows) if bool(data[2].any()) else (rows, None)

    job = replace(
        job,
        outputs=outputs,
        loss=lambda rows, data: (rows[0].logsumexp(0).sum(), 64),
        train_data=(*job.train_data[:2], labels),
        eval_data=None,
    )
    with pytest.raises(JobError, match="other names or numbers of tensors in another grain"):
        traced(job, plan({"data": 2}), tmp_path)


@parametrize("reads", ["", "size", "name", "text"], usual=["text"])
def test_parts_of_a_batch_that_are_no_tensors(reads: str, tmp_path: Path) -> None:
    """Constants reach the loss. What differs between grains, and lists that are as long as a grain, do not."""

    def loss(outputs: Any, data: Any) -> Any:
        assert data["mask"] is None
        assert not data["flag"]
        assert data["level"] == 3
        if (reads == "size" and data["size"] == 64) or (reads == "name" and data["names"][0] == "a"):
            return outputs.sum() * 0.0, 64
        total = torch.mul(outputs, data["names"]) if reads == "text" else outputs
        return total.logsumexp(0).sum(), 64

    def collate(samples: Any) -> Any:
        constants = {"mask": None, "flag": False, "level": 3}
        names = ["a"] * len(samples)
        return {"x": torch.stack([one for one, *_ in samples]), **constants, "size": len(samples), "names": names}

    job = job_of("supcon")
    job = replace(
        job,
        outputs=lambda model, data: model(data["x"]),
        loss=loss,
        train_data=list(zip(*job.train_data, strict=True)),
        collate=collate,
        eval_data=None,
        global_batch=63,
    )
    if not reads:
        verdict = shoal.verify(job, plan({"data": 2}), steps=1)
        assert verdict.verified, verdict.render()
    else:
        with pytest.raises(ShoalError, match="a part of the batch which is no tensor by sample"):
            traced(job, plan({"data": 2}), tmp_path)


def test_a_loss_that_uses_a_parameter_past_the_outputs_is_refused(tmp_path: Path) -> None:
    """Its gradient would be lost: plain torch adds it."""
    models: list[nn.Module] = []
    job = job_of("supcon")
    build = job.model

    def model() -> nn.Module:
        models.append(build())
        return models[-1]

    def loss(outputs: Any, data: Any) -> Any:
        weight = next(models[-1].parameters())
        return outputs.logsumexp(0).sum() * weight.square().sum(), 64

    job = replace(job, model=model, outputs=lambda model, data: model(data[0]), loss=loss, eval_data=None)
    with pytest.raises(JobError, match="of the model by itself"):
        traced(job, plan({"data": 2}), tmp_path)


def test_a_first_read_of_the_batch_changes_neither_draws_nor_outputs(tmp_path: Path) -> None:
    """The loss is computed again then, after it has drawn and has written into an output."""

    def loss(outputs: Any, data: Any) -> Any:
        with torch.no_grad():
            outputs.mul_(2.0)
        rows = torch.rand(len(outputs)) < 0.8
        return outputs[rows].logsumexp(0).sum() + 0 * data[2].sum(), 64

    job = replace(job_of("supcon"), outputs=lambda model, data: model(data[0]), loss=loss, eval_data=None)
    verdict = shoal.verify(job, plan({"data": 2}), steps=2)
    assert verdict.verified, verdict.render()
    one, two = (traced(job, plan({"data": n}), tmp_path / str(n)) for n in (1, 2))
    assert one.loss == pytest.approx(two.loss, rel=1e-6)


def test_evaluation_and_predictions(tmp_path: Path) -> None:
    """The loss of an evaluation is that of batches of `global_batch` samples, in order, on any number of ranks."""
    job = job_of("clip", epochs=1.0)
    file = f"{EXAMPLES / 'global_losses.py'}:clip"
    ends = run_all([Run(file, tmp_path / str(n), n, settings={"epochs": 1.0}) for n in (1, 2)])
    one, two = (ended.expect(0).result["metrics"]["loss"] for ended in ends)
    assert one == pytest.approx(two, rel=1e-4)
    model = seeded_model(job)
    model.load_state_dict(shoal.load(tmp_path / "1"))
    model.eval()
    assert job.outputs is not None
    with torch.no_grad():
        batches = [tuple(t[start : start + 64] for t in job.eval_data) for start in (0, 64)]
        pairs = [job.loss(job.outputs(model, batch), batch) for batch in batches]
    assert one == pytest.approx(float(sum(t for t, _ in pairs)) / sum(w for _, w in pairs), rel=1e-5)


def test_a_rank_without_samples_takes_part(tmp_path: Path) -> None:
    """Two grains of 8 and of 2 samples on three ranks, in the first step too."""
    job = replace(job_of("clip"), train_data=tuple(tensor[:10] for tensor in examples.pairs(256)), global_batch=64)
    trace = traced(job, plan({"data": 3}), tmp_path)
    assert {part.rank for part in trace.parts} == {1, 2}
    assert_plain(job, trace)


class Normalised(nn.Module):
    """Batch statistics, dropout and a counter, which two passes must move once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += len(x)
        out: Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return out


def test_buffers_move_once(tmp_path: Path) -> None:
    def loss(rows: Tensor, data: Any) -> Any:
        return examples.sup_con(F.normalize(rows, dim=1), data[2], 0.2)

    job = replace(job_of("supcon"), model=Normalised, loss=loss)
    for grains in (0, 2):
        wanted = plan({"data": 2}, batch={"grains_per_microbatch": grains})
        verdict = shoal.verify(job, wanted, steps=2)
        assert verdict.verified, verdict.render()
    trace = traced(job, wanted, tmp_path)
    assert trace.phase("buffers")["norm.num_batches_tracked"] == 1
    assert trace.phase("buffers")["calls"] == 64


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)))


def test_recomputed_blocks() -> None:
    sections = {"memory": {"recompute": "full"}, "batch": {"grains_per_microbatch": 2}}
    job = replace(examples.simclr(), model=blocks)
    verdict = shoal.verify(job, plan({"data": 2}, **sections), steps=2)
    assert verdict.verified, verdict.render()


class Stream:
    """The pairs as an iterable without a length, with a text that no batch of tensors has."""

    def __iter__(self) -> Any:
        first, second, labels = examples.pairs(192)
        for number, label in enumerate(labels.tolist()):
            yield {"views": (first[number], second[number]), "label": label, "text": f"sample {number}"}


def test_streams_with_texts(tmp_path: Path) -> None:
    def loss(outputs: Any, data: Any) -> Any:
        return examples.nt_xent(*outputs, 0.2) * len(data["label"]), len(data["label"])

    def job(**parts: Any) -> shoal.Job:
        stream = {"train_data": Stream(), "length": shoal.Steps(3), "eval_data": None, "shuffle": None}
        outputs = {"outputs": lambda model, data: tuple(model(view) for view in data["views"])}
        return replace(job_of("simclr"), **{**stream, **outputs, "loss": loss, **parts})

    losses = []
    for ranks in (1, 3):
        whole = complete(plan({"data": ranks}), 8, 8)
        trace_forked(job, whole, tmp_path / str(ranks), 3)
        losses.append([read(tmp_path / str(ranks) / "parallel", step, ranks).loss for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len({*losses[0]}) == 3
    reads = job(loss=lambda outputs, data: (outputs[0].sum() * len(data["text"][0]), 1))
    with pytest.raises(ShoalError, match="a part of the batch which is no tensor by sample"):
        trace_forked(lambda: reads, complete(plan({"data": 2}), 8, 8), tmp_path / "text", 1)
