"""What is expected here beside what others have published: `pytest -s` prints the error of each row.

`docs/plan.md` has the table, and why a row misses. Within 15 per cent is asked of the rows whose program
computes as this one does; the others are held to what they are, so that nothing drifts unseen.
"""

import pytest

from support.published import FITS, LLMQ_ROWS, NARROW, WIDE

# Rows that miss: (least, most) of expected / published. Why is in docs/plan.md.
MISSES = {
    "torchao 8B, 8 H100": (1.10, 1.22),
    "FP8-LM 7B TE": (0.80, 0.90),
    "FP8-LM 13B TE": (0.80, 0.90),
    "FP8-LM 7B FP8": (1.10, 1.20),
    "FP8-LM 175B BF16": (1.20, 1.30),
    "FP8-LM 175B FP8": (1.35, 1.47),
    "torchtitan 8B, 32K tokens": (0.55, 0.65),
    "torchtitan 8B, 64K tokens": (0.65, 0.77),
}


def check(row):
    found = row.expected()
    ratio = found / row.size
    print(f"| {row.name} | {row.size:.1f} | {found:.1f} | {100 * (ratio - 1):+.0f} % |")
    return ratio


@pytest.mark.parametrize("row", WIDE, ids=lambda row: row.name)
def test_wide_rows(row):
    least, most = MISSES.get(row.name, (0.85, 1.15))
    assert least <= check(row) <= most


@pytest.mark.parametrize("row", FITS, ids=lambda row: row.name)
def test_what_fitted_fits(row):
    assert check(row) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("row", LLMQ_ROWS, ids=lambda row: row.name)
def test_llmq(row):
    """Its activations are bf16 throughout and fused; ours, with a float32 stream, take up to twice."""
    assert (0.85 if not row.most else 0) <= check(row) <= (1.15 if not row.most else 2.1)


@pytest.mark.slow
@pytest.mark.parametrize("row", NARROW, ids=lambda row: row.name)
def test_narrow_rows(row):
    least, most = MISSES.get(row.name, (0.85, 1.15))
    assert least <= check(row) <= most
