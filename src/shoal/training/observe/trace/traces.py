"""Traces of steps: a step's tensors under logical names, from a parallel run or from the reference.

`Replay` has the settings of a Session that computes the steps of another run's trace again.

A tensor's key is PHASE/NAME. The phases follow the dataflow of a step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.checkpoint.state import OptimizerDocument, load_model, load_optimizer
from shoal.data.loader import Microbatch
from shoal.numerics.operators import raw_bytes, row_runs
from shoal.numerics.precision import numbers

T = TypeVar("T")

# In the order of the dataflow. `backward` is each rank's own gradient, `reduction` the mean over all ranks.
PHASES = ("data", "forward", "loss", "backward", "reduction", "clipping", "update", "buffers", "metrics")
# The environment variable with which shoal.verify_session requests a trace or a replay from a Session.
VARIABLE = "SHOAL_SESSION_TRACE"

# Suffix of the optimizer's own tensors in the phase `update`.
_OPTIMIZER = " (optimizer)"


@dataclass(frozen=True)
class MicrobatchTrace:
    """Trace of one microbatch: its rank, grains, samples and loss."""

    rank: int
    grains: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    total: float
    weight: float


@dataclass
class StepTrace:
    """Trace of one step.

    `forward`: fingerprints as call name -> grain -> numbers, in the order of the calls. `gradients`: each rank's own.
    `tensors`: all other tensors by key. `skipped`: why the update was skipped, or None.
    """

    step: int
    parts: list[MicrobatchTrace] = field(default_factory=list)
    forward: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    weight: float = 0.0
    norm: float = 0.0
    factor: float = 1.0
    skipped: str | None = None
    optimizer: OptimizerDocument = field(default_factory=lambda: OptimizerDocument(state={}, groups=[]))
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    updates: dict[int, list[str] | None] = field(default_factory=dict)  # names by rank; None: every parameter
    divided: bool = False  # whether ranks have parts of the model
    owned: list[str] = field(default_factory=list)  # cut parameters that one rank updates whole

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters after the step."""
        return {name: t for name, t in self.phase("update").items() if not is_optimizer(name)}

    @property
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors after the step."""
        tensors = self.phase("update").items()
        return {name.removesuffix(_OPTIMIZER): t for name, t in tensors if is_optimizer(name)}

    @property
    def first_digests(self) -> dict[str, str]:
        """The digest of each key on the first rank that has it."""
        digests: dict[str, str] = {}
        for _, own in sorted(self.digests.items()):
            digests = {**own, **digests}
        return digests

    def strays(self) -> Iterator[tuple[int, str]]:
        """Yield rank and key of each tensor that a rank lacks, or has with another digest than the first rank."""
        first = self.first_digests
        for rank, own in sorted(self.digests.items()):
            for key in sorted(first):
                if own.get(key) == first[key]:
                    continue
                # A rank need not have a part of the model, or a parameter that other ranks update.
                may_lack, updates = self.divided, self.updates.get(rank)
                if not may_lack and updates is not None and (is_optimizer(key) or key.startswith("clipping/")):
                    may_lack = key.partition("/")[2].partition("/")[0] not in updates
                if key in own or not may_lack:
                    yield rank, key

    def phase(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one phase by name."""
        return {key.partition("/")[2]: t for key, t in self.tensors.items() if key.startswith(f"{name}/")}


def is_optimizer(name: str) -> bool:
    """Return True if a name under `update` belongs to the optimizer's own state."""
    return name.endswith(_OPTIMIZER)


def state_by_key(model: Mapping[str, T], parameters: Container[str], optimizer: Mapping[str, T]) -> dict[str, T]:
    """Return a training state by trace keys: values of the model, split by the names `parameters`, and optimizer."""
    of_model = {f"update/{name}" if name in parameters else f"buffers/{name}": value for name, value in model.items()}
    return of_model | {f"update/{name}{_OPTIMIZER}": value for name, value in optimizer.items()}


def fingerprint(tensor: Tensor, rows: list[int]) -> list[list[float]]:
    """Return four numbers for each run of rows: mean, root mean square, and the means of two regular subsets.

    The subsets detect elements that only change places. In means, rounding errors of many elements cancel.
    """
    fingerprints = []
    for part in row_runs(tensor, rows):
        flat = numbers(part).reshape(-1)
        if not len(flat):
            fingerprints.append([0.0] * 4)
            continue
        parts = [
            flat.mean(),
            flat.square().mean().sqrt(),
            flat[::3].mean(),
            flat[1::7].mean() if len(flat) > 1 else flat[0],
        ]
        fingerprints.append(torch.stack(parts).tolist())
    return fingerprints


def identical(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_bytes(a), raw_bytes(b))


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()


FACTS = ("loss", "weight", "norm", "factor", "skipped", "optimizer", "divided", "owned")


def write(folder: Path, trace: StepTrace, rank: int) -> None:
    """Write one rank's view of a step: own gradients, forward and digests; on rank 0 the whole tensors, too."""
    tensors = {f"gradient/{name}": t for name, t in trace.gradients.get(rank, {}).items()}
    if rank == 0:
        tensors |= {f"tensor/{key}": t for key, t in trace.tensors.items()}
    save_file(
        {k: t.detach().cpu().contiguous() for k, t in tensors.items()}, folder / f"step-{trace.step}-{rank}.safetensors"
    )
    facts = {
        "parts": [vars(part) for part in trace.parts],
        "forward": trace.forward,
        "digests": trace.digests.get(rank, {}),
        "updates": trace.updates.get(rank),
        **{k: getattr(trace, k) for k in FACTS},
    }
    (folder / f"step-{trace.step}-{rank}.json").write_text(json.dumps(facts), encoding="utf-8")


def read(folder: Path, step: int, world_size: int, tensors: bool = True) -> StepTrace:
    """Read a step's trace of all ranks, with its tensors or only their digests."""
    whole = StepTrace(step)
    for rank in reversed(range(world_size)):  # rank 0 last: its values of shared facts win
        facts = json.loads((folder / f"step-{step}-{rank}.json").read_text(encoding="utf-8"))
        if tensors:
            saved = load_file(folder / f"step-{step}-{rank}.safetensors")
            whole.gradients[rank] = _under("gradient/", saved)
            whole.tensors |= _under("tensor/", saved)
        whole.parts[:0] = [
            MicrobatchTrace(p["rank"], tuple(p["grains"]), tuple(map(tuple, p["ids"])), p["total"], p["weight"])
            for p in facts["parts"]
        ]
        for call, grains in facts["forward"].items():
            whole.forward.setdefault(call, {}).update({int(g): numbers for g, numbers in grains.items()})
        whole.digests[rank], whole.updates[rank] = facts["digests"], facts["updates"]
        for name in FACTS:
            setattr(whole, name, facts[name])
    return whole


def write_changes(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Write parameters and buffers that a user's loop has changed between the last update and `step`."""
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / f"changes-{step}.safetensors"
    )


def read_changes(folder: Path, step: int) -> dict[str, Tensor]:
    """Read the tensors of `write_changes`; the result is empty if nothing was changed."""
    path = folder / f"changes-{step}.safetensors"
    return load_file(path) if path.exists() else {}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


@dataclass(frozen=True)
class Replay:
    """Trace settings of a Session under verification: the first `num_steps` steps are traced to `folder`.

    `of`: folder of a run on `world_size` ranks; each step starts from this run's state. None: no replay.
    `grain_by_grain` and `backwards`: compute a step in another way that should give the same result.
    """

    folder: str
    num_steps: int
    of: str | None = None
    world_size: int = 1
    grain_by_grain: bool = False
    backwards: bool = False

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Replay | None:
        """Return the settings from environment variables, or None without a verification."""
        text = variables.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def variables(self) -> dict[str, str]:
        """Return the environment variables with these settings."""
        return {VARIABLE: json.dumps(asdict(self))}

    def order(self, microbatches: Iterable[Microbatch]) -> Iterator[Microbatch]:
        """Return a step's microbatches in the order of this replay."""
        return reversed(list(microbatches)) if self.backwards else iter(microbatches)

    def note(self, step: int, model: nn.Module, after: Mapping[str, Tensor]) -> None:
        """Write the loop's own changes of the model between `after`, the last update, and `step`."""
        now = dict([*model.named_parameters(), *model.named_buffers()])
        changed = {name: t for name, t in now.items() if not torch.equal(t.detach().cpu(), after[name])}
        if changed:
            write_changes(Path(self.folder), step, changed)

    def start(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set the state that the replayed run had before `step`."""
        if self.of is not None:
            before = read(Path(self.of), step - 1, self.world_size)
            changed = read_changes(Path(self.of), step)
            load_model(model, {**before.phase("buffers"), **before.parameters, **changed})
            load_optimizer(optimizer, model, before.optimizer_tensors, before.optimizer)
