"""Rows of Parquet files by number, whatever files and row groups they are in."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import default_collate

from shoal.data.parquet import Parquet, from_spark
from shoal.errors import DataError

pa = pytest.importorskip("pyarrow", reason="pyarrow comes with the extra spark")


def write(folder: Path, *parts: range) -> Path:
    import pyarrow.parquet as pq

    folder.mkdir()
    for number, part in enumerate(parts):
        columns = {
            "id": list(part),
            "x": pa.array([[float(i), -float(i)] for i in part], pa.list_(pa.float32())),
            "ragged": [[i] * (i % 3 + 1) for i in part],
            "name": [f"n{i}" for i in part],
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=3)
    return folder


def test_samples_by_id(tmp_path: Path) -> None:
    rows = Parquet(write(tmp_path / "a", range(7), range(7, 11)))
    assert len(rows) == 11
    assert [rows[i]["id"] for i in range(11)] == list(range(11))
    found = rows.__getitems__([10, 0, 6, 0])
    assert [sample["id"] for sample in found] == [10, 0, 6, 0]
    assert found[0]["x"].tolist() == [10.0, -10.0]
    assert found[0]["x"].dtype == np.float32
    assert found[2]["ragged"].tolist() == [6]
    assert found[1]["name"] == "n0"
    with pytest.raises(IndexError):
        rows[11]


def test_a_batch_of_them_is_tensors(tmp_path: Path) -> None:
    rows = pickle.loads(pickle.dumps(Parquet(write(tmp_path / "a", range(5)), ["id", "x"])))
    batch = default_collate(rows.__getitems__([3, 1]))
    assert set(batch) == {"id", "x"}
    assert batch["id"].tolist() == [3, 1]
    assert batch["x"].shape == (2, 2)


def test_a_small_cache_reads_the_same(tmp_path: Path) -> None:
    rows = Parquet(write(tmp_path / "a", range(9), range(9, 12)), cache_bytes=1)
    assert [sample["id"] for sample in rows.__getitems__([11, 2, 5, 11])] == [11, 2, 5, 11]
    assert len(rows._cache) == 1


def test_what_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    with pytest.raises(DataError, match="there is no such folder"):
        Parquet(tmp_path / "gone")
    with pytest.raises(DataError, match=r"no \.parquet files"):
        Parquet(tmp_path)
    folder = write(tmp_path / "a", range(5))
    with pytest.raises(DataError, match="did you mean 'ragged'"):
        Parquet(folder, ["raged"])
    pq.write_table(pa.table({"id": [1, None, 3]}), tmp_path / "hole.parquet")
    with pytest.raises(DataError, match=r"column id of .*, row 1"):
        Parquet(tmp_path)[0]


def frame(**kinds: str) -> Any:
    """A frame's names and types, in Spark's words, without Spark."""
    fields = [
        SimpleNamespace(name=name, dataType=SimpleNamespace(simpleString=lambda kind=kind: kind))
        for name, kind in kinds.items()
    ]
    return SimpleNamespace(schema=SimpleNamespace(fields=fields), columns=list(kinds), count=lambda: 5)


def test_columns_that_no_tensor_holds_are_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        from_spark(frame(x="array<float>", v="vector", price="decimal(10,2)", at="timestamp"), tmp_path / "a")
    assert "v of type vector, price of type decimal(10,2), at of type timestamp" in caught.value.given
    for cast in ("vector_to_array", 'cast("double")', 'cast("long")'):
        assert cast in caught.value.remedy
    assert not (tmp_path / "a").exists()


def test_a_folder_with_the_frame_is_read_as_it_is(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", range(5))
    same = frame(id="bigint", x="array<float>", ragged="array<bigint>", name="string")
    assert len(from_spark(same, folder)) == 5
    with pytest.raises(DataError, match="overwrite=True"):
        from_spark(frame(id="bigint"), folder)
