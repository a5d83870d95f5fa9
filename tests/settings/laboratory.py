"""What a setting does, observed: a run with it beside the same run without it, or the words that refuse it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from tests.launching import JOBS, start_command
from tests.sharing import Shared

from shoal.runs.records import read_steps

HERE = Path(__file__).resolve().parent
SUBJECT = HERE / "subject.py"


@dataclass(frozen=True)
class Call:
    """One command, or one loop of one's own: on so many ranks, in a folder of its own.

    `arguments` follow the command and its job; `plan` is written as a file and given; `after` is a call whose run
    directory this one finds as its own. `{folder}` stands for the folder, `{out}` for the run directory.
    """

    command: str = "run"
    arguments: tuple[str, ...] = ()
    job: str | None = "job"
    plan: Mapping[str, Any] | None = None
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    after: Call | None = None
    loop: str | None = None

    def with_(self, *arguments: str, **changes: Any) -> Call:
        """This call with more arguments."""
        return replace(self, arguments=(*self.arguments, *arguments), **changes)

    @property
    def key(self) -> str:
        """Equal for equal calls."""
        return repr(self)


@dataclass(frozen=True)
class Ended:
    """How a call ended, and what it left."""

    codes: tuple[int, ...]
    folder: Path

    @property
    def code(self) -> int:
        """The first rank's."""
        return self.codes[0]

    @cached_property
    def said(self) -> str:
        """All that any rank said, on single spaces."""
        texts = [p.read_text(encoding="utf-8", errors="replace") for p in sorted(self.folder.glob("std*-*"))]
        return " ".join(" ".join(texts).split())

    @property
    def out(self) -> Path:
        """The run directory."""
        return self.folder / "out"

    @property
    def result(self) -> dict[str, Any]:
        """result.json."""
        self.expect_done()
        found: dict[str, Any] = json.loads((self.out / "result.json").read_text(encoding="utf-8"))
        return found

    @property
    def records(self) -> list[dict[str, Any]]:
        """records.jsonl, a value a step."""
        self.expect_done()
        return [json.loads(record.to_line()) for record in read_steps(self.out / "records.jsonl")]

    @property
    def plan(self) -> dict[str, Any]:
        """plan.toml."""
        return tomllib.loads((self.out / "plan.toml").read_text(encoding="utf-8"))

    def told(self, name: str) -> list[str]:
        """What the subject noted under a name, a line each, of all ranks in order."""
        paths = sorted(self.folder.glob(f"{name}-*.txt"))
        return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]

    def expect_done(self) -> Ended:
        """Itself. Raises: AssertionError with what was said where any rank failed."""
        assert not any(self.codes), f"exit codes {self.codes}: {self.said}"
        return self


class Laboratory:
    """Makes calls, each once."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._found: dict[str, Ended] = {}
        self._variables = {
            "XDG_CACHE_HOME": f"{shared.root}/cache",
            "PYTHONPATH": f"{JOBS}:{os.environ.get('PYTHONPATH', '')}",
        }

    def __call__(self, call: Call) -> Ended:
        """How it ended; of an equal call that was made before."""
        if call.key not in self._found:
            folder = self._shared.once(call.key, lambda folder: self._make(call, folder))
            codes = json.loads((folder / "codes.json").read_text(encoding="utf-8"))
            self._found[call.key] = Ended(tuple(codes), folder)
        return self._found[call.key]

    def _make(self, call: Call, folder: Path) -> None:
        before = self(call.after) if call.after is not None else None
        if before is not None and before.out.exists():
            shutil.copytree(before.out, folder / "out")
        for name, text in call.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        command = [str(SUBJECT), call.loop] if call.loop is not None else ["-m", "shoal", *self._argv(call, folder)]
        launcher = [sys.executable, str(HERE / "launcher.py"), str(call.ranks)] if call.ranks > 1 else []
        started = start_command(
            [*launcher, sys.executable, *command],
            folder.with_suffix(".launcher"),
            {**self._variables, **call.environment},
            cwd=folder,
        )
        with started as process:
            ended = process.wait()
        if launcher:
            codes = ended.expect(0).stdout
        else:
            codes = json.dumps([ended.code])
            for name, text in (("stdout", ended.stdout), ("stderr", ended.stderr)):
                (folder / f"{name}-0").write_text(text, encoding="utf-8")
        (folder / "codes.json").write_text(codes, encoding="utf-8")

    def _argv(self, call: Call, folder: Path) -> list[str]:
        argv = [call.command]
        if call.job is not None:
            argv.append(f"{SUBJECT}:{call.job}")
        if call.plan is not None:
            (folder / "plan.toml").write_text(tomli_w.dumps(dict(call.plan)), encoding="utf-8")
            argv += ["--plan", "plan.toml"]
        if call.command in ("run", "verify") and "--out" not in call.arguments:
            argv += ["--out", "out"]
        return argv + list(call.arguments)


See = Callable[[Ended], Any]


@dataclass(frozen=True)
class Acts:
    """What `see` sees of the call `given` is another thing than of the call `without`; `as_` says which, if it can."""

    given: Call
    without: Call
    see: See
    as_: Any = None

    def observe(self, laboratory: Laboratory) -> None:
        """Raises: AssertionError where both are the same."""
        with_it = self.see(laboratory(self.given).expect_done())
        without = self.see(laboratory(self.without).expect_done())
        assert with_it != without, f"no effect: {with_it!r} with it and without it"
        if self.as_ is not None:
            assert with_it == self.as_


@dataclass(frozen=True)
class Says:
    """The call ends well and says `words`, which it does not say without the setting."""

    given: Call
    words: str
    without: Call | None = None

    def observe(self, laboratory: Laboratory) -> None:
        """Raises: AssertionError where it is silent."""
        ended = laboratory(self.given).expect_done()
        assert self.words in ended.said, ended.said
        if self.without is not None:
            assert self.words not in laboratory(self.without).expect_done().said


@dataclass(frozen=True)
class Refuses:
    """The call ends with exit code 2, before any step, and with these words."""

    given: Call
    words: str

    def observe(self, laboratory: Laboratory) -> None:
        """Raises: AssertionError where it goes on, or says something else."""
        ended = laboratory(self.given)
        assert 2 in ended.codes, f"exit codes {ended.codes}: {ended.said}"
        assert self.words in ended.said, ended.said
        assert "Traceback" not in ended.said


Row = Acts | Says | Refuses
Table = Mapping[str, Row]


def of_field(key: str) -> str:
    """The field that a row is about: what stands before its colon."""
    return key.partition(":")[0]


def further(table: Table) -> list[str]:
    """Rows of fields that have one already, but for what is refused: `scripts/test --all` takes them."""
    seen: set[str] = set()
    found = []
    for key, row in table.items():
        if of_field(key) in seen and not isinstance(row, Refuses):
            found.append(key)
        elif not isinstance(row, Refuses):
            seen.add(of_field(key))
    return found
