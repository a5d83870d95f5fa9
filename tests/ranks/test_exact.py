"""Exact mode: the same bits on any number of processes, however they were started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.launching import EXAMPLES, JOBS, Ended, Run, run, run_all
from tests.sharing import Shared
from tests.usual import parametrize
from torch import nn

from shoal.checkpoint.weights import load

sys.path.append(str(JOBS))
from tiny import vectors

pytestmark = pytest.mark.ranks

DEVICES = (1, 2, 3, 4)
MODELS = ("convnet", "gpt")
SMALL_EXAMPLES = {
    "fashion_mnist.py:lenet": {"train_samples": 500, "eval_samples": 200, "batch": 24},
    "fashion_mnist.py:resnet18": {"train_samples": 100, "eval_samples": 50, "batch": 8},
    "gpt.py": {"batch": 16, "layers": 2, "width": 32, "heads": 2, "block": 32},
}
EXAMPLE_STEPS = {"fashion_mnist.py:lenet": 12, "fashion_mnist.py:resnet18": 3, "gpt.py": 12}


def assert_one_run(ends: list[Ended]) -> None:
    """Every run is the first one, to the bit."""
    for ended in ends:
        ended.expect(0)
    first = ends[0].result
    for ended in ends[1:]:
        result = ended.result
        for key in ("weights_sha256", "sample_digest", "metrics", "eval_samples", "train_loss", "steps", "samples"):
            assert result[key] == first[key], (key, result["world_size"])
        for mine, theirs in zip(ended.records, ends[0].records, strict=True):
            assert (mine["loss"], mine["grad_norm"], mine["digest"]) == (
                theirs["loss"],
                theirs["grad_norm"],
                theirs["digest"],
            )


@pytest.fixture(scope="module")
def mlp_alone(shared: Shared) -> Ended:
    return shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))


@parametrize("model", MODELS, usual=["gpt"])
def test_one_hash_on_any_number_of_devices(model: str, tmp_path: Path) -> None:
    ends = run_all([Run(f"{JOBS / 'tiny.py'}:{model}", tmp_path / str(n), n, exact=True) for n in DEVICES])
    assert_one_run(ends)
    assert [ended.result["world_size"] for ended in ends] == list(DEVICES)
    losses = [record["loss"] for record in ends[0].records]
    assert losses[-1] < losses[0], "a run that learns nothing proves nothing"


@pytest.mark.slow
def test_another_seed_is_another_hash(mlp_alone: Ended, tmp_path: Path) -> None:
    """The hashes above could all be those of the initial values, or of nothing."""
    other = run(Run(JOBS / "tiny.py", tmp_path / "run", 1, exact=True, settings={"lr": 0.11})).expect(0)
    assert other.result["weights_sha256"] != mlp_alone.result["weights_sha256"]
    assert other.result["sample_digest"] == mlp_alone.result["sample_digest"]
    shorter = run(Run(JOBS / "tiny.py", tmp_path / "short", 1, exact=True, arguments=("--steps", "15"))).expect(0)
    assert shorter.result["sample_digest"] != mlp_alone.result["sample_digest"]


@pytest.mark.slow
@pytest.mark.parametrize("job", SMALL_EXAMPLES)
def test_the_examples_on_one_device_and_three(job: str, tmp_path: Path) -> None:
    steps = ("--steps", str(EXAMPLE_STEPS[job]))
    wanted = [Run(EXAMPLES / job, tmp_path / str(n), n, True, steps, SMALL_EXAMPLES[job]) for n in (1, 3)]
    assert_one_run(run_all(wanted))


LAYOUTS = ("data=2", "data=2,expert=2", "data=4,expert=2", "data=4,expert=4")
ZERO_1 = '[layout]\nshard = 2\nexpert = 2\n[shard]\nlevel = "optimizer"\n[memory]\nrecompute = "full"\n'


@parametrize("model", ["listed", "stacked", "mixtral", "qwen"], usual=["stacked"])
def test_divided_experts_have_the_hash_of_one_process(model: str, tmp_path: Path) -> None:
    """Norms clip, and in step 4 some ranks have no grain."""
    (tmp_path / "zero_1.toml").write_text(ZERO_1)
    divided = [("--layout", layout) for layout in (LAYOUTS[2:3] if model == "stacked" else LAYOUTS)]
    ways = [("--devices", "1"), *divided, ("--plan", str(tmp_path / "zero_1.toml"))]
    job, settings = f"{JOBS / 'experts.py'}:job", {"model": model}
    runs = [Run(job, tmp_path / str(n), None, True, arguments, settings) for n, arguments in enumerate(ways)]
    assert_one_run([run(one, 300.0) for one in runs])


def test_data_workers_change_no_bit(tmp_path: Path) -> None:
    """Augmentation draws from the grain's generators in whichever process reads the sample."""
    job = f"{JOBS / 'tiny.py'}:augmented"
    ends = run_all(
        [
            Run(job, tmp_path / "none", 1, exact=True),
            Run(job, tmp_path / "one", 1, exact=True, arguments=("--workers", "1")),
            Run(job, tmp_path / "two", 2, exact=True, arguments=("--workers", "2")),
        ]
    )
    assert_one_run(ends)


@parametrize("job", ["both", "averaged"], usual=["both"])
def test_an_optimizer_of_optimizers_goes_on_with_its_whole_state(job: str, tmp_path: Path) -> None:
    """Its rates, its state, and the weights that its `eval` gives are those of an undisturbed run on any layout."""
    path = f"{JOBS / 'composed.py'}:{job}"
    whole, two, cut = run_all(
        [
            Run(path, tmp_path / "whole", 1, exact=True),
            Run(path, tmp_path / "two", 2, exact=True),
            Run(path, tmp_path / "cut", 2, exact=True, arguments=("--steps", "3")),
        ]
    )
    cut.expect(0)
    resumed = run(Run(path, tmp_path / "cut", 1, arguments=("--resume", "--steps", "8"))).expect(0)
    for ended in (two, resumed):
        for key in ("weights_sha256", "metrics", "train_loss"):
            assert ended.result[key] == whole.result[key], key
    weights = load(tmp_path / "cut")
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model.load_state_dict({name: weights[name] for name in weights.names})
    inputs, labels, _ = vectors(101, 2)
    loss = nn.functional.cross_entropy(model(inputs), labels).item()
    assert loss == pytest.approx(whole.result["metrics"]["loss"], rel=1e-5)  # of the weights that others are given
