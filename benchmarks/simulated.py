"""Claim: at the failure rates of Llama 3 the supervisor keeps 16,384 simulated ranks effective 94 % of the time.

Repeat with `python -m benchmarks.simulated`: a minute or two. `shoal.launch.supervise.recovery` decides on starts and
pauses, `shoal.launch.supervise.heartbeat` on ranks that hang, `shoal.runs.directory` numbers the starts,
`shoal.runs.attempts` counts losses, and `shoal.checkpoint.keeper` sets the interval; clock, network, ranks, checkpoints
and hosts are simulated.

The rate: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al., The Llama 3 Herd of Models, 2024,
section 3.3.4). Which of them end a process, a host, or let a rank hang is not published: the shares below are ours, as
the seconds of a step, of a start, of a checkpoint and of a repair.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.checkpoint.keeper import interval_seconds
from shoal.errors import PeerError, RankLostError, ShoalError
from shoal.launch.signals import Signals
from shoal.launch.supervise import heartbeat
from shoal.launch.supervise.heartbeat import Watch
from shoal.launch.supervise.recovery import Recovery
from shoal.planner.answer.outlook import Failures, daly, share_left
from shoal.runs.attempts import Events, mtbf_seconds
from shoal.runs.directory import Fence, RunDirectory
from shoal.runs.records import StepRecord

_RECORD = StepRecord(
    step=0,
    epoch=0,
    samples=0,
    num_samples=0,
    loss=None,
    weight=None,
    grad_norm=None,
    learning_rate=0.0,
    loss_scale=None,
    seconds=1.0,
    spans={},
    ranks={},
    memory_bytes=0,
    digest="",
)

DAY = 86400.0
LLAMA_MTBF_SECONDS = 54 * DAY / 419
# How a failure shows, and in how many of a hundred.
KINDS = {"a process ends": 60, "a host is gone": 30, "a rank hangs": 10}
# The other hosts' connections are ended after that.
HOST_SECONDS = 5.0


@dataclass(frozen=True)
class World:
    """What is simulated; times in seconds. `deterministic_step`: one that no start gets beyond."""

    ranks: int = 16384
    ranks_per_host: int = 8
    mtbf: float = LLAMA_MTBF_SECONDS
    length: float = 54 * DAY
    step: float = 5.0
    checkpoint: float = 10.0  # that the training waits for
    start: float = 180.0  # from the decision to the first new step, with the state read
    repair: float = 4 * 3600.0
    spares: int = 16  # hosts
    seed: int = 0
    max_restarts: int = 5  # as --max-restarts
    kinds: dict[str, int] = field(default_factory=lambda: dict(KINDS))
    deterministic_step: int | None = None


@dataclass
class Clock:
    """Simulated time; the supervisor's waits pass it."""

    now: float = 1.7e9

    def __call__(self) -> float:
        return self.now


class SimulatedSignals(Signals):
    """No signal ever arrives, and a wait takes no real time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(impatient=False)
        self._simulated = clock

    def wait(self, seconds: float) -> bool:
        self._simulated.now += seconds
        return False


class Simulation:
    """One call of `shoal run`, from its first start to the end of its length or to the supervisor's refusal."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.drawn, self.clock = world, random.Random(world.seed), Clock()
        self.directory = RunDirectory(folder)
        self.recovery = Recovery(world.max_restarts, self.directory, clock=self.clock)
        self.fence = Fence.next(folder, world.ranks, "begun")
        self.recovery.events = Events(self.directory.events, self.fence)
        self.began = self.clock.now
        self.step = self.saved = 0
        self._saved_at: float | None = None
        self.intervals: list[float] = []
        self.spent = Counter[str]()  # seconds by what they went into
        self.losses = Counter[str]()
        self.least_spares = world.spares
        self._repaired: list[float] = []  # when hosts come back
        self._next = self.clock.now + self.drawn.expovariate(1.0 / world.mtbf)

    def run(self) -> ShoalError | None:
        """Runs to the end; the error where the supervisor gave up."""
        return self.recovery.until_done(SimulatedSignals(self.clock), self._once)[1]

    @property
    def ettr(self) -> float:
        """The share of the time in which steps were computed that are in the result."""
        return self.step * self.world.step / (self.clock.now - self.began)

    def _once(self, count: int, noticed_at: float) -> tuple[int, ShoalError | None, float]:
        """One start of all ranks: it trains until something fails or the length is over."""
        world = self.world
        if count:
            self.fence = Fence.next(self.directory.path, world.ranks, "lost ranks", after=self.fence)
            self.recovery.events = Events(self.directory.events, self.fence)
            self._await_hosts()
        self.step = self.saved
        if not self._pass(world.start, "starts"):
            return self._lost()
        interval = interval_seconds(world.checkpoint, mtbf_seconds(self.directory.events, self.began, self.clock.now))
        self.intervals.append(interval)
        while self.clock.now - self.began < world.length:
            steps = max(1, round(interval / world.step))
            if world.deterministic_step is not None:
                steps = min(steps, world.deterministic_step - self.step)
            whole = self._pass(steps * world.step, "steps")
            self.step += steps if whole else int((self._since) // world.step)
            if whole and self.step == world.deterministic_step:
                self._write()
                return 69, _error(self._rank(), "it ended with code 1 without a word"), self.clock.now
            if not whole or not self._pass(world.checkpoint, "checkpoints"):
                return self._lost()
            self.saved, self._saved_at = self.step, self.clock.now
        return 0, None, self.clock.now

    def _pass(self, seconds: float, what: str) -> bool:
        """Lets time pass, up to the next failure; whether none came. `_since` is what has passed."""
        self._since = min(seconds, self._next - self.clock.now)
        self.clock.now += self._since
        self.spent[what] += self._since
        return self._since >= seconds

    def _write(self) -> None:
        """What the supervisor reads after a loss: the last record, and the newest checkpoint."""
        self.directory.records.write_text(replace(_RECORD, step=self.step).to_line() + "\n", encoding="utf-8")
        if self._saved_at is not None:
            self.directory.saved.write_text(json.dumps({"step": self.saved}), encoding="utf-8")
            os.utime(self.directory.saved, (self._saved_at, self._saved_at))

    def _lost(self) -> tuple[int, ShoalError | None, float]:
        """A failure at this instant: what the supervisor is told, and when."""
        world, rank = self.world, self._rank()
        self._write()
        kind = self.drawn.choices(list(world.kinds), list(world.kinds.values()))[0]
        self.losses[kind] += 1
        self._next = self.clock.now + self.drawn.expovariate(1.0 / world.mtbf)
        seconds = {"a process ends": 0.1, "a host is gone": HOST_SECONDS}.get(kind)
        error: ShoalError = _error(rank, "it was killed by SIGKILL")
        if seconds is None:
            seconds, reason = self._hung(rank)
            error = _error(rank, reason)
        elif kind == "a host is gone":
            error = PeerError(given="a collective", conflict=f"another rank is gone: rank {rank}", remedy="--resume")
            error.rank = rank
        if kind != "a rank hangs":
            self._repaired.append(self.clock.now + world.repair)
        self.clock.now += seconds
        self.spent["until a loss is noticed"] += seconds
        return 69, error, self.clock.now

    def _rank(self) -> int:
        return self.drawn.randrange(self.world.ranks)

    def _hung(self, rank: int) -> tuple[float, str]:
        """After how long the launcher of its host takes a rank for lost that hangs in a forward, and what it says."""
        here, began, clock = self.world.ranks_per_host, self.clock.now, self.clock
        with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
            paths = {number: Path(folder) / f"heartbeat-{number}" for number in range(here)}
            for number, path in paths.items():
                phase = heartbeat.PHASES.index("forward" if number == rank % here else "exposed_communication")
                longest = [self.world.step] * len(heartbeat.PHASES)
                content = heartbeat._NOW.pack(max(1, self.step), phase, began)
                path.write_bytes(content + 2 * heartbeat._LONGEST.pack(*longest))
            watch = Watch(paths, self.recovery.unsaved_seconds, clock=clock, all_here=False)
            living = dict.fromkeys(paths, os.getpid())
            found = watch.look(living)
            while not found:
                clock.now += 0.5
                found = watch.look(living)
        seconds, clock.now = clock.now - began, began
        return seconds, next(iter(found.values()))

    def _await_hosts(self) -> None:
        """Waits for a repaired host where more are broken than there are spare ones."""
        self._repaired = sorted(instant for instant in self._repaired if instant > self.clock.now)
        missing = len(self._repaired) - self.world.spares
        self.least_spares = min(self.least_spares, max(0, -missing))
        if missing > 0:
            until = self._repaired[missing - 1]
            self.spent["waits for a host"] += until - self.clock.now
            self.clock.now = until
            self._next = until + self.drawn.expovariate(1.0 / self.world.mtbf)  # nothing fails that does not run


def _error(rank: int, how: str) -> RankLostError:
    error = RankLostError(given=f"rank {rank}", conflict=how, remedy="--resume")
    error.rank = rank
    return error


def simulated(world: World) -> Simulation:
    """A simulation that has run. Raises: ShoalError where the supervisor gave up."""
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder, contextlib.redirect_stderr(io.StringIO()):
        found = Simulation(world, Path(folder))
        error = found.run()
    if error is not None:
        raise error
    return found


def cases() -> Iterator[tuple[str, World]]:
    """The rows of the table."""
    base = World()
    yield "as above", base
    yield "no spare host", replace(base, spares=0)
    yield "2 spare hosts", replace(base, spares=2)
    yield "4 spare hosts", replace(base, spares=4)
    yield "a checkpoint stalls for 1 s", replace(base, checkpoint=1.0)
    yield "a checkpoint stalls for 60 s", replace(base, checkpoint=60.0)
    yield "a start takes 60 s", replace(base, start=60.0)
    yield "a start takes 600 s", replace(base, start=600.0)
    yield "all of them hang", replace(base, kinds={"a rank hangs": 1})
    ten = replace(base, ranks=10 * base.ranks, mtbf=base.mtbf / 10.0, spares=10 * base.spares)
    yield "ten times as many ranks and spare hosts", ten
    yield "the same, `--max-restarts 20`", replace(ten, max_restarts=20)


def table() -> str:
    """Return the table of results/faults.md."""
    lines = [
        "| 16,384 ranks, 54 days, 16 spare hosts | losses | interval of checkpoints | ETTR | by Daly's formula |",
        "|---|---|---|---|---|",
    ]
    for name, world in cases():
        try:
            found = simulated(world)
        except ShoalError as error:
            lines.append(f"| {name} | the run ended: {error.remedy.partition(';')[0]} | | | |")
            continue
        failures = Failures(world.mtbf, world.checkpoint, world.start)
        formula = share_left(daly(failures), failures)
        interval = f"{found.intervals[-1]:.0f} s"
        lines.append(f"| {name} | {sum(found.losses.values())} | {interval} | {found.ettr:.1%} | {formula:.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the table, and where the time of its first row went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(table())
    found = simulated(World(seed=options.seed))
    total = found.clock.now - found.began
    for what, seconds in found.spent.most_common():
        print(f"{what}: {seconds / total:.2%}")
    print(f"steps that count: {found.ettr:.2%}; fewest spare hosts left: {found.least_spares}")


if __name__ == "__main__":
    main()
