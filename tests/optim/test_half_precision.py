"""Parameters of 16 bits, as hubs hand them out: they learn as float32 ones do, however small the steps."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim import AdamW

RECIPES = ("fp32", "bf16", "nvfp4", "bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "eco", "coat")
LR, STEPS = 1e-5, 60


def wide_of(optimizer, p):
    """The master of a parameter, or else what it is."""
    state = optimizer.state[p]
    return state["master"].read() if "master" in state else p.detach().float()


def moved(optimizer, p):
    """How far a parameter is from ones, after steps of one sign."""
    for _ in range(STEPS):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return (1 - wide_of(optimizer, p)).mean().item()


@pytest.mark.tier("nightly", keep=("(96, 96)", "shape0-dtype0-bf16-sr"))
@pytest.mark.tier(
    "thorough",
    keep=("shape1-dtype0-fp32", "shape1-dtype1-nvfp4", "shape1-dtype0-msamp-o3", "shape0-dtype0-bf16-sr"),
)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096,), (96, 96)])
def test_small_updates_move_a_16_bit_parameter_as_they_do_a_float32_one(name, dtype, shape):
    """Each is a thousandth of the last bit: rounded to nearest, the parameter stands still."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = AdamW([p], name, lr=LR, weight_decay=0.0)
    if "master" in optimizer.state[p]:
        twin = torch.nn.Parameter(torch.ones(shape))  # moments are as narrow as the parameter's
        expected = moved(AdamW([twin], name, lr=LR, weight_decay=0.0), twin)
        assert moved(optimizer, p) == pytest.approx(expected, rel=1e-6)
        assert torch.equal(p.detach(), optimizer.state[p]["master"].read().to(dtype))
    else:  # rounded stochastically: each step of 2^-8 below one is taken with probability LR / 2^-8
        steps = p.numel() * STEPS * LR / 2**-8
        assert abs(moved(optimizer, p) - STEPS * LR) < 4 * STEPS * LR / steps**0.5
        assert name == "bf16-sr"
        assert dtype == torch.bfloat16


def test_a_16_bit_parameter_that_is_written_between_steps_goes_on_from_there():
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=LR, weight_decay=0.0)
    moved(optimizer, p)
    with torch.no_grad():
        p[:4] = 3.0
    p.grad = torch.zeros_like(p)
    optimizer.step()
    master = optimizer.state[p]["master"].read()
    assert (3 - master[:4]).abs().max() < 2 * LR
    assert (1 - master[4:]).mean().item() == pytest.approx((STEPS + 1) * LR, rel=0.02)


def test_the_master_follows_a_model_that_becomes_16_bits_after_its_optimizer():
    model = torch.nn.LayerNorm(64)
    optimizer = ng.AdamW(model.parameters(), "msamp-o2", lr=LR, weight_decay=0.0)
    model.bfloat16()
    assert moved(optimizer, model.weight) == pytest.approx(STEPS * LR, rel=0.02)
