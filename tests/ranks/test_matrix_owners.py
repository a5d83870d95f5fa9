"""Optimizers of whole matrices where ranks have parts of them: one rank updates each with one process' arithmetic."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.habits import optimizers as habits
from tests.launching import EXAMPLES, Run, run, run_all
from tests.ranks.test_relayout import plan
from tests.usual import needs_zero23, parametrize
from torch import Tensor, nn

import shoal
from shoal.checkpoint.pieces import fill
from shoal.checkpoint.store import Store
from shoal.parallel.model.sharded_model import TensorSlice
from shoal.training.observe.trace.traces import read
from shoal.training.setup import engine
from shoal.training.setup.preflight import judged
from shoal.training.update.matrix_owners import MatrixOwners
from shoal.verification.forked import trace_forked
from shoal.verification.judge import Verdict, judge_traces

sys.path.append(str(EXAMPLES))
import gpt
from models import GPT

pytestmark = [pytest.mark.ranks, needs_zero23()]

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "ZeRO-3, 2": {"layout": {"shard": 2}, "shard": {"level": "parameters"}},
    "ZeRO-3, 3": {"layout": {"shard": 3}, "shard": {"level": "parameters"}},
    "ZeRO-2, 2": {"layout": {"shard": 2}, "shard": {"level": "gradients"}},
    "ZeRO-3, 2 x data 2": {"layout": {"shard": 2, "data": 2}, "shard": {"level": "parameters"}},
    "tensor 2": {"layout": {"tensor": 2}},
    "tensor 2 x ZeRO-3, 2": {"layout": {"tensor": 2, "shard": 2}, "shard": {"level": "parameters"}},
    "tensor 2 x ZeRO-1, 2": {"layout": {"tensor": 2, "shard": 2}, "shard": {"level": "optimizer"}},
    "pipeline 2 x ZeRO-3, 2": {"layout": {"pipeline": 2, "shard": 2}, "shard": {"level": "parameters"}},
}
Make = Callable[[Any], torch.optim.Optimizer]


class RowOfOne(GPT):
    """With a matrix [1, 32], which one of two ranks of the shard axis has whole and the other not at all."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=32, heads=4, block=16, dropout=0.1)
        self.blocks[0].scale = nn.Parameter(torch.ones(1, 32))
        self.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] * block.scale,))


def job(optimizer: Make | None = None, *, has_row: bool = False) -> shoal.Job:
    tokens = torch.randint(256, (24, 17), generator=torch.Generator().manual_seed(0))
    return replace(
        gpt.muon(steps=2),
        model=RowOfOne if has_row else partial(GPT, layers=2, width=32, heads=4, block=16, dropout=0.1),
        optimizer=optimizer or partial(gpt.muon_and_adamw, lr=1e-2),
        train_data=(tokens[:, :-1], tokens[:, 1:]),
        eval_data=None,
        metrics={},
        collate=None,
        global_batch=12,
        grains=6,
        clip_norm=0.5,
    )


def verdict_on(wanted: shoal.Job, sections: dict[str, dict[str, Any]], folder: Path) -> Verdict:
    plan = judged(wanted, shoal.Plan().with_sections(**sections)).plan
    trace_forked(lambda: wanted, plan, folder, 2)
    return judge_traces(wanted, plan, folder)


def owned(sections: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    ranks = shoal.Plan().with_sections(**sections).layout.world_size
    return read(folder / "parallel", 0, ranks).owned


@parametrize("name", LAYOUTS, usual=["ZeRO-3, 2", "tensor 2"])
def test_owners_have_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    sections, has_row = LAYOUTS[name], name.startswith("ZeRO")
    verdict = verdict_on(job(has_row=has_row), sections, tmp_path)
    assert verdict.verified, verdict.render()
    names = owned(sections, tmp_path)
    assert [n for n in names if n.endswith("up.weight")] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert "embedding.weight" not in names
    assert ("blocks.0.scale" in names) is has_row
    found = [c for c in verdict.checks if c.phase == "update" and c.name.partition("/")[0] in names]
    assert len(found) >= 4 * len(names)  # values and momenta of two steps
    assert {(check.error, check.tolerance) for check in found} == {(0.0, 0.0)}


class OfNoName(habits.Ortho):
    """Is known by its attribute alone."""

    needs = "matrix"


def of_8_bits(parameters: Any) -> torch.optim.Optimizer:
    """AdamW of bitsandbytes, whose tables of constants belong to the class."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'shoal[qlora]'")

    class AdamW8bit(bnb.optim.AdamW8bit):  # type: ignore[misc,name-defined]
        needs = "matrix"
        name2qmap: dict[str, Tensor] = {}  # noqa: RUF012

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            del self.name2qmap

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-2, min_8bit_size=1024)
    return made


@parametrize(
    ("name", "make", "own"),
    [
        ("ZeRO-3, 2", habits.Both, "blocks.1.up.weight"),  # by the trial
        ("tensor 2", habits.Both, "blocks.1.up.weight"),
        ("tensor 2", lambda p: torch.optim.Adafactor(p, lr=1e-2), "blocks.1.up.bias"),
        ("ZeRO-3, 2", lambda p: torch.optim.Adafactor(p, lr=1e-2), "blocks.1.up.bias"),
        ("ZeRO-3, 2", lambda p: OfNoName([q for q in p if q.ndim == 2]), "positions.weight"),
        *((name, of_8_bits, "blocks.1.up.weight") for name in ("ZeRO-2, 2", "ZeRO-3, 3", "tensor 2")),
    ],
    ids=[
        *("trial, ZeRO-3", "trial, tensor", "Adafactor, tensor", "Adafactor, ZeRO-3", "attribute"),
        *("8 bits, ZeRO-2", "8 bits, ZeRO-3", "8 bits, tensor"),
    ],
    usual=["Adafactor, tensor"],
)
def test_others_that_need_whole_parameters(name: str, make: Make, own: str, tmp_path: Path) -> None:
    verdict = verdict_on(job(make, has_row="ZeRO" in name), LAYOUTS[name], tmp_path)
    assert verdict.verified, verdict.render()
    assert own in owned(LAYOUTS[name], tmp_path)


def no_owners(patch: pytest.MonkeyPatch) -> None:
    """Each rank steps its part: Muon computes its iteration and its factor from the local shape."""
    patch.setattr(engine, "needing_whole", lambda *_: [])
    patch.setattr(engine, "refuse_divided_steps", lambda *_: None)


def local_factor(patch: pytest.MonkeyPatch) -> None:
    from torch.optim import _muon

    adjusted = _muon._adjust_lr
    patch.setattr(
        _muon, "_adjust_lr", lambda lr, how, shape: adjusted(lr, how, torch.Size((shape[0] // 2, shape[1] // 2)))
    )


def own_part_only(patch: pytest.MonkeyPatch) -> None:
    """The owner's whole gradient lacks the other ranks' parts."""
    collect = MatrixOwners._collect

    def forgetful(self: MatrixOwners, named: Any, *, gradients: bool) -> None:
        collect(self, named, gradients=gradients)
        for name, p in named if gradients else ():
            gradient, part = self._wholes[p].grad, self._slices[name][self._mesh.rank]
            if gradient is not None:
                own = part.take(gradient).clone()
                part.put(gradient.zero_(), own)

    patch.setattr(MatrixOwners, "_collect", forgetful)


@parametrize("bug", [no_owners, local_factor, own_part_only], usual=["no_owners"], ids=lambda bug: bug.__name__)
def test_planted_bugs_are_found(bug: Callable[[pytest.MonkeyPatch], None], tmp_path: Path) -> None:
    sections = LAYOUTS["tensor 2"]
    wanted = job()
    plan = judged(wanted, shoal.Plan().with_sections(**sections)).plan
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        trace_forked(lambda: wanted, plan, tmp_path, 1)
    verdict = judge_traces(wanted, plan, tmp_path)
    assert not verdict.verified
    failed = {check.phase for check in verdict.checks if not check.passed}
    assert failed == {"update"}, verdict.render()


def optimizer_of(out: Path, step: int) -> dict[str, Tensor]:
    saved = Store(out / "checkpoints").open(step)
    known = saved.document["tensors"]["optimizer"]
    whole = {path: TensorSlice.whole(entry["shape"]) for path, entry in known.items()}
    slices = {path: (part, torch.empty(part.shape)) for path, part in whole.items()}
    fill(saved, "optimizer", slices)
    return {path: tensor for path, (_, tensor) in slices.items()}


def trained(out: Path, sections: dict[str, dict[str, Any]], *more: str) -> dict[str, Tensor]:
    """The optimizer's state after four steps."""
    settings = {"steps": 4, "width": 32, "layers": 2, "batch": 8}
    arguments = (*plan(out.with_suffix(".toml"), sections), "--checkpoint-every", "2", *more)
    run(Run(f"{EXAMPLES / 'gpt.py'}:muon", out, None, settings=settings, arguments=arguments), 120).expect(0)
    return optimizer_of(out, 4)


@pytest.mark.slow  # six runs
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ZeRO-3, 2", ("tensor 2 x ZeRO-3, 2", "one process")),
        ("one process", ("ZeRO-3, 2", "pipeline 2 x ZeRO-3, 2")),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(before: str, after: tuple[str, ...], tmp_path: Path) -> None:
    layouts = {**LAYOUTS, "one process": {}}
    wanted = trained(tmp_path / "before", layouts[before])
    momenta = [key for key in wanted if "momentum_buffer" in key]
    assert len(momenta) == 12
    early = optimizer_of(tmp_path / "before", 2)
    assert min(float((wanted[k] - early[k]).norm() / wanted[k].norm()) for k in momenta) > 0.1  # a loss would be seen
    for number, name in enumerate(after):
        out = tmp_path / f"after-{number}"
        shutil.copytree(tmp_path / "before", out)
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        found = trained(out, layouts[name], "--resume")
        assert found.keys() == wanted.keys()
        for (
            key
        ) in momenta:  # the sums' rounding moves an update of bfloat16 by up to 3 %, and the next gradient by less
            assert float((found[key] - wanted[key]).norm()) < 0.01 * float(wanted[key].norm()), (name, key)


@pytest.mark.slow  # three runs
def test_one_hash_where_a_layout_promises_it(tmp_path: Path) -> None:
    """Exact mode has whole parameters: on one process, and with ZeRO-1."""
    zero = plan(path := tmp_path / "zero.toml", {"layout": {"shard": 2}, "shard": {"level": "optimizer"}})
    path.write_text(f"{path.read_text()}[execution]\nexact = true\n")
    settings = {"steps": 2, "width": 32, "layers": 1, "batch": 8}
    job_file = f"{EXAMPLES / 'gpt.py'}:muon"
    runs = [Run(job_file, tmp_path / str(n), n, exact=True, settings=settings) for n in (1, 2)]
    runs.append(Run(job_file, tmp_path / "zero", None, arguments=zero, settings=settings))
    hashes = {ended.expect(0).result["weights_sha256"] for ended in run_all(runs)}
    assert len(hashes) == 1
