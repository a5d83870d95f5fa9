"""All rows by name, and the cells of each."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from benchmarks.corpus import keras_applications, language, layers, perception, training
from benchmarks.corpus.cells import DIVIDED, EVERY, Cell, Found
from benchmarks.corpus.row import Row

LEFT_OUT = {
    **keras_applications.LEFT_OUT,
    "torch.nn.SyncBatchNorm": "torch itself refuses it on a CPU; shoal's batch norm is by grain on any layout",
    "blt, dbrx, deepseek_v32, dots1, luke and others of Transformers": "no tiny configuration: sizes that nothing sets",
}

ANY = "any"
_LAYERDROP = (
    "Transformers' own: where torch's fully_shard has marked a model, its layerdrop leaves out no layer, and the "
    "run is another than that of one process"
)
# What is known of a row and a cell besides that it is verified, or refused where a layout divides the model.
KNOWN = {
    "wav2vec2_conformer_growing": {ANY: "refused on purpose: its buffer of positions is too short for these samples"},
    "ibert": {
        ANY: "refused on purpose: its QuantAct averages the extremes of two calls in one buffer, so that a batch's "
        "value does not follow from those of its parts"
    },
    "deberta": dict.fromkeys(
        ("fast bf16", "exact bf16"), "Transformers' own: its mask's number overflows under autocast"
    ),
    "sparse_adam": {ANY: "refused on purpose where a layout makes the gradients of embeddings dense"},
    **{name: {"ZeRO-3": _LAYERDROP} for name in ("hubert", "unispeech", "wav2vec2_conformer")},
    "float64": dict.fromkeys(
        ("fast bf16", "exact bf16"), "refused on purpose: torch's autocast leaves float64 as it is"
    ),
}


def known(cell: Cell) -> str | None:
    """What is known of a cell that is not verified."""
    own = KNOWN.get(cell.row.name, {})
    return own.get(cell.kind, own.get(ANY))


def is_finding(cell: Cell, found: Found) -> bool:
    """Whether a cell is neither verified nor known, nor a refusal to divide the model."""
    if found["status"] == "verified" or known(cell):
        return False
    return found["status"] != "refused" or cell.kind not in DIVIDED


def all_rows() -> dict[str, Row]:
    """The rows by name, a family after the other. Raises: SystemExit where a package they need is not installed."""
    found: dict[str, Row] = {}
    for row in (*language.ROWS, *perception.ROWS, *keras_applications.ROWS, *layers.ROWS, *training.ROWS):
        if row.name in found:
            raise SystemExit(f"two rows are named {row.name}")
        found[row.name] = row
    return found


def cells_of(rows: dict[str, Row], chosen: Sequence[str]) -> list[Cell]:
    """The cells of the chosen rows; about a third of all rows are also divided."""
    found = []
    for name in chosen:
        # By name, so that a new row changes nothing for the others.
        kinds = EVERY + (DIVIDED if zlib.crc32(name.encode()) % 3 == 0 else ())
        found += [Cell(rows[name], kind) for kind in kinds]
    return found


def by_kind(cells: Sequence[Cell]) -> list[Cell]:
    """The cells a column after the other: what is wrong with a row mostly shows in the first."""
    kinds = (*EVERY[:1], *DIVIDED, *reversed(EVERY[1:]))
    return sorted(cells, key=lambda cell: kinds.index(cell.kind))


def sampled(rows: dict[str, Row], number: int, seed: str) -> list[str]:
    """So many names, the same for the same seed; of large models none."""
    names = sorted(name for name, row in rows.items() if row.family != keras_applications.FAMILY)
    return sorted(random.Random(seed).sample(names, min(number, len(names))))
