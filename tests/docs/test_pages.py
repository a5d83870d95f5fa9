"""The programs and commands of the pages that teach are run as they stand there."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.docs.pages import blocks_of, command, missing, tell
from tests.docs.test_readme import ROOT
from tests.usual import parametrize

DOCS = ROOT / "docs"
TAUGHT = [
    *(DOCS / name for name in ("index.md", "tutorial.md", "runs.md")),
    *DOCS.glob("how-to/*.md"),
    *DOCS.glob("coming-from/*.md"),
]
PAGES = {str(path.relative_to(DOCS)): path.read_text("utf-8") for path in sorted(TAUGHT)}
STORIES = [
    name
    for name, page in PAGES.items()
    if name != "tutorial.md" and any(block.language == "sh" for block in blocks_of(page))
]
NEEDS = {"coming-from/trainer.md": "transformers"}
PLAIN = [*DOCS.glob("*.md"), *DOCS.glob("engines/*.md")]
LOOKED_UP = {DOCS / f"{name}.md" for name in ("architecture", "settings")}  # rather than read
MOST_WORDS = 1_200
USUAL = {"how-to/matrix-optimizers.md"}  # and the tutorial


@pytest.mark.timeout(400)
@parametrize("name", STORIES, usual=USUAL)
def test_the_page_in_its_order(name: str, tmp_path: Path) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    tell(PAGES[name], tmp_path)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the tutorial was done."""
    folder = tmp_path_factory.mktemp("tutorial")
    tell(PAGES["tutorial.md"], folder)
    return folder


@pytest.mark.timeout(400)
def test_the_tutorial(taught: Path) -> None:
    assert json.loads((taught / "runs" / "verify" / "certificate.json").read_text())["verdict"] == "verified"
    assert len(json.loads((taught / "runs" / "certified" / "result.json").read_text())["certificate"]) == 64


@pytest.mark.timeout(400)
def test_settings_of_the_tutorial_reach_the_job(taught: Path) -> None:
    described = json.loads((taught / "runs" / "bf16" / "job.json").read_text())
    assert described["settings"] == {"lr": 0.05, "epochs": 1}
    assert 'compute = "bfloat16"' in (taught / "runs" / "bf16" / "plan.toml").read_text()


def test_what_a_page_shows_is_compared() -> None:
    assert missing("accuracy 0.9... of 12\n...\n", "accuracy 0.934 of 12\n") == []
    assert missing("accuracy 0.9... of 12\n", "accuracy 0.834 of 12\n") == ["accuracy 0.9... of 12"]
    with pytest.raises(ValueError, match="rm -r"):
        command("rm -r /tmp/x")


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    page = '```python\n# a.py\nprint("one")\n```\n\n```sh\npython a.py\n```\n\n```text\n{}\n```\n'
    tell(page.format("one"), tmp_path)
    with pytest.raises(AssertionError):
        tell(page.format("two"), tmp_path)
    with pytest.raises(AssertionError):
        tell(page.format("one").replace("python a.py", "python b.py"), tmp_path)


def test_programs_of_other_frameworks_are_no_blocks() -> None:
    assert blocks_of('```py title="train.py"\nimport horovod\n```\n\n```sh\nshoal run\n```\n')[0].language == "sh"


def long_sentences(page: str, most: int = 25) -> list[str]:
    """Sentences of a page's paragraphs and lists with more words than that; code, tables and headings are left out."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#", "<", ":::")))
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    sentences = re.split(r"(?<=[.!?:;])\s|\n\n|\n- ", text)
    return [" ".join(words) for sentence in sentences if len(words := sentence.split()) > most]


@pytest.mark.parametrize("path", sorted({ROOT / "README.md", *TAUGHT, *PLAIN}), ids=lambda p: p.name)
def test_sentences_are_short(path: Path) -> None:
    assert long_sentences(path.read_text("utf-8")) == []


def num_words(page: str) -> int:
    """Words of a page without its programs, the bars of its tables and the targets of its links."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"[^\s|]+", re.sub(r"\]\([^)]*\)", "]", text)))


@pytest.mark.parametrize("path", sorted({*TAUGHT, *PLAIN} - LOOKED_UP), ids=lambda p: p.name)
def test_a_page_is_read_in_ten_minutes(path: Path) -> None:
    assert num_words(path.read_text("utf-8")) <= MOST_WORDS


def test_a_long_sentence_is_found() -> None:
    long = "One " + "more " * 25 + "word."
    assert len(long_sentences(f"Short.\n\n- {long} Short.\n\n```sh\n{long}\n```\n| {long} |\n")) == 1
