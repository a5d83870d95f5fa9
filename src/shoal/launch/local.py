"""Local launcher: starts worker processes on this host and waits until all have ended."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from shoal.errors import ExitCode, ShoalError
from shoal.launch import heartbeat
from shoal.launch.fork_server import ForkServer
from shoal.launch.rank_processes import LocalRun, RankProcess, Start, tell, tell_groups
from shoal.launch.signals import Signals, pausing
from shoal.launch.stacks import different_calls
from shoal.launch.verdict import verdict
from shoal.launch.watch import Stuck, Watch

_POLL_SECONDS = 0.02
# After a rank has died, the others notice an error in their next collective or are ended.
_GRACE_SECONDS = 3.0
# After an agreed end with an error, the last rank may still be writing a checkpoint and the result.
_PATIENCE_SECONDS = 60.0
# A rank that dies more often than this is not replaced again.
_MOST_REPLACED = 3


class LaunchEnd(NamedTuple):
    """End of a launch: the run's exit code, the root error if there is one, and the time of the first failure."""

    code: int
    error: ShoalError | None
    failed_at: float  # seconds since the epoch; the time of the end if nothing failed


def launch(run: LocalRun, signals: Signals | None = None, server: ForkServer | None = None) -> LaunchEnd:
    """Start the workers and wait for them.

    Args:
        run: the processes to start.
        signals: receives the signals that arrive; default: a new object.
        server: the fork server of a run that may be launched again; default: a new one, for this launch.

    Raises:
        LaunchError: the port in MASTER_PORT is in use.
    """
    signals = signals or Signals(impatient=False)
    with contextlib.ExitStack() as until_end:
        server = server or until_end.enter_context(contextlib.closing(ForkServer(run.arguments, run.num_threads)))
        start = Start(run, server)
        until_end.callback(start.close)
        until_end.enter_context(signals.handled())
        until_end.enter_context(pausing(lambda number: tell_groups(start.workers, number)))
        if not server.until_loaded(lambda: signals.twice):
            return LaunchEnd(int(ExitCode.INTERRUPTED), None, time.time())
        return _launched(run, start, signals)


def _launched(run: LocalRun, start: Start, signals: Signals) -> LaunchEnd:
    start.begin()
    workers = start.workers
    replaced: Counter[int] = Counter()

    def replace(worker: RankProcess) -> bool:
        """Restart the worker's rank if that may help. Return False if the worker's end is a failure of the run."""
        rank = worker.rank
        if rank not in run.replaceable or replaced[rank] == _MOST_REPLACED or signals.twice:
            return False
        if not workers[0].is_well:
            replaced[rank] += 1
            start.again(rank)
        return True

    judged = {w.rank: w.heartbeat for w in workers if w.rank not in run.replaceable}
    watch = Watch(judged, run.unsaved, excused=run.excused, all_here=run.share is None)
    first = _watch(workers, signals, run.replaceable, replace, watch)
    failed_at = time.time() - max(0.0, time.monotonic() - first)
    code = workers[0].code
    cut_short = workers[0].given_up and code == ExitCode.PREEMPTED
    if run.replaceable and workers[0].is_well and code is not None and not cut_short:  # the others had been given up
        return LaunchEnd(code, None, failed_at)
    return LaunchEnd(*verdict(workers, signals, elsewhere=run.share is not None), failed_at)


def _ended_well(worker: RankProcess, serves: bool) -> bool:
    """Check the exit code and the report of an ended worker. A missing report means that it was interrupted."""
    return worker.is_well and (serves or worker.how_it_ended() is not None)


def _watch(
    workers: list[RankProcess],
    signals: Signals,
    replaceable: range,
    replace: Callable[[RankProcess], bool],
    watch: Watch,
) -> float:
    """Wait until all workers have ended. Return the monotonic time of the first failure, infinite if there was none.

    Forwards signals to the workers. Kills the remaining workers once one has died for good without a report.

    If `replace` may restart ranks, rank 0 leads the others, and none outlives it by long. Rank 0 first gets a request
    to stop: it may be well without the failed ranks and can save what was computed.
    """
    leader = workers[0]
    handed_on: signal.Signals | None = None
    since, first, asked = math.inf, math.inf, False
    while any(w.process.poll() is None for w in workers):
        wanted = signal.SIGKILL if signals.twice else signal.SIGTERM if signals.received else None
        if wanted is not None and wanted != handed_on:
            handed_on = wanted
            tell(workers, wanted)
        stuck = watch.look({w.rank: w.process.pid for w in workers if w.process.poll() is None})
        watch.excuse(stuck)
        _end_stuck(workers, stuck)
        failed = [w for w in workers if w.process.poll() is not None and not _ended_well(w, bool(replaceable))]
        if replaceable:
            failed = [w for w in failed if w.how_it_ended() is not None or not replace(w)]
            failed += [leader] if leader.is_well else []
        if failed:
            now, leads = time.monotonic(), leader.process.poll() is None
            since, first = min(since, now), min(first, now)
            if asked and not leads:
                since, asked = now, False
            told = not replaceable and all(w.how_it_ended() is not None for w in failed)
            if now - since > (_PATIENCE_SECONDS if asked or told else _GRACE_SECONDS):
                if leads and not leader.given_up and all(w.rank in replaceable for w in failed):
                    since, asked, leader.given_up = now, True, True
                    leader.process.send_signal(signal.SIGTERM)
                else:
                    tell(workers, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return first


def _end_stuck(workers: list[RankProcess], found: list[Stuck]) -> None:
    """Kill the ranks in `found` after they have shown their stacks."""
    if not found:
        return
    reasons = {stuck.rank: stuck.reason for stuck in found}
    waiting = [worker for worker in workers if worker.rank not in reasons and worker.process.poll() is None]
    shown = {worker.rank: heartbeat.show(worker.heartbeat, worker.process) for worker in waiting}
    stuck = [worker for worker in workers if worker.rank in reasons]
    shown |= {worker.rank: heartbeat.end(worker.heartbeat, worker.process) for worker in stuck}
    calls = different_calls(shown)
    for worker in stuck:
        stacks = f"\nIt was in\n{shown[worker.rank]}" if shown[worker.rank] else ""
        worker.stuck = "; ".join(filter(None, (calls, f"it {reasons[worker.rank]}, and was killed"))) + stacks
