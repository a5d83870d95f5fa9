"""Predicts published measurements from the catalogue alone, and scores predictions by source.

python -m benchmarks.published predict --rows IN.csv --out OUT.csv [--kind ddp] [--calibration one-per-source]
python -m benchmarks.published score --rows IN.csv --predictions OUT.csv [--kind ddp]
python -m benchmarks.published errors --rows IN.csv --predictions OUT.csv --out src/shoal/.../published_errors.toml
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.published import errors
from benchmarks.published import rows as published
from benchmarks.published import score as scoring
from benchmarks.published.predict import Answer, Predictors
from benchmarks.published.rows import Outcome, Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands; 0, or 2 where the rows cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        return int({"predict": _predict, "score": _score, "errors": _errors}[options.command](options))
    except (OSError, KeyError) as error:
        print(f"benchmarks.published: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    predict = commands.add_parser("predict", help="seconds and bytes of each row, its outcome unseen")
    predict.add_argument("--rows", type=Path, required=True)
    predict.add_argument("--out", type=Path, required=True)
    predict.add_argument("--calibration", choices=("none", "one-per-source"), default="none")
    score = commands.add_parser("score", help="what predictions are worth, by source")
    score.add_argument("--rows", type=Path, required=True)
    score.add_argument("--predictions", type=Path, required=True)
    table = commands.add_parser("errors", help="the table of errors that shoal prints error bars from")
    table.add_argument("--rows", type=Path, required=True)
    table.add_argument("--predictions", type=Path, required=True)
    table.add_argument("--out", type=Path, required=True)
    for command in (predict, score):
        command.add_argument("--kind", choices=("transformers", "ddp"), default="transformers")
    return parser


def _predict(options: argparse.Namespace) -> int:
    rows = published.read(options.rows)
    predictors = Predictors(options.kind)
    answers = {row["row_id"]: predictors.answer(published.described(row)) for row in rows}
    if options.calibration == "one-per-source":
        answers = _calibrated(rows, answers, options.kind)
    published.write(options.out, [_line(row["row_id"], answers[row["row_id"]]) for row in rows])
    known = sum(answer.seconds is not None for answer in answers.values())
    print(f"{known} of {len(rows)} rows predicted, in {options.out}")
    return 0


def _line(row_id: str, answer: Answer) -> dict[str, object]:
    return {
        "row_id": row_id,
        "step_time_s": "" if answer.seconds is None else f"{answer.seconds:.6g}",
        "peak_mem_gib": "" if answer.gib is None else f"{answer.gib:.4g}",
        "fits": "" if answer.fits is None else answer.fits,
        "note": answer.note,
    }


def outcome(kind: str, row: Row) -> Outcome:
    """What was measured; of a data-parallel row the seconds of a step, from its throughput."""
    if kind == "transformers":
        return published.outcome(row)
    from benchmarks.published.data_parallel import samples

    throughput, batch = published.number(row, "throughput"), samples(row)
    return Outcome(batch / throughput if throughput and batch else None, None, True)


def _calibrated(rows: Sequence[Row], answers: dict[str, Answer], kind: str) -> dict[str, Answer]:
    """Every prediction of a source times what its first measured row says."""
    factors: dict[str, float] = {}
    for row in rows:
        measured, answer = outcome(kind, row), answers[row["row_id"]]
        if row["source_key"] not in factors and measured.ran and measured.seconds and answer.seconds:
            factors[row["source_key"]] = measured.seconds / answer.seconds
    source = {row["row_id"]: row["source_key"] for row in rows}
    found: dict[str, Any] = {}
    for row_id, answer in answers.items():
        factor = factors.get(source[row_id], 1.0)
        seconds = None if answer.seconds is None else answer.seconds * factor
        found[row_id] = dataclasses.replace(answer, seconds=seconds)
    return found


def _score(options: argparse.Namespace) -> int:
    rows, predictions = published.read(options.rows), published.read(options.predictions)
    found = scoring.pairs(rows, predictions, lambda row: outcome(options.kind, row))
    print(scoring.table(scoring.score(found)))
    return 0


def _errors(options: argparse.Namespace) -> int:
    rows, predictions = published.read(options.rows), published.read(options.predictions)
    found = scoring.pairs(rows, predictions, published.outcome)
    options.out.write_text(errors.text(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
