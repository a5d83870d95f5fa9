"""Search for samples with a loss or gradient that is NaN or infinite."""

from __future__ import annotations

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
from shoal.training.microbatch.loss import LossComputer

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
    `culprits`: as `NonFiniteSearch.find` returns them. None: several ranks compute the model
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
        """Whether the run ends at this step."""
        return self.policy == "stop" or self.streak > _MAX_STREAK

    @property
    def _what(self) -> str:
        return "loss" if not math.isfinite(self.loss) else "gradient"

    @property
    def _culprit(self) -> str:
        if self.culprits is None:
            return "which sample brought it is not searched for in a divided model"
        return "rank {rank} on {host}, grains {grains}, samples {samples}".format(**self.culprits)

    @property
    def cause(self) -> str:
        """A description of the non-finite value and of its source."""
        return f"{self._what} is not finite: {self._culprit}"

    def __str__(self) -> str:
        return f"step {self.step}: {self.cause}: {self.policy}"

    def error(self, left: str, remedy: str) -> NonFiniteError:
        """Return the error that ends the run. `left`: a clause about the state of the parameters."""
        many = f", as in the {_MAX_STREAK} steps before" if self.streak > _MAX_STREAK else ""
        return NonFiniteError(
            given=f"step {self.step}: {self._culprit}",
            conflict=f"the {self._what} there is not finite{many}; {left}",
            remedy=f"mend or drop these samples, or set {remedy}",
        )


class NonFiniteSearch:
    """Search for non-finite losses and gradients that computes grains, and then samples, one by one."""

    def __init__(self, computer: LossComputer, precision: Precision, parameters: Sequence[Tensor]) -> None:
        self._computer, self._precision, self._parameters = computer, precision, list(parameters)

    def find(self, mesh: Mesh, microbatches: list[Microbatch]) -> dict[str, Any]:
        """Return the first rank with non-finite grains, with these grains and their sample ids.

        The result is the same on every rank. The search leaves no trace in model, optimizer and generators.
        Collective: all ranks, one JSON gather.
        """
        try:
            with self._computer.no_trace():
                grains, samples = self._search(microbatches)
        except Exception:  # for example, samples cannot be read again: report all of them
            grains = [grain.index for m in microbatches for grain in m.grains]
            samples = [i for m in microbatches for ids in m.read_ids for i in ids.tolist()]
        rows = mesh.gather_json({"rank": mesh.rank, "host": mesh.host, "grains": grains, "samples": samples})
        culprits = [t for t in rows if t["grains"]]
        if culprits:
            return {**culprits[0], "other_ranks": [t["rank"] for t in culprits[1:]]}
        return dict(NOBODY)

    def _search(self, microbatches: list[Microbatch]) -> tuple[list[int], list[int]]:
        bad = [part for microbatch in microbatches for part in microbatch.split() if not self._is_finite(part)]
        return [part.grains[0].index for part in bad], [i for part in bad for i in self._bad_samples(part)]

    def _bad_samples(self, part: Microbatch) -> list[int]:
        ids: list[int] = part.read_ids[0].tolist()
        if part.num_samples > _MAX_SEARCHED:
            return ids
        # If a sample cannot be computed alone (for example, BatchNorm of one value), report the whole grain.
        try:
            bad = [i for i, single in zip(ids, part.samples(), strict=True) if not self._is_finite(single)]
        except Exception:
            return ids
        return bad or ids

    def _is_finite(self, microbatch: Microbatch) -> bool:
        with self._computer.scope(microbatch):
            total, _ = self._computer.loss(self._precision.inputs(microbatch.batch))
        if not bool(torch.isfinite(total)):
            return False
        try:
            gradients = torch.autograd.grad(total, self._parameters, allow_unused=True)
        except RuntimeError:  # reentrant checkpointing only writes .grad, where hooks send it: check the loss
            return True
        return all(bool(torch.isfinite(g).all()) for g in gradients if g is not None)
