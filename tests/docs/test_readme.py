"""What README and docs show is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.forks import run

# A fixture runs all the commands of the README, one after the other, each in a second or more of imports.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SESSIONS = (ROOT / "docs" / "session.md").read_text()
# What a block of code shows in a line beside both columns of the theme, at 1,280 pixels.
LINE = 88
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(page for folder in ("docs", "benchmarks/results") for page in (ROOT / folder).rglob("*.md")),
    ]
)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's job file was written and its `shoal` commands were run."""
    folder = tmp_path_factory.mktemp("readme")
    job = next(block for block in blocks("python") if block.startswith("# digits_job.py"))
    (folder / "digits_job.py").write_text(job)
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("shoal ")]
    shutil.copy(ROOT / "benchmarks" / "planted_scripts" / "changed.py", folder / "train.py")
    assert [words.split()[1] for words in commands] == ["run", "run", "verify", "plan", "verify"]
    for line in commands:
        words = shlex.split(line, comments=True)
        done = run([sys.executable, "-m", *words], cwd=folder, timeout=100)
        assert done.returncode == 0, done.stderr
    return folder


def result(folder: Path, name: str) -> dict[str, object]:
    """A run's result.json."""
    document: dict[str, object] = json.loads((folder / "runs" / name / "result.json").read_text())
    return document


def test_exact_runs_agree(runs: Path) -> None:
    """Two and three processes give one hash and one digest, as the README's comment says."""
    two, three = result(runs, "two"), result(runs, "three")
    assert two["weights_sha256"] == three["weights_sha256"]
    assert two["sample_digest"] == three["sample_digest"]
    assert (two["world_size"], three["world_size"]) == (2, 3)


def test_run_directory_page_names_every_key(runs: Path) -> None:
    """docs/run-directory.md names every key of a record and of a result."""
    page = (ROOT / "docs" / "run-directory.md").read_text()
    record = json.loads((runs / "runs" / "two" / "records.jsonl").read_text().splitlines()[0])
    missing = [key for key in (*record, *record["spans"], *result(runs, "two")) if f"`{key}`" not in page]
    assert missing == []


def test_session_snippet(tmp_path: Path) -> None:
    """The loop of docs/session.md runs, on one process and on two, to the same losses."""
    plain, session = (block for block in blocks("python", SESSIONS) if "optimizer = build()" in block)
    setup = """
import torch, shoal
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(1000, 8), torch.randint(0, 4, (1000,)))
def build():
    model = torch.nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""
    ending = "    losses = globals().setdefault('losses', []); losses.append(round(step.loss, 5))\n"
    ending += "if session.rank == 0: print(losses)\nsession.close()\n"
    (tmp_path / "plain.py").write_text(setup + plain)
    (tmp_path / "own.py").write_text(setup + session + ending)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = []
    for command in (
        [sys.executable, "plain.py"],
        [sys.executable, "own.py"],
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "own.py"],
    ):
        done = run(command, cwd=tmp_path, env=variables, timeout=100)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert len(json.loads(printed[1])) == 12
    assert printed[1] == printed[2]


def test_five_lines_change() -> None:
    """From the plain loop to the Session's at most five lines are new or changed."""
    plain, session = (block.splitlines() for block in blocks("python", SESSIONS) if "optimizer = build()" in block)
    assert len([line for line in session if line.strip() and line not in plain]) <= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_lines_of_a_page(page: Path) -> None:
    """Relative links name files that are there and their headings; lines of programs fit a window of 1,280 pixels."""
    text = page.read_text()
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert [t for t in targets if t and not (page.parent / t).exists()] == []
    links = [t.split("#") for t in re.findall(r"\]\(([^)\s]*\.md#[^)\s]+)\)", text) if "://" not in t]
    assert [f"{file}#{name}" for file, name in links if name not in anchors(page.parent / file)] == []
    programs = "".join(blocks("python", text) + blocks("toml", text))
    assert [line for line in programs.splitlines() if len(line) > LINE] == []


def test_commands_exist() -> None:
    """The README's two commands are executable files."""
    for name in ("scripts/demo", "scripts/test"):
        assert name in README
        assert shutil.which(str(ROOT / name))


def test_the_readme_is_one_screen() -> None:
    """What a reader needs more of is on the pages."""
    assert len(README.splitlines()) <= 75
