"""What a deferred construction takes of memory, in an interpreter of its own."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.slow
def test_memory_is_that_of_the_values_asked_for() -> None:
    program = """
        import resource, torch
        from torch import nn
        from shoal.parallel.model.deferred_init import deferred

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        deferred(lambda: nn.Linear(8, 8), 0)[1].whole("weight")
        before = peak()

        def make():
            model = nn.Sequential(*(nn.Linear(1280, 1280) for _ in range(64)))  # 420 MB
            for layer in model[:6]:
                nn.init.trunc_normal_(layer.weight, a=-2.0, b=2.0)  # reads values, again and again
            for layer in model[6:20]:
                layer.weight = nn.Parameter(torch.randn(1280, 1280) * 0.02)
            return model

        model, values = deferred(make, 0)
        construction = peak() - before
        kept = [values.whole(f"{i}.weight") for i in range(16)]
        assert values.note is None and sum(w.nbytes for w in kept) > 100e6
        print(construction, peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=110, check=True
    )
    construction, whole = (float(text) for text in done.stdout.split())
    assert construction < 120, "MiB; a weight has 6.3, and the truncated normal takes eight at once"
    assert whole < 200
