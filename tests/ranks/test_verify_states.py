"""What a process did before it verifies: most of it does not matter, and what does is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.forks import run

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]

# Ranks are forked: kernels' threads, and a lock that one of them holds, would be lost in them.
AFTER_A_LOOP = """
import torch, shoal
from shoal.planner.profile.profiles import profile_job
from tests.conformance.cases import job as small
torch.set_num_threads(2)
large = torch.randn(900, 900, requires_grad=True)
(large @ large).sum().backward()
job = small()
model, data = job.model(), torch.utils.data.TensorDataset(*job.train_data())
optimizer = job.optimizer(list(model.parameters()))
total, weight = job.loss(model, torch.utils.data.default_collate([data[i] for i in range(16)]))
(total / weight).backward()
optimizer.step()
profile_job(job)
verdict = shoal.verify(job, shoal.Plan().with_sections(layout={"data": 2}), steps=1)
assert verdict.verified, verdict.render()
"""

# Torch begins threads for backwards within backwards, from the sixtieth.
AFTER_A_DEEP_BACKWARD = """
import torch, shoal
from shoal.errors import LaunchError
from tests.conformance.cases import job as small
class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient, None
Nested.apply(torch.ones(1, requires_grad=True), 70).sum().backward()
try:
    shoal.verify(small(), shoal.Plan().with_sections(layout={"data": 2}), steps=1)
except LaunchError as error:
    assert "the job is not at fault" in str(error) and "shoal verify JOBFILE" in str(error), error
else:
    raise AssertionError("not refused")
"""


@pytest.mark.parametrize("script", [AFTER_A_LOOP, AFTER_A_DEEP_BACKWARD], ids=["a loop", "a deep backward"])
def test_after(script: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = run(command, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
