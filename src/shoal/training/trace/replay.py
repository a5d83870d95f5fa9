"""Replay of traced steps in a Session whose loop is verified; see verification/traced_session.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.state import load_model, load_optimizer
from shoal.data.microbatch import Microbatch
from shoal.training.trace.traces import read, read_changes, write_changes

VARIABLE = "SHOAL_SESSION_TRACE"


@dataclass(frozen=True)
class Replay:
    """Trace settings of a verified Session: the first `num_steps` steps are traced to `folder`.

    `of`: the folder of a run on `world_size` ranks, from whose states each step starts. `grain_by_grain` and
    `backwards` change how a step is computed, and not what it means.
    """

    folder: str
    num_steps: int
    of: str | None = None
    world_size: int = 1
    grain_by_grain: bool = False
    backwards: bool = False

    @classmethod
    def told(cls, variables: Mapping[str, str]) -> Replay | None:
        """From the environment; None where nobody verifies."""
        text = variables.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def variables(self) -> dict[str, str]:
        """Environment variables with these settings."""
        return {VARIABLE: json.dumps(asdict(self))}

    def order(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        """The microbatches of a step in the order of this replay."""
        return reversed(list(microbatches)) if self.backwards else iter(microbatches)

    def note(self, step: int, model: nn.Module, after: Mapping[str, Tensor]) -> None:
        """Writes what the loop itself has changed of the model since `after`, the last update, and before `step`."""
        now = dict([*model.named_parameters(), *model.named_buffers()])
        changed = {name: t for name, t in now.items() if not torch.equal(t.detach().cpu(), after[name])}
        if changed:
            write_changes(Path(self.folder), step, changed)

    def start(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Sets the state that the run to replay had before `step`."""
        if self.of is not None:
            before = read(Path(self.of), step - 1, self.world_size)
            changed = read_changes(Path(self.of), step)
            load_model(model, {**before.phase("buffers"), **before.parameters, **changed})
            load_optimizer(optimizer, model, before.optimizer_tensors, before.optimizer)
