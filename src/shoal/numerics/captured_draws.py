"""Random numbers of a step that a CUDA graph replays: the same bits as in a step without a graph.

The numbers are a hash of the samples' keys (see `hashed_draws`). A replay runs no Python, so the keys are in a tensor
that receives the step's keys before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.numerics import device_reads
from shoal.numerics.generators import seed_torch
from shoal.numerics.grain_randomness import GrainScope, Sites
from shoal.numerics.hashed_draws import SampleKeys, Site, element_keys, site_key
from shoal.plans.grains import Grain, random_key


class NotCapturableError(Exception):
    """Error for a step that no graph can replay; the message gives the reason."""


class _ReplayedKeys(SampleKeys):
    """Keys in tensors whose memory lasts as long as this object."""

    on_host = False

    def __init__(self, seed: int, grains: Sequence[Grain], device: torch.device) -> None:
        super().__init__(seed, 0, grains)
        self._own = torch.zeros(2, sum(grain.size for grain in grains), dtype=torch.int32, device=device)
        self._sites: dict[Site, Tensor] = {}
        self._elements: dict[int, Tensor] = {}

    def fill(self, step: int) -> None:
        """Copy the keys of a step into the tensor that a graph reads."""
        device_reads.send(SampleKeys(self._seed, step, self._grains).rows(torch.device("cpu")), self._own)

    def rows(self, device: torch.device) -> Tensor:
        if device.type != self._own.device.type:
            raise NotCapturableError("it draws random numbers on the host")
        return self._own

    def at(self, site: Site, device: torch.device) -> Tensor:
        if site not in self._sites:
            self._sites[site] = site_key(*site, device)
        return self.rows(device) ^ self._sites[site]

    def columns(self, elements: int, device: torch.device) -> Tensor:
        if elements not in self._elements:
            self._elements[elements] = element_keys(elements, device)
        return self._elements[elements]


class CapturedScope(GrainScope):
    """GrainScope with keys that are filled in anew for each step. Each forward must draw as the first one does."""

    def __init__(
        self, seed: int, grains: Sequence[Grain], device: torch.device, names: Mapping[nn.Module, str] | None = None
    ) -> None:
        self._replayed = _ReplayedKeys(seed, grains, device)
        super().__init__(seed, 0, grains, names, keys=self._replayed)
        self._seed, self._names = seed, names or {}
        self._first: list[tuple[Site, ...]] = []

    def seed(self, step: int) -> None:
        """Fill in the keys of a step, and leave the global generators as a GrainScope leaves them."""
        self.key = random_key(self._seed, "model", step)
        self._replayed.fill(step)
        seed_torch(self.key)
        torch.empty(len(self._first), dtype=torch.int64).random_()

    def __enter__(self) -> CapturedScope:
        self.sites = Sites(self.key, self._names)
        torch.default_generator.manual_seed(self.key)
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: object) -> None:
        TorchFunctionMode.__exit__(self, *error)
        if error[0] is None:
            self._first = self._first or self.sites.in_order
            if self._first != self.sites.in_order:
                raise NotCapturableError("it does not draw as often in each forward")

    def generators(self, func: Any, device: torch.device) -> list[torch.Generator]:
        """Raise NotCapturableError, because a generator has a state of its own."""
        name = getattr(func, "__name__", func)
        fused = " with dropout in a fused kernel" if name == "scaled_dot_product_attention" else ""
        raise NotCapturableError(f"it draws random numbers by {name}{fused}, which are no hash of the step")
