"""Checkpointed state of gradient compression (error feedback, PowerSGD factors), which any number of ranks can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.pieces import fill
from shoal.checkpoint.store import SavedCheckpoint, TensorEntry
from shoal.distributed.collectives.compression.compressed_sum import Compression
from shoal.distributed.mesh import Mesh
from shoal.parallel.model.sharded_model import TensorSlice, TensorSlices

# Tensor group of a checkpoint, and key in its document.
GROUP = "compression"
_DROPPED = "gradients that {} had held back at this checkpoint are not sent any more: {}"


@dataclass(frozen=True)
class CompressedState:
    """Compression state of a run. `names`: names of the trainable parameters, in the order of the strategy."""

    compression: Compression
    mesh: Mesh
    names: Sequence[str]

    def tensors(self) -> TensorSlices:
        """Return this rank's residuals by parameter name and rank, and PowerSGD factors, identical on all ranks."""
        own: TensorSlices = {}
        for index, tensor in self.compression.withheld_of():
            own[f"{self.names[index]}@{self.mesh.rank}"] = TensorSlice.whole(tensor.shape), tensor
        for index, tensor in self.compression.bases():
            own[f"{self.names[index]}/basis"] = TensorSlice.whole(tensor.shape), tensor
        return own

    def document(self) -> dict[str, Any]:
        """Return the scheme, its fallback, and the loss unit of each rank's residuals, as JSON.

        Collective: all ranks, a JSON gather.
        """
        compression = self.compression
        units = self.mesh.gather_json(compression.unit)
        return {"scheme": compression.scheme, "fell_back": compression.fell_back, "units": units}

    def restore(self, saved: SavedCheckpoint) -> list[str]:
        """Restore the state from a checkpoint. Return messages on dropped state.

        Raises: ManifestError if tensors are missing.
        """
        compression, document = self.compression, saved.document.get(GROUP)
        known: Mapping[str, TensorEntry] = saved.document["tensors"].get(GROUP, {})
        same = document is not None and document["scheme"] == compression.scheme
        compression.reset(document["fell_back"] if document is not None and same else None)
        if document is None:
            return []
        bases = {
            f"{self.names[index]}/basis": (TensorSlice.whole(tensor.shape), tensor)
            for index, tensor in compression.bases()
        }
        fill(saved, GROUP, {n: t for n, t in bases.items() if n in known and known[n]["shape"] == list(t[0].shape)})
        units = document["units"]
        if not any(units):
            return []
        if not compression.feedback:
            return [_DROPPED.format(document["scheme"], "this plan has no feedback")]
        own = dict(compression.withheld_of())
        if len(units) == self.mesh.num_data_ranks:
            if units[self.mesh.rank]:  # else this rank has no residuals; after a fallback it wrote none
                rank = self.mesh.rank
                fill(saved, GROUP, {f"{self.names[i]}@{rank}": (TensorSlice.whole(t.shape), t) for i, t in own.items()})
            compression.unit = units[self.mesh.rank]
            return []
        # The residuals are of another layout: each rank takes an equal part of their sum.
        ranks = self.mesh.num_data_ranks
        for rank in (rank for rank, unit in enumerate(units) if unit):
            read = {index: torch.empty_like(tensor, device="cpu") for index, tensor in own.items()}
            fill(saved, GROUP, {f"{self.names[i]}@{rank}": (TensorSlice.whole(t.shape), t) for i, t in read.items()})
            for index, tensor in read.items():
                own[index].add_(tensor.to(own[index].device), alpha=1.0 / ranks)
        compression.unit = sum(units) / ranks
        return []


def left_behind(saved: SavedCheckpoint) -> list[str]:
    """Return a message if a checkpoint has residuals that this plan cannot send, since it does not compress."""
    document = saved.document.get(GROUP)
    if document is None or not any(document["units"]):
        return []
    return [_DROPPED.format(document["scheme"], "this plan does not compress")]
