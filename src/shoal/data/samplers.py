"""Samplers: orders other than a permutation, each a pure function of seed, epoch and position."""

from __future__ import annotations

import functools
import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.order import BLOCK, GOLDEN_WORD, Ids, Order, Sampler, from_blocks, permute, shuffled, uniforms
from shoal.errors import JobError, UserCodeError, text_of
from shoal.jobs.job import Progress
from shoal.jobs.user_errors import place_of
from shoal.plans.grains import Grain, random_key

_WORDS = 1 << 64
# Terms of the series of the logarithm. Its argument is at most 0.172, so the next term is below half a unit of float64.
_TERMS = 11
# Largest part of interleaved data whose passes are sorted instead of permuted.
_FEW = 256
# Numbers of progress at which ranks and a resume compare a curriculum: a few to show, and many in a digest. A prime
# number of parts has no border where a curriculum usually has one.
_SHOWN, _COMPARED = 16, 1009 + 1


def _array(values: Any) -> npt.NDArray[Any]:
    """Return values as an array, also those of a tensor on a GPU, of bfloat16 or with a gradient."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values)


def _numbers(given: str, values: Any, least: float = 0.0) -> npt.NDArray[np.float64]:
    """Return a copy of one number per sample. Raises: JobError for other shapes and for numbers below `least`."""
    try:
        array = _array(values)
        numbers = np.empty(0) if np.iscomplexobj(array) else np.array(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        numbers = np.empty(0)
    if numbers.ndim != 1 or not len(numbers) or not (np.isfinite(numbers) & (numbers >= least)).all():
        raise JobError(
            given=f"shoal.{given} of {type(values).__name__} {values!r:.60}",
            conflict="it takes one finite number for each sample" + (", of at least 0" if least == 0.0 else ""),
            remedy="give a list, an array or a tensor of one dim, with a number for each sample",
        )
    return numbers


def _fits(given: str, count: int, num_samples: int) -> None:
    if count != num_samples:
        raise JobError(
            given=f"sampler={given} of {count} samples, and a dataset of {num_samples}",
            conflict="the sampler has one value for each sample",
            remedy="make the values from the dataset that is trained on",
        )


def _counts(value: Any) -> bool:
    """Return whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _digest(values: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


class Weighted(Sampler):
    """Draws each sample with a probability in proportion to its weight.

    Args:
        weights: one number of at least 0 for each sample. A sample of weight 0 is never drawn.
        replacement: whether a sample may be drawn again in the same epoch. If False, an epoch is a random order of all
            samples with a weight above 0, in which samples of large weight come early.
        num_samples: number of draws in an epoch. Default None: the number of samples.

    Raises: JobError for other weights, and for more draws than there are samples to draw without replacement.
    Example: ``shoal.Job(..., sampler=shoal.Weighted(weights))``
    """

    def __init__(self, weights: Any, replacement: bool = True, num_samples: int | None = None) -> None:
        self.weights: npt.NDArray[np.float64] = _numbers("Weighted(weights)", weights)
        self.replacement = replacement
        if not isinstance(replacement, bool) or not (num_samples is None or _counts(num_samples)):
            raise JobError(
                given=f"shoal.Weighted(replacement={replacement!r:.40}, num_samples={num_samples!r:.40})",
                conflict="replacement is True or False, and an epoch has a whole number of draws",
                remedy="write shoal.Weighted(weights, replacement=True, num_samples=1000), say",
            )
        # Sequential sums are the same on every machine. torch.multinomial refuses more than 2^24 categories.
        self._sums = np.cumsum(self.weights)
        drawn = int(np.count_nonzero(self.weights))
        self._draws = num_samples if num_samples is not None else len(self.weights) if replacement else drawn
        if not 0.0 < self._sums[-1] < math.inf:
            raise JobError(
                given=f"shoal.Weighted(weights) with the sum {self._sums[-1]:g}",
                conflict="probabilities are in proportion to a sum that is finite and above 0",
                remedy="give at least one weight above 0, and weights with a finite sum",
            )
        if not replacement and self._draws > drawn:
            raise JobError(
                given=f"shoal.Weighted(replacement=False, num_samples={num_samples}), weights above 0: {drawn}",
                conflict="without replacement an epoch draws each sample once",
                remedy=f"write replacement=True, or num_samples={drawn} at most",
            )

    def draws(self, num_samples: int) -> int:
        return self._draws

    def check(self, num_samples: int) -> None:
        _fits("Weighted(weights)", len(self.weights), num_samples)

    def ids(self, order: Order, epoch: int, start: int, stop: int) -> Ids:
        if not self.replacement:
            whole: Ids = _weighted_order(self, order.seed, epoch)
            return whole[start:stop]
        places = uniforms(start, stop, random_key(order.seed, "weighted", epoch)) * self._sums[-1]
        # A product may be rounded up to the whole sum, which belongs to the last sample with a weight.
        last = np.searchsorted(self._sums, self._sums[-1])
        ids: Ids = np.minimum(np.searchsorted(self._sums, places, side="right"), last).astype(np.int64)
        return ids

    def describe(self) -> dict[str, Any]:
        own = {"replacement": self.replacement, "draws": self._draws}
        return {"kind": "weighted", **own, "weights": _digest(self.weights)}


@functools.lru_cache(maxsize=2)
def _weighted_order(sampler: Weighted, seed: int, epoch: int) -> Ids:
    """Return an epoch without replacement: samples by an exponential variable of the rate of their weight.

    Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir (Information Processing Letters, 2006).
    """
    able = np.flatnonzero(sampler.weights)
    uniform = 1.0 - uniforms(0, len(sampler.weights), random_key(seed, "weighted", epoch))[able]
    # np.log differs by a unit between machines, which could exchange two samples on some ranks. This series does not.
    mantissa, exponent = np.frexp(uniform)
    low = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(low, 2.0 * mantissa, mantissa), exponent - low
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = ratio * ratio, np.zeros_like(ratio)
    for term in range(_TERMS - 1, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    waits = -(exponent * math.log(2.0) + 2.0 * ratio * series) / sampler.weights[able]
    return able[np.argsort(waits, kind="stable")].astype(np.int64)


class _Interleaved(Sampler):
    """Parts of the data in fixed shares. Each part is read in passes of a new order, which go on through all epochs.

    Position p belongs to the part in whose interval frac(offset + p * golden ratio) lies. So every run of positions has
    the shares, to within a few samples (Weyl's sequence), and the count of a part before p is a closed form.
    """

    def __init__(self, sizes: Ids, shares: npt.NDArray[np.float64]) -> None:
        self._sizes = [int(size) for size in sizes]
        self._starts = np.cumsum([0, *self._sizes])
        sums = np.cumsum(shares)
        self._bounds = [0, *(round(float(bound / sums[-1]) * _WORDS) for bound in sums[:-1]), _WORDS]

    def check(self, num_samples: int) -> None:
        _fits(f"{type(self).__name__}(...)", int(self._starts[-1]), num_samples)

    def ids(self, order: Order, epoch: int, start: int, stop: int) -> Ids:
        before = epoch * order.num_samples
        return from_blocks(lambda index: _interleaved_block(self, order.seed, index), before + start, before + stop)

    @abstractmethod
    def members(self, ids: Ids) -> Ids:
        """Return the dataset's ids of samples that are counted through the parts."""

    def block(self, seed: int, index: int) -> Ids:
        """Return the ids at positions [index * BLOCK, (index + 1) * BLOCK), counted from the first epoch's begin."""
        begin, offset = index * BLOCK, 2 * random_key(seed, "interleaved")
        steps = np.arange(begin, begin + BLOCK, dtype=np.uint64) * np.uint64(GOLDEN_WORD) + np.uint64(offset)
        parts = np.searchsorted(np.array(self._bounds[1:-1], dtype=np.uint64), steps, side="right")
        ids = np.empty(BLOCK, dtype=np.int64)
        for part in np.unique(parts).tolist():
            places, size = np.flatnonzero(parts == part), self._sizes[part]
            low, high = (_below(begin, offset, bound) for bound in self._bounds[part : part + 2])
            passes, within = np.divmod(np.arange(high - low, high - low + len(places)), size)
            if size <= _FEW:  # many passes in a block, all at once: the order of random numbers
                first, last = int(passes[0]), int(passes[-1]) + 1
                drawn = uniforms(first * size, last * size, random_key(seed, "interleaved", part))
                within = np.argsort(drawn.reshape(-1, size), axis=1, kind="stable")[passes - first, within]
            for number in np.unique(passes).tolist() if size > _FEW else ():
                own = passes == number
                within[own] = permute(within[own], size, random_key(seed, "interleaved", part, number))
            ids[places] = self._starts[part] + within
        return ids


@functools.lru_cache(maxsize=4)
def _interleaved_block(sampler: _Interleaved, seed: int, index: int) -> Ids:
    return sampler.members(sampler.block(seed, index))


def _below(count: int, offset: int, bound: int) -> int:
    """Return how many of the first `count` words offset + i * GOLDEN_WORD, modulo 2^64, are below `bound`."""
    whole = _floor_sum(count, _WORDS, GOLDEN_WORD, offset + _WORDS)
    return whole - _floor_sum(count, _WORDS, GOLDEN_WORD, offset + _WORDS - bound)


def _floor_sum(count: int, divisor: int, slope: int, offset: int) -> int:
    """Return the sum of (slope * i + offset) // divisor over i in [0, count), in the steps of Euclid's algorithm."""
    total = 0
    while count:
        whole, slope = divmod(slope, divisor)
        constant, offset = divmod(offset, divisor)
        total += whole * (count * (count - 1) // 2) + constant * count
        # Count the points below the line by rows instead of columns.
        count, offset = divmod(slope * count + offset, divisor)
        slope, divisor = divisor, slope
    return total


class Balanced(_Interleaved):
    """Draws every class equally often.

    Each class is read in its own random order and begins anew when it ends. An epoch has as many samples as the data.

    Args:
        labels: one class for each sample: numbers or strings.

    Raises: JobError for labels of another shape.
    Example: ``shoal.Job(..., sampler=shoal.Balanced(labels))``
    """

    def __init__(self, labels: Any) -> None:
        try:
            array = _array(labels)
            if array.ndim != 1 or not len(array) or (array.dtype.kind == "f" and np.isnan(array).any()):
                raise ValueError
            _, classes, counts = np.unique(array, return_inverse=True, return_counts=True)
        except (TypeError, ValueError, RuntimeError):
            raise JobError(
                given=f"shoal.Balanced(labels) of {type(labels).__name__} {labels!r:.60}",
                conflict="it takes one class for each sample: numbers other than NaN, or strings",
                remedy="give a list, an array or a tensor of one dim; None is no class, write -1, say",
            ) from None
        self._members, self._labels = np.argsort(classes, kind="stable"), _digest(classes)
        super().__init__(counts, np.ones(len(counts)))

    def members(self, ids: Ids) -> Ids:
        own: Ids = self._members[ids]
        return own

    def describe(self) -> dict[str, Any]:
        return {"kind": "balanced", "labels": self._labels}


def _has_samples(data: Any) -> bool:
    """Return whether data are a map-style dataset that is not empty."""
    if isinstance(data, tuple | Mapping):  # tensors that belong together, whose length is not the number of samples
        return False
    try:
        return hasattr(data, "__getitem__") and len(data) > 0
    except Exception:  # a length that cannot be read
        return False


class Mixture(_Interleaved):
    """Datasets in given shares, in place of `train_data`.

    Each dataset is read in its own random order and begins anew when it ends. An epoch has as many samples as all
    datasets together. A sample's id counts through the datasets in the mapping's order.

    Args:
        datasets: name -> map-style dataset.
        weights: name -> share of the samples, above 0. The shares need not sum to 1.

    Raises: JobError if the names differ, a weight is not above 0 or a dataset has no length.
    Example: ``shoal.Job(..., sampler=shoal.Mixture({"web": web, "code": code}, {"web": 3, "code": 1}))``
    """

    def __init__(self, datasets: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        if not isinstance(datasets, Mapping) or not isinstance(weights, Mapping) or set(datasets) != set(weights):
            raise JobError(
                given=f"shoal.Mixture({datasets!r:.60}, {weights!r:.60})",
                conflict="each dataset has a name and a weight of that name",
                remedy='write shoal.Mixture({"web": web, "code": code}, {"web": 3, "code": 1}), say',
            )
        odd = [name for name, one in datasets.items() if not _has_samples(one)]
        shares = _numbers("Mixture(..., weights)", [weights[name] for name in datasets])
        if odd or not shares.all():
            raise JobError(
                given=f"shoal.Mixture of {', '.join(f'{name}: {weights[name]}' for name in datasets)}",
                conflict=f"{odd} are not map-style datasets with samples" if odd else "one of weight 0 is never read",
                remedy="give datasets with samples, such as TensorDataset(x, y), and weights above 0; leave others out",
            )
        self.datasets = dict(datasets)
        self._shares = (shares / np.cumsum(shares)[-1]).tolist()
        super().__init__(np.array([len(one) for one in datasets.values()]), shares)

    def members(self, ids: Ids) -> Ids:
        return ids

    def __call__(self) -> Any:
        """Return the concatenated datasets, which are the job's training data."""
        from torch.utils.data import ConcatDataset  # a Job is built on machines without torch

        return ConcatDataset(self.datasets.values())

    def describe(self) -> dict[str, Any]:
        named = zip(self.datasets, self._shares, self._sizes, strict=True)
        return {"kind": "mixture", "datasets": {name: [share, size] for name, share, size in named}}


class ByLength(Sampler):
    """Batches of samples of similar length, in random order, so that little of a batch is padding.

    Each epoch is shuffled and cut into windows. The samples of a window are sorted by length and cut into global
    batches, in random order. Every sample is read once in an epoch.

    Args:
        lengths: length of each sample, in any unit.
        window: number of global batches in a window. A larger window has less padding and less random batches.

    Raises: JobError for other lengths or windows.
    Example: ``shoal.Job(..., sampler=shoal.ByLength(lengths, window=50))``
    """

    def __init__(self, lengths: Any, window: int = 50) -> None:
        self.lengths, self.window = _numbers("ByLength(lengths)", lengths), window
        if not _counts(window):
            raise JobError(
                given=f"shoal.ByLength(window={window!r})",
                conflict="a window is a number of global batches",
                remedy="write window=50, say",
            )

    def check(self, num_samples: int) -> None:
        _fits("ByLength(lengths)", len(self.lengths), num_samples)

    def ids(self, order: Order, epoch: int, start: int, stop: int) -> Ids:
        index, first = divmod(start, self.window * order.global_batch)
        return _sorted_window(self, order, epoch, index)[first : first + stop - start]

    def describe(self) -> dict[str, Any]:
        return {"kind": "by length", "window": self.window, "lengths": _digest(self.lengths)}


@functools.lru_cache(maxsize=4)
def _sorted_window(sampler: ByLength, order: Order, epoch: int, index: int) -> Ids:
    count, batch, size = order.num_samples, order.global_batch, sampler.window * order.global_batch
    ids = shuffled(index * size, min(count, (index + 1) * size), count, order.seed, epoch)
    ids = ids[np.argsort(sampler.lengths[ids], kind="stable")]
    whole = len(ids) // batch  # a short batch is the epoch's last
    batches = permute(np.arange(whole), whole, random_key(order.seed, "window", epoch, index))
    return np.concatenate([ids[: whole * batch].reshape(whole, batch)[batches].ravel(), ids[whole * batch :]])


class TokenBudget(Sampler):
    """Steps with as many samples as fit into a number of tokens, in the place of `global_batch`.

    Each epoch is shuffled and cut into steps in order, so every sample is read once. A step's grains are runs of
    samples, cut where the tokens are closest to equal parts: a grain differs from an equal part by one sample at most.

    Args:
        lengths: number of tokens of each sample.
        tokens: largest number of tokens in a step.

    Raises: JobError for other lengths, and for samples with more than `tokens`, by their ids.
    Example: ``shoal.Job(..., sampler=shoal.TokenBudget(lengths, tokens=2**15))``, without `global_batch`
    """

    unequal = True

    def __init__(self, lengths: Any, tokens: int) -> None:
        self.lengths, self.tokens = _numbers("TokenBudget(lengths)", lengths), tokens
        if not _counts(tokens):
            raise JobError(
                given=f"shoal.TokenBudget(tokens={tokens!r})",
                conflict="a step has a number of tokens",
                remedy="write tokens=2**15, say",
            )
        longer = np.flatnonzero(self.lengths > tokens).tolist()
        if longer:
            raise JobError(
                given=f"shoal.TokenBudget(lengths, tokens={tokens})",
                conflict=f"samples longer than a step: {', '.join(map(str, longer[:8]))} ({len(longer)} in all)",
                remedy="cut these samples or leave them out of the dataset and of lengths, or give more tokens",
            )
        # The mean of an epoch, for which a step is planned. It may not depend on the job's seed.
        self.global_batch = round(len(self.lengths) / (len(_budget_bounds(self, 0, 0)) - 1))

    def check(self, num_samples: int) -> None:
        _fits("TokenBudget(lengths)", len(self.lengths), num_samples)

    def ids(self, order: Order, epoch: int, start: int, stop: int) -> Ids:
        return shuffled(start, stop, order.num_samples, order.seed, epoch)

    def bounds(self, order: Order, epoch: int) -> Ids:
        own: Ids = _budget_bounds(self, order.seed, epoch)
        return own

    def grains(self, order: Order, epoch: int, start: int, stop: int) -> list[Grain]:
        lengths = self.lengths[self.ids(order, epoch, start, stop)]
        ends = np.cumsum(lengths)
        parts = ends[-1] / order.num_grains * np.arange(1, order.num_grains)
        # A sample belongs to the part that its middle is in.
        cuts = np.unique([0, *np.searchsorted(ends - lengths / 2, parts), len(lengths)]).tolist()
        return [Grain(index, cut, cuts[index + 1] - cut) for index, cut in enumerate(cuts[:-1])]

    def spread(self, order: Order) -> str:
        """Return a sentence with the numbers of samples in the first epoch's steps."""
        sizes = np.diff(self.bounds(order, 0))
        return (
            f"steps of {self.tokens} tokens at most have {sizes.min()} to {sizes.max()} samples in the first epoch, "
            f"{sizes.mean():.1f} on average"
        )

    def describe(self) -> dict[str, Any]:
        return {"kind": "token budget", "tokens": self.tokens, "lengths": _digest(self.lengths)}


@functools.lru_cache(maxsize=4)
def _budget_bounds(sampler: TokenBudget, seed: int, epoch: int) -> Ids:
    count = len(sampler.lengths)
    ends = np.cumsum(sampler.lengths[shuffled(0, count, count, seed, epoch)])
    bounds, before = [0], 0.0
    while bounds[-1] < count:
        bounds.append(int(np.searchsorted(ends, before + sampler.tokens, side="right")))
        before = float(ends[bounds[-1] - 1])
    return np.array(bounds)


class Curriculum(Sampler):
    """Draws from the easiest samples first, and from more of the data as the training goes on.

    Each draw is uniform and with replacement. An epoch has as many samples as the data.

    Args:
        f: function of the step's progress in [0, 1] (a `shoal.Progress`) that returns the fraction of the samples to
            draw from, above 0 and at most 1. It must return the same on every rank.
        difficulty: one number for each sample; samples with the smallest come first. Default None: the dataset is
            sorted, from its easiest sample to its hardest.

    Raises: JobError if `f` is not callable or returns another number.
    Example: ``shoal.Job(..., sampler=shoal.Curriculum(lambda progress: min(1.0, 0.2 + 2 * progress)))``
    """

    def __init__(self, f: Callable[[Progress], float], difficulty: Any = None) -> None:
        if not callable(f):
            raise JobError(
                given=f"shoal.Curriculum({f!r:.40})",
                conflict="a curriculum is a function of the progress",
                remedy="write shoal.Curriculum(lambda progress: min(1.0, 0.2 + 2 * progress)), say",
            )
        self.f = f
        self.difficulty = None if difficulty is None else _numbers("Curriculum(difficulty)", difficulty, -math.inf)
        self._easiest = None if self.difficulty is None else np.argsort(self.difficulty, kind="stable")

    def check(self, num_samples: int) -> None:
        if self.difficulty is not None:
            _fits("Curriculum(difficulty)", len(self.difficulty), num_samples)
        for step in (0, 1):
            self._count(Progress(step, 1, step * num_samples), num_samples)

    def _count(self, progress: Progress, num_samples: int) -> int:
        return math.ceil(self._fraction(progress) * num_samples)

    def _fraction(self, progress: Progress) -> float:
        try:
            fraction = self.f(progress)
        except Exception as error:
            raise UserCodeError(
                given=f"shoal.Curriculum(f), whose f({float(progress):.3g}) was called",
                conflict=f"it raised {type(error).__name__}: {text_of(error)}{place_of(error)}",
                remedy="mend f, which takes a shoal.Progress",
            ) from error
        try:
            number = math.nan if isinstance(fraction, str) else float(fraction)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not 0.0 < number <= 1.0:
            raise JobError(
                given=f"shoal.Curriculum(f), whose f({float(progress):.3g}) is {fraction!r:.40}",
                conflict="it is the fraction of the samples to draw from, above 0 and at most 1",
                remedy="write shoal.Curriculum(lambda progress: min(1.0, 0.2 + 2 * progress)), say",
            )
        return number

    def ids(self, order: Order, epoch: int, start: int, stop: int) -> Ids:
        step = order.first_step(epoch) + start // order.global_batch
        count = self._count(Progress(step, order.num_steps, order.samples_before(step)), order.num_samples)
        places = uniforms(start, stop, random_key(order.seed, "curriculum", epoch)) * count
        ids = np.minimum(places.astype(np.int64), count - 1)
        return ids if self._easiest is None else self._easiest[ids]

    def describe(self) -> dict[str, Any]:
        # Rounded, since functions such as exp differ by a unit between machines.
        some, every = (
            [round(self._fraction(Progress(step, count - 1, step)), 9) for step in range(count)]
            for count in (_SHOWN, _COMPARED)
        )
        own = {"difficulty": None if self.difficulty is None else _digest(self.difficulty)}
        return {"kind": "curriculum", "f": some, "values": _digest(np.array(every)), **own}
