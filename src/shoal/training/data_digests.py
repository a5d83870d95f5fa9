"""Digests of samples of a job's data, drawn over each whole set, by which a resume notices other data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from shoal.data.sample_digest import spread
from shoal.data.source import MapSource, Source, TensorSource, digest_of_samples
from shoal.launch.in_child import look_in_child
from shoal.training.engine import Engine

# Samples of each part of a digest; a part begins within so many seconds of the first one.
_PARTS = (1, 1, 2, 4, 8, 16, 32, 64, 128)
_SECONDS = 0.2
_CHILD_SECONDS = 10.0


def data_digests(engine: Engine, saved: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Digests of up to 256 samples of the training data, and of each evaluation set, in parts; see `_digests`.

    Streams, and data that differ from one reading to the next, have none. No more parts than `saved` has are read.
    """
    data = engine.job.train_data
    workers: int | None = engine.plan.data.workers
    if data.reading.get("multiprocessing_context") not in (None, "fork"):
        workers = None  # of which nothing is known here
    sources = {"train_data": (data.source, workers)}
    sources |= {f"eval_data {name}".strip(): (own, 0) for name, own in engine.evaluator.sources.items()}
    most = {name: len(saved.get(name) or _PARTS) for name in sources}
    found = {name: _read(own, own_workers, most[name]) for name, (own, own_workers) in sources.items()}
    return {name: digests for name, digests in found.items() if digests}


def _read(source: Source, workers: int | None, most: int) -> list[str]:
    if not isinstance(source, MapSource) or (workers is None and not isinstance(source, TensorSource)):
        return []
    if not workers or isinstance(source, TensorSource):
        with source.looks():
            return list(_digests(source, most))

    def work() -> dict[str, list[str]]:
        torch.set_num_threads(1)  # OpenMP's threads are not in a copy
        return {"digests": list(_digests(source, most))}

    # Files that worker processes open must not be open here when these start.
    found = look_in_child(work, _CHILD_SECONDS)
    return found["digests"] if found is not None else []


def _digests(source: MapSource, most: int) -> Iterator[str]:
    """A digest of each part of the samples, until the time is over; none of data that differ when read again."""
    began, done, found = time.monotonic(), 0, list[str]()
    for size in _PARTS[:most]:
        if done >= len(source) or time.monotonic() - began > _SECONDS:
            break
        places = np.arange(done, min(done + size, len(source)))
        # All of a small set; of a large one some that are spread over it, however many there are.
        ids = places if len(source) <= sum(_PARTS) else spread(places, len(source))
        try:
            digests = {digest_of_samples(source.fetch([ids], [0])) for _ in range(2)}
        except Exception:  # which a step tells
            break
        if len(digests) > 1:
            return
        found += [digest[:16] for digest in digests if digest is not None]
        done += size
    yield from found
