"""The quick suite stays quick: processes take its time, so the tests that start them are counted."""

import pytest

# Each takes about a second of both cores. A new test that is slow, or replaces another, needs no larger number.
MAX_QUICK_TESTS_WITH_PROCESSES = 1175


def test_few_quick_tests_start_processes(request: pytest.FixtureRequest) -> None:
    """Counts what this session has collected: all such tests in scripts/test, fewer where paths are chosen."""
    marked = [i for i in request.session.items if i.get_closest_marker("ranks") or i.get_closest_marker("faults")]
    quick = [item for item in marked if not item.get_closest_marker("slow")]
    assert len(quick) <= MAX_QUICK_TESTS_WITH_PROCESSES
