"""Causes of a run's lost time, each with remedies and the time that each remedy would regain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.doctor.run_times import Periodic, RunTimes
from shoal.errors import HardwareError
from shoal.hardware.detect import here
from shoal.report.account import section
from shoal.report.quantities import several

# Smallest share of time that is reported: less is not worth a change, and accounts are not that exact.
WORTH = 0.03
_CHEAP = 0.75  # share of the device-hours
_RARER = 10
_CHECKPOINT_SHARE = 0.01  # share of the time that shoal's default checkpoint interval costs
_MOST_WORKERS = 8
# Share of a writing thread's seconds that training loses even if a core is free, measured on two cores with one memory.
_WRITING = 0.4
_EACH_FEW = 4
# A sample that takes less time is computed; one that waits for a disk or a network takes longer.
_COMPUTED = 2e-4
_HANDED_OVER = 5e-3  # to pass a microbatch from a data worker, measured on two cores
# A rank is slow if it is the slowest in this share of steps, by this share of a step.
_OFTEN, _SLOWER = 0.8, 0.05
_BUCKET_BYTES = 1 << 20
_FEW_MESSAGES = 4
_BY_CALLBACK = ", where the job's callback asks for it"


@dataclass(frozen=True)
class Remedy:
    """Change of a run that would save time: `gain` is a fraction of the training time.

    `sections`: changes of the plan. `devices`: a new number of devices. `arguments`: options of `shoal run`.
    `variables`: environment variables (None: unset). A remedy without any of these is for people to apply.
    `period`: steps between two occurrences of a periodic event.
    `planned`: the gain by the planner's predictions of both plans, if requested.
    `cost`: device time relative to the run if the number of devices changes, before the gain.
    """

    name: str
    words: str
    gain: float
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    devices: int | None = None
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    period: int = 0
    planned: float | None = None
    cost: float = 1.0

    @property
    def device_time(self) -> float:
        """Device-hours of the same training relative to the run."""
        return self.cost * (1.0 - self.gain)

    @property
    def can_be_tried(self) -> bool:
        """True if a trial run of the same job can measure the gain."""
        return bool(self.sections or self.devices or self.arguments or self.variables)


@dataclass(frozen=True)
class LostTime:
    """Cause of lost time: `seconds` per step, its `share` of the training time, and the observation.

    `could`: the share that would be saved if there is no remedy.
    """

    cause: str
    title: str
    seconds: float
    share: float
    seen: str
    remedies: tuple[Remedy, ...] = ()
    could: float = 0.0

    @property
    def regained(self) -> float:
        """Fraction of the training time that the best remedy saves."""
        return max((remedy.gain for remedy in self.remedies), default=self.could)

    @property
    def is_worth_telling(self) -> bool:
        """True if a remedy saves time, or takes the same time with far fewer device-hours."""
        cheap = any(r.gain > -WORTH and r.device_time <= _CHEAP for r in self.remedies)
        return self.regained >= WORTH or cheap


Losses = Iterator[LostTime]


def causes(times: RunTimes, *more: LostTime) -> tuple[LostTime, ...]:
    """Return the causes worth reporting, the largest possible saving first; `more` are causes found elsewhere."""
    rules = (_shares, _bubbles, _devices, _host)
    return in_order([*more, *of_any_loop(times), *(loss for rule in rules for loss in rule(times))])


def of_any_loop(times: RunTimes) -> Losses:
    """Yield the causes that a training loop without shoal may have too."""
    rules = (_evaluation, _checkpoints, _data, _threads, _slow_rank, _messages, _large_sums)
    return (loss for rule in rules for loss in rule(times))


def in_order(losses: Iterable[LostTime]) -> tuple[LostTime, ...]:
    """Return the causes worth reporting, the largest possible saving first."""
    return tuple(sorted((loss for loss in losses if loss.is_worth_telling), key=lambda loss: -loss.regained))


def _lost(times: RunTimes, cause: str, title: str, seconds: float, seen: str, *remedies: Remedy) -> LostTime:
    return LostTime(cause, title, seconds, seconds / times.total, seen, remedies, seconds / times.total)


def ms(seconds: float) -> str:
    """Return seconds in milliseconds, or in seconds from one on."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _evaluation(times: RunTimes) -> Losses:
    cost = times.evaluation
    if not cost.per_step or cost.every is None:
        return
    every = round(cost.every)
    rarer = every * _RARER
    lost = cost.per_step + times.best.per_step
    gain = lost * (1 - 1 / _RARER) / times.total
    seen = f"an evaluation of {ms(cost.each)} after every {every} steps{_slows(cost)}"
    if times.best.per_step:
        seen += f", and training waits {ms(times.best.each)} for a checkpoint where the watched metric is better"
    remedy = Remedy("evaluate-rarely", f"evaluation every {rarer} steps instead of {every}", gain)
    if times.asks_evaluations:
        remedy = replace(remedy, words=remedy.words + _BY_CALLBACK)
    else:
        remedy = replace(remedy, arguments=("--evaluate-every", str(rarer)), period=rarer)
    yield _lost(times, "evaluation", "evaluation", lost, seen, remedy)


def _checkpoints(times: RunTimes) -> Losses:
    for cost, is_requested in ((times.checkpoint, False), (times.requested, True)):
        if not cost.per_step or cost.every is None:
            continue
        every = round(cost.every)
        beside = _beside(times, every)
        lost = cost.per_step + beside
        gain = (lost - _CHECKPOINT_SHARE * times.step) / times.total
        rarer = max(every + 1, round(every * lost / (_CHECKPOINT_SHARE * times.step)))
        seen = (
            f"training waits {ms(cost.each)} for a checkpoint after every {'step' if every == 1 else f'{every} steps'}"
        )
        seen += _slows(cost)
        if beside:
            seen += f", and a thread writes it beside the next ones: {ms(times.writing or 0.0)} of a core"
        words = f"a checkpoint every {rarer} steps instead of {every}"
        remedy = Remedy("checkpoint-rarely", words + _BY_CALLBACK, gain)
        if not is_requested:
            words += ", or without --checkpoint-every, as costs 1 %"
            remedy = replace(remedy, words=words, arguments=("--checkpoint-every", str(rarer)), period=rarer)
        yield _lost(times, "checkpoints", "checkpoints", lost, seen, remedy)


def _slows(cost: Periodic) -> str:
    """Return by how much the steps at such an event are longer, if that is much of its cost."""
    longer = cost.per_step * (cost.every or 0.0) - cost.each
    return f", and the steps at it take {ms(longer)} longer" if longer > 0.2 * cost.each else ""


def _beside(times: RunTimes, every: int) -> float:
    """Return the seconds per step that a writing thread costs training, if most steps overlap with writing.

    If checkpoints are rarer, the cost shows in the steps that overlap.
    """
    if times.writing is None or every > _EACH_FEW:
        return 0.0
    spare = _spare_cores(times) > 0 and times.device == "cpu"
    return times.writing * (_WRITING if spare or times.device != "cpu" else 1.0) / every


def _data(times: RunTimes) -> Losses:
    waits = times.ranks.get("data_wait")
    wait = max(times.spans.get("data_wait", 0.0), waits.most if waits is not None else 0.0)
    rest = max(times.step - wait, 1e-9)
    workers = int(times.section("data").get("workers") or 0)
    read = (times.step * workers) if workers else wait  # workers read in parallel with the step
    known = times.reads_compute
    computes = read < _COMPUTED * times.samples / times.world_size if known is None else known
    most = _spare_cores(times) // times.world_size if computes else _MOST_WORKERS
    if most <= workers:
        return
    wanted = next((n for n in range(workers + 1, most) if read / n <= rest), most)
    then = max(rest + _HANDED_OVER * times.microbatches, read / wanted)
    seen = f"a step waits {ms(wait)} for its samples, with {workers or 'no'} data workers a rank"
    words = f"{several(wanted, 'data worker')} a rank"
    if not computes and _spare_cores(times) < wanted * times.world_size:
        words += ", where reading waits; where it computes, each takes a core that the ranks have now"
    gain = (times.step - then) / times.total
    remedy = Remedy("workers", words, gain, {"data": {"workers": wanted}})
    yield _lost(times, "data", "waiting for samples", wait, seen, remedy)


def _spare_cores(times: RunTimes) -> int:
    """Return the number of cores that no rank uses, or a default if the run did not record its cores."""
    if times.cores is None:
        return _MOST_WORKERS * times.world_size
    return max(0, times.cores - times.world_size * (times.threads or 1))


def _threads(times: RunTimes) -> Losses:
    """Find more threads than cores: they take turns, and so do the threads that wait for others."""
    if times.threads is None or times.cores is None or times.device != "cpu":
        return
    fair = max(1, times.cores // times.world_size)
    if times.threads <= fair:
        return
    running = times.threads * times.world_size
    carried = max(times.cores, fair * times.world_size)
    busy = times.step - times.spans.get("data_wait", 0.0)
    # Steps in which the threads happen not to collide are as quick as all steps could be.
    lost = max(busy * (1 - carried / running), times.step - sum(times.undisturbed.values()))
    seen = f"{times.world_size} processes of {times.threads} threads on {times.cores} cores"
    words = f"{several(fair, 'thread')} a process: OMP_NUM_THREADS={fair}, or unset, as shoal divides cores"
    remedy = Remedy("threads", words, lost / times.total, variables={"OMP_NUM_THREADS": str(fair)})
    yield _lost(times, "threads", "more threads than cores", lost, seen, remedy)


def _slow_rank(times: RunTimes) -> Losses:
    busy = times.ranks.get("busy_seconds")
    if busy is None or times.world_size < 2 or busy.how_often < _OFTEN or _crowded(times):
        return
    fair = busy.most * (1 - 1 / times.share_of_grains)  # a rank with more grains takes this much longer
    wait = busy.most - busy.least - fair
    if wait < _SLOWER * times.step:
        return
    ratio, often = busy.most / max(busy.least, 1e-9), busy.how_often
    seen = f"rank {busy.rank_of_most} is {ratio:.2g} times as long busy as the quickest, in {often:.0%} of steps"
    quick = sum(seconds for name, seconds in times.undisturbed.items() if name != "exposed_communication")
    without_it = on_devices(times, times.world_size - 1, min(quick or busy.least, busy.least))
    remedies = []
    if without_it is not None and without_it < times.step:
        fewer = times.world_size - 1
        words = f"{several(fewer, 'device')}, without that of rank {busy.rank_of_most}"
        gain = (times.step - without_it) / times.total
        remedies.append(Remedy("without-slow-rank", words, gain, devices=fewer, cost=fewer / times.world_size))
    words = f"rank {busy.rank_of_most} as quick as the others: look at what else runs on its host and cores"
    remedies.append(Remedy("mend-slow-rank", words, wait / times.total))
    yield _lost(times, "slow rank", f"waiting for rank {busy.rank_of_most}", wait, seen, *remedies)


def _crowded(times: RunTimes) -> bool:
    """Check whether there are more processes or threads than cores, which makes ranks slow in turns."""
    if times.cores is None or times.device != "cpu":
        return False
    return (times.threads or 1) * times.world_size > times.cores


def _shares(times: RunTimes) -> Losses:
    lost, fullest = times.computing * (1 - 1 / times.share_of_grains), f"{times.share_of_grains:.2g} times the mean"
    if times.share_of_grains <= 1.0:
        return
    seen = f"{times.grains} grains do not divide evenly: the fullest rank has {fullest}"
    words = "a number of devices that divides the grains, or another Job(grains=...), which changes the run"
    remedy = Remedy("even-shares", words, lost / times.total)
    yield _lost(times, "shares", "uneven shares", lost, seen, remedy)


def _bubbles(times: RunTimes) -> Losses:
    stages = int(times.section("layout").get("pipeline") or 1)
    if stages < 2:
        return
    per_rank = int(times.section("pipeline").get("stages_per_rank") or 1)
    bubble = _bubble(stages, per_rank, times.microbatches)
    lost = times.computing * bubble
    seen = (
        f"{stages} stages with {times.microbatches} microbatches stand still for {bubble:.0%} of forward and backward"
    )
    per_microbatch = int(times.section("batch").get("grains_per_microbatch") or 1)
    remedies = []
    if per_microbatch > 1:
        then = _bubble(stages, per_rank, times.microbatches * 2)
        gain = times.computing * (1 - (1 - bubble) / (1 - then)) / times.total
        words = f"{times.microbatches * 2} microbatches instead of {times.microbatches}"
        smaller = {"batch": {"grains_per_microbatch": -(-per_microbatch // 2)}}
        remedies.append(Remedy("microbatches", words, gain, smaller))
    yield _lost(times, "bubbles", "pipeline bubbles", lost, seen, *remedies)


def _bubble(stages: int, per_rank: int, microbatches: int) -> float:
    """Return the share of a pipeline's time in which a rank is idle (1F1B, interleaved over `per_rank` stages)."""
    waits = (stages - 1) / per_rank
    return waits / (waits + microbatches)


def _communication(times: RunTimes) -> float:
    """Return the exposed seconds of sums on the rank that waits least, which exclude waits for slower ranks."""
    exposed = times.ranks.get("exposed_communication")
    return exposed.least if exposed is not None else times.spans.get("exposed_communication", 0.0)


def _messages(times: RunTimes) -> Losses:
    """Find sums in many small messages, each of which has the latency of a large one."""
    needed = 1 + times.message_bytes // _BUCKET_BYTES
    if times.messages is None or times.world_size < 2 or times.messages <= _FEW_MESSAGES * needed:
        return
    sums = _communication(times)
    lost = sums * (1 - needed / times.messages)
    if times.device == "cpu" and _spare_cores(times) < times.world_size:
        # Sending and receiving use the cores that compute, so fewer messages speed up the whole step.
        quiet = sum(seconds for name, seconds in times.undisturbed.items() if name != "exposed_communication")
        lost = max(lost, times.step - quiet - sums * needed / times.messages)
    seen = f"{times.messages} messages a step for {times.message_bytes / 1e3:.3g} KB of gradients, {ms(sums)} exposed"
    remedies = [Remedy("larger-buckets", f"buckets for {needed} messages a step", lost / times.total)]
    if times.device == "cpu" and times.section("collectives").get("all_reduce") != "shared_memory":
        words, shared = "sums in shared memory, where the ranks are of one host", {"all_reduce": "shared_memory"}
        remedies.insert(0, Remedy("shared-memory", words, lost / times.total, {"collectives": shared}))
    yield _lost(times, "messages", "many small sums", lost, seen, *remedies)


def _large_sums(times: RunTimes) -> Losses:
    """Find sums limited by their bytes, which bfloat16 halves."""
    sums, messages = _communication(times), times.messages or 0
    plain = times.section("collectives").get("compression", "none") == "none"
    exact = bool(times.section("execution").get("exact"))
    if times.world_size < 2 or not messages or times.message_bytes < messages * _BUCKET_BYTES or not plain or exact:
        return
    if sums < _SLOWER * times.step:
        return
    seen = f"{times.message_bytes / 1e6:.3g} MB of gradients a step and rank, of which {ms(sums)} are exposed"
    words = "gradients summed in bfloat16, which rounds them: docs/compression.md"
    sections = {"collectives": {"compression": "bfloat16"}}
    yield _lost(times, "sums", "large sums", sums, seen, Remedy("bfloat16", words, 0.5 * sums / times.total, sections))


def _devices(times: RunTimes) -> Losses:
    """Find more ranks than the batch has work for: each adds more in sums and waits than it saves."""
    if times.world_size < 2 or int(times.section("layout").get("pipeline") or 1) > 1:
        return
    if times.threads and times.cores is not None and times.threads > max(1, times.cores // times.world_size):
        return  # the threads need fixing first
    others = [n for n in range(1, times.world_size) if times.world_size % n == 0]
    seconds_by_number = {n: seconds for n in others if (seconds := on_devices(times, n)) is not None}
    if not seconds_by_number:
        return
    best = min(seconds_by_number, key=lambda n: seconds_by_number[n])
    # Waits with another cause have their own remedy.
    mended = sum(loss.regained for loss in (*_messages(times), *_slow_rank(times))) * times.total
    lost = times.step - mended - seconds_by_number[best]  # may be negative: fewer device-hours for a longer time
    per_rank = times.samples / times.world_size
    seen = f"{per_rank:.3g} samples a rank: {ms(times.computing)} of computing, {ms(_communication(times))} of sums"
    if _crowded(times):
        seen += f"; {times.world_size} processes on {times.cores} cores"
    words = f"{several(best, 'device')} instead of {times.world_size}"
    if (planned := planned_ratio(times, best)) is not None:
        words += f" (its plan expected {planned:.2g} times the time of a step)"
    remedy = Remedy("fewer-devices", words, lost / times.total, devices=best, cost=best / times.world_size)
    yield _lost(times, "devices", "more devices than the batch has work for", max(0.0, lost), seen, remedy)


def _host(times: RunTimes) -> Losses:
    other = times.spans.get("other", 0.0)
    seen = f"{ms(other)} a step are neither data, model, sums nor update"
    yield _lost(times, "host", "the host beside the model", other, seen)


_FLOPS_PER_PARAMETER = 6.0  # a multiply-add forward, two backward
_REACHED = 0.4  # share of a device's peak that products of a small model reach
_AGREEMENT = 0.05  # share of the sums' time that remains on one device


def on_devices(times: RunTimes, devices: int, computing: float | None = None) -> float | None:
    """Return the estimated seconds of a step on `devices` devices of the data axis, or None if the layout allows none.

    `computing`: a rank's busy seconds, if they differ from the run's.
    """
    layout = times.section("layout")
    if devices < 1 or any(int(layout.get(axis) or 1) > 1 for axis in ("tensor", "pipeline", "context", "shard")):
        return None
    if times.section("server").get("mode", "none") != "none":
        return None
    crowd, then = _crowd(times, times.world_size), _crowd(times, devices)
    more = times.world_size / devices
    spans = times.spans
    busy = times.computing
    rest = sum(spans.get(name, 0.0) for name in ("optimizer", "other"))
    data = sum(spans.get(name, 0.0) for name in ("data_wait", "host_to_device"))
    if computing is not None:  # a rank that is busy for `computing` seconds in total
        part = computing / max(times.step - spans.get("exposed_communication", 0.0), 1e-9)
        busy, rest = busy * part, rest * part  # but a quick rank waits for its samples as the others do
    scaled = _scaled(times, busy / crowd)
    computed = busy / crowd * (1 - scaled + scaled * more)
    sums = _communication(times)
    left = (devices - 1) / (times.world_size - 1) if devices > 1 else _AGREEMENT
    return (computed + rest / crowd + data / crowd * more) * then + sums / crowd * left


def planned_ratio(times: RunTimes, devices: int) -> float | None:
    """Return the planned step time on `devices` devices relative to the run's own, from the run's prediction."""
    predicted = times.section("prediction")
    now, then = predicted.get("step_seconds"), section(predicted, "curve").get(str(devices))
    return then / now if now and then else None


def _crowd(times: RunTimes, devices: int) -> float:
    """Return the number of processes per core, at least 1."""
    if times.device != "cpu" or not times.cores:
        return 1.0
    return max(1.0, devices / times.cores)


def _scaled(times: RunTimes, busy: float) -> float:
    """Return the fraction of a rank's computing that grows with its samples."""
    per_sample = times.section("prediction").get("flops_per_sample")
    per_sample = per_sample if isinstance(per_sample, int | float) else _FLOPS_PER_PARAMETER * times.parameters
    flops, peak = float(per_sample) * times.samples, _peak(times)
    if not flops or not peak or busy <= 0.0:
        return 0.5
    return min(1.0, flops / times.world_size / (peak * _REACHED) / busy)


def _peak(times: RunTimes) -> float:
    try:
        device = here().device
    except (HardwareError, OSError):
        return 0.0
    if device.kind != times.device:
        return 0.0
    dtype = str(times.section("precision").get("compute") or "float32")
    return device.flops.get(dtype, device.flops.get("float32", 0.0)) * max(1, times.threads or 1)
