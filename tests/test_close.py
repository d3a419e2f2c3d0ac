"""The tolerance of `assert_close_to_norm`: rounding passes, whatever the order of a sum; an error of one element does not."""

from __future__ import annotations

import pytest
import torch

from tests.close import TERMS, assert_close_to_norm, error_of_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_another_order_is_close_and_one_wrong_element_is_not(dtype: torch.dtype) -> None:
    numbers = torch.randn(200, TERMS // 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    want, got = torch.zeros(200, dtype=dtype), torch.zeros(200, dtype=dtype)
    for place in range(numbers.shape[1]):
        want, got = want + numbers[:, place], got + numbers[:, -1 - place]
    assert not torch.equal(got, want)
    terms = numbers.shape[1]
    assert_close_to_norm(got, want, terms=terms)
    if dtype == torch.float32:
        got[17] += 0.01
        with pytest.raises(AssertionError, match="one element: .* of the norm"):
            assert_close_to_norm(got, want, terms=terms, of="one element")


def test_numbers_that_cancel_are_measured_by_the_scale_of_what_they_are_differences_of() -> None:
    assert error_of_norm(1e-7, 0.0) == float("inf")
    assert_close_to_norm(1e-7, 0.0, scale=1.0)
    with pytest.raises(AssertionError):
        assert_close_to_norm(1e-3, 0.0, scale=1.0)
    with pytest.raises(AssertionError):
        assert_close_to_norm([1.0, 2.0], [1.0])


def test_the_coarser_format_decides() -> None:
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert_close_to_norm(float(third.float()), third, terms=1)
    with pytest.raises(AssertionError):
        assert_close_to_norm(third.float().double(), third, terms=1)
