"""One rank of a benchmark. All ranks measure the same probe at the same time, so that they share the machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.distributed.collectives.base import Team
from shoal.distributed.collectives.choose import open_collective
from shoal.distributed.mesh import Mesh, open_mesh
from shoal.distributed.process_setup import prepare_process, versions
from shoal.hardware.detect import ALGORITHMS, shares_memory
from shoal.hardware.values import SHARED_MEMORY
from shoal.jobs.job import Job, Steps
from shoal.launch.environment import Environment
from shoal.planner.measure.probes import (
    LAYER_OPERATORS,
    Probe,
    algorithms,
    alone,
    copies,
    exchanges,
    probes,
    process_group,
    sample,
    sample_together,
)
from shoal.plans.plan import Layout, Plan
from shoal.plans.resolve import complete
from shoal.runs.directory import write_file
from shoal.training.observe.metering import StepMeter
from shoal.training.observe.step_records import RecordWriter, Surroundings
from shoal.training.observer import peak_memory_bytes
from shoal.training.setup.engine import Options, build

_EXCHANGE_SECONDS = 0.15  # approximate time for one size of one kind
_STORAGE_BYTES = 1 << 26
# Multiple of the planned time after which no further round starts.
_OVERRUN = 1.2


@dataclass(frozen=True)
class MeasureTask:
    """Measurements of a rank, and the folder for their results."""

    folder: Path
    threads: int
    seconds: float  # total time of the computing probes
    quick: bool
    computes: bool = True  # False: only the exchanges
    axis: str = ""  # a model-dividing axis: then only steps on it are measured


class Budget:
    """Time limit of each probe, which skips probes whose smaller sizes took too long."""

    def __init__(self, total_seconds: float, rounds: int, num_probes: int) -> None:
        self.slice_seconds = total_seconds / rounds / max(1, num_probes)
        self._longest_seconds = max(0.2, total_seconds / 40)
        self._ends = time.monotonic() + _OVERRUN * total_seconds
        self._seen: dict[str, dict[float, float]] = {}

    def over(self, mesh: Mesh) -> bool:
        """Return True if any rank has used up its time, for example because other programs use the cores.

        Collective: all ranks.
        """
        return bool(mesh.all_gather([float(time.monotonic() > self._ends)]).any())

    def allows(self, probe: Probe) -> bool:
        """Return True if a call is likely short enough, from the line through the two largest probes of its name."""
        seen = sorted(self._seen.get(probe.name, {}).items())[-2:]
        if not seen or probe.work <= seen[-1][0]:
            return True
        (less, quick), (more, slow) = seen[0], seen[-1]
        slope = (slow - quick) / (more - less) if more > less else 0.0
        return slow + slope * (probe.work - more) < self._longest_seconds

    def note(self, probe: Probe, seconds: float) -> None:
        """Record a call's seconds on the slowest rank."""
        seen = self._seen.setdefault(probe.name, {})
        seen[probe.work] = min(seconds, seen.get(probe.work, seconds))


def measure(task: MeasureTask, environment: Environment) -> None:
    """Measure, and write rank-R.json into the task's folder."""
    prepare_process(exact=False, num_threads=None)
    torch.set_num_threads(task.threads)  # overrides OMP_NUM_THREADS
    torch.manual_seed(environment.rank)
    with open_mesh(environment, Layout.model_validate({task.axis or "data": environment.world_size})) as mesh:
        if task.axis:
            rows = list(steps(mesh, task.quick, task.axis))
        else:
            rows = list(steps(mesh, task.quick)) if mesh.device.type == "cpu" else []
        facts = _facts(mesh)  # includes the memory of a process that has trained almost nothing
        if task.computes and not task.axis:
            rows += _computing(task, mesh)
        if mesh.world_size > 1 and not task.axis:
            rows += _exchanging(task, mesh)
        if mesh.world_size == 1 and not task.axis:
            rows += _storing(task)
    write_file(task.folder / f"rank-{environment.rank}.json", json.dumps({"facts": facts, "rows": rows}))


def _computing(task: MeasureTask, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Run every probe in several rounds, so that a disturbance of some seconds does not spoil one probe."""
    from shoal.planner.measure.operators import operators  # late: tracing's modules take 50 MB that no run uses

    rounds = 1 if task.quick else 3
    wanted = [*probes(mesh.device, task.quick), *copies(mesh.device)]
    wanted += operators() if mesh.device.type == "cpu" else ()
    wanted += alone(mesh, task.quick)
    budget = Budget(task.seconds, rounds, len(wanted))
    for number in range(rounds):
        for probe in wanted:
            if number and budget.over(mesh):
                return
            if not budget.allows(probe):
                continue
            mesh.all_gather([0.0])  # all ranks start together
            takes_part = mesh.rank < probe.ranks
            seconds, own = sample(probe, mesh.device, budget.slice_seconds) if takes_part else ([], 0.0)
            budget.note(probe, float(mesh.all_gather([own]).max()))
            yield {"name": probe.name, "size": probe.place, "work": probe.work, "seconds": seconds}


def _exchanging(task: MeasureTask, mesh: Mesh) -> Iterator[dict[str, Any]]:
    rounds = 1 if task.quick else 2
    longest = _EXCHANGE_SECONDS / 2 if task.quick else _EXCHANGE_SECONDS
    wanted = [*exchanges(mesh, task.quick), *algorithms(mesh, task.quick), *process_group(mesh, task.quick)]
    budget = Budget(longest * len(wanted) * rounds, 1, 1)
    refused: set[str] = set()
    for number in range(rounds):
        for probe in wanted:
            if number and budget.over(mesh):
                return
            if probe.name in refused or not budget.allows(probe):
                continue
            mesh.all_gather([0.0])
            try:
                once = max(1e-6, sample_together(probe, mesh.device, 1)[0])
            except (RuntimeError, NotImplementedError):  # the backend lacks this collective, on all ranks
                refused.add(probe.name)
                continue
            slowest = float(mesh.all_gather([once]).max())
            budget.note(probe, slowest)
            count = max(3, min(200, int(longest / slowest)))
            seconds = sample_together(probe, mesh.device, count)
            if mesh.rank < probe.ranks:
                yield {"name": probe.name, "size": probe.place, "work": probe.work, "seconds": seconds}


def _storing(task: MeasureTask) -> Iterator[dict[str, Any]]:
    content = os.urandom(1 << 20) * (_STORAGE_BYTES >> (22 if task.quick else 20))
    seconds = []
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=".", prefix=".shoal-bench-") as file:
        for _ in range(1 if task.quick else 3):
            file.seek(0)
            begun = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - begun)
    if seconds:
        yield {"name": "storage", "size": len(content), "work": float(len(content)), "seconds": seconds}


def _facts(mesh: Mesh) -> dict[str, Any]:
    """Return facts about the device from the system, without measuring."""
    facts: dict[str, Any] = {**versions(), "threads": torch.get_num_threads(), "world_size": mesh.world_size}
    if mesh.device.type != "cuda":
        return facts | {"kind": "cpu", "resident_bytes": peak_memory_bytes(mesh.device)}
    properties = torch.cuda.get_device_properties(mesh.device)
    torch.cuda.synchronize(mesh.device)
    free, total = torch.cuda.mem_get_info(mesh.device)
    resident = total - free - torch.cuda.memory_reserved(mesh.device)
    return facts | {
        "kind": "gpu",
        "model": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "resident_bytes": resident,
    }


# ------------------------------------------------------------------------- steps of models that compute almost nothing

# Layers of the two models, whose difference gives the cost for each parameter.
FEW, MANY = 1, 25
_WIDTH, _GRAINS, _WARM_UP, _STEPS, _QUICK_STEPS = 8, 8, 5, 60, 15
_PAIR = 2  # layers of a block: a tensor axis cuts one by its outputs and one by its inputs


def step_operators(layers: int) -> int:
    """Return the operators of a step of `layers` layers as a profile counts them.

    They are not traced here, so that the process uses no more memory than a run.
    """
    return LAYER_OPERATORS * layers + 1


def steps(mesh: Mesh, quick: bool, axis: str = "data") -> Iterator[dict[str, Any]]:
    """Yield rows of seconds per step by a model's number of parameters; their work is the number of operators.

    `axis`: the mesh axis of all ranks. Collective: all ranks.
    """
    for layers in (FEW, MANY) if axis == "data" else (_PAIR * mesh.world_size, MANY - 1):
        job = Job(
            model=functools.partial(_model if axis == "data" else _blocks, layers),
            loss=_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
            train_data=torch.utils.data.TensorDataset(torch.ones(64, _WIDTH)),
            global_batch=_GRAINS,
            grains=_GRAINS,
            length=Steps(10_000),
        )
        # One microbatch per rank, or one per stage on the pipeline axis.
        ranks = mesh.world_size
        shares = ranks if axis in ("data", "shard", "pipeline") else 1
        document: dict[str, Any] = {
            "layout": {axis: ranks},
            "batch": {"grains_per_microbatch": job.num_grains // shares},
        }
        if axis == "shard":
            document["shard"] = {"level": "parameters"}
        if axis != "pipeline" and shares_memory(ranks):
            document["collectives"] = {"all_reduce": SHARED_MEMORY}
        meter, count = StepMeter(), _WARM_UP + (_QUICK_STEPS if quick else _STEPS)
        plan = complete(Plan().with_sections(**document), job.num_grains, job.grain_size)
        engine = build(job, plan, mesh, Options(observer=meter))
        around = Surroundings(note=_unheard, on_step=_unheard, stop_requested=lambda: False)
        try:
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:  # records and meter, as in a run
                meter.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy, [])
                records = RecordWriter(Path(folder) / "records.jsonl" if mesh.rank == 0 else None)
                with contextlib.closing(records):
                    outcome = engine.trainer(None, count, around, records).train()
        finally:
            meter.close()
            engine.close()
        seconds = outcome.step_seconds[_WARM_UP:]
        yield {"name": "step", "size": 2 * layers, "work": float(step_operators(layers)), "seconds": seconds}


def _unheard(*reports: object) -> None:
    """Ignore reports from this training."""


def _model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def _blocks(layers: int) -> nn.Module:
    return nn.Sequential(*(_model(_PAIR) for _ in range(layers // _PAIR)))


def _loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).sum(), len(batch[0])


# --------------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Sampling:
    """Sizes in bytes, samples for each, seconds of one sample, and the folder for the result."""

    folder: Path
    sizes: Sequence[int]
    samples: int
    sample_seconds: float
    threads: int


def measure_collectives(sampling: Sampling, environment: Environment) -> None:
    """Write `rank-N.json` with rows of name, size and seconds of a call by sample."""
    prepare_process(exact=False, num_threads=sampling.threads)
    with open_mesh(environment, Layout(data=environment.world_size)) as mesh:
        opened = {name: open_collective(name, Team(), mesh.device) for name in ALGORITHMS}
        rows: list[dict[str, object]] = []
        for size in sampling.sizes:
            numel = max(1, size // 4)
            tensors = {name: collective.allocate(numel, torch.float32) for name, collective in opened.items()}
            calls: dict[str, Callable[[], object]] = {
                n: functools.partial(opened[n].all_reduce, t) for n, t in tensors.items()
            }
            # Tensors that the algorithm did not allocate go through its staging areas.
            calls["shared_memory, copied"] = functools.partial(opened["shared_memory"].all_reduce, torch.zeros(numel))
            counts: dict[str, int] = {}  # calls in a sample, the same on all ranks
            for name, call in calls.items():
                call()
                began = time.perf_counter()
                call()
                once = float(mesh.all_gather([time.perf_counter() - began]).mean())
                counts[name] = max(1, min(200, int(sampling.sample_seconds / once)))
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            # Algorithms alternate within each sample, so that disturbances affect all of them.
            for _ in range(sampling.samples):
                for name, call in calls.items():
                    dist.barrier()
                    call()
                    began = time.perf_counter()
                    for _ in range(counts[name]):
                        call()
                    seconds[name].append((time.perf_counter() - began) / counts[name])
            rows += [{"name": name, "size": size, "seconds": samples} for name, samples in seconds.items()]
            del calls, call
            for name in list(tensors):
                opened[name].release(tensors.pop(name))
        for collective in opened.values():
            collective.close()
    write_file(sampling.folder / f"rank-{environment.rank}.json", json.dumps({"rows": rows}))
