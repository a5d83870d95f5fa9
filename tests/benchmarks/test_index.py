"""Pages of results are what their generators make of the records, and the index names every record."""

import json

import pytest

from benchmarks import index, loss_curves, questions, sharded_memory


def test_the_index_is_as_generated() -> None:
    assert index.PAGE.read_text(encoding="utf-8") == index.page(), "run python -m benchmarks.index"


def test_each_record_is_in_the_index_and_there() -> None:
    named = {name for rows in index.GROUPS.values() for row in rows for name in row.records} | set(index.others())
    assert [name for name in sorted(named) if not (index.RESULTS / name).is_file()] == []
    records = {str(path.relative_to(index.RESULTS)) for path in index.RESULTS.rglob("*") if path.is_file()}
    assert records - named - {"README.md"} == set()


def test_a_claim_is_a_sentence() -> None:
    assert index.claim("matrix") == (
        "Of 120 pairs of a model and a layout `shoal verify` verifies 112, and 8 are refused with a reason"
    )
    with pytest.raises(ValueError, match="no sentence after 'Claim:'"):
        index.claim("step_time_rank")


def test_the_page_of_sharded_memory() -> None:
    results = json.loads(sharded_memory.RESULTS.read_text(encoding="utf-8"))
    assert sharded_memory.PAGE.read_text(encoding="utf-8") == sharded_memory.page(results)


def test_the_page_of_loss_curves() -> None:
    results = json.loads(loss_curves.RESULTS.read_text(encoding="utf-8"))
    assert loss_curves.PAGE.read_text(encoding="utf-8") == loss_curves.page(results["curves"])


def test_the_page_of_questions() -> None:
    results = json.loads(questions.RESULTS.read_text(encoding="utf-8"))
    assert questions.page(results) in questions.PAGE.read_text(encoding="utf-8")
