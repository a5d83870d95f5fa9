"""Search for samples with a loss or gradient that is NaN or infinite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.data.loader import Microbatch
from shoal.distributed.mesh import Mesh
from shoal.errors import NonFiniteError
from shoal.numerics.precision import Precision
from shoal.training.microbatch.step import LossComputer

# A grain with more samples than this is reported as a whole, without a search for single samples.
_MAX_SEARCHED = 256
# More non-finite steps in a row than this are no accident: skipping them does not help.
_MAX_STREAK = 10
# The result of a search without a culprit.
NOBODY: dict[str, Any] = {"rank": None, "host": None, "grains": [], "samples": [], "other_ranks": []}


@dataclass(frozen=True)
class NonFiniteStep:
    """A step with a loss or gradient that is not finite.

    `step` counts from 0. `loss`: the mean over the global batch.
    `culprits`: as `find_nonfinite` returns them. None: several ranks compute the model
    together, so that it is not searched.
    `streak`: number of non-finite steps in a row, including this step. `policy`: the job's `on_nonfinite`.
    """

    step: int
    loss: float
    culprits: dict[str, Any] | None
    streak: int
    policy: str

    @property
    def ends(self) -> bool:
        """True if the run ends at this step."""
        return self.policy == "stop" or self.streak > _MAX_STREAK

    @property
    def _culprit(self) -> str:
        if self.culprits is None:
            return "which sample brought it is not searched for in a divided model"
        if self.culprits["rank"] is None:
            return "no sample brings it by itself"
        return "rank {rank} on {host}, grains {grains}, samples {samples}".format(**self.culprits)

    @property
    def cause(self) -> str:
        """A description of the non-finite value and of its source."""
        what = "loss" if not math.isfinite(self.loss) else "gradient"
        return f"{what} is not finite: {self._culprit}"

    def __str__(self) -> str:
        return f"step {self.step}: {self.cause}: {self.policy}"

    def error(self, left: str, remedy: str) -> NonFiniteError:
        """Return the error that ends the run. `left`: a clause about the state of the parameters."""
        what = "loss" if not math.isfinite(self.loss) else "gradient"
        many = f", as in the {_MAX_STREAK} steps before" if self.streak > _MAX_STREAK else ""
        return NonFiniteError(
            given=f"step {self.step}: {self._culprit}",
            conflict=f"the {what} there is not finite{many}; {left}",
            remedy=f"mend or drop these samples, or set {remedy}",
        )


def find_nonfinite(
    computer: LossComputer,
    precision: Precision,
    parameters: Sequence[Tensor],
    mesh: Mesh,
    microbatches: list[Microbatch],
) -> dict[str, Any]:
    """Return the first rank with a non-finite loss or gradient, with the grains and the ids of the samples.

    The search computes grains, and then samples, one by one. The result is the same on every rank. The search leaves no
    trace in model, optimizer and generators.
    Collective: all ranks, one JSON gather.
    """

    def is_finite(microbatch: Microbatch) -> bool:
        with computer.scope(microbatch, computer.grain_scope(microbatch)):
            total, _ = computer.loss(precision.inputs(microbatch.batch))
        if not bool(torch.isfinite(total)):
            return False
        try:
            gradients = torch.autograd.grad(total, list(parameters), allow_unused=True)
        except RuntimeError:  # reentrant checkpointing only writes .grad, where hooks send it: check the loss
            return True
        return all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)

    grains: list[int] = []
    samples: list[int] = []
    try:
        with computer.no_trace():
            bad = [part for microbatch in microbatches for part in microbatch.split() if not is_finite(part)]
            for part in bad:
                ids: list[int] = part.read_ids[0].tolist()
                bad_ids: list[int] = []
                # If a sample cannot be computed alone (for example, BatchNorm of one value), report the whole grain.
                with contextlib.suppress(Exception):
                    if part.num_samples <= _MAX_SEARCHED:
                        bad_ids = [i for i, one in zip(ids, part.samples(), strict=True) if not is_finite(one)]
                grains.append(part.grains[0].index)
                samples += bad_ids or ids
    except Exception:  # for example, samples cannot be read again: report all of them
        grains = [grain.index for m in microbatches for grain in m.grains]
        samples = [i for m in microbatches for ids in m.read_ids for i in ids.tolist()]
    rows = mesh.gather_json({"rank": mesh.rank, "host": mesh.host, "grains": grains, "samples": samples})
    culprits = [row for row in rows if row["grains"]]
    if culprits:
        return {**culprits[0], "other_ranks": [row["rank"] for row in culprits[1:]]}
    return dict(NOBODY)
