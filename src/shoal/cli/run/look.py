"""Probe of a job before ranks start, in a separate interpreter.

It serves callers that already use torch: a fork of them may lack threads of OpenMP or autograd, or lose CUDA.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from shoal.launch.environment import INSIDE
from shoal.launch.signals import Signals
from shoal.launch.supervise.child import Child, OutputRelay, no_answer
from shoal.runs.request import RunRequest, dumped, loaded

_REQUEST, _FOUND = "look.json", "found.json"
_POLL_SECONDS = 0.05
_PROGRAM = "import sys, shoal.cli.run.look; shoal.cli.run.look.main(sys.argv[1])"


def look_aside(request: RunRequest, folder: Path, signals: Signals, stream: TextIO | None) -> dict[str, Any] | None:
    """Return the result of `training.preflight.look` in another process, or None if a signal requested a stop.

    Raises: LaunchError if that process dies.
    """
    (folder / _REQUEST).write_text(dumped(request), encoding="utf-8")
    relay = OutputRelay(stream) if stream is not None else None
    output = relay.writer if relay is not None else None
    child = Child([sys.executable, "-c", _PROGRAM, str(folder)], variables={INSIDE: "1"}, output=output, errors=output)
    try:
        while child.process.poll() is None and not signals.received:
            signals.wait(_POLL_SECONDS)
    finally:
        code = child.finish(0.0)
        if relay is not None:
            relay.close()
    if signals.received:
        return None
    try:
        result: dict[str, Any] = json.loads((folder / _FOUND).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise no_answer(code) from None
    return result


def main(path: str) -> None:
    """Probe the job of the request in a folder, and write the result to the folder."""
    from shoal.training.setup.preflight import look

    folder = Path(path)
    result = look(loaded(RunRequest, (folder / _REQUEST).read_text(encoding="utf-8")))
    (folder / _FOUND).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that the job's code started
