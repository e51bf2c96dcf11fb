"""A tensor's largest magnitude held for some steps: as by hand, through skips and resumes, or refused."""

import numpy as np
import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.formats import decode
from narrowgauge.nn import convert, discard_step, recipe_tensors, set_step
from narrowgauge.quantization import QuantContext, make_cast, quantize_in_context
from narrowgauge.quantization.oracle import reference_quantize
from narrowgauge.recipes import parse_recipe

TABLE = {"element": "e2m1", "block": 16, "scale": "e5m3", "tensor_scale": "tensor", "refresh": 3}
HELD = 'compute = "fp32"\nfprop.x = {element = "e2m1", block = 16, scale = "e5m3", tensor_scale = "tensor", '
HELD += "refresh = 3}"


@pytest.mark.parametrize("table", [TABLE, TABLE | {"scale": "e4m3"}, TABLE | {"scale": "bf16"}])
@pytest.mark.parametrize("held", [0.0, 0.37, 11.0])
def test_under_a_held_magnitude_as_by_hand(table, held):
    x, c = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), make_cast(table)
    q = quantize_in_context(x, c, -1, QuantContext(held=torch.tensor(held)))
    hand = reference_quantize(x.numpy(), c, held=held)
    np.testing.assert_array_equal(decode(q.codes, c.element).numpy(), hand.values)
    np.testing.assert_array_equal(q.scales.numpy().ravel(), np.array(list(hand.scales.values()), np.float32))
    assert q.tensor_scale.item() == np.float32(hand.tensor_scale)


def model(text=HELD):
    return convert(torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False)), parse_recipe(text, "held"))


def step(m, number, largest, parts=1):
    """Forward passes of a step, and the magnitude that it began with."""
    set_step(m, 0, number, 0)
    began = recipe_tensors(m)["0.fprop_x.held"].item()
    for part in range(parts):
        m(torch.full((4, 16), largest / (part + 1)))
    return began


def test_it_is_taken_every_third_step():
    m = model()
    assert [step(m, n + 1, largest, parts=2) for n, largest in enumerate([4.0, 8, 2, 6, 1, 9, 5])] == [
        0.0, 4, 4, 4, 6, 6, 6,
    ]  # fmt: skip
    m.eval()
    with torch.no_grad():
        m(torch.full((4, 16), 100.0))
    set_step(m, 0, 8, 0)
    assert recipe_tensors(m)["0.fprop_x.held"].item() == 5.0


def test_numbers_beyond_the_one_that_is_held_go_as_far_as_scales_do():
    m = model()
    m[0].weight.data = torch.eye(16)
    step(m, 1, 6.0)
    set_step(m, 0, 2, 0)
    beyond = m(torch.full((1, 16), 48.0))  # under a scale of 8 x 448
    torch.testing.assert_close(beyond, torch.full((1, 16), 48.0), rtol=1e-6, atol=0)
    assert m(torch.full((1, 16), 6000.0)).max().item() == pytest.approx(61440 / 448 * 6, rel=1e-6)


def test_a_step_that_is_not_taken_is_forgotten():
    m = model()
    set_step(m, 0, 1, 0)
    m(torch.full((4, 16), 7.0))
    discard_step(m)
    assert [step(m, 1, 3.0), step(m, 2, 5.0)] == [0.0, 3.0]


def test_it_goes_on_from_a_checkpoint():
    m, again = model(), model()
    for number, largest in enumerate((4.0, 8.0)):
        step(m, number + 1, largest)
    set_step(m, 0, 3, 0)
    set_step(again, 0, 3, 0)
    kept = {name: t.clone() for name, t in recipe_tensors(m).items()}
    assert set(kept) == {"0.fprop_x.amax", "0.fprop_x.held", "0.fprop_x.age"}
    for name, tensor in recipe_tensors(again).items():
        tensor.copy_(kept[name])
    sizes = (3.0, 9.0, 2.0, 7.0)
    assert [step(m, n + 3, s) for n, s in enumerate(sizes)] == [
        step(again, n + 3, s) for n, s in enumerate(sizes)
    ]


def test_what_is_saved_is_what_the_product_saw():
    reuse = HELD + '\nwgrad.x = "fprop.x"\n'
    grads = []
    for saved in ("input", "operand"):
        m = model(f'saved = "{saved}"\n{reuse}')
        m[0].weight.data = torch.eye(16)
        for number, scale in enumerate((1.0, 3.0)):
            set_step(m, 0, number + 1, 0)
            x = scale * torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            m.zero_grad()
            m(x).backward(torch.eye(8, 16))
        grads.append(m[0].weight.grad)
    assert torch.equal(*grads)


MISTAKES = {
    'fprop.x = {cast = "mxfp4", refresh = 50}': "refresh = 50, but it holds the largest magnitude",
    'fprop.x = {cast = "e4m3", refresh = 50}': "scales of this cast are current; leave it out",
    'fprop.x = {cast = "nvfp4", refresh = 1}': "refresh = 1, but it is a number of steps, two or more",
    'fprop.x = {cast = "nvfp4", refresh = 9, center = "tokens"}': "what is held is of the tensor as it comes",
    'm = {cast = "nvfp4", refresh = 9}': "refresh in place 'm', but it belongs to GEMM operands",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_cannot_be_held(text):
    with pytest.raises(UserError, match=MISTAKES[text]):
        parse_recipe(text, "mine")
