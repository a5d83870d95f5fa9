"""Flat vectors of real numbers for tensors that may be complex."""

from __future__ import annotations

import torch

from shoal.numerics.flat import as_real, in_dtype, real_numel, views_of


def test_complex_tensors_are_pairs_wherever_they_lie() -> None:
    tensors = [torch.ones(3), torch.tensor([[1.0 + 2.0j, -3.0j]]), torch.tensor(2.0 - 1.0j).conj()]
    flat = torch.zeros(sum(map(real_numel, tensors)))
    for view, tensor in zip(views_of(flat, tensors), tensors, strict=True):
        view.copy_(as_real(tensor))
    assert flat.tolist() == [1, 1, 1, 1, 2, 0, -3, 2, 1]
    for view, tensor in zip(views_of(flat, tensors), tensors, strict=True):
        assert torch.equal(in_dtype(view, tensor), tensor)


def test_a_complex_vector_has_complex_pieces() -> None:
    (piece,) = views_of(torch.zeros(2, dtype=torch.complex64), [torch.zeros(2, 1, dtype=torch.complex64)])
    assert piece.shape == (2, 1)
