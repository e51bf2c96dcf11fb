"""MS-AMP's portable cases of a scaled tensor (its tests/common); its FP4 cases are in `test_remedies.py`."""

import itertools

import pytest
import torch

from narrowgauge.quantization import QuantizedState, make_cast

KINDS = ("fp32", "bf16", "fp16-scaled", "e4m3", "e5m2")
TOLERANCE = {"e4m3": 0.1, "fp16-scaled": 1e-3}


def stored(x, kind):
    """What is read back of a tensor that was stored in a kind of numbers."""
    state = QuantizedState(x.shape, make_cast(kind))
    state.write(x)
    return state.read()


@pytest.mark.parametrize("kind", TOLERANCE)
def test_round_trip(kind):
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(1000))
    torch.testing.assert_close(stored(x, kind), x, rtol=0, atol=TOLERANCE[kind])


@pytest.mark.parametrize(("first", "second"), list(itertools.product(KINDS, KINDS)))
def test_from_any_kind_to_any_other(first, second):
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(1000))
    torch.testing.assert_close(stored(stored(x, first), second), x, rtol=0.1, atol=0.1)


def test_what_fp16_alone_would_lose_goes_on_to_e4m3():
    x = torch.full((4, 4), 2.0**-17)
    assert torch.equal(stored(stored(x, "fp16-scaled"), "e4m3"), x)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_power_of_two_is_exact(kind):
    x = torch.full((4, 4), 1 / 512)
    assert torch.equal(stored(x, kind), x)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [*KINDS, "fp16"])
def test_what_is_not_finite_is_seen_in_what_was_stored(kind, bad, everywhere):
    x = (
        torch.full((4, 4), bad)
        if everywhere
        else torch.ones(4, 4).index_put_((torch.tensor(2),), torch.tensor(bad))
    )
    assert not stored(x, kind).abs().amax().isfinite()
