"""A program: pieces that a user writes, which `shoal.Job` takes and which a plain torch loop takes too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.habits import plain

Expected = Literal["trains", "refused", "either"]
Pieces = dict[str, Any]
# Rounding: a gradient is a sum of at most 10**4 products of float32 in another order, so that its relative error is
# below 10**4 * 2**-24 = 6e-4, and typically 1e-5. A batch read twice, a weight counted twice or a state of another
# layout moves the parameters by percents of what training moves them.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Program:
    """One small program and what is right for it.

    expected: "trains" where the plain loop's numbers are those of every layout; "refused" where the program has no
        meaning that is the same on every layout; "either" where shoal may give the plain loop's numbers or refuse.
    why: the reason of "refused" and "either". names: what a refusal must name.
    pieces: keywords of `plain.train`; `shoal.Job` takes the same ones (`steps` and `epochs` as its length).
    reference: pieces -> Trained, a loop in plain torch; None where only shoal says what is drawn (dropout by grain):
        the run on one process is the reference then.
    tolerance: largest deviation of a tensor, as a fraction of how far training moves it.
    declared: more fields of the Job, by which a user declares what shoal asks for.
    told: what a run must print before its first step where it trains with other numbers than the plain loop's: that
        samples see their grain alone, say, or that nothing seeds what is drawn. unseeded: two runs differ anyway.
    may_refuse: cells that may be refused where the others train: the proof of a stream has no ids to read again.
    late: state begins after some steps, so that the refusal may come after them. alone_trains: refused on 2 and 4.
    """

    name: str
    kind: str
    expected: Expected
    file: Path
    pieces: Callable[[], Pieces]
    reference: Callable[..., plain.Trained] | None
    job: Callable[[], Any]
    why: str = ""
    names: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    declared: dict[str, Any] = field(default_factory=dict)
    told: str = ""
    unseeded: bool = False
    may_refuse: tuple[str, ...] = ()
    late: bool = False
    alone_trains: bool = False

    @property
    def says(self) -> str:
        """What the program does, in a sentence."""
        return inspect.getdoc(self.job) or ""

    @property
    def num_steps(self) -> int:
        """Steps of the whole training; a pass over the data has four of them."""
        pieces = {**plain.DEFAULTS, **self.pieces()}
        return int(pieces["epochs"] * 4 if "epochs" in pieces else pieces["steps"])

    def plain(self) -> plain.Trained:
        """Numbers of the plain loop. Raises: whatever the program raises there."""
        assert self.reference is not None, f"{self.name} has no reference"
        pieces = {**plain.DEFAULTS, **self.pieces()}
        return self.reference(**{**pieces, "model": _seeded(pieces["model"])})


def habit(
    kind: str,
    expected: Expected = "trains",
    *,
    reference: Callable[..., plain.Trained] | None = plain.train,
    declared: dict[str, Any] | None = None,
    **facts: Any,
) -> Callable[[Callable[[], Pieces]], Callable[[], Any]]:
    """Makes a job function of a function that returns pieces; its `program` has both."""

    def decorate(pieces: Callable[[], Pieces]) -> Callable[[], Any]:
        @functools.wraps(pieces)
        def job() -> Any:
            return _job({**pieces(), **(declared or {})})

        assert expected == "trains" or facts.get("why"), f"{pieces.__name__}: why is it {expected}?"
        file = Path(inspect.getfile(pieces))
        job.program = Program(  # type: ignore[attr-defined]
            pieces.__name__, kind, expected, file, pieces, reference, job, declared=declared or {}, **facts
        )
        return job

    return decorate


def _seeded(model: Callable[[], Any]) -> Callable[[], Any]:
    """The same initial values for the loop and for shoal."""

    def seeded() -> Any:
        torch.manual_seed(1)
        return model()

    return seeded


def _job(pieces: Pieces) -> Any:
    """`shoal.Job` of a program's pieces: samples in order, so that the loop has the same batches."""
    import shoal

    fields = {**plain.DEFAULTS, **pieces}
    epochs, steps = fields.pop("epochs", None), fields.pop("steps")
    fields["length"] = shoal.Epochs(epochs) if epochs else shoal.Steps(steps)
    fields["model"] = _seeded(fields["model"])
    return shoal.Job(**{"shuffle": False, **fields})
