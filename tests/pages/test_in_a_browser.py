"""Reports of six runs and of several, in a real browser: no message, no request, no violation of axe's rules.

axe-core is no dependency: `npm install --no-save axe-core` puts it where the test looks, or SHOAL_AXE names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import CHROMIUM, Browser, browser
from tests.run_folders import STORIES, one_process, resumed_twice

from shoal.cli.main import main

AXE = Path(
    os.environ.get("SHOAL_AXE", Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js")
)
MOST_BYTES = 1_500_000
# Width, dark or not, and the medium.
VIEWS = [(1200, False, ""), (1200, True, ""), (390, False, ""), (390, True, ""), (800, False, "print")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: reports are not opened in a browser"),
]


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, story in STORIES.items():
        run = story(folder / name.replace(" ", "-")).written()
        assert main(["report", str(run)]) == 0
        found[name] = run / "report.html"
    runs = [str(made(folder / made.__name__).written()) for made in (one_process, resumed_twice)]
    found["several"] = folder / "several.html"
    assert main(["report", *runs, "-o", str(found["several"])]) == 0
    return found


@pytest.mark.parametrize("name", [*STORIES, "several"])
def test_a_page_opens(name: str, pages: dict[str, Path], opened: Browser) -> None:
    page = pages[name]
    assert page.stat().st_size <= MOST_BYTES
    for width, dark, media in VIEWS:
        opened.open(page, width=width, dark=dark, media=media)
        assert opened.value("document.documentElement.dataset.drawn") == "yes"
        assert opened.value("document.querySelectorAll('.chart').length === document.querySelectorAll('canvas').length")
        assert opened.value("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"
        assert (opened.messages, opened.requests) == ([], [])


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm install --no-save axe-core")
@pytest.mark.parametrize("name", [*STORIES, "several"])
def test_axe_finds_no_violation(name: str, pages: dict[str, Path], opened: Browser) -> None:
    for width, dark, media in VIEWS:
        opened.open(pages[name], width=width, dark=dark, media=media)
        opened.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        opened.value(f"{AXE.read_text(encoding='utf-8')};0")
        found = "axe.run().then(found => found.violations.map(one => one.id + ' ' + one.nodes[0].html.slice(0, 200)))"
        assert opened.value(found) == []


def test_keys_move_the_cursor_and_print_is_light(pages: dict[str, Path], opened: Browser) -> None:
    opened.open(pages["one process"], dark=True)
    legend = "document.querySelector('.u-legend .u-value').textContent"
    opened.value("document.querySelector('.chart').focus()")
    for _ in range(3):
        for kind in ("rawKeyDown", "keyUp"):
            opened.ask(
                "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
            )
    assert opened.value(f"new Promise(done => requestAnimationFrame(() => done({legend})))") == "4"
    opened.ask("Page.printToPDF")
    assert opened.value("document.documentElement.dataset.theme") == ""
    assert opened.messages == []


def test_the_policy_refuses_scripts_and_requests(pages: dict[str, Path], opened: Browser, tmp_path: Path) -> None:
    """The check can fail: a page with an element that asks for something, and a script of another."""
    text = pages["one process"].read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.html"
    more = "<script>window.ran = true</script><img src='file:///nowhere.png' alt=''>"
    wrong.write_text(text.replace("</main>", f"{more}</main>"), encoding="utf-8")
    opened.open(wrong)
    assert opened.value("window.ran === undefined")
    assert len(opened.messages) == 2
