"""Servers: processes that store a shard of the parameters and step its optimizer, and the client of all servers."""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.state import load_optimizer, merged_optimizers, optimizer_state
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.errors import PeerError, PlanError
from shoal.jobs.job import Job, Progress
from shoal.launch.environment import Environment
from shoal.numerics.gradient_norm import clip_values, rounded
from shoal.numerics.precision import Precision
from shoal.parallel.data.pushed import Push, ServerShard, divide_parameters, pack, unpack
from shoal.plans.plan import Plan
from shoal.training.parameter_server.channel import Channel, ClosedError, accept_each, listen
from shoal.training.parameter_server.members import Asked, Members, Role, introduce, key_of
from shoal.training.setup.job_model import build_model
from shoal.training.update.job_optimizer import Parameters, build_optimizer
from shoal.training.update.optimizer_step import Stepper

_CPU = torch.device("cpu")


def homes(model: nn.Module, num_servers: int) -> list[list[str]]:
    """Return the names of each server's trainable parameters. Raises: PlanError if a server would have none."""
    sizes = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    if len(sizes) < num_servers:
        raise PlanError(
            given=f"server.num_servers = {num_servers} for a model of {len(sizes)} trainable parameters",
            conflict="a server keeps whole parameters, at least one",
            remedy=f"server.num_servers = {max(1, len(sizes))} at most",
        )
    return divide_parameters(sizes, num_servers)


class Server:
    """Server of one shard and its optimizer, which answers requests of the conductor and the workers."""

    def __init__(self, job: Job, plan: Plan, number: int) -> None:
        precision = Precision.of(plan.precision, _CPU)
        self.model = build_model(job, precision)
        own = set(homes(self.model, plan.server.num_servers)[number])
        # Move the parameters of other servers to the meta device, under all their names.
        others = {id(p): p for name, p in self.model.named_parameters() if name not in own}
        empty = {key: nn.Parameter(p.detach().to("meta"), p.requires_grad) for key, p in others.items()}
        for key, p in others.items():
            vars(empty[key]).update(vars(p))
        for module in self.model.modules():
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in empty:
                    module._parameters[name] = empty[id(parameter)]
        parameters = Parameters(self.model)
        self.optimizer = build_optimizer(job.optimizer, parameters)
        stepper = Stepper(self.optimizer, job, exact=plan.execution.exact)

        def step(progress: Progress) -> None:
            clip_values([p.grad for p in parameters if p.grad is not None], job.clip_value)
            stepper.set_rates(progress)
            stepper.step(progress.step, refuse_noise=plan.server.num_servers > 1)

        self.shard = ServerShard(parameters, step, job.num_grains, exact=plan.execution.exact)
        self._lock = threading.Lock()

    def answer(self, request: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the answer to one message by its kind. A lock serializes the messages of all threads."""
        with self._lock:
            shard = self.shard
            match request["kind"]:
                case "push":
                    nodes = tuple((int(lo), int(hi)) for lo, hi in request["nodes"])
                    used = tuple(map(int, request["used"]))
                    push = Push(
                        int(request["step"]), int(request["part"]), int(request["ticket"]), nodes, used, tuple(tensors)
                    )
                    return {"taken": shard.push(push)}, []
                case "pull":  # the parameters, unless the client has this version
                    version, packed = shard.pull()
                    return {"version": version}, [] if request["have"] == version else [packed]
                case "combine":
                    tickets = {int(part): int(ticket) for part, ticket in request["tickets"]}
                    return {"norms": shard.combine(request["step"], tickets)}, []
                case "gradients":
                    gradients = shard.gradients()
                    return {"used": [g is not None for g in gradients]}, [g.clone() for g in gradients if g is not None]
                case "apply":
                    progress = Progress(*request["progress"])
                    update = shard.apply(request["step"], request["version"], request["scale"], progress)
                    return {"taken": update, "repeated": shard.repeated}, []
                case "load":  # packed parameters, then the optimizer's tensors by path
                    unpack(tensors[0], [p for _, p in Parameters(self.model).named])
                    state = dict(zip(request["paths"], tensors[1:], strict=True))
                    load_optimizer(self.optimizer, self.model, state, request["document"])
                    shard.reset(request["version"])
                    return {}, []
                case "state":
                    state, document = optimizer_state(self.optimizer, self.model)
                    return {"document": document, "paths": list(state)}, [shard.pull()[1], *state.values()]
            raise KeyError(request["kind"])


def serve(job: Job, plan: Plan, environment: Environment, role: Role) -> None:
    """Serve a shard until the conductor reports the run's end. Raises: PeerError if the conductor is gone before."""
    with listen() as listener:
        port = listener.getsockname()[1]
        with contextlib.closing(introduce(environment, role, job, plan, port=port)) as wire:
            try:
                server = Server(job, plan, role.number)
                attending = listener, key_of(environment), functools.partial(_answer_all, server)
                threading.Thread(target=accept_each, args=attending, daemon=True).start()
                _answer_all(server, wire)
            except ClosedError as error:
                raise PeerError(
                    given=f"{role} of this run",
                    conflict=f"the conductor is gone: {error}",
                    remedy="look at what it said; --resume goes on from the newest checkpoint",
                ) from error


def _answer_all(server: Server, wire: Channel) -> None:
    """Answer messages until the message of the run's end. Raises: ClosedError.

    A dead or replaced worker gets no more answers. Its complete pushes remain valid.
    """
    with contextlib.closing(wire):
        while True:
            request, tensors = wire.receive()
            if request["kind"] == "end":
                return
            try:
                answer, answer_tensors = server.answer(request, tensors)
            except Exception as error:
                shown = as_shoal_error(error)
                answer, answer_tensors = {"error": to_json(shown, 0, socket.gethostname())}, []
            wire.send(answer, answer_tensors)


class Servers:
    """Client of all servers of a run. The local model and optimizer have the servers' values only after a `fetch`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_servers: int, crew: Members) -> None:
        self._model, self._optimizer, self._crew = model, optimizer, crew
        self.names = homes(model, num_servers)
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def load(self, version: int) -> None:
        """Send each server its shard of the local model and optimizer state."""
        tensors, document = optimizer_state(self._optimizer, self._model, copy=False)
        known = set(self._named)

        def of(number: int) -> Asked:
            own = set(self.names[number])
            state = {name: values for name, values in document["state"].items() if name in own}
            others = known - own
            paths = [path for path in tensors if path.partition("/")[0] not in others]
            request = {"kind": "load", "version": version, "paths": paths, "document": {**document, "state": state}}
            packed = pack([self._named[name] for name in self.names[number]])
            return request, [packed, *(tensors[path] for path in paths)]

        self._crew.ask(of)

    def fetch(self, *, optimizer: bool) -> None:
        """Copy the servers' parameters, and on request their optimizer states, into the local objects."""
        request = {"kind": "state"} if optimizer else {"kind": "pull", "have": -1}
        answers = self._crew.ask(lambda number: (request, ()))
        state: dict[str, Tensor] = {}
        for names, (answer, tensors) in zip(self.names, answers, strict=True):
            unpack(tensors[0], [self._named[name] for name in names])
            state |= dict(zip(answer.get("paths", ()), tensors[1:], strict=True))
        if optimizer:
            document = merged_optimizers(answer["document"] for answer, _ in answers)
            load_optimizer(self._optimizer, self._model, state, document)

    def combine(self, step: int, tickets: Mapping[int, int]) -> float:
        """Let each server sum a step's gradients, and return the norm of these sums over the whole model."""
        request = {"kind": "combine", "step": step, "tickets": list(tickets.items())}
        answers = self._crew.ask(lambda number: (request, ()))
        norms: dict[str, float] = {}
        for names, (answer, _) in zip(self.names, answers, strict=True):
            norms |= {name: norm for name, norm in zip(names, answer["norms"], strict=True) if norm is not None}
        return rounded(math.hypot(*norms.values()), {p.dtype for p in self._model.parameters()})

    def apply(self, version: int, scale: float | None, progress: Progress) -> int:
        """Let each server update its parameters, or skip the step; return the maximum number of repeated pushes."""
        command = {"kind": "apply", "step": progress.step, "version": version, "scale": scale}
        request: dict[str, Any] = {**command, "progress": [progress.step, progress.num_steps, progress.samples]}
        answers = self._crew.ask(lambda number: (request, ()))
        return max(int(answer["repeated"]) for answer, _ in answers)

    def gradients(self) -> None:
        """Copy the gradients that were summed last into the parameters' `.grad`."""
        answers = self._crew.ask(lambda number: ({"kind": "gradients"}, ()))
        for names, (answer, tensors) in zip(self.names, answers, strict=True):
            remaining = iter(tensors)
            for name, used in zip(names, answer["used"], strict=True):
                self._named[name].grad = next(remaining) if used else None
