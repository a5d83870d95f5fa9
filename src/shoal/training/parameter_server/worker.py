"""Worker process: pulls parameters, computes tasks, pushes gradients. Also the entry point of servers and workers."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.loader import DataRank, MapLoader
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.distributed.mesh import Report, alone, choose_device, measures, to_row
from shoal.errors import JobError, PeerError
from shoal.jobs.job import Job
from shoal.launch.environment import Environment
from shoal.numerics.precision import Precision, widest
from shoal.parallel.data.pushed import ExactPart, FastPart, unpack
from shoal.plans.resolve import CompletePlan
from shoal.training.microbatch.policy import MicrobatchPolicy
from shoal.training.microbatch.step import StepRunner
from shoal.training.observer import Observer
from shoal.training.parameter_server.channel import Channel, ClosedError, connect
from shoal.training.parameter_server.members import (
    ANSWER_SECONDS,
    OverError,
    Role,
    introduce,
    key_of,
    raise_if_error,
    role,
)
from shoal.training.parameter_server.server import serve
from shoal.training.setup.engine import Engine, Options, build

BEAT_SECONDS = 1.0
# A conductor that ends the run has informed all processes within this time.
_LAST_WORD_SECONDS = 5.0


class Worker:
    """Engine and channels of one worker."""

    def __init__(self, engine: Engine, wire: Channel, key: bytes) -> None:
        """Receive the addresses of the servers and the run's fixed tensors from the conductor, and connect."""
        if not isinstance(engine.loader, MapLoader):
            raise no_stream()
        self._engine, self._wire, self._watch, self._loader = engine, wire, engine.observer, engine.loader
        self._runner = StepRunner(engine, engine.loader, lambda text: None)
        self._reduce = widest(Precision.of(engine.plan.precision, engine.mesh.device).reduce, engine.parameters)
        wire.send({"kind": "ready"})  # not earlier: nobody reads messages before
        welcome, tensors = wire.receive()
        if welcome["kind"] == "end":
            raise OverError
        named = dict(engine.model.named_parameters())
        fixed = fixed_tensors(engine.model)
        with torch.no_grad():
            for tensor, value in zip(fixed, tensors, strict=True):
                tensor.copy_(value)
        self._homes = [[named[name] for name in names] for names in welcome["names"]]
        self._servers = [connect("127.0.0.1", port, key) for port in welcome["ports"]]
        self._versions = [-1] * len(self._servers)
        self._era = 0

    def attend(self) -> None:
        """Execute the conductor's commands until the run has ended. Raises: ClosedError; errors of the job."""
        self._engine.model.train()
        while True:
            task, tensors = self._wire.receive()
            if task["kind"] == "end":
                return
            if task["kind"] == "show":
                self._adopt(task, tensors)
                self._wire.send({"kind": "shown", "version": self._pull(task["version"])})
            else:
                self._compute(task, tensors)

    def _compute(self, task: dict[str, Any], tensors: list[Tensor]) -> None:
        clock, before = self._engine.clock, self._counted()
        clock.begin()
        clock.mark("exposed_communication")
        self._adopt(task, tensors)
        version = self._pull(task["version"])
        clock.mark("other")
        self._loader.move(DataRank(task["part"], task["num_parts"]))
        self._engine.buffers.slot = task["part"]
        self._loader.seek(task["step"], self._engine.computer.computation.effective_grains)
        fetched = self._runner.fetch(task["step"])
        self._loader.warn_of_incidents()
        if fetched.error is not None:
            raise fetched.error
        self._watch.part_begins(task["part"])
        self._runner.run(fetched, 1.0, lambda following: [])
        self._watch.part_computed()
        clock.mark("exposed_communication")
        strategy = self._engine.strategy
        assert isinstance(strategy, FastPart | ExactPart)
        for place, (server, parameters) in enumerate(zip(self._servers, self._homes, strict=True)):
            gradients = strategy.gradients(parameters, self._reduce)
            push = {key: task[key] for key in ("step", "part", "ticket")}
            nodes = [list(node) for node in gradients]
            header = {"kind": "push", **push, "nodes": nodes, "used": strategy.used(parameters)}
            answer, _ = server.ask(header, list(gradients.values()))
            raise_if_error(answer, f"server {place}")
        sums = strategy.sums
        seconds, spans = clock.end()
        sent, received = (now - then for now, then in zip(self._counted(), before, strict=True))
        memory = clock.peak_memory_bytes()
        done = {
            "kind": "done",
            "ticket": task["ticket"],
            "version": version,
            "nodes": [list(node) for node in sums],
            "computation": self._engine.computer.computation.to_json(),
            "row": to_row(Report(measures=measures(spans, seconds, memory))),
            "pushed_bytes": sent,
            "pulled_bytes": received,
        }
        self._wire.send(done, list(sums.values()))

    def _adopt(self, task: dict[str, Any], tensors: list[Tensor]) -> None:
        """Adopt the run's microbatch policy, and the buffers before this step."""
        if task["era"] != self._era:  # the run was rolled back: pulled versions are obsolete
            self._era, self._versions = task["era"], [-1] * len(self._servers)
        if task["computation"] is not None:
            self._runner.probe.restore(task["computation"])
            names = MicrobatchPolicy.from_json(task["computation"]).buffers
            computation = self._engine.computer.computation
            self._engine.buffers.watch(computation.buffers, dict(computation.rules))
            named = dict(self._engine.model.named_buffers())
            with torch.no_grad():
                for name, value in zip(names, tensors, strict=True):
                    named[name].copy_(value)

    def _pull(self, least: int) -> int:
        """Pull the newest parameters of every server; return the oldest version, which is at least `least`."""
        for place, (server, parameters) in enumerate(zip(self._servers, self._homes, strict=True)):
            answer, tensors = server.ask({"kind": "pull", "have": self._versions[place]})
            raise_if_error(answer, f"server {place}")
            assert answer["version"] >= least, "a task is given out once every server has what it starts from"
            if tensors:
                unpack(tensors[0], parameters)
            self._versions[place] = answer["version"]
        self._watch.pulled(min(self._versions))
        return min(self._versions)

    def _counted(self) -> tuple[int, int]:
        return sum(s.sent_bytes for s in self._servers), sum(s.received_bytes for s in self._servers)

    def close(self) -> None:
        """Close the channels."""
        for wire in self._servers:
            wire.close()


def no_stream() -> JobError:
    """Return the error for a stream in a plan with servers."""
    return JobError(
        given="a stream as train_data, in a plan with servers",
        conflict="a worker that replaces another reads the same samples again by their ids",
        remedy='use a map-style dataset, or server.mode = "none"',
    )


def fixed_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that no server has: parameters that are not trained, and buffers."""
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    return [*frozen, *model.buffers()]


def work(job: Job, plan: CompletePlan, environment: Environment, role: Role, watch: Observer) -> None:
    """Compute until the conductor reports the run's end; report errors of the job to the conductor.

    Raises: PeerError if the conductor is gone before; errors of the job.
    """
    ranks = plan.layout.data
    local = Environment(role.number, ranks, role.number, ranks, shares_gpu=environment.shares_gpu)
    with contextlib.closing(introduce(environment, role, job, plan)) as wire:
        try:

            def beat() -> None:  # regular signs of life, which a stopped process does not send
                pause = threading.Event()
                with contextlib.suppress(ClosedError, OSError):
                    while not pause.wait(BEAT_SECONDS):
                        wire.send({"kind": "alive"})

            threading.Thread(target=beat, daemon=True).start()
            with contextlib.closing(
                build(job, plan, alone(choose_device(local).device), Options(observer=watch))
            ) as engine:
                watch.attach(engine.sharded_model, engine.updater.optimizer, engine.strategy)
                with contextlib.closing(Worker(engine, wire, key_of(environment))) as worker:
                    worker.attend()
        except (PeerError, OverError):
            raise
        except ClosedError as error:
            if _is_over(wire, environment):
                raise OverError from error
            raise PeerError(
                given=f"{role} of this run",
                conflict=f"a process that it needs is gone: {error}",
                remedy="look at what the conductor said; --resume goes on from the newest checkpoint",
            ) from error
        except Exception as error:
            shown = as_shoal_error(error)
            shown.rank, shown.host = environment.rank, socket.gethostname()
            with contextlib.suppress(ClosedError):
                wire.send({"kind": "failed", "error": to_json(shown, environment.rank, socket.gethostname())})
            raise shown from error


def _is_over(wire: Channel, environment: Environment) -> bool:
    """Return True if the run has ended, by an unread message of the conductor or by its closed listener.

    A conductor that ends before it has read all messages resets the connection, and its own last message is lost.
    """
    with contextlib.suppress(ClosedError, TimeoutError):
        wire.limit(_LAST_WORD_SECONDS)
        while True:
            if wire.receive()[0]["kind"] == "end":
                return True
    # Only the conductor closes the socket that the launcher opened. A conductor that was killed leaves it open.
    try:
        socket.create_connection((environment.address, environment.port), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def take_part(job: Job, plan: CompletePlan, environment: Environment, watch: Observer | None = None) -> bool:
    """Serve or work until the run has ended; return False for the conductor, which does neither.

    `watch`: the observer of a worker. Raises: PeerError if the conductor is gone before; errors of the job.
    """
    mine = role(plan, environment.rank)
    if mine.kind == "conductor":
        return False
    with contextlib.suppress(OverError):  # this process started so slowly that the run ended without it
        if mine.kind == "server":
            serve(job, plan, environment, mine)
        else:
            work(job, plan, environment, mine, watch or Observer())
    return True
