"""Which cases of a table every run of the tests takes; the others are marked slow, for `scripts/test --all`.

Said where the table becomes parameters, by the cases' ids. A test that is slow as a whole has the mark itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest

SLOW = pytest.mark.slow


def needs_zero23() -> pytest.MarkDecorator:
    """Of what cuts gradients or parameters, which is refused before torch 2.13."""
    from shoal.parallel.shard import torch_release

    return pytest.mark.skipif(
        bool(torch_release.missing()), reason="ZeRO-2 and 3 are refused in words before torch 2.13"
    )


def parametrize(
    names: str | tuple[str, ...],
    values: Iterable[Any],
    *,
    usual: Collection[str] | None = None,
    rare: Collection[str] = (),
    ids: Callable[[Any], str] | Iterable[str] | None = None,
) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize; only cases with an id in `usual` are not slow, or all but the `rare`.

    Raises: ValueError where these name a case that is not there.
    """
    found = list(values)
    texts = [_text(value, ids or str) for value in found] if ids is None or callable(ids) else list(ids)
    usual = set(texts) - set(rare) if usual is None else usual
    gone = {*usual, *rare} - set(texts)
    if gone:
        raise ValueError(f"no cases {sorted(gone)} of {names}: {texts}")
    cases = []
    for text, value in zip(texts, found, strict=True):
        marks = () if text in usual else (SLOW,)
        if isinstance(value, type(pytest.param())):
            cases.append(pytest.param(*value.values, id=text, marks=(*value.marks, *marks)))
        else:
            cases.append(pytest.param(*(value if isinstance(names, tuple) else (value,)), id=text, marks=marks))
    return pytest.mark.parametrize(names, cases)


def _text(value: Any, text: Callable[[Any], str]) -> str:
    if isinstance(value, type(pytest.param())):
        return str(value.id)
    return "-".join(map(text, value)) if isinstance(value, tuple) else text(value)


def pairs(rows: Sequence[tuple[str, ...]], columns: Collection[tuple[int, int]]) -> set[tuple[str, ...]]:
    """A few of the rows in which any two values that stand together in two of these columns of a row do so again.

    Always the same few: next comes the row with most pairs that are new; of equals the one whose last value has been
    taken least, and then the first.
    """

    def of(row: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, row[i], j, row[j]) for i, j in columns}

    left = {pair for row in rows for pair in of(row)}
    taken: Counter[str] = Counter()
    chosen: set[tuple[str, ...]] = set()
    while left:
        best = max(rows, key=lambda row: (len(of(row) & left), -taken[row[-1]]))
        chosen.add(best)
        taken[best[-1]] += 1
        left -= of(best)
    return chosen
