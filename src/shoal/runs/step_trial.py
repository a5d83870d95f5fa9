"""Trial of step modes: a run's own steps in turns of each mode, the choice, and the schedule that other runs repeat.

A turn is some successive steps in one mode. Turns of a candidate lie between two turns of the best mode so far. Modes
compute other bits, so that a run is repeated only by the same turns: the trial is written to the run directory before
each turn, and to a file of this machine at its end. Whoever reads one of them follows its turns without a clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.bounded_files import read_object
from shoal.errors import CommandError
from shoal.plans.plan import Plan
from shoal.plans.resolve import STEPS
from shoal.runs.machine_records import MachineRecords
from shoal.runs.sound_values import adapter

_LAST = ", channels last"


@dataclass(frozen=True)
class StepMode:
    """Mode in which a step is computed. `compile`: a kind of compilation of a plan, "none" for no compilation."""

    cuda_graph: bool = False
    compile: str = "none"
    channels_last: bool = False

    @classmethod
    def of(cls, plan: Plan) -> StepMode:
        """Return the mode of a plan."""
        return cls(plan.execution.cuda_graph, plan.execution.compile, plan.execution.channels_last)

    @classmethod
    def named(cls, name: str) -> StepMode:
        """Return the mode of a name. Raises: KeyError."""
        step = name.removesuffix(_LAST)
        return cls(*STEPS[step], channels_last=name != step)

    @property
    def name(self) -> str:
        """Name of the mode, such as "compiled, channels last"."""
        kind = (self.cuda_graph, self.compile if self.compile == "none" else "default")
        return next(name for name, known in STEPS.items() if known == kind) + (_LAST if self.channels_last else "")


@dataclass(frozen=True)
class ModeTurn:
    """Steps in one mode: those after `after` finished steps, up to step `until`.

    `seconds`: median of the measured steps on the slowest rank; None if the turn was not measured.
    """

    mode: str
    after: int
    until: int
    seconds: float | None = None


@dataclass(frozen=True)
class TrialCandidate:
    """Mode to try. `cost_seconds`: of its first step, beyond a step's own time."""

    name: str
    cost_seconds: float = 0.0

    def added_to(self, best: StepMode) -> StepMode:
        """Return the candidate's mode where `best` is the best one so far."""
        if self.name == CHANNELS_LAST:
            return replace(best, channels_last=True)
        return replace(StepMode.named(self.name), channels_last=best.channels_last)


@dataclass(frozen=True)
class TrialVerdict:
    """Verdict on a candidate, in words. `seconds`, `of_best`: of a step; `spread`: of the best mode's two turns."""

    reason: str
    seconds: float | None = None
    of_best: float | None = None
    spread: float | None = None


CHANNELS_LAST = "channels last"
# Steps of a turn that are not measured, the fewest measured ones, and how long they take at least.
WARM_UPS, LEAST_STEPS, LEAST_SECONDS = 3, 10, 0.2
# Runs with fewer steps try nothing: the trial of one candidate takes at least 39.
FEWEST_STEPS = 200
# The gain that a switch needs; the gain that a candidate is expected to bring; the most of a run for its turns.
LEAST_GAIN, EXPECTED_GAIN, MOST_OF_RUN = 0.01, 0.25, 0.25
# Seconds of the first step of a mode: a capture; a compilation, here for the first time and again.
GRAPH_SECONDS, COMPILE_SECONDS, COMPILE_AGAIN_SECONDS = 1.0, 40.0, 10.0


def is_too_short(num_steps: int) -> bool:
    """Return True if a run of so many steps has no trial, whatever a step takes."""
    return num_steps < FEWEST_STEPS


@dataclass
class StepTrial:
    """Trial of a run. All turns are over but the last one.

    Args:
        base: name of the mode of the run's first plan.
        net: digest of what is trained, and where: `TrialKey.net`.
        num_steps: number of steps of the run.
        candidates: those to try; the first one is next.
        best: name of the best mode so far.
        verdicts: by name of a candidate.
        chosen: name of the mode of all steps after the last turn; None while the trial lasts.
    """

    base: str
    net: str
    num_steps: int
    candidates: list[TrialCandidate]
    best: str = ""
    steps_per_turn: int = field(default_factory=lambda: LEAST_STEPS)
    turns: list[ModeTurn] = field(default_factory=list)
    verdicts: dict[str, TrialVerdict] = field(default_factory=dict)
    chosen: str | None = None

    def __post_init__(self) -> None:
        if not self.best:
            self.best = self.base
            self._proceed(0)

    @property
    def ends_at(self) -> int:
        """The last step of the last turn."""
        return self.turns[-1].until if self.turns else 0

    def mode_after(self, step: int) -> StepMode:
        """Return the mode of the step after `step` finished steps."""
        turn = next((turn for turn in self.turns if turn.after <= step < turn.until), None)
        return StepMode.named(turn.mode if turn is not None else self.chosen or self.best)

    def next_end(self, step: int) -> int | None:
        """Return the end of the turn that `step`, a number of finished steps, lies in; None after the last one."""
        return next((turn.until for turn in self.turns if turn.after <= step < turn.until), None)

    def measures(self, step: int) -> bool:
        """Return True if step number `step` counts for the seconds of the current turn."""
        return self.chosen is None and self.turns[-1].after + WARM_UPS < step <= self.turns[-1].until

    def decide(self, seconds: float | None) -> None:
        """End the last turn, and begin another one or choose.

        `seconds`: median of the turn's measured steps on the slowest rank; None if a rank has not measured it, as after
        a restart. The turn is then repeated.
        """
        last = self.turns[-1]
        if seconds is None:
            self._begin(last.mode, last.until)
            return
        self.turns[-1] = replace(last, seconds=seconds)
        if len(self.turns) == 1:
            self.steps_per_turn = max(LEAST_STEPS, math.ceil(LEAST_SECONDS / max(seconds, 1e-6)))
        elif last.mode == self.best and self.turns[-2].mode == self._candidate_mode and self.turns[-2].seconds:
            before = next(turn.seconds for turn in self.turns[-3::-1] if turn.mode == self.best and turn.seconds)
            own = self.turns[-2].seconds
            candidate, of_best = self.candidates.pop(0), (before + seconds) / 2
            gain, spread = 1.0 - own / of_best, abs(before - seconds) / of_best
            words = (
                f"{abs(gain):.1%} {'less' if gain > 0 else 'more'} than {self.best}, whose turns differ by {spread:.1%}"
            )
            self.verdicts[candidate.name] = TrialVerdict(words, own, of_best, spread)
            if gain >= LEAST_GAIN and gain > spread:
                self.best = candidate.added_to(StepMode.named(self.best)).name
            if candidate.name == "compiled":  # what is compiled stays so
                self.candidates = [replace(one, cost_seconds=GRAPH_SECONDS) for one in self.candidates]
        self._proceed(last.until)

    def refuse(self, step: int, reason: str) -> None:
        """Leave out the current candidate, whose mode cannot compute the step after `step` finished steps."""
        last, candidate = self.turns.pop(), self.candidates.pop(0)
        if last.after < step:
            self.turns.append(replace(last, until=step))
        self.verdicts[candidate.name] = TrialVerdict(f"left out: {reason}")
        self._proceed(step)

    def end(self, step: int, reason: str) -> None:
        """Choose the best mode so far for all steps after `step`. `reason`: why the trial goes no further."""
        if self.turns[-1].until > step:
            last = self.turns.pop()
            self.turns += [replace(last, until=step)] if last.after < step else []
        self.verdicts |= {one.name: TrialVerdict(f"not tried: {reason}") for one in self.candidates}
        self.candidates, self.chosen = [], self.best

    def _proceed(self, step: int) -> None:
        """Begin the next turn after `step`, or choose if no candidate is left that pays."""
        is_of_best = bool(self.turns) and self.turns[-1].mode == self.best
        while self.candidates and (reason := self._why_not(self.candidates[0], step, 2 if is_of_best else 3)):
            self.verdicts[self.candidates.pop(0).name] = TrialVerdict(f"not tried: {reason}")
        if not self.candidates:
            self.chosen = self.best
            return
        self._begin(self._candidate_mode if is_of_best else self.best, step)

    @property
    def _candidate_mode(self) -> str:
        """Name of the mode of the candidate that is next or current."""
        return self.candidates[0].added_to(StepMode.named(self.best)).name

    def _begin(self, mode: str, step: int) -> None:
        self.turns.append(ModeTurn(mode, step, step + WARM_UPS + self.steps_per_turn))

    def _why_not(self, candidate: TrialCandidate, step: int, num_turns: int) -> str:
        """Return why a candidate does not pay after `step`, in `num_turns` turns; empty if it does or may."""
        left = self.num_steps - step
        if num_turns * (WARM_UPS + self.steps_per_turn) > MOST_OF_RUN * left:
            return f"its turns take {num_turns * (WARM_UPS + self.steps_per_turn)} of the {left} steps that are left"
        seconds = next((turn.seconds for turn in self.turns[::-1] if turn.mode == self.best and turn.seconds), None)
        if seconds is None or left * seconds * EXPECTED_GAIN >= candidate.cost_seconds:
            return ""
        return f"it costs about {candidate.cost_seconds:.0f} s, and the {left} steps left take {left * seconds:.3g} s"


def trial_text(trial: StepTrial) -> str:
    """Return a trial as JSON text."""
    return json.dumps(asdict(trial), indent=1) + "\n"


def trial_of(document: object) -> StepTrial:
    """Parse the JSON value of a trial. Raises: ValueError."""
    trial: StepTrial = adapter(StepTrial).validate_python(document)
    names = {trial.base, trial.best, trial.chosen or trial.best, *(turn.mode for turn in trial.turns)}
    try:
        for name in names:
            StepMode.named(name)
    except KeyError as error:
        raise ValueError(f"a step mode of another version: {error}") from None
    return trial


def read_trial(path: Path) -> StepTrial | None:
    """Read a trial.json; None if there is none. Raises: CommandError for another file."""
    try:
        return trial_of(read_object(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(
            given=str(path),
            conflict=f"it is no trial of step modes that this version wrote: {str(error).splitlines()[0]:.200}",
            remedy="give the trial.json of a run of this version, or write --step eager",
        ) from None


# ------------------------------------------------------------------------------------------- the file of this machine

_RECORDS = MachineRecords("steps", 500)


@dataclass(frozen=True)
class TrialKey:
    """Key of a trial: all that it depends on, apart from time. `net`: digest of facts, for runs of any length."""

    net: str
    num_steps: int

    @classmethod
    def of(cls, facts: Mapping[str, Any], num_steps: int) -> TrialKey:
        """Return the key of facts of job, plan, versions and device."""
        return cls(hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(), num_steps)

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"{self.net[:32]}-{self.num_steps}"


def recorded_trial(key: TrialKey) -> StepTrial | None:
    """Return this machine's trial of a key, or None."""
    with contextlib.suppress(ValueError, KeyError):
        return trial_of(_RECORDS.read()[key.name])
    return None


def has_compiled(key: TrialKey) -> bool:
    """Check whether a trial on this machine has compiled the same job, whatever its number of steps."""
    known = [trial for name, trial in _RECORDS.read().items() if name.startswith(key.net[:32])]
    return any("compiled" in str(turn.get("mode")) for trial in known for turn in trial.get("turns", ()))


def record_trial(key: TrialKey, trial: StepTrial) -> str | None:
    """Store a trial for later runs of the key. Return why that is not possible, or None."""
    try:
        _RECORDS.store(key.name, asdict(trial))
    except OSError as error:
        return f"{_RECORDS.path}: {error.strerror or error}"
    return None
