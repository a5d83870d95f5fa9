"""Calls of a run's callbacks: isolated from the training, with reports of failures and requests to all ranks.

`ModelGuard` restores the model after a hook. `HookBarrier` is a barrier of all ranks within a hook, which detects ranks
with a hook that has raised or ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from shoal.checkpoint.keeper import RunState
from shoal.checkpoint.state import TENSOR, encode
from shoal.checkpoint.whole_optimizer import parts, rates_seen
from shoal.distributed.collectives.shared_memory.peers import has_ended
from shoal.distributed.failures import as_shoal_error, is_lost_peer
from shoal.distributed.mesh import COLLECTIVE_TIMEOUT, Mesh, raise_together
from shoal.errors import JobError, PeerError, ShoalError, UserCodeError, first_line, text_of
from shoal.jobs.user_errors import place_of
from shoal.numerics.generators import generators_kept
from shoal.numerics.python_state import OF_TORCH, same_bits
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.runs.attempts import Events
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import (
    CHECKPOINT,
    END,
    EVALUATE,
    FAILED,
    Callback,
    Ending,
    RunControl,
    RunFacts,
    overrides,
    refuse_own,
)
from shoal.training.callbacks.ema import EMA

_CHUNK = 1 << 22  # elements per chunk of a checksum: 32 MiB


class Meddled(Exception):  # noqa: N818 - it carries the error
    """Change of a parameter, buffer or learning rate by a hook."""

    def __init__(self, error: ShoalError) -> None:
        self.error = error


class _Armed(NamedTuple):
    """The model before a hook that may access it, and the handle that detects forwards."""

    modes: list[tuple[nn.Module, bool]]
    buffers: list[tuple[str, Tensor, Tensor]]
    numbers: dict[str, object]
    forwards: RemovableHandle


class ModelGuard:
    """Context of a hook that restores generators, modes and buffers, and detects changed parameters and rates.

    A forward in the hook may change buffers. A hook without a forward must not change them.
    """

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._device = model, model.mesh.device
        self._rated, self._has_run = tuple(parts(optimizer).values()), False
        self._armed: _Armed | None = None
        self._inside = False
        # A callback may keep a reference, and use it in any later hook.
        self._has_model = self._has_parameters = False
        self.set_numbers: set[str] = set()  # attributes of the model that hooks have set
        self._sums: list[int] = []

    def gives(self, what: str) -> None:
        """Watch the "model" or its "parameters" from now on, before a hook gets them."""
        if not self._has_parameters:
            self._has_parameters = True
            if self._inside:
                self._sums = self._sums_now()
        if what == "model":
            self._has_model = True
            self._arm()

    def _arm(self) -> None:
        if not self._inside or self._armed is not None:
            return
        modes = [(module, module.training) for module in self._model.model.modules()]
        buffers = [(name, b, b.detach().clone()) for name, b in self._model.buffers()]
        self._armed = _Armed(modes, buffers, self._numbers(), register_module_forward_pre_hook(self._runs))

    def _seen(self) -> dict[str, tuple[int, bool, int]]:
        """Return torch's version counter, requires_grad and identity of each parameter."""
        return {
            name: (getattr(p, "_local_tensor", p)._version, p.requires_grad, id(p))
            for name, p in self._model.parameters()
        }

    def _numbers(self) -> dict[str, object]:
        """Return plain attributes of the model's modules that are numbers or texts."""
        return {
            f"{prefix}.{name}".removeprefix("."): value
            for prefix, module in self._model.model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str) and name != "training" and name not in OF_TORCH
        }

    def _runs(self, module: nn.Module, inputs: object) -> None:
        self._has_run = True

    def _sums_now(self) -> list[int]:
        """Return a checksum of each parameter, since torch does not count changes through `p.data`."""
        sums = [_checksum(local(p)) for _, p in self._model.parameters()]
        return torch.stack(sums).tolist() if sums else []

    @contextlib.contextmanager
    def around(self, key: str, hook: str) -> Iterator[None]:
        """Return a context around one hook. Raises: Meddled if the hook has changed parameters, buffers or rates."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        before, rates, self._inside, self._has_run = self._seen(), rates_seen(self._rated), True, False
        if self._has_parameters:
            self._sums = self._sums_now()
        if self._has_model:
            self._arm()
        try:
            with torch.no_grad(), generators_kept():
                yield
        finally:
            self._inside = False
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)
            # Restore modes and buffers. `written`: the first buffer that the hook has changed without a forward.
            armed, self._armed, written = self._armed, None, None
            if armed is not None:
                armed.forwards.remove()
                if not self._has_run:
                    numbers = self._numbers().items()
                    self.set_numbers |= {name for name, value in numbers if armed.numbers.get(name) != value}
                for module, training in armed.modes:
                    module.training = training
                with torch.no_grad():
                    # All buffers: torch's version counter misses writes of batch statistics.
                    for name, buffer, value in armed.buffers:
                        if written is None and not self._has_run and not same_bits(buffer, value):
                            written = name
                        buffer.copy_(value)
        if rates != rates_seen(self._rated):
            raise Meddled(
                JobError(
                    given=f"callback {key}, whose {hook} changes a learning rate of the optimizer",
                    conflict="callbacks do not train: before each step shoal sets the rates by the job's schedule, and "
                    "this change would have no effect",
                    remedy="write Job(schedule=shoal.Schedule(torch.optim.lr_scheduler.StepLR, step_size=30)), or a "
                    "function of progress; for rates that follow a loss use a loop of your own with shoal.Session",
                )
            )
        # The first parameter that the hook has changed.
        now = self._seen()
        changed = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
        if changed is None and self._has_parameters:
            sums = zip(now, self._sums, self._sums_now(), strict=True)
            changed = next((name for name, was, now_is in sums if was != now_is), None)
        if changed is None and written is not None:
            raise Meddled(
                JobError(
                    given=f"callback {key}, whose {hook} changes the buffer {written}",
                    conflict="callbacks do not train: buffers are put back after each hook, and this change would have "
                    "no effect",
                    remedy="change the buffer in the model's forward, or keep the value in a plain attribute that "
                    "on_start and on_step set from run.step",
                )
            )
        if changed is not None:
            raise Meddled(
                JobError(
                    given=f"callback {key}, whose {hook} changes {changed}",
                    conflict="callbacks do not train: a change in place is in no gradient, and other layouts would not "
                    "make it",
                    remedy="change parameters in the optimizer's step (an optimizer hook), or by "
                    "torch.nn.utils.parametrize in the model",
                )
            )


def _checksum(tensor: Tensor) -> Tensor:
    """Return the int64 [] sum of a tensor's bits, weighted by position so that changed signs and orders show."""
    own = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()]
    bits = own.view(kind).reshape(-1)
    weights = torch.arange(1, 2 * min(bits.numel(), _CHUNK) + 1, 2, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = 3 * total + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total


# States of a rank: waiting within a hook, hook ended, hook raised, or gone and calling no more hooks.
_WAITS, _ENDED, _RAISED, _GONE = "waits", "ended", "raised", "gone"
_SOONEST_SECONDS, _LATEST_SECONDS = 0.0005, 0.02


class MissingRankError(JobError):
    """Error at a barrier that another rank does not reach. `derived`: that rank's hook raised, which is the cause."""

    def __init__(self, *, given: str, conflict: str, remedy: str, derived: bool = False) -> None:
        super().__init__(given=given, conflict=conflict, remedy=remedy)
        self.derived = derived


class HookBarrier:
    """Barrier within a hook, through the ranks' key-value store.

    A collective would wait for a rank after an error in its hook. Instead, each rank writes its state when a hook ends,
    which costs some microseconds and no wait. Only ranks at a barrier wait. They also watch the other processes of
    their own host, since without a launcher nobody else does.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh, self._store = mesh, mesh.store if mesh is not None else None
        self._hook = self._calls = 0  # hooks that have begun, the same number on all ranks; barriers within this hook
        self._raised = 0  # number of the last hook that raised
        self._met = (0, 0)  # hook and number of the last barrier that this rank has passed
        self._gone = False
        if self._mesh is not None and self._store is not None:
            process = [self._mesh.host, _process_numbers(), os.getpid()]
            self._store.set(f"process {self._mesh.rank}", json.dumps(process))

    def begin(self) -> None:
        """Record the beginning of a hook."""
        self._hook, self._calls = self._hook + 1, 0

    def end(self, raised: bool) -> None:
        """Record the end of a hook, with or without an error."""
        self._raised = self._hook if raised else self._raised
        self._say(_RAISED if raised else _ENDED)

    def leave(self) -> None:
        """Record that an error ends this rank, which reaches no barrier any more."""
        self._gone = True
        self._say(_GONE)

    def _say(self, how: str) -> None:
        if self._mesh is not None and self._store is not None:
            how = _GONE if self._gone else how
            with contextlib.suppress(dist.DistError, RuntimeError):  # rank 0 is gone, and has its own error
                row = [self._hook, self._calls, how, self._raised, self._met]
                self._store.set(str(self._mesh.rank), json.dumps(row))

    def wait(self, what: str) -> None:
        """Wait until every rank is at the same barrier. `what`: the call that waits, for messages.

        With one rank this returns at once. Raises: MissingRankError, on every waiting rank, if a rank will not come;
        PeerError if its process has ended.
        Collective: all ranks' hooks.
        """
        if self._mesh is None or self._store is None:
            return
        self._calls += 1
        self._say(_WAITS)
        pause, until = _SOONEST_SECONDS, time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
        ahead = [rank for rank in range(self._mesh.world_size) if rank != self._mesh.rank]
        while ahead:
            ahead = [rank for rank in ahead if not self._has_come(self._store, rank, what)]
            for rank in ahead:
                if not self._store.check([f"process {rank}"]):
                    continue
                host, numbers, pid = json.loads(self._store.get(f"process {rank}"))
                is_visible = (host, numbers) == (self._mesh.host, _process_numbers())
                if is_visible and has_ended(pid) and not self._has_come(self._store, rank, what):
                    raise PeerError(
                        given=f"rank {rank} (process {pid})",
                        conflict=f"it ended while rank {self._mesh.rank} waited for it in {what}",
                        remedy="look at what that rank said; --resume goes on from the newest checkpoint",
                    )
            if ahead and time.monotonic() > until:
                raise _missing(what, self._mesh.rank, ahead[0], "has not come within 10 minutes")
            time.sleep(pause if ahead else 0.0)
            pause = min(2 * pause, _LATEST_SECONDS)
        self._met = self._hook, self._calls

    def _has_come(self, store: Store, rank: int, what: str) -> bool:
        """Return True if a rank is at this rank's barrier. Raises: MissingRankError if it will not come."""
        if not store.check([str(rank)]):
            return False
        hook, calls, how, raised, met = json.loads(store.get(str(rank)))
        if tuple(met) >= (self._hook, self._calls) or (hook == self._hook and calls >= self._calls):
            return True
        assert self._mesh is not None, "there is a store"
        if how == _GONE or raised == self._hook:
            raise _missing(what, self._mesh.rank, rank, "has raised before it", derived=True)
        if hook > self._hook or (hook == self._hook and how == _ENDED):
            raise _missing(what, self._mesh.rank, rank, "has ended its hook without it")
        return False


def _process_numbers() -> str:
    """Return the namespace of process ids, since containers on one host may have their own."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _missing(what: str, here: int, there: int, why: str, **more: Any) -> MissingRankError:
    return MissingRankError(
        given=f"{what} in a hook of rank {here}",
        conflict=f"it gathers from all ranks, and rank {there} {why}",
        remedy=f"call {what} in the same hook of every rank, and do what is for one rank with the result",
        **more,
    )


_ASKING = ("on_start", "on_step", "on_evaluation", "on_checkpoint")


@dataclass(frozen=True)
class Settled:
    """Requests that all ranks follow now; `end`: the callback, reason and step of a requested end."""

    evaluate: bool = False
    checkpoint: bool = False
    end: dict[str, Any] | None = None


class ActiveCallbacks:
    """One rank's callbacks, the failures that the ranks have not shared yet, and the keys that are switched off."""

    def __init__(self, callbacks: Sequence[Callback], mesh: Mesh | None) -> None:
        """Raise JobError for callbacks that conflict, or that have hooks outside of their classes."""
        self.all, self._mesh = list(callbacks), mesh
        seen: Counter[str] = Counter()
        for callback in self.all:
            refuse_own(callback)
            name = type(callback).__name__
            seen[name] += 1
            callback.key = name if seen[name] == 1 else f"{name}-{seen[name]}"
        if seen["EMA"] > 1:
            raise JobError(
                given=f"{seen['EMA']} callbacks EMA",
                conflict="a checkpoint has one average of the weights",
                remedy="keep one of them, or write a Callback with parameter_tensors() for the others",
            )
        self.state = RunState()
        # Agreed on all ranks. Until then a failed callback is still called: its hook may gather from all ranks.
        self.off: set[str] = set()
        self.failures: list[dict[str, Any]] = []
        self.errors: dict[str, ShoalError] = {}  # of required callbacks, by key

    def with_hook(self, hook: str) -> list[Callback]:
        """Return the active callbacks whose class overrides a hook."""
        return [c for c in self.all if c.key not in self.off and overrides(c, hook)]

    def fail(self, callback: Callback, hook: str, error: BaseException) -> None:
        """Record that a hook has raised. Only the first failure of a callback counts until the ranks share it."""
        rank, host = (self._mesh.rank, self._mesh.host) if self._mesh is not None else (0, "")
        said = f"{type(error).__name__}: {first_line(error, 300)}{place_of(error)}"
        if any(failure["key"] == callback.key for failure in self.failures):
            return
        derived = isinstance(error, MissingRankError) and error.derived
        self.failures.append(
            {
                "key": callback.key,
                "hook": hook,
                "step": self.state.step,
                "where": f"rank {rank} on {host}" if host else f"rank {rank}",
                "said": said,
                "derived": derived,
            }
        )
        if callback.required and not derived:
            own = error if isinstance(error, ShoalError) else _error_of_hook(callback, hook, said, error)
            self.errors[callback.key] = own


class CallbackStates:
    """The callbacks of a run as checkpoints see them: states, tensors like the parameters, and `on_checkpoint`."""

    def __init__(self, active: ActiveCallbacks, saved: Callable[[Path | str], None]) -> None:
        self._active, self.saved = active, saved
        self.model: ShardedModel | None = None  # until the run has begun
        self.note: Callable[[str], None] = lambda line: None
        self._warned: set[str] = set()

    def states(self) -> dict[str, Mapping[str, Any]]:
        """Return the states of the active callbacks by key. A state that cannot be saved counts as a failure."""

        def refuse_unsaveable(key: str, state: Mapping[str, Any]) -> None:
            encode(state, key, "callback", lambda path, tensor: {TENSOR: path})

        return self._collected("state_dict", refuse_unsaveable)

    def parameter_tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the parameter tensors of the active callbacks by key. Invalid tensors count as a failure."""
        if self.model is None:
            return {}
        shapes = {name: local(p).shape for name, p in self.model.parameters()}

        def refuse_uncut(key: str, tensors: Mapping[str, Any]) -> None:
            for name, tensor in tensors.items():
                if name not in shapes or not isinstance(tensor, Tensor) or tensor.shape != shapes[name]:
                    is_tensor = isinstance(tensor, Tensor)
                    got = f"of shape {list(tensor.shape)}" if is_tensor else f"of type {type(tensor).__name__}"
                    own = f"that parameter has {list(shapes[name])} here" if name in shapes else ""
                    raise UserCodeError(
                        given=f"parameter_tensors() with {name!r} {got}",
                        conflict=own or "no parameter has that name",
                        remedy="give a tensor for names and shapes of run.parameters() alone; others go into "
                        "state_dict()",
                    )

        return self._collected("parameter_tensors", refuse_uncut)

    def _collected(self, method: str, refuse: Callable[[str, Mapping[str, Any]], None]) -> dict[str, Mapping[str, Any]]:
        values: dict[str, Mapping[str, Any]] = {}
        for callback in self._active.with_hook(method):
            try:
                own = dict(getattr(callback, method)())
                refuse(callback.key, own)
                values[callback.key] = own
            except Exception as error:
                self._active.fail(callback, method, error)
        return values

    def restore(self, states: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Restore states, and return lines about callbacks without one. Raises: UserCodeError if a callback cannot."""
        mine = {callback.key: callback for callback in self._active.all}
        for key, callback in mine.items():
            try:
                if key in states:
                    callback.load_state_dict(states[key])
                if key in tensors:
                    callback.load_parameter_tensors(tensors[key])
            except ShoalError:
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {text_of(error)}"
                raise _error_of_hook(callback, "load_state_dict", said, error) from error
        stateful = {k for k, c in mine.items() if overrides(c, "state_dict") or overrides(c, "parameter_tensors")}
        saved = states.keys() | tensors.keys()
        lines = [f"callback {key} begins anew: the checkpoint has no state of it" for key in sorted(stateful - saved)]
        return lines + [
            f"the state of callback {key} is left: this job has no such callback" for key in sorted(saved - mine.keys())
        ]

    def differ(self, digests: Sequence[Mapping[str, str] | None]) -> list[str]:
        """Note and return, once, lines about callbacks with different states on ranks, from all ranks' digests."""
        known = [own for own in digests if own is not None]
        lines = []
        for key in [k for k in (known[0] if known else {}) if k not in self._warned]:
            ranks = [str(rank) for rank, own in enumerate(digests) if own is not None and own.get(key) != known[0][key]]
            if ranks:
                self._warned.add(key)
                lines.append(
                    f"callback {key} has another state on rank {', '.join(ranks)} than on rank 0, whose is kept; "
                    "write a state that follows from steps and metrics alone"
                )
        for line in lines:
            self.note(line)
        return lines


class CallbackCalls:
    """Caller of one rank's callbacks. `unagreed`: True if requests are possible since the last agreement."""

    def __init__(self, callbacks: Sequence[Callback] = (), mesh: Mesh | None = None) -> None:
        """Raise JobError for callbacks that conflict, or that have hooks outside of their classes."""
        self._active = ActiveCallbacks(callbacks, mesh)
        self.for_checkpoints = CallbackStates(self._active, lambda folder: self._call("on_checkpoint", folder))
        self._run: RunControl | None = None
        self._barrier = HookBarrier(None)
        self._noted: set[str] = set()  # keys of callbacks with a note about state that a resume lacks
        self.unagreed = False
        self.meddled: str | None = None  # why the model no longer matches the state, and must not be saved

    def __len__(self) -> int:
        return len(self._active.all)

    def begin(
        self,
        facts: RunFacts,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        build: Callable[[], nn.Module],
        *,
        note: Callable[[str], None],
        events: Events,
    ) -> None:
        """Create the callbacks' RunControl, before the first step."""
        self._guard = ModelGuard(model, optimizer)
        if model.divides_state:  # otherwise nothing is gathered
            self._barrier = HookBarrier(model.mesh)
        self._run = RunControl(
            facts,
            model,
            build,
            gives=self._guard.gives,
            print_line=note,
            events=events,
            barrier=self._barrier,
            state=lambda: self._active.state,
        )
        self.for_checkpoints.model, self.for_checkpoints.note = model, self._run.note

    def start(self, state: RunState) -> None:
        """Call `on_start`, before the first step."""
        self._active.state = state
        self._call("on_start")
        self.for_checkpoints.states()  # a state that cannot be saved fails now, not at the first checkpoint
        self.for_checkpoints.parameter_tensors()
        self.unagreed |= bool(self._active.failures)

    def stepped(self, state: RunState, record: StepRecord, *, late: bool = False) -> None:
        """Call `on_step`. `late`: the next step is already queued, so that the model matches neither step."""
        self._active.state = state
        if self._run is not None:
            self._run.late = late
        try:
            self._call("on_step", record)
        finally:
            if self._run is not None:
                self._run.late = False

    @property
    def always_at_once(self) -> bool:
        """True if some `on_step` always has to run before the next step. The same on all ranks: classes decide it."""
        stepping = self._active.with_hook("on_step")
        return any(not (type(c).watches_only and overrides(c, "at_once")) for c in stepping)

    def num_late(self, step: int, most: int) -> float:
        """Return for how many steps, from `step` on (counted from 1), the `on_step` hooks may run late.

        The count ends before the first step at which a callback wants to run at once, and at `most`; without an
        `on_step` it is infinity. It is this rank's alone: ranks have to agree on the minimum.
        """
        stepping = self._active.with_hook("on_step")
        if not stepping:
            return math.inf
        for number in range(most):
            for callback in stepping:
                try:
                    at_once = not type(callback).watches_only or bool(callback.at_once(step + number))
                except (Exception, SystemExit) as error:
                    if is_lost_peer(error):
                        raise
                    self._active.fail(callback, "at_once", error)
                    at_once = True
                if at_once:
                    return number
        return most

    def evaluated(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluation`."""
        self._active.state = state
        self._call("on_evaluation", dict(metrics))

    def conclude(self, mesh: Mesh, status: str, metrics: Mapping[str, float], by: Mapping[str, Any] | None) -> None:
        """Call `on_end` of a training without error, and report failures since the last step.

        Raises: as `settle`.
        Collective: all ranks, if there are callbacks.
        """
        if self._active.all:
            self._call("on_end", Ending(status, self._active.state.step, dict(metrics), by["reason"] if by else None))
            self.settle(mesh, 0)

    def end(
        self,
        status: str,
        metrics: Mapping[str, float] | None = None,
        *,
        reason: str | None = None,
        error: Exception | None = None,
    ) -> ShoalError | None:
        """Call `on_end` without a meeting of the ranks, note failures, and return a required callback's error.

        `error`: why the training has failed, maybe on this rank alone.
        """
        if self._run is None:
            return None
        shown = as_shoal_error(error) if error is not None else None
        if shown is not None and not shown.everywhere:
            self._run.failed_alone = True
            self._barrier.leave()
        text = str(shown) if shown is not None else None
        before = len(self._active.failures)
        with contextlib.suppress(JobError):  # a hook that changes the model: nothing reads the model any more
            self._call("on_end", Ending(status, self._active.state.step, metrics or {}, reason, text))
        failures, errors = self._active.failures[before:], self._active.errors
        for failure in failures:
            self._run.note(f"callback {failure['key']} raised in on_end on {failure['where']}: {failure['said']}")
        return next((errors[failure["key"]] for failure in failures if failure["key"] in errors), None)

    def _call(self, hook: str, *arguments: Any) -> None:
        if self._run is None:
            return
        for callback in self._active.all:
            if callback.key in self._active.off or not overrides(callback, hook):
                continue
            if hook in _ASKING and not type(callback).watches_only:
                self.unagreed = True
            self._run.caller = callback
            self._barrier.begin()
            raised = True
            try:
                with self._guard.around(callback.key, hook):
                    getattr(callback, hook)(self._run, *arguments)
                raised = False
                # Attributes of the model that the callback sets, and that a resumed run would not have.
                names, self._guard.set_numbers = sorted(self._guard.set_numbers), set()
                restores = overrides(callback, "on_start") or overrides(callback, "load_state_dict")
                if names and not restores and callback.key not in self._noted:
                    self._noted.add(callback.key)
                    self._run.note(
                        f"callback {callback.key} sets {names[0]} of the model, which is in no checkpoint: a resumed "
                        "run begins with the value of model(); set it in on_start, too, from run.step"
                    )
            except Meddled as error:  # raise at once: nothing may be computed or saved with this model
                self.meddled = f"callback {callback.key} has changed the model"
                raise error.error from None
            except (Exception, SystemExit) as error:
                if is_lost_peer(error):
                    raise
                self._active.fail(callback, hook, error)
            finally:
                self._barrier.end(raised)
                self._run.caller = None

    @property
    def request_bits(self) -> int:
        """Bits of the requests of this rank's callbacks."""
        return (self._run.request_bits if self._run is not None else 0) | (FAILED if self._active.failures else 0)

    def settle(self, mesh: Mesh, request_bits: int) -> Settled:
        """Return the requests of all ranks' callbacks, the same on all ranks; switch off callbacks that raised.

        Raises: on every rank, the error of a required callback.
        Collective: all ranks, one or two JSON gathers.
        """
        run, active = self._run, self._active
        reasons = dict(run.reasons) if run is not None else {}
        rows = mesh.gather_json({"failures": active.failures, "reasons": reasons})
        failures = sorted((f for row in rows for f in row["failures"]), key=lambda f: bool(f["derived"]))
        active.failures = []
        if run is not None:
            run.request_bits = 0
            run.reasons.clear()
        lost = {f["key"]: f for f in reversed(failures) if f["key"] not in active.off}
        active.off |= lost.keys()
        if any(callback.required for callback in active.all if callback.key in lost):
            raise_together(mesh, next((active.errors[key] for key in lost if key in active.errors), None))
        for key, failure in reversed(lost.items()):
            if run is not None:
                run.note(
                    f"callback {key} raised in {failure['hook']} after step {failure['step']} on {failure['where']}: "
                    f"{failure['said']}; it is switched off on all ranks, and the training goes on"
                )
        end = None
        if request_bits & END:
            key, reason = next(iter((k, r) for row in rows for k, r in row["reasons"].items()), ("", ""))
            end = {"callback": key, "reason": reason, "step": active.state.step}
        return Settled(bool(request_bits & EVALUATE), bool(request_bits & CHECKPOINT), end)

    @property
    def average(self) -> EMA | None:
        """The callback with averaged weights that are evaluated as well, or None."""
        for callback in self._active.all:
            if isinstance(callback, EMA) and callback.evaluate and callback.key not in self._active.off:
                return callback
        return None


def _error_of_hook(callback: Callback, hook: str, said: str, error: BaseException) -> ShoalError:
    if isinstance(error, Exception) and isinstance(as_shoal_error(error), MemoryError):
        return as_shoal_error(error)
    return UserCodeError(
        given=f"callback {callback.key}",
        conflict=f"its {hook} raised {said}",
        remedy="mend it, or leave it out; required = False lets the training go on without it",
    )
