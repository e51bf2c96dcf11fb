"""Sizes and counts as words, and words as sizes."""

import pytest

from narrowgauge.units import human_bytes, human_count, signed_percent


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00 k"),
        (65_536, "65.5 k"),
        (999_999, "1.00 M"),
        (1.2e9, "1.20 B"),
        (3e15, "3000 T"),
    ],
)
def test_counts_have_three_digits(count, words):
    assert human_count(count) == words


@pytest.mark.parametrize(
    ("percent", "words"),
    [
        (10.0, "+10.00 %"),
        (-0.006, "-0.01 %"),
        (-0.004, "0.00 %"),
        (0.0049, "0.00 %"),
        (-0.0, "0.00 %"),
        (float("inf"), "not finite"),
    ],
)
def test_what_rounds_to_zero_percent_has_no_sign(percent, words):
    assert signed_percent(percent) == words


@pytest.mark.parametrize(("count", "words"), [(12, "12 bytes"), (2048, "2.0 KiB"), (24 * 2**30, "24.0 GiB")])
def test_bytes_are_in_binary_units(count, words):
    assert human_bytes(count) == words
