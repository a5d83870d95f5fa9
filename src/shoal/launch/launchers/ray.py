"""Launcher on Ray: an actor for each rank, in one placement group, on an existing cluster or a new one."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import CommandError, ExitCode, LaunchError, ShoalError
from shoal.launch.environment import RESTARTS
from shoal.launch.launchers.argument import parsed
from shoal.launch.launchers.base import Submission, library
from shoal.launch.launchers.engine_rank import EngineRank, RankCommand, RankEnd, RankLook, environments
from shoal.launch.launchers.reports import restarted
from shoal.launch.signals import Signals
from shoal.launch.supervise.recovery import verdict

# Ranks share no objects, and Ray's default store takes a third of the memory.
_STORE_BYTES = 200 << 20
_LOOK_SECONDS = 0.3
# After a loss the others notice an error in their next collective or are ended; a rank that has reported an error may
# still be writing a checkpoint.
_GRACE_SECONDS, _PATIENCE_SECONDS = 5.0, 60.0
_PLACE_SECONDS, _SAY_SECONDS = 60.0, 10.0
_CONNECT_SECONDS = 10.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RaySettings:
    """Settings of `--on ray:KEY=VALUE,...`."""

    address: str = ""  # of a cluster; default: RAY_ADDRESS; "local": a new cluster
    cpus: int = 1  # of a rank
    gpus: int = -1  # of a rank; default: one if the plan is for GPUs or the cluster has GPUs
    strategy: str = "PACK"


def render(submission: Submission) -> Mapping[str, str]:
    """Describe the placement group and the actors of the run. Raises: CommandError for invalid settings."""
    settings = _settings(submission)
    where = _address(settings) or "a new cluster on this host"
    gpus = "1 GPU where there are any" if settings.gpus < 0 else f"{settings.gpus} GPU"
    return {
        "ray": f"cluster:         {where}\n"
        f"placement group: {settings.strategy}, {submission.num_processes} bundles of {settings.cpus} CPU, {gpus}\n"
        f"in each actor:   shoal {' '.join(submission.arguments)}\n"
    }


def start(submission: Submission, signals: Signals) -> int:
    """Start the ranks in actors, show rank 0's output, and restart all ranks if one is lost."""
    settings = _settings(submission)
    if not _address(settings):
        os.environ.update(_token(os.environ))
    ray = library("ray", "ray", submission)
    with _connected(ray, settings, submission), signals.handled():  # a second time: ray.init installs its own handlers
        run = RayRun(ray, settings, submission, signals)
        try:
            return run.train()
        finally:
            run.close()


def _settings(submission: Submission) -> RaySettings:
    settings = parsed(RaySettings, "ray", submission.options)
    known = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    if settings.strategy not in known or settings.gpus > 1:
        raise CommandError(
            given=f"--on ray:{submission.options}",
            conflict=f"strategy={settings.strategy}, gpus={settings.gpus} of a rank",
            remedy=f"write a strategy of {', '.join(known)}; a rank has one GPU (gpus=1) or none (gpus=0)",
        )
    return settings


def _address(settings: RaySettings) -> str:
    """Return the cluster's address; empty for a new cluster."""
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


@contextlib.contextmanager
def _connected(ray: Any, settings: RaySettings, submission: Submission) -> Iterator[None]:
    """Connect to the cluster, or use the program's own connection. Raises: LaunchError."""
    if ray.is_initialized():
        yield
        return
    address = _address(settings)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    _refuse_unreachable(address)
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            cpus = max(submission.num_processes * settings.cpus, os.cpu_count() or 1)
            own = {"num_cpus": cpus, "object_store_memory": _STORE_BYTES, "_node_ip_address": _LOOPBACK}
            ray.init(address="local", include_dashboard=False, **own, **quiet)
    except Exception as error:
        raise _not_connected(address, error, reached=":" in address) from None
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Raise LaunchError if nothing listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "//" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise _not_connected(address, error, reached=False) from None


def _token(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with a token for a new cluster, since other users of this host can reach its ports.

    Ray reads the variables during its import and needs them until the program ends. They are not set if Ray is already
    imported or the user has chosen RAY_AUTH_MODE.
    """
    if "RAY_AUTH_MODE" not in variables and "ray" not in sys.modules:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {}


def _not_connected(address: str, error: Exception, *, reached: bool) -> LaunchError:
    said = str(error).strip().split("\n")[0][:300]
    if not address:
        remedy = "see the logs in /tmp/ray/session_latest/logs"
    elif reached:  # only the cluster's own log says that it rejects the token
        remedy = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) to the cluster's token; "
        remedy += "and check with ray status that this is a cluster, of the same version"
    else:
        remedy = "check that ray start --head runs there (ray status), or leave the address and RAY_ADDRESS out"
    where = f"the Ray cluster at {address}" if address else "a new Ray cluster on this host"
    what = "something answers there, and does not take this command's token, or is no such cluster: " if reached else ""
    return LaunchError(given=where, conflict=f"{what}{type(error).__name__}: {said}", remedy=remedy)


@dataclass
class RayRun:
    """Actors of a run's ranks, and the watch over them."""

    ray: Any
    settings: RaySettings
    submission: Submission
    signals: Signals
    clock: Callable[[], float] = time.monotonic
    _group: Any = None
    _actors: list[Any] = field(default_factory=list)
    _hosts: list[str] = field(default_factory=list)

    def train(self) -> int:
        """Start the ranks until the run ends and return its exit code."""
        ray, bundle = self.ray, self._bundle
        there = min(int(ray.available_resources().get(name, 0.0) // each) for name, each in bundle.items() if each)
        self.submission = self.submission.with_what_is_there(there)
        number = self.submission.num_processes
        self._group = ray.util.placement_group([bundle] * number, strategy=self.settings.strategy)
        began = said = self.clock()
        ready = self._group.ready()
        while not ray.wait([ready], timeout=_LOOK_SECONDS)[0]:
            if self.signals.received:
                return int(ExitCode.INTERRUPTED)
            total = {name: ray.cluster_resources().get(name, 0.0) for name in bundle}
            short = [name for name, each in bundle.items() if total[name] < each * number]
            if short and self.clock() - began > _PLACE_SECONDS / 6:  # nodes may still be joining
                raise LaunchError(
                    given=f"{number} ranks with {_resources(bundle)} each",
                    conflict=f"the Ray cluster has {_resources(total)} in all",
                    remedy="use fewer --devices, or smaller cpus= and gpus= of a rank, or add nodes",
                )
            if self.clock() - said > _SAY_SECONDS:
                said = self.clock()
                free = {name: ray.available_resources().get(name, 0.0) for name in bundle}
                print(f"waiting for room on the Ray cluster: free are {_resources(free)}", file=sys.stderr)

        def once(restarts: int) -> tuple[int, ShoalError | None]:
            try:
                self._start(restarts)
            except ray.exceptions.RayActorError as error:
                return verdict([RankEnd(0, "a Ray node", gone=_gone(error)).ended()], self.signals)
            return verdict([end.ended() for end in self._watched()], self.signals)

        return restarted(self.submission, self.signals, once)

    def close(self) -> None:
        """End the actors and release their resources."""
        self._end_actors()
        if self._group is not None:
            with contextlib.suppress(Exception):
                self.ray.util.remove_placement_group(self._group)

    @property
    def _bundle(self) -> dict[str, float]:
        has_gpus = self.ray.cluster_resources().get("GPU", 0) > 0
        wanted = has_gpus if self.submission.gpus is None else self.submission.gpus
        gpus = int(wanted) if self.settings.gpus < 0 else self.settings.gpus
        return {"CPU": self.settings.cpus, **({"GPU": gpus} if gpus else {})}

    def _start(self, restarts: int) -> None:
        """Start actors and, in each actor, its rank. Raises: LaunchError; RayActorError."""
        self._end_actors()
        ray, strategy = self.ray, self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        bundle = self._bundle
        remote = ray.remote(RankActor)
        self._actors = [
            remote.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
            ).remote()
            for index in range(self.submission.num_processes)
        ]
        try:
            places: list[str] = ray.get([actor.place.remote() for actor in self._actors])
        except ray.exceptions.RayTaskError as error:
            said = str(error).strip().split("\n")[-1][:300]
            raise LaunchError(
                given="an actor for each rank",
                conflict=f"a node of the cluster cannot start it: {said}",
                remedy='pip install "shoal[ray]" on every node, the same version as here; or put it into the '
                "runtime_env",
            ) from None
        self._hosts = places
        address = _LOOPBACK if len(set(places)) == 1 else places[0]
        port = ray.get(self._actors[0].listen.remote(address))
        words, logs = self.submission.arguments, str(self.submission.out / "logs")
        threads = {"OMP_NUM_THREADS": str(self.settings.cpus)}
        again = {RESTARTS: str(restarts)} if restarts else {}
        commands = [
            RankCommand(
                words,
                str(self.submission.folder),
                {**threads, **environment.variables(), **again},
                logs if environment.rank else "",
            )
            for environment in environments("ray", places, (address, port), own_gpu="GPU" in bundle)
        ]
        ray.get([actor.start.remote(command) for actor, command in zip(self._actors, commands, strict=True)])

    def _watched(self) -> list[RankEnd]:
        """Wait for the ends of all ranks. A failure of one rank ends the others after a grace period."""
        ends: dict[int, RankEnd] = {}
        looks: dict[Any, int] = {actor.look.remote(_LOOK_SECONDS): i for i, actor in enumerate(self._actors)}
        failed, handed_on = math.inf, 0
        while looks:
            if len(self.signals.received) > handed_on:
                handed_on = len(self.signals.received)
                self._tell(signal.SIGKILL if self.signals.twice else signal.SIGTERM, ends)
            ready, _ = self.ray.wait(list(looks), num_returns=1, timeout=_LOOK_SECONDS)
            for reference in ready:
                index = looks.pop(reference)
                end = self._look(reference, index, given_up=failed == -math.inf)
                if end is None:
                    looks[self._actors[index].look.remote(_LOOK_SECONDS)] = index
                    continue
                ends[index] = end
                spoke, code = end.look.report is not None, None if end.gone else end.look.code
                if failed == math.inf and not (spoke and code in (ExitCode.DONE, ExitCode.PREEMPTED)):
                    failed = self.clock() + (_PATIENCE_SECONDS if spoke else _GRACE_SECONDS)
            if self.clock() > failed > -math.inf:
                failed = -math.inf
                self._tell(signal.SIGKILL, ends)
        return [ends[index] for index in sorted(ends)]

    def _look(self, reference: Any, index: int, *, given_up: bool) -> RankEnd | None:
        """Return the end of a rank if it has ended. Show the output of rank 0."""
        host = self._hosts[index]
        try:
            look: RankLook = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            return RankEnd(index, host, gone=_gone(error), given_up=given_up)
        if index == 0 and look.text:
            print(look.text, end="", flush=True)
        return None if look.code is None else RankEnd(index, host, look, given_up=given_up)

    def _tell(self, number: int, ends: Mapping[int, RankEnd]) -> None:
        for index, actor in enumerate(self._actors):
            if index not in ends:
                actor.tell.remote(int(number))

    def _end_actors(self) -> None:
        """End the actors and their ranks. Actors that are alive first remove their files."""
        closed = [actor.close.remote() for actor in self._actors]
        if closed:
            with contextlib.suppress(Exception):
                self.ray.wait(closed, num_returns=len(closed), timeout=_GRACE_SECONDS)
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor, no_restart=True)
        self._actors = []


class RankActor(EngineRank):
    """Actor with the process of one rank."""

    def place(self) -> str:
        """Return the address of this node."""
        import ray

        return str(ray.util.get_node_ip_address())


def _resources(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in numbers.items())


def _gone(error: Exception) -> str:
    said = " ".join(str(error).split())[:300]
    return f"was lost with its actor: {said}"
