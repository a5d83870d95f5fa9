"""What every unit test gets: the process as it was before, whatever the test did to it."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The time of a single example says nothing on a shared machine.
settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def same_process_afterwards() -> Iterator[None]:
    """Random generators, sys.path and job modules are put back; a leaked environment variable fails the test."""
    import numpy as np
    import torch  # not above: pytest's first process would import it too, before it starts its workers

    path, modules, variables = list(sys.path), set(sys.modules), dict(os.environ)
    python, legacy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.endswith("_job") or name.startswith("beside_"):
            del sys.modules[name]
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(own)
    assert _lasting(dict(os.environ)) == _lasting(variables)


@pytest.fixture
def no_other_test(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the folder of the tests and hides their modules: hundreds of files, which would count as a job's own."""
    monkeypatch.chdir(tmp_path)
    tests = os.path.join(Path(__file__).parents[1], "")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tests) and name != request.module.__name__:
            monkeypatch.delitem(sys.modules, name)


def _lasting(variables: dict[str, str]) -> dict[str, str]:
    """Without pytest's own, and without what torch's compiler sets for the rest of the process."""
    others = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
    return {k: v for k, v in variables.items() if k not in others}
