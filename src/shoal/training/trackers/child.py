"""Process of a tracker: reads a run's entries, one JSON object per line, and sends them to the tracker's service.

On failure the process writes the reason to its output. It ends soon after the run, however the run ended.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import first_line
from shoal.runs.directory import read_json, write_file
from shoal.training.trackers.services import SERVICES, TrackedRun

# After the end of its run a process ends within this time, whatever its tracker does.
_ALONE_SECONDS = 30.0
_MOST_TOGETHER = 500


def main() -> int:
    """Serve until the result or the end of the run. Return the exit code: 0, or 1 if the tracker failed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages print to the log
    try:
        batches = _entries()
        first, *rest = next(batches)
        opening = first["open"]
        out = Path(opening["out"]) if opening["out"] is not None else None
        name = opening["service"]
        run = TrackedRun(opening["where"], out, opening["name"], opening["about"], opening["first_step"])
        place = out / "trackers.json" if out is not None else None
        known = (read_json(place) or {}) if place is not None else {}
        service = SERVICES[name]()
        known[name] = service.open(run, known.get(name))
        if place is not None:
            write_file(place, json.dumps(known, indent=2, sort_keys=True) + "\n")
        result: Mapping[str, Any] = {"status": "failed", "error": "the run ended without a result"}
        while True:
            metrics = [(entry["step"], entry["metrics"]) for entry in rest if "metrics" in entry]
            if metrics:
                service.log(metrics)
            own_result = next((entry["result"] for entry in rest if "result" in entry), None)
            if own_result is not None:
                result = own_result
                break
            try:
                rest = next(batches)
            except StopIteration:
                break
        service.close(result)
    except BaseException as error:  # a package may even call sys.exit()
        text = first_line(error, 250)
        print(f"{type(error).__name__}: {text}", file=answers, flush=True)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _entries() -> Iterator[list[dict[str, Any]]]:
    """Yield the entries that have arrived, at least one at a time. A thread reads, to detect the run's end at once."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)
        time.sleep(_ALONE_SECONDS)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    ended = False
    while not ended:
        lines_now = [lines.get()]
        while len(lines_now) < _MOST_TOGETHER and not lines.empty():
            lines_now.append(lines.get())
        ended = None in lines_now
        entries = [json.loads(line) for line in lines_now if line is not None]
        if entries:
            yield entries


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for the timer and for packages' threads
