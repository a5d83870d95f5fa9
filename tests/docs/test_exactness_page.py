"""Initial weights come about as docs/exactness.md says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.docs.pages import write_first_job
from tests.forks import run

PROGRAM = """\
import digits_job, hashlib, shoal, torch
from dataclasses import replace

plain = digits_job.job(lr=0.0)


def own_seed():
    torch.manual_seed(0)
    return plain.model()


def from_file():
    model = plain.model()
    model.load_state_dict(torch.load("weights.pt"))
    return model


if __name__ == "__main__":
    by_hand = own_seed()
    torch.save(by_hand.state_dict(), "weights.pt")
    digest = hashlib.sha256(b"0/initial values").digest()  # 0: the job's seed
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    expected = {"plain": plain.model(), "own_seed": by_hand, "from_file": by_hand}
    models = {"plain": plain.model, "own_seed": own_seed, "from_file": from_file}
    for name, model in models.items():
        run = shoal.run(replace(plain, model=model), steps=1, out=f"runs/{name}")
        digest = shoal.weights_sha256(run.model().state_dict())
        print(name, digest == shoal.weights_sha256(expected[name].state_dict()))
"""


@pytest.mark.timeout(200)
def test_initial_weights(tmp_path: Path) -> None:
    write_first_job(tmp_path)
    (tmp_path / "initial_weights.py").write_text(PROGRAM)
    done = run([sys.executable, "initial_weights.py"], cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no-op" not in done.stderr, "a model that loads its weights is not warned of its outline"
    said = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert said == ["plain True", "own_seed True", "from_file True"]
