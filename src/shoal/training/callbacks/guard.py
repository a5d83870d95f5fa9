"""ModelGuard: context of a callback's hook that restores the model afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from shoal.checkpoint.whole_optimizer import parts, rates_seen
from shoal.errors import JobError, ShoalError
from shoal.numerics.generators import generators_kept
from shoal.numerics.python_state import OF_TORCH, same_bits
from shoal.parallel.model.sharded_model import ShardedModel, local

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
