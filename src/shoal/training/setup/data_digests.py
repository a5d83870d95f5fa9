"""Digests of samples spread over each of a job's data sets. A resume compares them to detect changed data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from shoal.data.sample_digest import spread
from shoal.data.source import MapSource, Source, TensorSource, digest_of_samples
from shoal.launch.supervise.child import look_in_child
from shoal.training.setup.engine import Engine

# Samples in each part of a digest, and the time within which the last part has to start.
_PARTS = (1, 1, 2, 4, 8, 16, 32, 64, 128)
_SECONDS = 0.2
_CHILD_SECONDS = 10.0


def data_digests(engine: Engine, saved: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return digests of up to 256 samples of the training data and of each evaluation set, in parts.

    Streams and data that differ between two readings have no digest. `saved`: limits the number of parts.
    """
    data = engine.job.train_data
    workers: int | None = engine.plan.data.workers
    if data.reading.get("multiprocessing_context") not in (None, "fork"):
        workers = None  # spawned workers may read other values than this process
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
        torch.set_num_threads(1)  # a forked child has no OpenMP threads
        return {"digests": list(_digests(source, most))}

    # A child reads, since files that worker processes open must not be open here when the workers start.
    found = look_in_child(work, _CHILD_SECONDS)
    return found["digests"] if found is not None else []


def _digests(source: MapSource, most: int) -> Iterator[str]:
    """Yield a digest of each part of the samples until the time is over; none if a second reading differs."""
    began, done, found = time.monotonic(), 0, list[str]()
    for size in _PARTS[:most]:
        if done >= len(source) or time.monotonic() - began > _SECONDS:
            break
        places = np.arange(done, min(done + size, len(source)))
        # A small set is read completely. Of a large set, the samples are spread over its whole length.
        ids = places if len(source) <= sum(_PARTS) else spread(places, len(source))
        try:
            digests = {digest_of_samples(source.fetch([ids], [0])) for _ in range(2)}
        except Exception:  # a step reports it
            break
        if len(digests) > 1:
            return
        found += [digest[:16] for digest in digests if digest is not None]
        done += size
    yield from found
