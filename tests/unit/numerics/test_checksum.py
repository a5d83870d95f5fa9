"""Checksums of tensors' bits."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.numerics.checksum import bits_checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64)


@given(st.sampled_from(DTYPES), st.integers(1, 37), st.data())
def test_a_single_bit_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    one = (torch.arange(size) + 1).to(dtype)
    two = one.clone()
    there = (torch.view_as_real(two) if two.is_complex() else two).view(torch.uint8).reshape(-1)
    place = data.draw(st.integers(0, len(there) - 1))
    there[place] ^= 1 << data.draw(st.integers(0, 7))
    other = torch.ones(3)
    assert bits_checksum([one, other]) == bits_checksum([one.clone(), other]) != bits_checksum([two, other])


def test_of_slices_and_nothing() -> None:
    whole = torch.arange(10.0)
    assert bits_checksum([whole[1:4]]) == bits_checksum([whole[1:4].clone()])
    assert bits_checksum([whole.view(2, 5).t()]) == bits_checksum([whole.view(2, 5).t().contiguous()])
    assert bits_checksum([torch.empty(0), torch.zeros(())]) == 0
