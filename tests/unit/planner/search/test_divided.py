"""A search in several processes: the answer of one, and processes that end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.planner.models import facts, gpus, transformer

from shoal.errors import LaunchError
from shoal.planner.answer.outlook import Case, curve, sensitivity
from shoal.planner.predict.workload import Workload
from shoal.planner.search.aims import Ceiling, parse
from shoal.planner.search.choice import Choice, NothingFitsError, choose
from shoal.planner.search.divided import dealt
from shoal.planner.search.passes import Wanted
from shoal.planner.search.space import Space, counts
from shoal.plans.plan import Plan

LAYERS, HEADS, POSITIONS = 6, 4, 512
AIMS = ["fastest", "cheapest", "deadline=600s", "efficiency=0.7", "widest=0.6"]


def made(gib: float = 1.45, grains: int = 8) -> Case:
    """On devices so small that some layouts fit and others do not."""
    profile = transformer(LAYERS, 1024, 2048, 8192, POSITIONS, HEADS)
    cluster = gpus(3, 4, gib=gib)
    return Case(
        Workload(profile, grains, grains),
        cluster,
        Space(Plan(), facts(grains, LAYERS, HEADS, POSITIONS), counts(cluster)),
    )


@pytest.fixture(autouse=True)
def every_search_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.planner.answer.outlook._LARGE", 1)


def found(case: Case, aim: str, cores: int) -> tuple[Choice, object, object]:
    with case.search_on(cores) as search:
        choice = choose(search, parse(aim), 100)
        return choice, curve(search, choice.chosen.devices), sensitivity(case, search, choice.chosen)


@pytest.mark.parametrize("cores", [2, 3])
@pytest.mark.parametrize("aim", AIMS)
def test_the_answer_is_that_of_one_process(aim: str, cores: int) -> None:
    case = made()
    choice, *others = found(case, aim, 1)
    divided, *of_divided = found(case, aim, cores)
    assert divided == choice
    assert of_divided == others
    assert {rejected.reason.partition(" by ")[0] for rejected in choice.rejected} > {"does not fit"}


def test_what_nothing_serves_is_told_as_by_one_process() -> None:
    case, told = made(gib=0.2), []
    for cores in (1, 2):
        with case.search_on(cores) as search, pytest.raises(NothingFitsError) as error:
            choose(search, parse("fastest"))
        told.append(str(error.value))
    assert told[0] == told[1]
    assert "no layout fits: the nearest" in told[0]


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_each_of_the_degrees_is_in_one_part(number: int) -> None:
    cuts = made().space.cuts
    parts = dealt(cuts, number)
    assert sorted(cut for part in parts for cut in part) == sorted(cuts)
    assert len(parts) == number
    assert max(map(len, parts)) - min(map(len, parts)) <= LAYERS
    for cut in cuts:
        alike = {number for number, part in enumerate(parts) for one in part if one._replace(pipeline=1) == cut}
        assert cut.context == 1 or len(alike) <= 1


def test_a_ceiling_is_the_lowest_of_all_parts() -> None:
    with memoryview(bytearray(16)).cast("d") as shared:
        shared[0] = shared[1] = float("inf")
        own, other = Ceiling(shared, 0), Ceiling(shared, 1)
        assert own.allows((7.0, 1.0))
        other.lower((5.0, 2.0))
        assert own.allows((5.0, 3.0)), "only the first of a key is known of others: what is equal is looked at"
        assert not own.allows((6.0, 0.0))
        assert not other.allows((5.0, 3.0))
        own.lower((9.0,))
        assert not own.allows((6.0, 0.0)), "it does not rise"


def children() -> list[int]:
    """Processes that this one has started."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(number) for number in text.split()]


def test_a_part_that_fails_is_told_by_its_own_code() -> None:
    with made().search_on(2) as search:
        passes = search.passes()
        passes._processes.ask(99, "run", Wanted())  # passes that were not begun
        with pytest.raises(LaunchError, match="one of them ended with code 1;"):
            passes._processes.answers()


def test_a_command_without_input_searches_too() -> None:
    found = subprocess.run(f"{sys.executable} -c '{ONCE}' <&-", shell=True, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "1\n", "")


def test_a_part_that_is_killed_ends_the_search() -> None:
    before = set(children())
    with made().search_on(2) as search:
        passes = search.passes()
        assert passes.take(Wanted())
        (child,) = set(children()) - before
        os.kill(child, signal.SIGKILL)
        with pytest.raises(LaunchError, match="one of them ended with code -9"):
            passes.take(Wanted())
    assert set(children()) == before


def test_parts_end_with_the_search() -> None:
    before = set(children())
    with made().search_on(3):
        assert len(set(children()) - before) == 2
    assert set(children()) == before


def has_ended(process: int) -> bool:
    """Whether a process is gone, or left to its parent to be asked for."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] == "Z"


ONCE = """
import shoal.planner.answer.outlook as outlook
from shoal.planner.search.passes import Wanted
from tests.unit.planner.search.test_divided import made

outlook._LARGE = 1
with made().search_on(2) as search:
    print(len(search.passes().take(Wanted())))
"""
LONG = """
import shoal.planner.answer.outlook as outlook
from shoal.planner.search.passes import Wanted
from tests.unit.planner.search.test_divided import made

outlook._LARGE = 1
with made(gib=4.0, grains=4096).search_on(2) as search:
    passes = search.passes()
    print("ready", flush=True)
    while True:
        passes.take(Wanted())
"""


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.0])
def test_no_part_outlives_a_command_that_is_killed(seconds: float) -> None:
    """Its part has been told of the search, and is loading its modules, or searches."""
    process = subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        time.sleep(seconds)
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
        (child,) = [int(number) for number in text.split()]
        process.kill()
        process.wait()
        while not has_ended(child):  # or the test's time is over
            time.sleep(0.01)
