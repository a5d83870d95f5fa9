"""shoal.run and shoal.plan in a kernel of Jupyter, cell by cell: lambdas, progress, an interrupt, a resume."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_preempted import context_switches
from tests.launching import JOBS, Ended, Gate, Run, unlaunched
from tests.sharing import Shared

pytestmark = pytest.mark.slow  # an interpreter with torch for the kernel and for each rank

_WHY = "no kernel of Jupyter is installed: pip install 'shoal[kernel]' -c constraints.txt"
nbclient = pytest.importorskip("nbclient", reason=_WHY)
pytest.importorskip("ipykernel", reason=_WHY)

FIRST = """
import torch, tiny, shoal
torch.manual_seed(3)
_ = (torch.randn(1000, 1000) @ torch.randn(1000, 1000)).exp().sum()  # OpenMP's threads are there now
job = lambda lr=0.1: tiny.mlp(lr=lr, loss=lambda model, batch: shoal.cross_entropy(model(batch[0]), batch[1]))
"""


class Kernel:
    """A notebook whose cells are run one by one."""

    def __init__(self, folder: Path, **variables: str) -> None:
        import nbformat
        from nbformat.v4 import new_code_cell, new_notebook

        self._cell, self._notebook = new_code_cell, new_notebook()
        self._notebook.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "Python"}
        assert nbformat.validate(self._notebook) is None
        self.client = nbclient.NotebookClient(
            self._notebook, timeout=100, resources={"metadata": {"path": str(folder)}}, allow_errors=True
        )
        manager = self.client.create_kernel_manager()
        manager.kernel_spec.argv[0] = sys.executable
        self._variables = {**unlaunched(os.environ), "PYTHONPATH": str(JOBS), **variables}

    def __enter__(self) -> Kernel:
        self.client.start_new_kernel(env=self._variables)
        self.client.start_new_kernel_client()
        return self

    def __exit__(self, *_: object) -> None:
        self.client._cleanup_kernel()

    def run(self, source: str) -> list[Any]:
        """The outputs of a new cell."""
        cell = self._cell(source)
        self._notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self._notebook.cells) - 1)
        found: list[Any] = cell.outputs
        return found

    def interrupt(self) -> None:
        """As the button does: SIGINT to the kernel and its group."""
        os.killpg(self.pid, signal.SIGINT)

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self.client.km.provisioner.process.pid)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    with Kernel(tmp_path, **Gate(tmp_path / "gate", 5).environment) as found:
        yield found


def text(outputs: list[Any]) -> str:
    """What the cell shows, errors too."""
    found = [o.get("text", "") or "\n".join(o.get("traceback", [])) or str(o.get("data", "")) for o in outputs]
    return "".join(found)


@pytest.mark.timeout(300)
def test_a_notebook(kernel: Kernel, tmp_path: Path, shared: Shared) -> None:
    undisturbed: Ended = shared.run(Run(JOBS / "tiny.py", Path(), 1, exact=True))
    gate = Gate(tmp_path / "gate", 5)
    assert text(kernel.run(FIRST)) == ""

    def press() -> None:
        while not gate.reached(2):
            if done.wait(0.05):
                return
        kernel.interrupt()
        before = context_switches(kernel.pid)
        while context_switches(kernel.pid) < before + 50 and not done.wait(0.05):  # some polls: it is handed on
            pass
        gate.open()

    done = threading.Event()
    presser = threading.Thread(target=press)
    presser.start()
    try:
        outputs = kernel.run("run = shoal.run(job, devices=2, exact=True, out='out')")
        said = text(outputs)
    finally:
        done.set()
        presser.join()
    assert "KeyboardInterrupt" in said
    assert "notebook:job -> out" in said  # progress is in the cell
    (shown,) = [output["data"] for output in outputs if "data" in output]
    assert re.match(r"<div><progress value=\"\d+\" max=\"16\"", shown["text/html"]), "one element, updated"
    assert shown["text/plain"].startswith("step ")
    streamed = "".join(output.get("text", "") for output in outputs)
    assert "step 1/16" not in streamed, "no line a step beside it"
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "preempted"

    said = text(kernel.run("run = shoal.run(job, devices=3, out='out', resume=True)"))
    assert "completed after step 16" in said, said
    (shown,) = kernel.run("run")
    assert "<th>status</th><td>completed</td>" in shown["data"]["text/html"]
    assert "status='completed'" in shown["data"]["text/plain"]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["weights_sha256"] == undisturbed.result["weights_sha256"]
    assert "True" in text(kernel.run("shoal.weights_sha256(run.model().state_dict()) == run.result['weights_sha256']"))

    (shown,) = kernel.run("shoal.plan(job, cluster='4xH100')")
    assert "notebook:job on 4xH100" in shown["data"]["text/html"]
    assert shown["data"]["text/plain"].startswith("layout ")
    said = text(kernel.run("shoal.run(job, devices=99)"))
    assert "PlanError" in said
