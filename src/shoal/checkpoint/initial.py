"""Initial weights of a run: loading from a source into this rank's part of a model, and a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.matching import Matches, match, named_tensors, short, value_of
from shoal.checkpoint.state import sha256_of
from shoal.checkpoint.state_dicts import StoredWeights
from shoal.checkpoint.weights import weights_of
from shoal.distributed.mesh import together
from shoal.errors import JobMismatchError, LaunchError
from shoal.parallel.model.sharded_model import ShardedModel, local
from shoal.runs.options import InitialWeights, NameRules


@dataclass(frozen=True)
class TakenWeights:
    """Report on initial weights: the source, its SHA-256, and the tensors loaded, converted or unmatched."""

    source: Path
    origin: str
    sha256: str
    rules: NameRules
    num_taken: int
    converted: dict[str, int]  # "bfloat16 to float32" -> tensors
    matches: Matches

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value for job.json."""
        return {
            "from": str(self.source),
            "sha256": self.sha256,
            "allow": list(self.rules.allow),
            "rename": [list(pair) for pair in self.rules.rename],
            "taken": self.num_taken,
            "missing": self.matches.missing,
            "unexpected": self.matches.unexpected,
            "mismatched": self.matches.mismatched,
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        changed = "".join(f"; {count} converted from {kind}" for kind, count in self.converted.items())
        first = f"initial weights: {self.num_taken} tensors of {self.origin}, SHA-256 {self.sha256[:16]}...{changed}"
        own = "initial weights: as the job's model() makes it, "
        return [
            first,
            *short(self.matches.missing, f"{own}missing there: "),
            *short(self.matches.mismatched, f"{own}another shape there: "),
            *short(self.matches.unexpected, "initial weights: not used, unexpected: "),
        ]


def take_weights(wanted: InitialWeights, sharded_model: ShardedModel) -> TakenWeights:
    """Load this rank's part of a model from a source that every host can read.

    The source is read one tensor at a time and hashed once on each host.
    Raises: on every rank: JobMismatchError with the differences that are not allowed; LaunchError if hosts have
    different weights; errors of `weights_of`.
    Collective: all ranks, JSON gathers.
    """
    mesh, parts = sharded_model.mesh, sharded_model.division.parts

    def shape(name: str, tensor: Tensor) -> tuple[int, ...]:
        return tuple(parts[name].shape) if name in parts else tuple(tensor.shape)

    def remedy(kinds: Collection[str]) -> str:
        allowed = ",".join(kind for kind in kinds if kind != "wrong")
        return f"give the weights of this model, --init-rename OLD=NEW for another prefix, or --init-allow {allowed}"

    def matched() -> tuple[StoredWeights, Matches]:
        """Match the whole model with the source. The result is the same on every rank, for all ranks' parts."""
        weights = weights_of(wanted.source)
        matches = match(named_tensors(sharded_model.model, shape), weights, wanted.rules)
        matches.refuse(weights, wanted.rules, remedy)
        if not matches.pairs:
            raise JobMismatchError(
                given=f"{weights.origin}, with {', '.join(list(weights)[:3])} ...",
                conflict="not one tensor of the model would come from there",
                remedy="add --init-rename OLD=NEW for another prefix, or give the weights of this model",
            )
        return weights, matches

    weights, matches = together(mesh, matched)

    def fill() -> None:
        with torch.no_grad():
            for one, keys in matches.pairs:
                if not one.tensor.is_meta:
                    part = sharded_model.part(one.names[0], one.tensor)
                    local(one.tensor).copy_(part.take(value_of(weights, keys)))

    # The SHA-256 of the source's tensors by sorted key. For a run's checkpoint it is the weights_sha256.
    hosts = mesh.gather_json(mesh.host)
    first = hosts.index(mesh.host) == mesh.rank
    mine = together(mesh, lambda: sha256_of(weights[key] for key in sorted(weights)) if first else None)
    digests = {host: digest for host, digest in zip(hosts, mesh.gather_json(mine), strict=True) if digest is not None}
    if len(set(digests.values())) > 1:
        raise LaunchError(
            given=f"{weights.origin} on {len(digests)} hosts",
            conflict="; ".join(f"{host} has SHA-256 {digest[:16]}..." for host, digest in digests.items()),
            remedy="give a path that all hosts share, or copy the same weights to each",
        )
    digest = str(digests[hosts[0]])
    together(mesh, fill)
    kinds = Counter[str]()
    for one, keys in matches.pairs:
        source, target = (str(kind).removeprefix("torch.") for kind in (weights.dtype(keys[0]), one.tensor.dtype))
        if source != target:
            kinds[f"{source} to {target}"] += 1
    converted = dict(sorted(kinds.items()))
    return TakenWeights(wanted.source, weights.origin, digest, wanted.rules, len(matches.pairs), converted, matches)
