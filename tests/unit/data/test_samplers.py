"""Samplers: pure functions of seed, epoch and position, with the distribution that they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

import shoal
from shoal.data.order import Ids, Order, Sampler
from shoal.data.samplers import _below
from shoal.data.source import opened
from shoal.errors import JobError
from shoal.jobs.job import Epochs, Length, Samples
from shoal.plans.grains import share

N = 203
LABELS = np.repeat(["many", "few", "one"], [180, 22, 1])
LENGTHS = np.random.default_rng(5).integers(1, 400, N)
SAMPLERS: dict[str, Sampler] = {
    "weighted": shoal.Weighted(np.arange(N) % 5),
    "without replacement": shoal.Weighted(np.arange(N) % 5, replacement=False),
    "more draws": shoal.Weighted(torch.ones(N), num_samples=300),
    "balanced": shoal.Balanced(LABELS),
    "by length": shoal.ByLength(LENGTHS, window=3),
    "curriculum": shoal.Curriculum(lambda progress: 0.1 + 0.9 * progress, difficulty=-LENGTHS),
    "mixture": shoal.Mixture({"a": range(150), "b": range(53)}, {"a": 1, "b": 3}),
}


OTHER_F = shoal.Curriculum(lambda progress: 0.1 + 0.8 * progress, difficulty=-LENGTHS)
STEPPED, STEPPED_LATER = (shoal.Curriculum(lambda p, end=end: 0.2 if p < end else 1.0) for end in (0.48, 0.5))


def order(sampler: Any, length: Length | None = None, batch: int = 16, seed: int = 3, count: int = N) -> Order:
    return Order(sampler.draws(count), batch, 8, seed, True, length or Epochs(3), sampler)


def step_ids(of: Order, step: int) -> Ids:
    return np.concatenate(of.ids(step, of.grains(step)))


def epoch_ids(of: Order, epoch: int) -> Ids:
    first = of.first_step(epoch)
    return np.concatenate([step_ids(of, step) for step in range(first, of.first_step(epoch + 1))])


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ids_follow_from_seed_epoch_and_position(name: str, data: st.DataObject) -> None:
    """Any step, asked for by itself and in any rank's part, has the ids of a whole reading."""
    batch = data.draw(st.integers(1, 70))
    of = order(SAMPLERS[name], batch=batch)
    step, ranks = data.draw(st.integers(0, of.num_steps - 1)), data.draw(st.integers(1, 5))
    grains = of.grains(step)
    parts = [ids for rank in range(ranks) for ids in of.ids(step, share(grains, rank, ranks))]
    whole = epoch_ids(of, of.epoch(step))
    first = step % of.first_step(1) * batch
    assert np.concatenate(parts).tolist() == whole[first : first + batch].tolist()
    assert len(whole) == of.num_samples
    assert whole.dtype == np.int64
    assert 0 <= whole.min() <= whole.max() < N


@pytest.mark.parametrize("name", SAMPLERS)
def test_epochs_and_seeds_differ(name: str) -> None:
    of = order(SAMPLERS[name])
    assert epoch_ids(of, 0).tolist() != epoch_ids(of, 1).tolist()
    assert epoch_ids(of, 0).tolist() != epoch_ids(replace(of, seed=4), 0).tolist()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_length_in_samples_cuts_the_last_step(name: str) -> None:
    of = order(SAMPLERS[name], Samples(250))
    sizes = [len(step_ids(of, step)) for step in range(of.num_steps)]
    assert sum(sizes) == 250
    assert max(sizes) == 16


def test_weights_are_probabilities() -> None:
    weights = np.array([0.0, 1.0, 2.0, 5.0, 0.0])
    of = order(shoal.Weighted(weights, num_samples=40_000), batch=1000)
    counts = np.bincount(epoch_ids(of, 0), minlength=5)
    expected = weights / weights.sum() * 40_000
    assert counts[[0, 4]].tolist() == [0, 0]
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()  # five standard deviations


def test_without_replacement_has_numpys_distribution() -> None:
    """The first of a weighted order is drawn by weight, the second by weight from the rest, as numpy's choice."""
    weights = np.array([1.0, 2.0, 5.0])
    pairs = np.zeros((3, 3))
    for seed in range(1500):
        epoch = epoch_ids(order(shoal.Weighted(weights, replacement=False), Epochs(1), 3, seed, 3), 0)
        assert sorted(epoch.tolist()) == [0, 1, 2]
        pairs[epoch[0], epoch[1]] += 1
    shares = weights / weights.sum()
    expected = 1500 * shares[:, None] * shares[None, :] / (1 - shares[:, None]) * (1 - np.eye(3))
    assert (np.abs(pairs - expected) <= 5 * np.sqrt(expected)).all()


def test_more_categories_than_torch_draws_from() -> None:
    weights = np.zeros(2**24 + 9)
    weights[[7, -1]] = 1.0, 3.0
    of = order(shoal.Weighted(weights, num_samples=4000), batch=4000, count=len(weights))
    drawn, counts = np.unique(epoch_ids(of, 0), return_counts=True)
    assert drawn.tolist() == [7, 2**24 + 8]
    assert abs(counts[1] - 3000) <= 5 * np.sqrt(750)


def test_classes_have_equal_parts_of_every_batch() -> None:
    of = order(shoal.Balanced(LABELS), batch=30)
    for step in range(of.num_steps):
        counts = [np.count_nonzero(LABELS[step_ids(of, step)] == name) for name in ("many", "few", "one")]
        whole = len(step_ids(of, step))
        assert max(abs(count - whole / 3) for count in counts) <= 2
    # The draws of a class go round: none is read a second time before all were read once.
    ids = np.concatenate([epoch_ids(of, epoch) for epoch in range(3)])
    for name in ("many", "few"):
        counts = np.bincount(ids, minlength=N)[name == LABELS]
        assert counts.max() - counts.min() <= 1


@given(st.integers(0, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**64))
def test_parts_are_counted_in_closed_form(count: int, offset: int, bound: int) -> None:
    words = [(offset + place * 0x9E3779B97F4A7C15) % 2**64 for place in range(count)]
    assert _below(count, offset, bound) == sum(word < bound for word in words)


def test_a_mixture_has_its_shares_and_reads_each_set_in_passes() -> None:
    mixture = shoal.Mixture({"a": range(150), "b": range(53)}, {"a": 1, "b": 3})
    of = order(mixture, Epochs(4))
    ids = np.concatenate([epoch_ids(of, epoch) for epoch in range(4)])
    assert abs(np.count_nonzero(ids >= 150) - 0.75 * len(ids)) <= 2
    for low, high in ((0, 150), (150, N)):
        counts = np.bincount(ids, minlength=N)[low:high]
        assert counts.max() - counts.min() <= 1
    job = opened(made(train_data=None, sampler=mixture))
    assert isinstance(job.train_data.source.data, ConcatDataset)
    assert len(job.train_data.source) == N


def test_batches_by_length_are_of_one_length_and_read_all() -> None:
    of = order(shoal.ByLength(LENGTHS, window=100), batch=10)
    assert sorted(epoch_ids(of, 1).tolist()) == list(range(N))
    batches = [LENGTHS[step_ids(of, step)] for step in range(of.first_step(1))]
    assert np.mean([np.ptp(batch) for batch in batches]) < 0.1 * np.ptp(LENGTHS)
    means = [batch.mean() for batch in batches[:-1]]
    assert means != sorted(means)  # the batches themselves are shuffled


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(30, 90), st.integers(1, 9), st.integers(0, 5))
def test_a_budget_fills_each_step(lengths: list[int], tokens: int, grains: int, seed: int) -> None:
    sampler, of_sample = shoal.TokenBudget(lengths, tokens), np.array(lengths)
    of = Order(len(lengths), sampler.global_batch, grains, seed, True, Epochs(2.5), sampler)
    seen = 0
    for step in range(of.first_step(2)):
        assert of.samples_before(step) == seen
        own = of.ids(step, of.grains(step))
        assert [grain.index for grain in of.grains(step)] == list(range(len(own)))
        assert 1 <= len(own) <= grains
        part = of_sample[np.concatenate(own)].sum() / grains
        assert all(of_sample[ids].sum() <= part + max(lengths) for ids in own)
        assert sum(map(len, own)) == len(np.concatenate(own)) > 0
        seen += sum(map(len, own))
        if of.epoch(step + 1) == of.epoch(step):
            following = step_ids(of, step + 1)[0]
            assert of_sample[np.concatenate(own)].sum() <= tokens < of_sample[[*np.concatenate(own), following]].sum()
        else:
            assert sorted(epoch_ids(of, of.epoch(step)).tolist()) == list(range(len(lengths)))
    assert of.num_steps == of.first_step(2) + round(0.5 * (of.first_step(3) - of.first_step(2)))


def test_a_budget_sets_the_batch() -> None:
    job = made(sampler=shoal.TokenBudget(LENGTHS, 2000), global_batch=None)
    assert job.global_batch == pytest.approx(N / order(job.sampler).first_step(1), abs=1)
    assert replace(job, grains=4).describe()["sampler"]["tokens"] == 2000


def test_a_curriculum_draws_from_the_easiest() -> None:
    of = order(SAMPLERS["curriculum"], Epochs(1))
    rank = np.argsort(np.argsort(-LENGTHS, kind="stable"))
    for step in range(of.num_steps):
        assert rank[step_ids(of, step)].max() < np.ceil((0.1 + 0.9 * step / of.num_steps) * N)


def made(**changes: Any) -> shoal.Job:
    fields: dict[str, Any] = {"model": object, "loss": print, "optimizer": print, "train_data": list(range(N))}
    return shoal.Job(**{**fields, "global_batch": 16, "grains": 8, **changes})


REFUSED: dict[str, tuple[Any, str]] = {
    "shuffle": (lambda: made(sampler=SAMPLERS["weighted"], shuffle=True), "leave shuffle out"),
    "torch's": (lambda: made(sampler=torch.utils.data.SequentialSampler(range(3))), "sampler=SequentialSampler"),
    "class": (lambda: made(sampler=shoal.Weighted), "sampler=Weighted"),
    "no weights": (lambda: shoal.Weighted([]), "one finite number for each sample"),
    "text": (lambda: shoal.Weighted(["a"]), "one finite number for each sample"),
    "negative": (lambda: shoal.Weighted([1, -1]), "of at least 0"),
    "zeros": (lambda: shoal.Weighted([0, 0]), "with the sum 0"),
    "complex": (lambda: shoal.Weighted(torch.ones(3, dtype=torch.complex64)), "one finite number for each sample"),
    "half a draw": (lambda: shoal.Weighted([1, 1], num_samples=2.5), "a whole number of draws"),
    "text of a draw": (lambda: shoal.Weighted([1, 1], num_samples="3"), "a whole number of draws"),
    "true draws": (lambda: shoal.Weighted([1, 1], num_samples=True), "a whole number of draws"),
    "text of False": (lambda: shoal.Weighted([1, 1], replacement="False"), "True or False"),
    "too many": (lambda: shoal.Weighted([1, 0], False, 2), "replacement=True"),
    "other length": (lambda: opened(made(sampler=shoal.Weighted([1, 2]))), "of 2 samples, and a dataset of 203"),
    "window": (lambda: shoal.ByLength([1, 2], 0), "window=0"),
    "labels": (lambda: shoal.Balanced([[1], [2]]), "one class for each sample"),
    "no label": (lambda: shoal.Balanced([1, None]), "one class for each sample"),
    "NaN": (lambda: shoal.Balanced([1.0, float("nan")]), "numbers other than NaN"),
    "no mixture": (lambda: shoal.Mixture(None, {"a": 1}), "each dataset has a name"),
    "set": (lambda: shoal.Mixture({"a": {1, 2}}, {"a": 1}), "not map-style"),
    "mistake in f": (
        lambda: opened(made(sampler=shoal.Curriculum(lambda p: 1 / p))),
        "ZeroDivisionError.*test_samplers",
    ),
    "names": (lambda: shoal.Mixture({"a": [1]}, {"b": 1}), "each dataset has a name"),
    "tensors": (lambda: shoal.Mixture({"a": ([1], [2])}, {"a": 1}), "not map-style"),
    "weight 0": (lambda: shoal.Mixture({"a": [1], "b": [2]}, {"a": 1, "b": 0}), "never read"),
    "two sources": (lambda: opened(made(sampler=SAMPLERS["mixture"])), "a mixture reads its own datasets"),
    "no function": (lambda: shoal.Curriculum(0.5), "a function of the progress"),
    "fraction": (lambda: opened(made(sampler=shoal.Curriculum(lambda p: 2 * p))), r"f\(0\) is 0"),
    "batch": (lambda: made(sampler=shoal.TokenBudget(LENGTHS, 2000)), "leave global_batch out"),
    "long sample": (lambda: shoal.TokenBudget([5, 90, 7, 80], 60), r"longer than a step: 1, 3 \(2 in all\)"),
    "tokens": (lambda: shoal.TokenBudget([5], 0), "tokens=0"),
    "whole batch": (
        lambda: made(sampler=shoal.TokenBudget(LENGTHS, 2000), global_batch=None, length=Samples(9)),
        "give Epochs or Steps",
    ),
    "no batch": (lambda: made(global_batch=None), "global_batch counts at least one"),
    "stream": (lambda: opened(made(sampler=SAMPLERS["weighted"], train_data=iter([1]))), "read in its own order"),
    "evaluation": (lambda: made(train_data=None), "a step needs samples"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    build, said = REFUSED[kind]
    with pytest.raises((JobError, shoal.ShoalError), match=said):
        build()


def test_values_of_tensors_of_any_kind() -> None:
    values = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    assert shoal.Weighted(values).weights.tolist() == [1.0, 2.0]
    assert shoal.Balanced(values).describe() == shoal.Balanced([5, 6]).describe()
    curriculum = shoal.Curriculum(lambda progress: torch.tensor(0.5))
    assert step_ids(order(curriculum), 0).max() < N / 2 + 1


def test_a_loader_has_any_batch_beside_a_budget() -> None:
    data = torch.utils.data.DataLoader(torch.zeros(N, 1), batch_size=7)
    job = opened(made(train_data=data, sampler=shoal.TokenBudget(LENGTHS, 2000), global_batch=None))
    assert len(job.train_data.source) == N
    whole = torch.utils.data.DataLoader(torch.zeros(N, 1), batch_size=16, drop_last=True)
    opened(made(train_data=whole, sampler=shoal.Weighted(np.ones(N), num_samples=160)))


def test_a_resume_compares_the_sampler() -> None:
    described = [
        made(sampler=sampler, train_data=None if callable(sampler) else [1]).describe()
        for sampler in (
            *SAMPLERS.values(),
            *(shoal.Weighted(np.arange(N) % 6), shoal.ByLength(LENGTHS, 4), OTHER_F, STEPPED, STEPPED_LATER),
        )
    ]
    assert len({str(one["sampler"]) for one in described}) == len(described)
