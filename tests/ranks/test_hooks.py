"""Code that reaches into what a layout moves gives the weights of a plain loop with the whole batch, or one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import hooks
from tests.launching import JOBS, Ended, Run, run
from tests.usual import parametrize

from shoal.checkpoint.weights import load

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "data": "[layout]\ndata = 2",
    "grain by grain": "[layout]\ndata = 2\n[batch]\ngrains_per_microbatch = 1",
    "exact": "[layout]\ndata = 2\n[execution]\nexact = true",
    "zero 1": '[layout]\nshard = 2\n[shard]\nlevel = "optimizer"',
    "zero 2": '[layout]\nshard = 2\n[shard]\nlevel = "gradients"',
    "zero 3": '[layout]\nshard = 2\n[shard]\nlevel = "parameters"',
    "pipeline": "[layout]\npipeline = 2",
    "tensor": "[layout]\ntensor = 2",
    "one copy": '[layout]\ndata = 2\n[memory]\nshared = true\n[collectives]\nall_reduce = "shared_memory"',
}
# Rounding of float32 over three steps with momentum: some hundred units in the last place of weights below one.
TOLERANCE = 1e-5


def under(name: str, layout: str, folder: Path) -> Ended:
    path = folder / "plan.toml"
    path.write_text(f"schema = 1\n{LAYOUTS[layout]}\n")
    return run(Run(f"{JOBS / 'hooks.py'}:{name}", folder / "run", None, arguments=("--plan", str(path))))


@parametrize(
    ("name", "layout"),
    [
        *(
            ("hooked", layout)
            for layout in ("data", "grain by grain", "exact", "zero 1", "zero 2", "zero 3", "pipeline")
        ),
        *(("masked", layout) for layout in ("data", "zero 2", "zero 3")),
        *(("kept", layout) for layout in ("data", "zero 2", "zero 3")),
        ("rolled", "zero 3"),
    ],
    usual=[
        "hooked-zero 3",
        "hooked-pipeline",
        "masked-data",
        "kept-zero 2",
    ],
)
def test_has_the_weights_of_a_plain_loop(name: str, layout: str, tmp_path: Path) -> None:
    ended = under(name, layout, tmp_path).expect(0)
    weights: Any = load(ended.out)
    for key, wanted in hooks.plain(name).items():
        torch.testing.assert_close(torch.as_tensor(weights[key]), wanted, atol=TOLERANCE, rtol=0)


@parametrize(
    ("name", "layout", "said"),
    [
        ("hooked", "tensor", "a hook on the parameter blocks.0.up.weight, with tensor > 1"),
        ("hooked", "one copy", "a hook on the parameter blocks.0.up.weight, with memory.shared = true"),
        ("masked", "pipeline", "a forward that writes parameter blocks.0.down.weight"),
        ("adapted", "zero 3", "a forward that writes the trainable parameter blocks.0.down.weight"),
        ("left", "zero 3", "a loss that uses a tensor from within a block, which is not an output of the block"),
        ("longer", "zero 3", "a model or loss that calls parts of the model"),
        ("skipping", "zero 3", "a model or loss that calls parts of the model"),
    ],
    usual=["hooked-tensor-a hook on the parameter blocks.0.up.weight, with tensor > 1"],
)
def test_is_refused_at_once(name: str, layout: str, said: str, tmp_path: Path) -> None:
    ended = under(name, layout, tmp_path).fails(2)
    assert said in ended.message.given
