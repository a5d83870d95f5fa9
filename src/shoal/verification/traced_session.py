"""Verification of a user's own loop: its Session on several forked ranks against the same loop on one process."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shoal.distributed.failures import user_error
from shoal.errors import JobError, ShoalError
from shoal.launch.environment import Environment
from shoal.training.trace.replay import Replay
from shoal.training.trace.traces import StepTrace, read, read_changes
from shoal.verification.compare import References, compare
from shoal.verification.diagnose import diagnose
from shoal.verification.forked import forked
from shoal.verification.judge import Verdict, at_least_one, refuse_unrepeatable
from shoal.verification.reference import Computed


def verify_session(train: Callable[[], object], devices: int, steps: int = 3) -> Verdict:
    """Calls `train`, which makes a Session and loops over its steps, on `devices` forked ranks and on one process.

    Each step on one process starts from the state that the ranks had reached. Loops end after `steps` steps.
    Raises: what `train` raises; NotDeterministicError; JobError where it makes no steps.
    """
    at_least_one("devices", devices)
    at_least_one("steps", steps)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        together = Replay(str(folder / "parallel"), steps)
        _train(train, devices, together)
        single = replace(together, of=together.folder, world_size=devices)
        ways = {
            "alone": single,
            "again": single,
            "grain by grain": replace(single, grain_by_grain=True),
            "backwards": replace(single, grain_by_grain=True, backwards=True),
        }
        for way, told in ways.items():
            _train(train, 1, replace(told, folder=str(folder / way)))
        verdict = _judge(folder, list(ways), devices)
    verdict.seconds = time.monotonic() - began
    return verdict


def _train(train: Callable[[], object], world_size: int, replay: Replay) -> None:
    def work(environment: Environment) -> None:
        os.environ.update(replay.variables())
        try:
            train()
        except (ShoalError, SystemExit):
            raise
        except Exception as error:
            raise user_error("the loop", error) from error

    with forked(world_size, work, Path(replay.folder), aloud=replay.of is None) as wait:
        wait()


def _judge(folder: Path, ways: list[str], world_size: int) -> Verdict:
    verdict = Verdict()
    before = _read(folder / "parallel", -1, world_size)
    for step in itertools.count():  # of several updates a step each is compared by itself
        if step and not (folder / "parallel" / f"step-{step}-0.json").exists():
            break
        parallel = _read(folder / "parallel", step, world_size)
        for name, tensor in read_changes(folder / "parallel", step).items():
            key = f"update/{name}"
            before.tensors[key if key in before.tensors else f"buffers/{name}"] = tensor
        computed = [Computed(_read(folder / way, step, 1)) for way in ways]
        if step == 0:
            refuse_unrepeatable(computed[0].trace, computed[1].trace)
        for way in computed:
            way.magnitudes = {n: float(t.double().norm()) for n, t in way.trace.phase("reduction").items()}
        references = References(computed, None, complete=True)
        order = list(parallel.parameters)
        verdict.checks += compare(parallel, before, references, order, {})
        verdict.num_steps += 1
        if verdict.failed:
            verdict.diagnosis = diagnose(verdict.failed, parallel, before, references, world_size)
            break
        before = parallel
    return verdict


def _read(folder: Path, step: int, world_size: int) -> StepTrace:
    try:
        return read(folder, step, world_size)
    except FileNotFoundError:
        raise JobError(
            given="a loop to verify",
            conflict="it made no steps of a shoal.Session, or not the same on one process",
            remedy="give a function that makes a Session, prepares, and iterates its steps",
        ) from None
