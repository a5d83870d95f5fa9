"""Membership and commit as a state machine: any number of takers, restarts and committers, paused at any line."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.runs.test_directory_lock_interleaved import Process

from shoal.errors import FencedError
from shoal.runs.directory import Fence, newest


@dataclass
class Member:
    """A launcher as it sees the run: its generation, the step that it has read or committed, and what it does now."""

    fence: Fence
    step: int
    does: Process | None = None
    commits: bool = False


class Membership(RuleBasedStateMachine):
    """Processes that begin generations and commit steps to one directory.

    What holds: each generation begins once; who begins one has read every step that was committed before; nobody
    commits a step after a later generation has read; no step is committed twice.
    """

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="membership-"))
        self.path = self.folder / "saved.json"
        first = Fence.next(self.folder, 1, "begun")
        first.write(self.path, json.dumps({"step": 0, "generation": 1}))
        self.members = [Member(first, 0)]
        self.takers: list[Process] = []
        self.committed: list[tuple[int, int]] = [(0, 1)]  # step, generation
        self.read: dict[int, int] = {1: 0}  # by generation

    def _saved(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.path.read_text(encoding="utf-8"))
        return found

    def _take(self, after: Fence | None) -> tuple[Fence, int]:
        fence = Fence.next(self.folder, 1, "resumed" if after is None else "lost ranks", after=after)
        return fence, self._saved()["step"]

    @rule()
    @precondition(lambda self: len(self.takers) < 3)
    def takes_over(self) -> None:
        self.takers.append(Process(lambda: self._take(None)))

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: len(self.takers) < 3)
    def starts_its_ranks_again(self, which: int) -> None:
        member = self.members[which % len(self.members)]
        if member.does is None:
            self.takers.append(Process(lambda: self._take(member.fence)))

    @rule(which=st.integers(0, 99))
    def begins_to_commit(self, which: int) -> None:
        member = self.members[which % len(self.members)]
        if member.does is None:
            text = json.dumps({"step": member.step + 1, "generation": member.fence.generation})
            member.does = Process(lambda: member.fence.write(self.path, text))

    @rule(which=st.integers(0, 99), lines=st.integers(1, 25))
    def goes_on(self, which: int, lines: int) -> None:
        moving = [*self.takers, *(member.does for member in self.members if member.does is not None)]
        if moving:
            for _ in range(lines):
                moving[which % len(moving)].step()

    @rule(which=st.integers(0, 99))
    def finishes(self, which: int) -> None:
        moving = [*self.takers, *(member.does for member in self.members if member.does is not None)]
        if moving:
            moving[which % len(moving)].finish()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "members"):
            return
        for member in self.members:
            if member.does is not None and member.does.over:
                member.does.finish()
                if member.does.result is None:  # it has committed
                    member.step += 1
                    self._commit(member.step, member.fence.generation)
                else:
                    assert isinstance(member.does.result, FencedError)
                    assert newest(self.folder) > member.fence.generation
                member.does = None
        for taker in [taker for taker in self.takers if taker.over]:
            self.takers.remove(taker)
            taker.finish()
            if isinstance(taker.result, FencedError):
                continue
            fence, step = taker.result
            assert fence.generation not in self.read, "a number is used once"
            self.read[fence.generation] = step
            self.members.append(Member(fence, step))
        saved = self._saved()
        later = [step for generation, step in self.read.items() if generation > saved["generation"]]
        assert all(step >= saved["step"] for step in later), "a commit after a later generation has read"

    def _commit(self, step: int, generation: int) -> None:
        assert step not in [other for other, _ in self.committed], "a step is committed twice"
        self.committed.append((step, generation))
        for other, read in self.read.items():
            assert other <= generation or read >= step, "a later generation has not read what was committed"

    def teardown(self) -> None:
        if not hasattr(self, "members"):
            return
        for moving in [*self.takers, *(member.does for member in self.members if member.does is not None)]:
            moving.finish()
        self.holds()
        fence, step = self._take(None)
        assert step == max(self.committed)[0], "nothing that was committed is lost"
        fence.write(self.path, json.dumps({"step": step + 1, "generation": fence.generation}))  # who is newest can
        assert not list(self.folder.glob(".*"))
        shutil.rmtree(self.folder)


Membership.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestMembership = Membership.TestCase
