"""Samples that cannot be read: which are read in their places, and what is drawn at random then."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.data.test_loader import Noisy, microbatches, order

import shoal
from shoal.data.loader import DataRank, MapLoader
from shoal.data.order import Order
from shoal.data.source import MapSource, open_data, small_batch
from shoal.errors import DataError

HOW = order(50, 16, 4)


class Together(Noisy):
    """Samples that are read many at a time."""

    def __getitems__(self, ids: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in ids]


def tolerant(
    data: Noisy, most: int = 3, rank: int = 0, ranks: int = 1, workers: int = 0, how: Order = HOW
) -> MapLoader:
    source = open_data("train_data", data, None).source
    assert isinstance(source, MapSource)
    return MapLoader(source, how, DataRank(rank, ranks), workers, pin_memory=False, bad_samples=most)


def rows(one: MapLoader, per: int, step: int = 1) -> torch.Tensor:
    one.seek(step, per)
    return torch.cat([m.batch for m in microbatches(one, step)])


BROKEN = int(HOW.ids(1, HOW.grains(1))[2][1])  # in the third grain of step 1


@pytest.mark.parametrize("kind", [Noisy, Together])
def test_the_place_is_filled_alike_by_whoever_reads_it(kind: type[Noisy]) -> None:
    one = tolerant(kind(broken=BROKEN))
    whole = rows(one, 4)
    assert len(whole) == 16
    assert BROKEN not in whole[:, 0].tolist()
    (incident,) = one.incidents
    assert list(incident.bad) == [BROKEN]
    parts = torch.cat([rows(tolerant(kind(broken=BROKEN), rank=rank, ranks=3), 1) for rank in range(3)])
    assert torch.equal(parts, whole)
    assert torch.equal(rows(one, 2), whole), "known to be bad, and not read"
    assert len(one.incidents) == 1
    sound = rows(tolerant(kind()), 4)
    other = [place for place in range(16) if not torch.equal(sound[place], whole[place])]
    assert set(other) <= set(range(8, 12)), "other grains are as they were"


def test_what_was_read_is_in_the_digest_and_can_be_read_again() -> None:
    (whole,) = microbatches(tolerant(Noisy(broken=BROKEN)), 1)
    assert [i for ids in whole.read_ids for i in ids.tolist()] == whole.batch[:, 0].tolist()
    assert torch.equal(torch.cat([part.batch for part in whole.split()]), whole.batch)


def test_a_sample_that_a_step_reads_twice_has_one_replacement() -> None:
    how = replace(HOW, sampler=shoal.Weighted([1.0, 1.0] + 48 * [0.0]))
    whole = rows(tolerant(Noisy(broken=0), how=how), 4)
    (one,) = microbatches(tolerant(Noisy(broken=0), how=how), 1)
    assert [i for ids in one.read_ids for i in ids.tolist()] == whole[:, 0].tolist()
    assert len(set(whole[:, 0].tolist())) == 2
    words = [m.words for rank in range(3) for m in microbatches(tolerant(Noisy(broken=0), 3, rank, 3, how=how), 1)]
    assert [sum(part) for part in zip(*words, strict=True)] == one.words


def test_with_worker_processes() -> None:
    one = tolerant(Noisy(broken=BROKEN), workers=1)
    try:
        assert torch.equal(rows(one, 4), rows(tolerant(Noisy(broken=BROKEN)), 4))
        assert [list(incident.bad) for incident in one.incidents] == [[BROKEN]]
    finally:
        one.close()


def test_a_broken_dataset_is_refused() -> None:
    class AllBroken(Noisy):
        def __getitem__(self, i: int) -> torch.Tensor:
            raise OSError("gone")

    with pytest.raises(DataError, match="can be read"):
        rows(tolerant(AllBroken()), 4)


def test_memory_that_runs_out_is_no_samples_fault() -> None:
    class Large(Noisy):
        def __getitem__(self, i: int) -> torch.Tensor:
            raise MemoryError

    one = tolerant(Large(), 30)
    with pytest.raises(DataError, match="MemoryError"):
        rows(one, 4)
    assert one.incidents == []


class Weak(Noisy):
    """Its broken sample can be read again from the second pass on."""

    def __init__(self, broken: int, flag: Path) -> None:
        super().__init__(broken=broken)
        self.flag = flag

    def __getitem__(self, i: int) -> torch.Tensor:
        self.broken = None if self.flag.exists() else BROKEN
        return super().__getitem__(i)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_known_to_be_bad_stays_bad(workers: int, tmp_path: Path) -> None:
    """Also to workers, which know what was known when they were started."""
    again = next(s for s in range(2, 20) if BROKEN in {int(i) for own in HOW.ids(s, HOW.grains(s)) for i in own})
    one = tolerant(Weak(BROKEN, tmp_path / "mended"), workers=workers)
    try:
        one.seek(1, 4)
        for step in range(1, again + 1):
            (read,) = microbatches(one, step)
            if step == 1:
                (tmp_path / "mended").touch()
    finally:
        one.close()
    assert BROKEN not in read.batch[:, 0].tolist()
    assert [list(incident.bad) for incident in one.incidents] == [[BROKEN]]


def test_what_a_state_knows_is_not_forgotten_in_silence() -> None:
    source = open_data("train_data", Noisy(), None).source
    assert isinstance(source, MapSource)
    with pytest.raises(DataError, match="keeps its number"):
        MapLoader(source, HOW, DataRank(0, 1), 0, pin_memory=False).leave_out({3: "broken"})


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many open files"), RuntimeError("not enough memory")])
def test_a_host_that_runs_short_is_no_samples_fault(error: Exception) -> None:
    class Short(Noisy):
        def __getitem__(self, i: int) -> torch.Tensor:
            raise error

    one = tolerant(Short(), 30)
    with pytest.raises(DataError):
        rows(one, 4)
    assert one.incidents == []


def test_a_look_at_the_first_samples_does_without_bad_ones() -> None:
    source = open_data("train_data", Noisy(broken=1), None).source
    with pytest.raises(DataError):
        small_batch(source, None)
    assert len(small_batch(source, None, 1)) == 2
