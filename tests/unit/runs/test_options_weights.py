"""Rules of initial weights, from options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import CommandError
from shoal.runs.options import InitialWeights, NameRules, initial_weights


@pytest.mark.parametrize(
    ("rename", "key", "name"),
    [
        ((("encoder", "model"),), "encoder.0.weight", "model.0.weight"),
        ((("encoder", "model"),), "encoders.0.weight", "encoders.0.weight"),  # whole parts of a name alone
        ((("encoder", ""),), "encoder.0.weight", "0.weight"),
        ((("", "model"),), "weight", "model.weight"),
        ((("a.b", "c"), ("a", "d")), "a.x", "d.x"),
        ((("a.b", "c"), ("a", "d")), "a.b.x", "c.x"),
        ((("weight", "kernel"),), "weight", "kernel"),
    ],
)
def test_prefixes_are_renamed(rename: tuple[tuple[str, str], ...], key: str, name: str) -> None:
    assert NameRules((), rename).renamed(key)[0] == name


def test_of_options(tmp_path: Path) -> None:
    found = initial_weights(str(tmp_path), "unexpected, missing", ["a.=b", "c="])
    assert found == InitialWeights(tmp_path, NameRules(("missing", "unexpected"), (("a", "b"), ("c", ""))))
    assert initial_weights(None, None, []) is None


@pytest.mark.parametrize(
    ("source", "allow", "rename", "said"),
    [
        (None, "missing", [], "add --init-from"),
        (None, None, ["a=b"], "add --init-from"),
        ("gone", None, [], "no such file or folder"),
        (".", "strict", [], "differences are missing, unexpected, mismatched"),
        (".", "", [], "differences are"),
        (".", None, ["a"], "OLD=NEW"),
        (".", None, ["a=a."], "OLD=NEW"),
    ],
)
def test_refused_in_words(source: str | None, allow: str | None, rename: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        initial_weights(source, allow, rename)


def test_a_request_hands_them_over(tmp_path: Path) -> None:
    """Ranks read the request from a file."""
    from shoal.cli.options import RunOptions
    from shoal.cli.run.start import requested
    from shoal.runs.request import RunRequest, dumped, loaded

    job = tmp_path / "job.py"
    job.write_text("def job(): ...\n", encoding="utf-8")
    wanted = RunOptions(str(job), init_from=str(tmp_path), init_allow="missing", init_rename=("a=b",))
    request = requested(replace(wanted, out=str(tmp_path / "out")))
    assert request.what.initial_weights == InitialWeights(tmp_path, NameRules(("missing",), (("a", "b"),)))
    assert (
        loaded(RunRequest, json.dumps(json.loads(dumped(request)))).what.initial_weights == request.what.initial_weights
    )
