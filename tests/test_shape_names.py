"""Shapes in names are checked while the tests run: an argument of another shape than its name is found."""

import pytest
import torch

from narrowgauge.kernels.attention import attend, document_mask
from support.shape_names import letters_of


def test_a_name_says_its_dimensions():
    names = ("x_BTD", "w_NK", "x", "FROM_M", "x_bt")
    assert [letters_of(name) for name in names] == ["BTD", "NK", "", "", ""]


def test_another_number_of_dimensions_is_found():
    document_mask(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(AssertionError, match=r"document_mask: position_BT has the shape \(3,\)"):
        document_mask(torch.zeros(3, dtype=torch.long))


def test_two_sizes_of_one_letter_are_found():
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)
    with pytest.raises(AssertionError, match=r"attend: k_BKSH has the shape \(1, 2, 3, 5\), where .*'H': 4"):
        attend(q, k, k)
