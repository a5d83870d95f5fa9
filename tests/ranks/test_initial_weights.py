"""Initial weights of a run from elsewhere, in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.launching import JOBS, Ended, Run, run, run_all
from tests.ranks.test_model_out import LAYOUTS
from tests.ranks.test_relayout import ONE_THREAD, plan
from tests.usual import parametrize

import shoal

pytestmark = pytest.mark.ranks

JOB = f"{JOBS / 'layouts.py'}:stack"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run whose weights the others begin with."""
    out = tmp_path_factory.mktemp("first") / "run"
    return run(Run(JOB, out, 1, settings={"steps": 4}, environment=ONE_THREAD)).expect(0)


def began(first: Ended, out: Path, *arguments: str, **changes: Any) -> Run:
    fields: dict[str, Any] = {"settings": {"steps": 3}, "environment": ONE_THREAD, **changes}
    return Run(JOB, out, arguments=("--init-from", str(first.out), *arguments), **fields)


def test_one_hash_on_one_two_and_three_processes(first: Ended, tmp_path: Path) -> None:
    """In exact mode; and another than without the weights. The run says what it began with."""
    runs = [began(first, tmp_path / str(devices), devices=devices, exact=True) for devices in (1, 2, 3)]
    ended = [one.expect(0) for one in run_all(runs)]
    plain = run(Run(JOB, tmp_path / "plain", 1, exact=True, settings={"steps": 3}, environment=ONE_THREAD)).expect(0)
    hashes = {one.result["weights_sha256"] for one in ended}
    assert len(hashes) == 1
    assert plain.result["weights_sha256"] not in hashes
    for one in ended:
        noted = json.loads((one.out / "job.json").read_text(encoding="utf-8"))["initial_weights"]
        assert noted["sha256"] == first.result["weights_sha256"]
        assert f"initial weights: {noted['taken']} tensors of a checkpoint of step 4" in one.stdout


@parametrize("layout", LAYOUTS, usual=["ZeRO-3", "pipeline"])
def test_every_layout_begins_with_them(layout: str, first: Ended, tmp_path: Path) -> None:
    """What it has before its first step is, bit by bit, what the other run ended with."""
    arguments = (*plan(tmp_path / "plan.toml", LAYOUTS[layout]), "--steps", "1")
    ended = run(began(first, tmp_path / "run", *arguments, devices=None)).expect(0)
    at_start = shoal.load(ended.out, step=0)
    assert shoal.weights_sha256(at_start) == first.result["weights_sha256"]
    alone = run(began(first, tmp_path / "alone", "--steps", "1")).expect(0)
    assert ended.result["train_loss"] == pytest.approx(alone.result["train_loss"], rel=1e-5)


def test_a_resume_needs_no_file(first: Ended, tmp_path: Path) -> None:
    """Not before the first step either; and it knows which weights they were."""
    state = dict(shoal.load(first.out))
    del state["head.weight"]  # tied
    save_file(state, tmp_path / "weights.safetensors")
    source = Ended(0, "", "", tmp_path / "weights.safetensors")
    call = began(source, tmp_path / "run", "--steps", "1")
    run(call).expect(0)
    whole = run(began(source, tmp_path / "whole")).expect(0)
    (tmp_path / "weights.safetensors").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000001")
    (tmp_path / "run" / "saved.json").unlink()
    call.arguments = ("--resume", "--steps", "3")
    ended = run(call).expect(0)
    assert ended.result["resumed_from"] == 0
    assert ended.result["weights_sha256"] == whole.result["weights_sha256"]
    noted = [json.loads((one / "job.json").read_text())["initial_weights"] for one in (call.out, whole.out)]
    assert noted[0] == noted[1]
    assert noted[0]["sha256"] == shoal.weights_sha256(state)

    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "saved.json").unlink()
    call.arguments = ("--resume", "--steps", "3")
    refused = run(call).expect(2)
    assert "it began with weights of" in refused.stderr


def test_a_divided_model_with_another_head(tmp_path: Path) -> None:
    """Every rank names all that differs, also of what another rank holds, and nothing is trained."""
    torch.save(
        {"model": {"embedding.weight": torch.ones(16, 8), "blocks.7.up.weight": torch.ones(2)}}, tmp_path / "a.pt"
    )
    source = Ended(0, "", "", tmp_path / "a.pt")
    arguments = plan(tmp_path / "plan.toml", LAYOUTS["pipeline"])
    refused = run(began(source, tmp_path / "run", *arguments, devices=None)).expect(2)
    for line in ("missing in the file: blocks.0.down.bias [8]", "missing in the file: blocks.1.down.bias [8]"):
        assert line in refused.stderr
    assert "unexpected, not in the model: blocks.7.up.weight [2]" in refused.stderr
    allowed = ("--init-allow", "missing,unexpected", "--steps", "1")
    ended = run(began(source, tmp_path / "run", *arguments, *allowed, devices=None)).expect(0)
    assert "initial weights: 1 tensors of" in ended.stdout
    assert torch.equal(shoal.load(ended.out, step=0)["head.weight"], torch.ones(16, 8))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ZeRO-3", "pipeline", "tensor"])
def test_values_that_differ_between_ranks_are_refused_where_a_model_is_divided(layout: str, tmp_path: Path) -> None:
    """Each rank would hold a part of a model of its own."""
    arguments = (*plan(tmp_path / "plan.toml", LAYOUTS[layout]), "--steps", "1")
    job = f"{JOBS / 'layouts.py'}:unseeded"
    ended = run(Run(job, tmp_path / "run", None, arguments=arguments, environment=ONE_THREAD)).expect(2)
    assert "which gives other initial values on rank 1 than on rank 0" in " ".join(ended.stderr.split())
