"""Steps to trace are a number or a range, and anything else is refused."""

import pytest

from shoal.errors import CommandError
from shoal.runs.options import TraceSteps


@pytest.mark.parametrize(("text", "steps"), [("10", (10, 10)), ("10-12", (10, 12)), (" 3 - 4 ", (3, 4))])
def test_a_step_or_several(text: str, steps: tuple[int, int]) -> None:
    assert TraceSteps.parse(text) == TraceSteps(*steps)
    assert TraceSteps.parse(str(TraceSteps(*steps))) == TraceSteps(*steps)


@pytest.mark.parametrize("text", ["0", "12-10", "ten", "10:12", "-3", "", "1-2-3"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="steps are counted from 1"):
        TraceSteps.parse(text)
