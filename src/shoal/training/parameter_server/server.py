"""Server process: holds a shard of the parameters, receives pushes, and steps their optimizer on command."""

from __future__ import annotations

import functools
import socket
import threading
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.state import load_optimizer, optimizer_state
from shoal.distributed.failures import as_shoal_error, to_json
from shoal.errors import PeerError, PlanError
from shoal.job import Job, Progress
from shoal.launch.environment import Environment
from shoal.numerics.precision import Precision
from shoal.parallel.data.pushed import Push, ServerShard, divide_parameters, unpack
from shoal.plans.plan import Plan
from shoal.training.engine import build_model
from shoal.training.optimizer_step import Parameters, Stepper, build_optimizer
from shoal.training.parameter_server.channel import Channel, ClosedError, accept_each, listen
from shoal.training.parameter_server.peers import Role, introduce, key_of

_CPU = torch.device("cpu")


def homes(model: nn.Module, num_servers: int) -> list[list[str]]:
    """The names of the trainable parameters of each server. Raises: PlanError where one would have none."""
    sizes = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    if len(sizes) < num_servers:
        raise PlanError(
            given=f"server.num_servers = {num_servers} for a model of {len(sizes)} trainable parameters",
            conflict="a server keeps whole parameters, at least one",
            remedy=f"server.num_servers = {max(1, len(sizes))} at most",
        )
    return divide_parameters(sizes, num_servers)


class Server:
    """Server of one shard and its optimizer: answers requests of the conductor and the workers."""

    def __init__(self, job: Job, plan: Plan, number: int) -> None:
        precision = Precision.of(plan.precision, _CPU)
        self.model = build_model(job, precision)
        own = set(homes(self.model, plan.server.num_servers)[number])
        _leave_out(self.model, own)
        parameters = Parameters(self.model)
        self.optimizer = build_optimizer(job.optimizer, parameters)
        stepper = Stepper(self.optimizer, job, exact=plan.execution.exact)
        step = functools.partial(_step, stepper, plan.server.num_servers > 1)
        self.shard = ServerShard(parameters, step, job.grains, exact=plan.execution.exact)
        self._lock = threading.Lock()

    def answer(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer to one message, by its kind."""
        answers = {
            "push": self._push,
            "pull": self._pull,
            "combine": self._combine,
            "gradients": self._gradients,
            "apply": self._apply,
            "load": self._load,
            "state": self._state,
        }
        with self._lock:
            return answers[asked["kind"]](asked, tensors)

    def _push(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        nodes = tuple((int(lo), int(hi)) for lo, hi in asked["nodes"])
        used = tuple(map(int, asked["used"]))
        push = Push(int(asked["step"]), int(asked["part"]), int(asked["ticket"]), nodes, used, tuple(tensors))
        return {"taken": self.shard.push(push)}, []

    def _pull(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """The parameters, unless the asker has this version."""
        version, packed = self.shard.pull()
        return {"version": version}, [] if asked["have"] == version else [packed]

    def _combine(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        tickets = {int(part): int(ticket) for part, ticket in asked["tickets"]}
        return {"norms": self.shard.combine(asked["step"], tickets)}, []

    def _gradients(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        found = self.shard.gradients()
        return {"used": [g is not None for g in found]}, [g.clone() for g in found if g is not None]

    def _apply(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        progress = Progress(*asked["progress"])
        taken = self.shard.apply(asked["step"], asked["version"], asked["scale"], progress)
        return {"taken": taken, "repeated": self.shard.repeated}, []

    def _load(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """Takes parameters, and the optimizer's state, which comes after them, by path."""
        own = [p for _, p in Parameters(self.model).named]
        unpack(tensors[0], own)
        held = dict(zip(asked["paths"], tensors[1:], strict=True))
        load_optimizer(self.optimizer, self.model, held, asked["document"])
        self.shard.reset(asked["version"])
        return {}, []

    def _state(self, asked: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        held, document = optimizer_state(self.optimizer, self.model)
        _, packed = self.shard.pull()
        return {"document": document, "paths": list(held)}, [packed, *held.values()]


def _step(stepper: Stepper, divided: bool, progress: Progress) -> None:
    stepper.set_rates(progress)
    stepper.seed(progress.step)
    stepper.step(refuse_noise=divided)


def _leave_out(model: nn.Module, own: set[str]) -> None:
    """Puts the parameters of other servers on the meta device, under all their names."""
    others = {id(p): p for name, p in model.named_parameters() if name not in own}
    empty = {key: nn.Parameter(p.detach().to("meta"), p.requires_grad) for key, p in others.items()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in empty:
                module._parameters[name] = empty[id(parameter)]


def serve(job: Job, plan: Plan, environment: Environment, role: Role) -> None:
    """Keeps a shard until the conductor says that the run has ended. Raises: PeerError where it is gone before."""
    with listen() as listener:
        wire = introduce(environment, role, job, plan, port=listener.getsockname()[1])
        try:
            server = Server(job, plan, role.number)
            attending = listener, key_of(environment), functools.partial(_answer_worker, server)
            threading.Thread(target=accept_each, args=attending, daemon=True).start()
            _answer_all(server, wire)
        except ClosedError as error:
            raise PeerError(
                given=f"{role} of this run",
                conflict=f"the conductor is gone: {error}",
                remedy="look at what it said; --resume goes on from the newest checkpoint",
            ) from error
        finally:
            wire.close()


def _answer_worker(server: Server, wire: Channel) -> None:
    """One that is dead or replaced is answered no more: what it had pushed whole stays."""
    try:
        _answer_all(server, wire)
    finally:
        wire.close()


def _answer_all(server: Server, wire: Channel) -> None:
    """Answers until it is told that the run has ended. Raises: ClosedError."""
    while True:
        asked, tensors = wire.receive()
        if asked["kind"] == "end":
            return
        try:
            answer, held = server.answer(asked, tensors)
        except Exception as error:
            told = as_shoal_error(error)
            answer, held = {"error": to_json(told, 0, socket.gethostname())}, []
        wire.send(answer, held)
