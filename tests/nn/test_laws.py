"""Each recipe under what models do to a layer, beyond one product: views, no tokens, weights that are shared,
numbers that are not finite. What loops do to it: `test_own_loop.py`."""

import torch

from narrowgauge.nn import convert
from narrowgauge.recipes import GEMM_PLACES, recipe
from nn.layers import batch, every_recipe, make, same, steps


@every_recipe
def test_views_are_tensors_like_others(name):
    """The gradient of a sum is one number in every place; an input can be a turned or repeated view."""
    x, dy = batch(2, 32)
    spread = torch.zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    views = [
        (spread, dy.transpose(0, 1).contiguous().transpose(0, 1)),
        (turned, torch.ones(()).expand(dy.shape)),
        (x[:, :1].expand(-1, 32, -1), dy),
    ]
    for x, dy in views:
        assert not x.is_contiguous()
        plain = steps(make(name), x.contiguous().requires_grad_(), dy.contiguous())
        assert same(steps(make(name), x.detach().requires_grad_(), dy), plain)


@every_recipe
def test_no_tokens_no_gradient(name):
    x, dy = batch(0, 32)
    y, dx, dw, db = steps(make(name), x.requires_grad_(), dy, numbers=(1,))
    assert (y.shape, dx.shape) == (dy.shape, x.shape)
    assert not dw.any()
    assert not db.any()


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
        model(batch(64, k=48)[0]).square().mean().backward()
        return model

    tied, apart = pair(True), pair(False)
    assert len(list(tied.parameters())) == 1
    a, b = (layer.weight.grad for layer in apart)
    assert not torch.equal(a, b)
    torch.testing.assert_close(tied[0].weight.grad, a + b, rtol=1e-6, atol=0)


def spoil(under):
    """One element of an input, an output gradient or a weight spoils its row of each product."""
    m, n, k = 20, 11, 33
    for poison in (float("nan"), float("inf"), -float("inf")):

        def products(which, column, poison=poison):
            layer, (x, dy) = make(under, k=70, n=19, bias=False), batch(37, k=70, n=19)
            with torch.no_grad():
                {"x": x[m], "dy": dy[m], "w": layer.weight[n]}[which][column] = poison
            y, dx, dw = (t.isfinite() for t in steps(layer, x.requires_grad_(), dy, numbers=(1,)))
            spoiled = {"x": (y[m], dw[:, k]), "dy": (dx[m], dw[n]), "w": (y[:, n], dx[:, k])}
            return torch.cat(spoiled[which]), {"x": dx, "dy": y, "w": dw}[which]

        for which, column in (("x", k), ("dy", n), ("w", k)):
            spoiled, clean = products(which, column)
            assert not spoiled.any()
            # The slope of rounding a NaN is NaN.
            assert clean.all() or (which == "w" and make(under).spec.casts["fprop.w"].estimator_k)


@every_recipe
def test_what_is_not_finite_never_comes_out_finite(name):
    spoil(name)


def test_what_is_not_finite_never_comes_out_finite_of_products_in_fp32():
    spoil(recipe("fp32").with_places({p: "e5m2" if p.endswith("dy") else "e4m3" for p in GEMM_PLACES}))
