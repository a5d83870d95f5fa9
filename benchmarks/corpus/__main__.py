"""Claim: `shoal verify` calls none of the corpus' right models wrong, and refuses in words what it cannot do.

Every row in fast and exact mode, in float32 and bfloat16, on two processes, and one hash on 1, 2 and 3; every third row
also divided. Cells are kept in benchmarks/results/corpus.jsonl as they come, and corpus.md there is made of them.

    python -m benchmarks.corpus                        # all of it again, then the page
    python -m benchmarks.corpus --resume               # what is not verified yet
    python -m benchmarks.corpus --only bert resnet     # these rows
    python -m benchmarks.corpus --sample 8 --seed 2026-W47 # so many rows, others for another seed; nothing is kept
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.corpus.cells import Cell, run
from benchmarks.corpus.results import PAGE, RESULTS, Results, page, reason
from benchmarks.corpus.row import Row
from benchmarks.corpus.rows import LEFT_OUT, all_rows, by_kind, cells_of, is_finding, known, sampled


def main() -> None:
    """Runs what is asked for, two cells at a time, and writes the page."""
    options = _options()
    rows = all_rows()
    unknown = [name for name in options.only or () if name not in rows]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r}: rows are {', '.join(rows)}")
    chosen = options.only or (sampled(rows, options.sample, options.seed) if options.sample else list(rows))
    cells = [] if options.page else by_kind(cells_of(rows, chosen))
    if options.cells:
        cells = [cell for cell in cells if cell.kind in options.cells]
    results = Results(RESULTS)
    if options.resume:
        cells = [cell for cell in cells if (results.get(cell) or {}).get("status") != "verified"]
    bad = _compute(cells, results, options)
    if not options.sample:
        _write(results, rows)
    if bad:
        names = " ".join(dict.fromkeys(cell.row.name for cell in bad))
        told = "; ".join(cell.name for cell in bad)
        raise SystemExit(f"not verified: {told}. Again: python -m benchmarks.corpus --only {names}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows; these are run again")
    parser.add_argument("--cells", nargs="+", metavar="KIND", help="of the rows, these columns of the table")
    parser.add_argument("--sample", type=int, default=0, help="so many rows, drawn by --seed; nothing is kept")
    parser.add_argument("--seed", default="0", help="any text, a date say")
    parser.add_argument("--resume", action="store_true", help="leave out what is verified already")
    parser.add_argument("--page", action="store_true", help="write the page from what is there, run nothing")
    parser.add_argument("--at-once", type=int, default=2)
    return parser.parse_args()


def _compute(cells: Sequence[Cell], results: Results, options: argparse.Namespace) -> list[Cell]:
    bad = []
    for number, (cell, found) in enumerate(run(cells, options.at_once), 1):
        if not options.sample:
            results.put(cell, found)
        said = f"({found['worst']:.2f})" if found["status"] == "verified" else reason(found)
        place = f"{number}/{len(cells)}"
        print(f"{place} {cell.name}: {found['status']} {said} in {found.get('seconds', '?')} s", flush=True)
        if is_finding(cell, found):
            if options.sample:
                print(found.get("traceback") or found.get("said"), flush=True)
            bad.append(cell)
    return bad


def _write(results: Results, rows: dict[str, Row]) -> None:
    every = cells_of(rows, list(rows))
    results.tidy(every)
    PAGE.write_text(page(results, every, known, LEFT_OUT), encoding="utf-8")


if __name__ == "__main__":
    main()
