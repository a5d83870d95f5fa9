"""Parquet files as a dataset with one sample per row, and conversion of a Spark DataFrame to such files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import DataError, nearest

_INSTALL = 'pip install "shoal[spark]"'
# Spark's names of the number types that a sample may have, also in arrays.
_NUMBERS = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double")
_CASTS = {
    "vector": "pyspark.ml.functions.vector_to_array(column)",
    "decimal": 'column.cast("double")',
    "timestamp": 'column.cast("long")',
    "date": 'datediff(column, lit("1970-01-01"))',
}


class Parquet:
    """Map-style dataset of a folder of Parquet files. Sample i is row i, with files in the order of their names.

    A sample is a dict of its columns: numbers, arrays of numbers as numpy arrays, text.

    Args:
        columns: names of the columns to read. Default: all.
        cache_bytes: size of the cache of recently used row groups. Row groups are read on access. Default: 1 GiB.

    Raises: DataError if there are no files, a column does not exist, or a value is missing.
    """

    def __init__(
        self, folder: str | os.PathLike[str], columns: Sequence[str] | None = None, cache_bytes: int = 1 << 30
    ) -> None:
        self.folder = os.fspath(folder)
        self._cache_bytes = cache_bytes
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise DataError(
                given=self.folder, conflict="pyarrow is not installed, which reads Parquet", remedy=_INSTALL
            ) from None
        is_folder = os.path.isdir(self.folder)
        names = sorted(name for name in os.listdir(self.folder) if name.endswith(".parquet")) if is_folder else []
        if not names:
            raise DataError(
                given=f"Parquet({self.folder!r})",
                conflict="there are no .parquet files" if is_folder else "there is no such folder",
                remedy="give the folder that shoal.from_spark or frame.write.parquet has written, and that all hosts "
                "see",
            )
        files = [ParquetFile(os.path.join(self.folder, name), memory_map=True) for name in names]
        schema = files[0].schema_arrow
        self.columns = tuple(schema.names if columns is None else columns)
        wrong = [name for name in self.columns if name not in schema.names]
        if wrong:
            raise DataError(
                given=f"Parquet({self.folder!r}, columns={list(self.columns)})",
                conflict=f"there is no column {', '.join(wrong)}{nearest(wrong[0], schema.names)}",
                remedy=f"use columns of {', '.join(schema.names)}",
            )
        self._groups = [(file, group) for file in files for group in range(file.num_row_groups)]
        counts = [file.metadata.row_group(group).num_rows for file, group in self._groups]
        self._starts: list[int] = [0, *accumulate(counts)]
        self._cache: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        place = bisect_right(self._starts, i) - 1
        rows, at = self._rows(place), i - self._starts[place]
        # Copies, since a job may modify its sample.
        return {name: v.copy() if isinstance(v := rows[name][at], np.ndarray) else v for name in self.columns}

    def __getitems__(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        # In order of rows, so that each row group is read once even if the cache has room for one only.
        order = sorted(range(len(ids)), key=lambda k: ids[k])
        samples: list[dict[str, Any]] = [{}] * len(ids)
        for k in order:
            samples[k] = self[ids[k]]
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        return (Parquet, (self.folder, self.columns, self._cache_bytes))  # each data worker opens its own files

    def _rows(self, place: int) -> dict[str, Any]:
        """Return the columns of a row group."""
        if place in self._cache:
            self._cache.move_to_end(place)
            return self._cache[place]
        file, group = self._groups[place]
        table = file.read_row_group(group, columns=list(self.columns), use_threads=False)
        rows = {name: self._values(name, table.column(name).combine_chunks(), place) for name in self.columns}
        self._cache[place] = rows
        while len(self._cache) > 1 and sum(map(_bytes, self._cache.values())) > self._cache_bytes:
            self._cache.popitem(last=False)
        return rows

    def _values(self, name: str, column: Any, place: int) -> Any:
        """Return a column's values by row: an array, or a list of strings or of arrays of different lengths."""
        column = column.chunk(0) if hasattr(column, "chunks") else column
        if column.null_count:
            row = self._starts[place] + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(
                given=f"column {name} of {self.folder}, row {row}",
                conflict="there is no value",
                remedy=f'fill or drop it before it is written: frame.dropna(subset=["{name}"])',
            )
        if not hasattr(column, "flatten") or not hasattr(column, "offsets"):
            kind = str(column.type)
            return column.to_pylist() if kind in ("string", "binary", "large_string") else _array(column)
        lengths = np.diff(column.offsets.to_numpy())
        flat = _array(column.flatten())
        if len(set(lengths.tolist())) <= 1:
            return flat.reshape(len(lengths), -1)
        return np.split(flat, np.cumsum(lengths)[:-1])


def from_spark(frame: Any, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Parquet:
    """Write a Spark DataFrame as Parquet into a folder that all ranks see, and return it as a dataset.

    Call it in the program that has the Spark session and starts the run. The job then reads `shoal.Parquet(folder)`. An
    existing folder with the same columns and number of rows is reused.
    Raises: DataError that lists all columns that no tensor can store; DataError if the folder has another frame.
    """
    path, schema = os.path.abspath(os.fspath(folder)), frame.schema
    wrong = {}
    for field in schema.fields:
        kind = field.dataType.simpleString()
        inner = kind.removeprefix("array<").removesuffix(">") if kind.startswith("array<") else kind
        if inner not in _NUMBERS and kind not in ("string", "binary"):
            wrong[field.name] = kind
    if wrong:
        casts = {cast for kind in wrong.values() for word, cast in _CASTS.items() if kind.startswith(word)}
        raise DataError(
            given=f"a DataFrame with {', '.join(f'{name} of type {kind}' for name, kind in wrong.items())}",
            conflict="samples hold numbers, arrays of numbers, and text",
            remedy=f"cast or drop these columns: {'; '.join(sorted(casts)) or 'frame.drop(...)'}",
        )
    if os.path.isdir(path) and not overwrite:
        there, number = Parquet(path), frame.count()
        if there.columns != tuple(frame.columns) or len(there) != number:
            raise DataError(
                given=f"a DataFrame of {number} rows with columns {', '.join(frame.columns)}, and {path}",
                conflict=f"that holds {len(there)} rows with columns {', '.join(there.columns)}",
                remedy="give another folder, or overwrite=True",
            )
        return there
    frame.write.mode("overwrite" if overwrite else "error").parquet(f"file://{path}")
    return Parquet(path)


def _array(column: Any) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


def _bytes(rows: dict[str, Any]) -> int:
    """Return the approximate size of a row group's values in bytes."""
    sizes = [value.nbytes if hasattr(value, "nbytes") else 64 * len(value) for value in rows.values()]
    return sum(sizes)
