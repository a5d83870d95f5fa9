"""Calls of a run's callbacks: isolated from the training, failures named, requests followed by all ranks at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.run_state import RunState
from shoal.distributed.agreement import raise_together
from shoal.distributed.failures import as_shoal_error, is_lost_peer, place_of
from shoal.distributed.mesh import Mesh
from shoal.errors import JobError, ShoalError, UserCodeError
from shoal.numerics.isolation import generators_kept
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.runs.records import StepRecord
from shoal.training.callbacks.base import (
    CHECKPOINT,
    END,
    EVALUATE,
    FAILED,
    Callback,
    Ending,
    Limbs,
    RunControl,
    RunFacts,
    overrides,
    refuse_own,
)
from shoal.training.callbacks.ema import EMA

_CHUNK = 1 << 22  # elements of which a checksum is taken at once: 32 MiB each time
_ASKING = ("on_start", "on_step", "on_evaluation", "on_checkpoint")


@dataclass(frozen=True)
class Settled:
    """Requests that all ranks follow now; `end`: by whom and why."""

    evaluate: bool = False
    checkpoint: bool = False
    end: dict[str, Any] | None = None


class CallbackCalls:
    """Calls the callbacks of one rank. `unagreed`: some may have asked for something since the ranks last agreed."""

    def __init__(self, callbacks: Sequence[Callback] = (), mesh: Mesh | None = None) -> None:
        """Raises: JobError for callbacks that cannot be together, or whose hooks are not those of their classes."""
        self._callbacks, self._mesh = list(callbacks), mesh
        seen: Counter[str] = Counter()
        for callback in self._callbacks:
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
        self._run: RunControl | None = None
        # As agreed: one that has raised is called until then, since its hook may gather something of all ranks.
        self._off: set[str] = set()
        self._failures: list[dict[str, Any]] = []
        self._errors: dict[str, ShoalError] = {}
        self._warned: set[str] = set()
        self._state = RunState()
        self.unagreed = False
        self.meddled: str | None = None  # why the model is not that of the state any more, and may not be saved

    def __len__(self) -> int:
        return len(self._callbacks)

    # ---------------------------------------------------------------------------------------------------- the hooks
    def begin(
        self, facts: RunFacts, model: ShardedModel, build: Callable[[], nn.Module], note: Callable[[str], None]
    ) -> None:
        """Gives the callbacks their run, before the first step."""
        self._guard = _Guard(model)
        self._run = RunControl(facts, Limbs(model, build, self._guard.gives, note), lambda: self._state)

    def start(self, state: RunState) -> None:
        """Before the first step."""
        self._state = state
        self._call("on_start")

    def stepped(self, state: RunState, record: StepRecord) -> None:
        """After a step."""
        self._state = state
        self._call("on_step", record)

    def evaluated(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""
        self._state = state
        self._call("on_evaluation", dict(metrics))

    def saved(self, folder: Path) -> None:
        """After a checkpoint was taken."""
        self._call("on_checkpoint", folder)

    def conclude(self, mesh: Mesh, status: str, metrics: Mapping[str, float], by: Mapping[str, Any] | None) -> None:
        """At the end of a training that has ended as it should; names what has failed since the last step.

        Collective: all ranks, where there are callbacks. Raises: as `settle`.
        """
        if self._callbacks:
            self._call("on_end", Ending(status, self._state.step, dict(metrics), by["reason"] if by else None))
            self.settle(mesh, 0)

    def failed(self, error: Exception) -> None:
        """At the end of a training that has failed."""
        ending = Ending("failed", self._state.step, {}, error=str(as_shoal_error(error)))
        with contextlib.suppress(JobError):  # of a hook that changes the model: the run has failed as it is
            self._call("on_end", ending)

    def _call(self, hook: str, *arguments: Any) -> None:
        if self._run is None:
            return
        for callback in self._callbacks:
            if callback.key in self._off or not overrides(callback, hook):
                continue
            if hook in _ASKING and not type(callback).watches_only:
                self.unagreed = True
            self._run.caller = callback
            try:
                with self._guard.around(callback.key, hook):
                    getattr(callback, hook)(self._run, *arguments)
            except _Meddled as error:  # at once: nothing may be computed or saved with it
                self.meddled = f"callback {callback.key} has changed the model"
                raise error.told from None
            except (Exception, SystemExit) as error:
                if is_lost_peer(error):
                    raise
                self._fail(callback, hook, error)
            finally:
                self._run.caller = None

    def _fail(self, callback: Callback, hook: str, error: BaseException) -> None:
        step, text = self._state.step, next(iter(str(error).strip().splitlines()), "")[:300]
        rank, host = (self._mesh.rank, self._mesh.host) if self._mesh is not None else (0, "")
        said = f"{type(error).__name__}: {text}{place_of(error)}"
        where = f"rank {rank} on {host}" if host else f"rank {rank}"
        if any(failure["key"] == callback.key for failure in self._failures):
            return
        self._failures.append({"key": callback.key, "hook": hook, "step": step, "where": where, "said": said})
        if callback.required:
            self._errors[callback.key] = (
                error if isinstance(error, ShoalError) else _raised(callback, hook, said, error)
            )

    # ------------------------------------------------------------------------------------------------- the requests
    @property
    def asked(self) -> int:
        """Bits of what this rank's callbacks ask for."""
        return (self._run.asked if self._run is not None else 0) | (FAILED if self._failures else 0)

    def settle(self, mesh: Mesh, asked: int) -> Settled:
        """Requests of any rank's callbacks, the same on all ranks; switches off callbacks that raised.

        Collective: all ranks, a JSON gather, or two. Raises: on every rank, the error of a required callback.
        """
        run = self._run
        reasons = dict(run.reasons) if run is not None else {}
        told = mesh.gather_json({"failures": self._failures, "reasons": reasons})
        failures = [failure for own in told for failure in own["failures"]]
        self._failures = []
        if run is not None:
            run.asked = 0
            run.reasons.clear()
        lost = {f["key"]: f for f in reversed(failures) if f["key"] not in self._off}
        self._off |= lost.keys()
        if any(callback.required for callback in self._callbacks if callback.key in lost):
            raise_together(mesh, next((self._errors[key] for key in lost if key in self._errors), None))
        for key, failure in reversed(lost.items()):
            if run is not None:
                run.note(
                    f"callback {key} raised in {failure['hook']} after step {failure['step']} on {failure['where']}: "
                    f"{failure['said']}; it is switched off on all ranks, and the training goes on"
                )
        end = None
        if asked & END:
            key, reason = next(iter((k, r) for own in told for k, r in own["reasons"].items()), ("", ""))
            end = {"callback": key, "reason": reason, "step": self._state.step}
        return Settled(bool(asked & EVALUATE), bool(asked & CHECKPOINT), end)

    # --------------------------------------------------------------------------------------------------- evaluation
    @property
    def average(self) -> EMA | None:
        """The callback whose averaged weights are evaluated as well, if any."""
        for callback in self._callbacks:
            if isinstance(callback, EMA) and callback.evaluate and callback.key not in self._off:
                return callback
        return None

    # -------------------------------------------------------------------------------------------------- checkpoints
    def states(self) -> dict[str, Mapping[str, Any]]:
        """Each callback's state, of those that are not switched off."""
        return self._gathered("state_dict")

    def parameter_tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Each callback's tensors of parameters, likewise."""
        return self._gathered("parameter_tensors")

    def _gathered(self, method: str) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for callback in (c for c in self._callbacks if c.key not in self._off and overrides(c, method)):
            try:
                found[callback.key] = dict(getattr(callback, method)())
            except Exception as error:
                self._fail(callback, method, error)
        return found

    def restore(self, states: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Takes up states; lines about those that are not. Raises: UserCodeError where a callback cannot."""
        mine = {callback.key: callback for callback in self._callbacks}
        for key, callback in mine.items():
            try:
                if key in states:
                    callback.load_state_dict(states[key])
                if key in tensors:
                    callback.load_parameter_tensors(tensors[key])
            except ShoalError:
                raise
            except Exception as error:
                raise _raised(callback, "load_state_dict", f"{type(error).__name__}: {error}", error) from error
        kept = {k for k, c in mine.items() if overrides(c, "state_dict") or overrides(c, "parameter_tensors")}
        saved = states.keys() | tensors.keys()
        lines = [f"callback {key} begins anew: the checkpoint has no state of it" for key in sorted(kept - saved)]
        return lines + [
            f"the state of callback {key} is left: this job has no such callback" for key in sorted(saved - mine.keys())
        ]

    def differ(self, digests: Sequence[Mapping[str, str] | None]) -> list[str]:
        """Lines about callbacks whose state is not the same on all ranks, from every rank's digests; each once."""
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
        if self._run is not None:
            for line in lines:
                self._run.note(line)
        return lines


def _raised(callback: Callback, hook: str, said: str, error: BaseException) -> ShoalError:
    if isinstance(error, Exception) and isinstance(as_shoal_error(error), MemoryError):
        return as_shoal_error(error)
    return UserCodeError(
        given=f"callback {callback.key}",
        conflict=f"its {hook} raised {said}",
        remedy="mend it, or leave it out; required = False lets the training go on without it",
    )


class _Meddled(Exception):  # noqa: N818 - it carries the error
    def __init__(self, told: ShoalError) -> None:
        self.told = told


class _Guard:
    """Context of a hook: generators, modes and buffers are afterwards as they were, and parameters have to be."""

    def __init__(self, model: ShardedModel) -> None:
        self._model, self._device = model, model.mesh.device
        self._armed: tuple[list[tuple[nn.Module, bool]], list[tuple[Tensor, Tensor]]] | None = None
        self._inside = False
        # A callback may keep what it was given once, and use it in any later hook.
        self._has_model = self._has_parameters = False
        self._sums: list[int] = []

    def gives(self, what: str) -> None:
        """Before a hook has the "model" or its "parameters"; they are watched from now on."""
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
        buffers = [(b, b.detach().clone()) for _, b in self._model.buffers()]
        self._armed = modes, buffers

    def _seen(self) -> dict[str, tuple[int, bool, int]]:
        """Of each parameter: torch's count of changes, whether it is trained, and which object it is."""
        return {
            name: (getattr(p, "_local_tensor", p)._version, p.requires_grad, id(p))
            for name, p in self._model.parameters()
        }

    def _sums_now(self) -> list[int]:
        """A checksum of each parameter: torch counts no change that is made through `p.data`."""
        sums = [_checksum(local(p)) for _, p in self._model.parameters()]
        return torch.stack(sums).tolist() if sums else []

    @contextlib.contextmanager
    def around(self, key: str, hook: str) -> Iterator[None]:
        """Around one hook. Raises: _Meddled where it has changed a parameter."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        before, self._inside = self._seen(), True
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
            self._put_back()
        changed = self._changed(before)
        if changed is not None:
            raise _Meddled(
                JobError(
                    given=f"callback {key}, whose {hook} changes {changed}",
                    conflict="callbacks do not train: a change in place is in no gradient, and other layouts would not "
                    "make it",
                    remedy="change parameters in the optimizer's step (an optimizer hook), or by "
                    "torch.nn.utils.parametrize in the model",
                )
            )

    def _changed(self, before: Mapping[str, tuple[int, bool, int]]) -> str | None:
        """The first parameter that is not as it was before a hook."""
        now = self._seen()
        changed = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
        if changed is None and self._has_parameters:
            sums = zip(now, self._sums, self._sums_now(), strict=True)
            changed = next((name for name, was, found in sums if was != found), None)
        return changed

    def _put_back(self) -> None:
        armed, self._armed = self._armed, None
        if armed is None:
            return
        for module, training in armed[0]:
            module.training = training
        with torch.no_grad():
            for buffer, kept in armed[1]:  # always: torch counts no version where batch statistics are written
                buffer.copy_(kept)


def _checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits, weighted by place so that changes of sign and order show; int64 []."""
    own = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()]
    bits = own.view(kind).reshape(-1)
    weights = torch.arange(1, 2 * min(bits.numel(), _CHUNK) + 1, 2, device=bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = 3 * total + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total
