"""Rows of a product on one rank, whole and cut by a tensor axis."""

from dataclasses import replace

import pytest
from tests.unit.planner.made import matmul

from shoal.planner.predict.compute_time import MatrixRow, sizes_on_rank, unaligned_rows
from shoal.planner.predict.workload import Share
from shoal.planner.profile.values import Amount, Operation, TensorCut


def head(vocabulary: int, cut: TensorCut = TensorCut.N) -> Operation:
    """An output layer, of which the vocabulary is n."""
    return replace(matmul("head", 1024, vocabulary, 768, cut=cut), rows=("k", "n"))


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "is_aligned"),
    [
        (50_257, 1, False),
        (50_264, 1, True),
        (50_264, 2, False),  # 25,132 on each
        (50_272, 4, True),
        (50_257, 2, False),
        (50_255, 2, False),  # 25,128 on one rank, 25,127 on the other, for which it waits
    ],
)
def test_a_cut_vocabulary_is_as_aligned_as_the_part_of_a_rank(vocabulary, tensor, is_aligned):
    rows = unaligned_rows(head(vocabulary), Share(1, tensor=tensor))
    assert rows == (() if is_aligned else (MatrixRow(vocabulary, tensor),))


def test_a_cut_of_something_else_leaves_a_row_whole():
    assert unaligned_rows(head(50_264, TensorCut.M), Share(1, tensor=2)) == ()
    assert unaligned_rows(head(50_264, TensorCut.BATCH), Share(1, tensor=2)) == ()
    assert unaligned_rows(head(50_264, TensorCut.NONE), Share(1, tensor=2)) == ()
    assert unaligned_rows(head(50_264, TensorCut.SEQUENCE), Share(1, tensor=2, sequence=True)) == ()


def test_rows_along_positions_follow_sequence_parallelism():
    along_m = replace(head(768, TensorCut.SEQUENCE), rows=("m",), m=Amount(1032))
    assert unaligned_rows(along_m, Share(1, tensor=2)) == ()
    assert unaligned_rows(along_m, Share(1, tensor=2, sequence=True)) == (MatrixRow(1032, 2),)


def test_padding_serves_every_rank():
    assert MatrixRow(50_257).padded == MatrixRow(50_304).padded == 50_304
    assert MatrixRow(50_257, 4).padded == 50_432
    assert MatrixRow(769).padded == 776
    for ranks in range(1, 9):
        assert MatrixRow(MatrixRow(50_257, ranks).padded, ranks).is_aligned


def test_a_vector_has_no_rows():
    assert unaligned_rows(replace(head(1), k=Amount(769)), Share(1)) == ()
    assert unaligned_rows(replace(head(768), k=Amount(769)), Share(1)) == (MatrixRow(769),)


def test_sizes_are_those_of_the_largest_part():
    assert sizes_on_rank(head(50_257), Share(2, tensor=2)) == (2048, 25_129, 768, 1)
    assert sizes_on_rank(replace(head(768, TensorCut.BATCH), batch=Amount(0, 4)), Share(2, tensor=2)) == (
        2048,
        768,
        768,
        4,
    )
