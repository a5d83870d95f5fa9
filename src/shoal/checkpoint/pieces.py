"""Sharded tensors in checkpoints: each rank writes its own slices, and reads any slices from all files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shoal.checkpoint.manifest import FileEntry, ManifestError
from shoal.checkpoint.state import refuse_differences
from shoal.checkpoint.store import SavedCheckpoint, Snapshot, Store, TensorEntry
from shoal.distributed.mesh import Mesh
from shoal.numerics.out_of_memory import is_out_of_memory
from shoal.parallel.model.sharded_model import TensorSlice, TensorSlices, entries, first_holders

Index = dict[str, dict[str, TensorEntry]]  # group ("model", "optimizer") -> path -> entry

# Largest size of a file with several tensors. A file is read as a whole, so ranks need this much memory to load.
FILE_BYTES = 32 << 20


def file_name(group: str, rank: int, world_size: int, number: int) -> str:
    """Return the name of a file with a rank's part of a group: the group's name if there is only one rank."""
    return group if world_size == 1 else f"{group}-{rank:05d}-of-{world_size:05d}.{number}"


def described(own: Mapping[str, TensorSlices]) -> dict[str, dict[str, Any]]:
    """Return this rank's slices and the file number of each, as JSON for the other ranks."""
    groups = {}
    for group, tensors in own.items():
        rows, number, size = entries(tensors), 0, 0
        for path, (_, tensor) in tensors.items():
            if size + tensor.nbytes > FILE_BYTES and size:
                number, size = number + 1, 0
            size += tensor.nbytes
            rows[path].append(number)
        groups[group] = rows
    return groups


def index(ranks: list[dict[str, dict[str, Any]]]) -> Index:
    """Combine what every rank `described` into an index. The first rank that has a part writes it."""
    groups: Index = {}
    for group in ranks[0]:
        own = [of_rank[group] for of_rank in ranks]
        groups[group] = {}
        for path in sorted(set().union(*own)):
            holders = first_holders(own, path)
            dtype, shape, *_ = own[holders[0]][path]
            files = {file_name(group, rank, len(ranks), own[rank][path][3]): own[rank][path][2] for rank in holders}
            groups[group][path] = {"dtype": dtype, "shape": shape, "files": files}
    return groups


def share(
    own: Mapping[str, TensorSlices],
    written: Index,
    rank: int,
    world_size: int,
    copies: Callable[[str, Mapping[str, Tensor]], dict[str, Tensor]] | None = None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the name and CPU tensors of each file that this rank writes. CPU tensors are not copied.

    `copies`: function that returns CPU copies of a file's tensors instead.
    """
    files: dict[str, dict[str, Tensor]] = {}
    for group, tensors in own.items():
        prefix = file_name(group, rank, world_size, 0).partition(".")[0]
        for path, (_, tensor) in tensors.items():
            for name in written[group][path]["files"]:
                if name.partition(".")[0] == prefix:
                    files.setdefault(name, {})[path] = tensor
    for name, content in files.items():
        on_cpu = copies(name, content) if copies is not None else {p: t.cpu().contiguous() for p, t in content.items()}
        yield name, on_cpu


def fill(saved: SavedCheckpoint, group: str, targets: TensorSlices) -> None:
    """Copy a checkpoint's tensors to targets, with one file in memory at a time.

    Raises: ManifestError if tensors are missing.
    """
    known = saved.document["tensors"].get(group, {})
    missing = {path: part.numel for path, (part, _) in targets.items()}
    absent = sorted(targets.keys() - known.keys())
    if absent:
        raise ManifestError(f"it has no {absent[0]}")
    files = sorted({name for path in targets for name in known[path]["files"]})
    with torch.no_grad():
        for name in files:
            content = saved.read(name)
            for path in targets.keys() & content.keys():
                part, tensor = targets[path]
                piece = TensorSlice.from_json(known[path]["shape"], known[path]["files"][name])
                missing[path] -= part.copy(tensor, piece, content[path])
    incomplete = sorted(path for path, count in missing.items() if count)
    if incomplete:
        raise ManifestError(f"its files lack some of {incomplete[0]}")


def refuse_other_model(saved: SavedCheckpoint, own: TensorSlices, absent: set[str]) -> None:
    """Check names, shapes and dtypes against the model; `absent`: names on other ranks. Raises: JobMismatchError."""
    known = saved.document["tensors"]["model"].items()
    mine = {name: f"{dtype} {shape}" for name, (dtype, shape, *_) in entries(own).items()}
    refuse_differences(mine, {n: f"{e['dtype']} {e['shape']}" for n, e in known if n not in absent})


class WriteFailure(NamedTuple):
    """Failure of a disk or memory to take a checkpoint. `code`: the errno, or None if memory ran out."""

    text: str
    code: int | None = None


def write_together(
    mesh: Mesh, store: Store, snapshot: Snapshot, own: Mapping[str, TensorSlices]
) -> WriteFailure | None:
    """Write a checkpoint in which each rank writes its part. Return the failure, or None if it is written.

    The checkpoint is written completely or not at all.
    Collective: all ranks, JSON gathers.
    """
    written = index(mesh.gather_json(described(own)))
    aside, failure = _attempt(lambda: store.begin(snapshot.step)) if mesh.rank == 0 else (None, None)
    place, failure = mesh.gather_json([aside, failure])[0]
    if failure is not None:
        return WriteFailure(*failure)

    def add() -> dict[str, FileEntry]:
        content = share(own, written, mesh.rank, mesh.world_size)
        return dict(store.add(place, name, tensors) for name, tensors in content)

    files, failure = _attempt(add)
    rows = mesh.gather_json([{name: vars(entry) for name, entry in (files or {}).items()}, failure])
    failure = next((one for _, one in rows if one is not None), None)
    if aside is not None:
        every = {name: FileEntry(**entry) for of, _ in rows for name, entry in of.items()}
        if failure is None:
            document = {**snapshot.document, "tensors": written}
            _, failure = _attempt(lambda: store.commit(aside, snapshot.step, every, document, best=snapshot.best))
        if failure is not None:
            store.place.remove(aside)
    failure = mesh.gather_json(failure)[0]
    return WriteFailure(*failure) if failure is not None else None


T = TypeVar("T")


def _attempt(write: Callable[[], T]) -> tuple[T | None, WriteFailure | None]:
    """Call `write`. Return the result and the failure of a disk or memory, one of which is None."""
    try:
        return write(), None
    except OSError as error:
        return None, WriteFailure(str(error), error.errno)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None, WriteFailure(f"memory ran out: {str(error).strip()[:200] or type(error).__name__}")
