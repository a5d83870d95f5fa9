"""Each error is the built-in that it refines, survives pickling, and renders as three beats."""

import inspect
import pickle

import pytest

import shoal.errors as errors
from shoal.errors import ExitCode, ShoalError, first_line, nearest

BUILT_INS = {
    "CommandError": ValueError,
    "JobFileError": ImportError,
    "SettingError": ValueError,
    "JobError": ValueError,
    "JobMismatchError": ValueError,
    "PlanError": ValueError,
    "HardwareError": ValueError,
    "RunDirectoryError": FileExistsError,
    "InUseError": FileExistsError,
    "DataError": RuntimeError,
    "DatasetNotFoundError": FileNotFoundError,
    "LossError": TypeError,
    "UserCodeError": RuntimeError,
    "OutOfMemoryError": MemoryError,
    "NonFiniteError": ArithmeticError,
    "LaunchError": OSError,
    "RankLostError": ChildProcessError,
    "PeerError": ConnectionError,
    "FencedError": RuntimeError,
    "CollectiveError": ValueError,
    "CertificateError": ValueError,
    "NotDeterministicError": RuntimeError,
    "StorageError": OSError,
    "IntegrityError": OSError,
    "InternalError": RuntimeError,
}
LEAVES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if ShoalError in kind.__mro__[1:]]
BEATS = {"given": "a plan", "conflict": "it is\ntwo lines", "remedy": "write one"}


def test_every_leaf_is_listed_here() -> None:
    assert {kind.__name__ for kind in LEAVES} == set(BUILT_INS)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_a_leaf_is_the_built_in_it_refines(kind: type[ShoalError]) -> None:
    with pytest.raises(BUILT_INS[kind.__name__]) as caught:
        raise kind(**BEATS)
    error = caught.value
    assert isinstance(error, ShoalError)
    assert str(error) == "a plan; it is\ntwo lines; write one"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.given, copy.conflict, copy.remedy) == tuple(BEATS.values())
    assert isinstance(kind.exit_code, ExitCode)
    assert kind.exit_code is not ExitCode.DONE


def test_three_beats_one_a_line() -> None:
    error = errors.PlanError(**BEATS)
    assert error.render().splitlines() == [
        "error: PlanError",
        "  you gave:       a plan",
        "  conflicts with: it is",
        "                  two lines",
        "  write instead:  write one",
    ]
    error.rank, error.host = 3, "somewhere"
    assert error.render().splitlines() == [
        "error on rank 3 (somewhere): PlanError: it is",
        "  two lines",
        "  you gave:       a plan",
        "  write instead:  write one",
    ]


def test_a_message_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    error = errors.RankLostError(given="g", conflict="words " * 100 + "; more", remedy="do this " * 20)
    error.rank, error.host = 1, "h"
    lines = error.render().splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("error on rank 1 (h): RankLostError: words words")
    assert lines[1].startswith("  words words")
    assert lines[-1].startswith("                  ")
    error.conflict = path = "/a/long/path" * 20
    assert error.render().splitlines()[:2] == ["error on rank 1 (h): RankLostError:", f"  {path}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  devices     two processes on the two cores", "  devices     two processes on the two\n              cores"),
        ("three words and then some more of those", "three words and then some more of those"),
        ("three words and then some more of the rest", "three words and then some more of the\n  rest"),
        ("  one of several indented words of the text", "  one of several indented words of the\n    text"),
        ("short", "short"),
        ("a\n\nb", "a\n\nb"),
        ("x" * 50 + " y", "x" * 50 + "\n  y"),
        ("resume: shoal run a.py --out runs/a --resume", "resume:\n  shoal run a.py --out runs/a --resume"),
        (
            "note  shoal plan counts with numbers of this host",
            "note  shoal plan counts with numbers of\n      this host",
        ),
        ("or shoal run a.py --out runs/a, and then another", "or shoal run a.py --out runs/a, and then\n  another"),
        ("shoal run a.py --resume --out runs/another-one", "shoal run a.py --resume --out runs/another-one"),
        ("A=1 B=2 shoal run a.py --resume --out runs/one", "A=1 B=2 shoal run a.py --resume --out runs/one"),
    ],
)
def test_long_lines_break_between_words(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert errors.folded(text) == expected


def test_the_nearest_name() -> None:
    assert nearest("lrr", ["lr", "epochs"]) == "; did you mean 'lr'?"
    assert nearest("zzz", ["lr", "epochs"]) == ""
    assert nearest("lr", []) == ""


def test_exit_codes_are_distinct() -> None:
    assert {c.name: int(c) for c in ExitCode} == {
        **{"DONE": 0, "FAILED": 1, "USER": 2, "NONFINITE": 65, "RANK_LOST": 69},
        **{"STORAGE": 73, "INTEGRITY": 74, "PREEMPTED": 75, "INTERRUPTED": 130},
    }


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("\none\ntwo"), 2) == "on"
    assert first_line(ValueError()) == ""
