"""Predictions: a model's outputs for each sample, written to one file of any size."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.state import raw
from shoal.checkpoint.tensor_file import DTYPE_NAMES, tensor_file_head
from shoal.distributed.mesh import Mesh, together
from shoal.errors import CommandError, JobError
from shoal.jobs.job import Job
from shoal.numerics.outputs import RowsOfOutputs

SUFFIXES = (".npz", ".safetensors")
IDS, OUTPUTS = "ids", "outputs"

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a sample's row


def refuse_file(path: Path) -> None:
    """Raise CommandError for a file with an unknown suffix, or a file that exists."""
    if path.suffix not in SUFFIXES:
        raise CommandError(
            given=f"--output {path}",
            conflict=f"predictions are written as {' or '.join(SUFFIXES)}",
            remedy=f"write --output {path.with_suffix('.npz')}",
        )
    if path.exists():
        raise CommandError(
            given=f"--output {path}", conflict="it is there, and nothing is overwritten", remedy="give another name"
        )


def of_first_part(model: nn.Module, batch: Any) -> Any:
    """Return the model's outputs for a tensor, or for the first tensor of a tuple or list.

    Raises: JobError for other batches.
    """
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        return model(batch[0])
    if isinstance(batch, Tensor):
        return model(batch)
    raise JobError(
        given=f"a batch of type {type(batch).__name__}",
        conflict="which part of it the model takes is not known",
        remedy="write Job(predict=lambda model, batch: model(batch['inputs'])), say",
    )


def predict_function(job: Job) -> Callable[[Any, Any], Any]:
    """Return the function of (model, batch) that gives a job's predictions by sample."""
    return job.predict or (of_first_part if job.outputs is None else RowsOfOutputs(job.outputs))


class Predictions:
    """Named outputs of all samples, collected on disk; `write` merges them into one file in constant memory.

    The file has each sample's id, int64, and one row per output, in the order of the data. Rank c modulo the number of
    ranks collects chunk c. All chunks have the same size, except the last.
    """

    def __init__(self, mesh: Mesh, path: Path) -> None:
        """Create a temporary directory next to the output file `path`. Collective: all ranks."""
        self._mesh, self._path = mesh, path
        names = mesh.gather_json(f".{path.name}-{uuid.uuid4().hex[:12]}")
        self._aside: Path = path.parent / names[0]
        together(mesh, lambda: self._aside.mkdir(mode=0o700, parents=True, exist_ok=True))
        self._kinds: dict[str, Kind] = {}
        self._here = 0  # samples of this rank
        self._chunk = 0
        self.count = 0

    def add(self, size: int, outputs: Any) -> None:
        """Add the outputs of this rank's next chunk of `size` samples.

        Raises: JobError if an output does not have one row per sample.
        """
        named = dict(self._named(outputs))
        if IDS in named:
            raise _no_rows("an output named 'ids'", "that is what the samples' ids are called", "rename it")
        for name, tensor in named.items():
            if tensor.ndim == 0 or len(tensor) != size:
                raise _no_rows(
                    f"{name} of shape {list(tensor.shape)} for {size} samples",
                    "an output has a row for each sample",
                    "return tensors whose first dim is that of the batch",
                )
        kinds = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in named.items()}
        self._kinds = self._kinds or kinds
        _refuse_apart(kinds, self._kinds)
        for name, tensor in named.items():
            with self._part(name, self._mesh.rank).open("ab") as file:
                file.write(raw(self._writable(tensor)))
        self._here += size
        self._chunk = max(self._chunk, size)

    def _named(self, outputs: Any) -> Iterator[tuple[str, Tensor]]:
        if isinstance(outputs, tuple | list):
            outputs = {f"{OUTPUTS}_{number}": value for number, value in enumerate(outputs)}
        elif not isinstance(outputs, Mapping):
            outputs = {OUTPUTS: outputs}
        for name, value in outputs.items():
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            if not isinstance(value, Tensor) or value.dtype not in DTYPE_NAMES:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise _no_rows(
                    f"{name} of type {kind}",
                    "outputs are tensors, or a dict of tensors",
                    "write Job(predict=lambda model, batch: model(**batch).logits), say",
                )
            yield str(name), value.detach()

    def _writable(self, tensor: Tensor) -> Tensor:
        """Return the tensor in a dtype that the file supports: numpy has neither bfloat16 nor float8."""
        narrow = tensor.is_floating_point() and tensor.dtype not in (torch.float64, torch.float32, torch.float16)
        return tensor.float() if narrow and self._path.suffix == ".npz" else tensor

    def _part(self, name: str, rank: int) -> Path:
        return self._aside / f"{rank}-{list(self._kinds).index(name)}.raw"

    def write(self) -> None:
        """Write the file atomically. Raises: OSError, JobError. Collective: all ranks."""
        rows = self._mesh.gather_json(
            [
                self._here,
                self._chunk,
                {name: [DTYPE_NAMES[dtype], shape] for name, (dtype, shape) in self._kinds.items()},
            ]
        )
        self.count, self._chunk = sum(here for here, _, _ in rows), max(chunk for _, chunk, _ in rows)
        dtypes = {text: dtype for dtype, text in DTYPE_NAMES.items()}
        own = [{n: (dtypes[text], tuple(shape)) for n, (text, shape) in kinds.items()} for _, _, kinds in rows if kinds]
        self._kinds = own[0] if own else {}
        for kinds in own:
            _refuse_apart(kinds, self._kinds)
        all_kinds: dict[str, Kind] = {**self._kinds, IDS: (torch.int64, ())}

        def write_file() -> None:
            whole = self._aside / self._path.name
            if self._path.suffix == ".npz":
                with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
                    for name, (dtype, shape) in all_kinds.items():
                        kind = self._writable(torch.empty(0, dtype=dtype)).numpy().dtype
                        header = {"descr": kind.str, "fortran_order": False, "shape": (self.count, *shape)}
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                            np.lib.format.write_array_header_2_0(file, header)
                            self._copy(name, file.write)
            else:
                rows_of = {name: (dtype, (self.count, *shape)) for name, (dtype, shape) in all_kinds.items()}
                order, head = tensor_file_head(rows_of)
                with whole.open("wb") as plain_file:
                    plain_file.write(head)
                    for name in order:
                        self._copy(name, plain_file.write)
            os.replace(whole, self._path)

        together(self._mesh, write_file if self._mesh.rank == 0 else lambda: None)

    def _copy(self, name: str, write: Callable[[bytes], Any]) -> None:
        """Copy the rows of one output into the file, chunk by chunk from the ranks' parts."""
        starts = range(0, self.count, max(1, self._chunk))
        if name == IDS:
            for start in starts:
                write(np.arange(start, min(start + self._chunk, self.count), dtype=np.int64).tobytes())
            return
        dtype, shape = self._kinds[name]
        row_bytes = self._writable(torch.empty(0, dtype=dtype)).element_size() * math.prod(shape)
        with contextlib.ExitStack() as opened:
            ranks = [rank for rank in range(self._mesh.world_size) if rank * self._chunk < self.count]
            parts = [opened.enter_context(self._part(name, rank).open("rb")) for rank in ranks]
            for number, start in enumerate(starts):
                write(parts[number % self._mesh.world_size].read(min(self._chunk, self.count - start) * row_bytes))

    def close(self) -> None:
        """Remove the temporary directory."""
        shutil.rmtree(self._aside, ignore_errors=True)


def _refuse_apart(kinds: dict[str, Kind], before: dict[str, Kind]) -> None:
    """Raise JobError if names, shapes or dtypes of outputs differ between chunks."""
    if kinds == before:
        return
    apart = next(name for name in {**kinds, **before} if kinds.get(name) != before.get(name))
    raise _no_rows(
        f"{apart} of {_said(kinds.get(apart))} for some samples, and of {_said(before.get(apart))} for others",
        "rows of one output have one shape and dtype",
        "reduce or pad them in predict: the argmax, or a fixed length",
    )


def read(path: Path) -> dict[str, Tensor]:
    """Return the predictions in a file by name."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _said(kind: Kind | None) -> str:
    return "nothing" if kind is None else f"{str(kind[0]).removeprefix('torch.')} {list(kind[1])}"


def _no_rows(given: str, conflict: str, remedy: str) -> JobError:
    return JobError(given=f"predict, which returns {given}", conflict=conflict, remedy=remedy)
