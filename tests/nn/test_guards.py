"""Each recipe under what models and training loops do to a layer, beyond one product: shapes that fill no
block, accumulated micro-batches, shared and frozen weights, other dtypes, a state dict."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from narrowgauge.nn import Linear, convert, recipe_tensors, set_step
from narrowgauge.recipes import recipe
from nn.plain_recipes import PLAIN

every_recipe = pytest.mark.parametrize("name", PLAIN)
HALF_ULP = 2.0**-8  # of bf16, the dtype of matmul results


def make(name, k=96, n=64, bias=True):
    torch.manual_seed(0)
    layer = torch.nn.Linear(k, n, bias=bias)
    return Linear(layer, recipe(name).for_layer([("up", None)], 0), 0)


def batch(m=64, k=96, n=64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(2, m, k, generator=g), torch.randn(2, m, n, generator=g)


def products(layer, x, dy):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad.clone()


def same(got, expected):
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("m", "k", "n"), [(5, 1, 7), (5, 7, 1), (1, 1, 1), (13, 41, 33), (129, 40, 24)], ids=str
)
@every_recipe
def test_what_fills_no_block_is_filled_with_zeros(name, m, k, n):
    """The same matmuls as of tensors that fill every block.

    Bits of stochastic rounding are a function of the element's number, outliers one of all ranks, and a mean
    one of all tokens, which filling changes: here none is asked for.
    """
    r = recipe(name).for_layer([("up", None)], 0)
    plain = {
        "rounding": "nearest-even",
        "scale_rounding": "nearest-even",
        "outliers": 0.0,
        "compensate": False,
    }
    plain |= {"center": "", "center_cast": ""}
    r = replace(r, casts={p: c.having(**plain) if c.is_scaled else c for p, c in r.casts.items()})
    g = torch.Generator().manual_seed(2)
    x, w, dy = (torch.randn(*size, generator=g) for size in ((m, k), (n, k), (m, n)))

    def run(x, w, dy):
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        with torch.no_grad():
            layer.weight.copy_(w)
        return products(Linear(layer, r, 0), x, dy)

    def filled(t):
        return torch.nn.functional.pad(t, (0, -t.shape[1] % 128, 0, -t.shape[0] % 128))

    got, whole = run(x, w, dy), run(filled(x), filled(w), filled(dy))
    for a, b in zip(got, whole, strict=True):
        b = b[: a.shape[0], : a.shape[1]]
        # a last bit of bf16, where sums of fp32 in another order fall on the other side of a tie
        torch.testing.assert_close(a, b, rtol=2 * HALF_ULP, atol=1e-5)
        assert a.abs().max() > 0


# Whose blocks lie within a micro-batch: not those with scales of whole tensors, or of whole columns in wgrad.
WITHIN = set(PLAIN) - {"coat", "fp8", "fp8-fnuz", "fp8-row", "nvfp4", "nvfp4-4over6", "fp4", "fp4-all"}
WITHIN -= {"mxfp8-fwd-nvfp4-bwd", "averis", "quartet2", "tetrajet2"}


@pytest.mark.parametrize("name", [n for n in PLAIN if n in WITHIN])
def test_micro_batches_add_up_to_the_batch(name):
    x, dy = batch(m=128)
    layer = make(name)
    for step in (1, 2):  # the second with the scales of histories
        set_step(layer, 0, step, 0)
        y, dx, dw = products(layer, x, dy)
    parts = []
    for i in range(2):
        set_step(layer, 0, 2, i)
        parts.append(products(layer, x[i : i + 1], dy[i : i + 1]))
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), y, rtol=2 * HALF_ULP, atol=1e-5)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), dx, rtol=2 * HALF_ULP, atol=1e-5)
    roundings = HALF_ULP * (dw.abs() + sum(p[2].abs() for p in parts)) + 1e-4
    assert ((sum(p[2] for p in parts) - dw).abs() <= roundings).all()


@every_recipe
def test_gradients_accumulate_in_the_parameter(name):
    x, dy = batch()
    layer, twin = make(name), make(name)
    for each in (layer, twin):
        set_step(each, 0, 1, 0)  # the twin drops its gradients, which would begin another step
    first, second = products(twin, x, dy), products(twin, 2 * x, dy)
    for t in (x, 2 * x):
        layer(t).backward(dy)
    assert torch.equal(layer.weight.grad, first[2] + second[2])


@every_recipe
def test_layers_that_share_a_weight_add_their_gradients(name):
    def pair(tied):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(48, 48, bias=False), torch.nn.Linear(48, 48, bias=False))
        if tied:
            model[1].weight = model[0].weight
        else:
            model[1].load_state_dict(model[0].state_dict())
        model = convert(model, name)
        model(torch.randn(64, 48, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        return model

    tied, apart = pair(True), pair(False)
    assert tied[0].weight is tied[1].weight
    assert len(list(tied.parameters())) == 1
    assert not torch.equal(apart[0].weight.grad, apart[1].weight.grad)
    torch.testing.assert_close(
        tied[0].weight.grad, apart[0].weight.grad + apart[1].weight.grad, rtol=1e-6, atol=0
    )


@every_recipe
def test_an_input_without_gradient_leaves_the_weights(name):
    x, dy = batch()
    layer, frozen = make(name), make(name)
    expected = products(layer, x, dy)
    frozen(x).backward(dy)
    assert x.grad is None
    assert torch.equal(frozen.weight.grad, expected[2])
    assert torch.equal(frozen.bias.grad, layer.bias.grad)


@every_recipe
def test_views_without_strides_of_their_own(name):
    """The gradient of a sum is one number in every place; an input can be a transposed or repeated view."""
    x, _ = batch()
    layer, twin = make(name), make(name)
    repeated = x[:, :1].expand(-1, 64, -1)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    for view in (repeated, turned):
        expected = products(twin, view.contiguous(), torch.ones(2, 64, 64))
        layer.zero_grad()
        leaf = view.detach().requires_grad_()
        y = layer(leaf)
        y.sum().backward()
        assert same((y, leaf.grad, layer.weight.grad), expected)


@pytest.mark.tier("thorough", keep=(torch.bfloat16, "fp8-dtype1", "nvfp4-dtype2"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_recipe
def test_a_converted_model_changes_its_dtype_as_a_plain_one_does(name, dtype):
    def trained(convert_first):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        model = convert(model, name).to(dtype) if convert_first else convert(model.to(dtype), name)
        x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
        results = []
        for step in (1, 2, 3):
            set_step(model, 0, step, 0)
            model.zero_grad()
            y = model(step * x)
            y.square().mean().backward()
            results += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        assert all(p.dtype == dtype for p in model.parameters())
        assert all(t.dtype == torch.float32 for t in recipe_tensors(model).values())
        return results

    first = trained(True)
    assert all(t.dtype == dtype and t.isfinite().all() for t in first)
    assert same(first, trained(False))


@every_recipe
def test_a_state_dict_goes_to_an_unconverted_model_and_back(name):
    def model(seed=0):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    trained, plain, back = convert(model(), name), model(1), convert(model(2), name)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in (1, 2):
        set_step(trained, 0, step, 0)
        optimizer.zero_grad()
        trained(x).square().mean().backward()
        optimizer.step()
    state = trained.state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    back.load_state_dict(plain.state_dict())
    for key, tensor in recipe_tensors(back).items():  # which a state dict does not hold
        tensor.copy_(recipe_tensors(trained)[key])
    with torch.no_grad():
        set_step(trained, 0, 3, 0)
        set_step(back, 0, 3, 0)
        assert torch.equal(back(x), trained(x))


@pytest.mark.tier("thorough", keep=(False, "nvfp4-True"))
@pytest.mark.parametrize("reentrant", [True, False])
@every_recipe
def test_a_recomputed_pass_is_no_step_of_its_own(name, reentrant):
    """Without a training loop that sets its step, as in another library's."""
    x, dy = batch()
    plain, again = make(name), make(name)
    for _ in range(3):
        expected = products(plain, x, dy)
        again.zero_grad()
        leaf = x.clone().requires_grad_()
        y = checkpoint(again, leaf, use_reentrant=reentrant)
        y.backward(dy)
        assert torch.equal(leaf.grad, expected[1])
        assert torch.equal(again.weight.grad, expected[2])
