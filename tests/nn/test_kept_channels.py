"""The channels that a layer keeps in another cast: how it chooses, its matmuls, its checkpoints."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.formats import RandomStream
from narrowgauge.guard.widening import places_with, rule_for
from narrowgauge.nn import convert, discard_step, recipe_tensors, set_step
from narrowgauge.quantization import QuantContext, emulate, make_cast
from narrowgauge.recipes import Device, choose_backend, parse_recipe, recipe
from narrowgauge.recipes.exchange import refusals

K, N = 64, 32
STOCHASTIC = 'cast = "mxfp4", hadamard = 32, rounding = "stochastic"'


def recipe_with(**keys):
    """Both operands of fprop keep 5 % of the channels (3), fprop.x with more keys."""
    more = "".join(f", {k} = {v}" for k, v in keys.items())
    x = 'cast = "mxfp4", keep_channels = 0.05, keep_cast = "mxfp8"'
    wgrad = f'wgrad.dy = {{{STOCHASTIC}, keep_cast = "mxfp8"}}\n'
    wgrad += f'wgrad.x = {{{STOCHASTIC}, of = "fprop.x", keep_channels = 0.05, keep_cast = "mxfp8"}}\n'
    return parse_recipe(f'compute = "fp32"\nfprop.x = {{{x}{more}}}\nfprop.w = {{{x}}}\n{wgrad}', "kept")


def model(of=None):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    return convert(layers, recipe_with() if of is None else of)


def tokens(*large, seed=0, count=48):
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(seed))
    x[:, list(large)] *= 30
    return x


def step(m, number, *parts):
    """The passes of a step; the channels that it kept."""
    set_step(m, 0, number, 0)
    kept = recipe_tensors(m)["0.fprop_x.chosen"].nonzero().flatten().tolist()
    for x in parts:
        m(x)
    return kept


def test_the_choice_is_of_the_whole_step_and_made_once():
    m = model()
    small, large = tokens(5, count=8), tokens(9, 20, 40, seed=1)
    assert step(m, 1, small, large) == []
    assert step(m, 2, tokens(1, 2, 3)) == [9, 20, 40]
    assert step(m, 3, tokens(1, 2, 3)) == [9, 20, 40]
    m.eval()
    with torch.no_grad():
        m(1000 * tokens(1, 2, 3))
    assert step(m, 4) == [9, 20, 40]


def test_over_some_steps_and_anew():
    m = model(recipe_with(keep_steps=2, keep_every=3))
    inputs = [
        tokens(1, 2, 3),
        5 * tokens(4, 5, 6, seed=1),
        tokens(7, 8, 9),
        tokens(10, 11, 12),
        tokens(1, 2, 3),
    ]
    kept = [step(m, n + 1, x) for n, x in enumerate([*inputs, tokens()])]
    assert kept[:5] == [[], [1, 2, 3], [4, 5, 6], [4, 5, 6], [10, 11, 12]]
    assert set(kept[5]) < {1, 2, 3, 10, 11, 12}, "of both steps"


def test_a_step_that_is_not_taken_is_forgotten():
    m = model()
    set_step(m, 0, 1, 0)
    m(tokens(5, 6, 7))
    discard_step(m)
    assert [step(m, 1, tokens(1, 2, 3)), step(m, 2)] == [[], [1, 2, 3]]


def test_it_goes_on_from_a_checkpoint():
    chosen = recipe_with(keep_steps=2, keep_every=3)
    m, again = model(chosen), model(chosen)
    for number in (1, 2, 3):
        step(m, number, tokens(number, 2 * number, 30))
    for each in (m, again):
        set_step(each, 0, 4, 0)
    kept = {name: t.clone() for name, t in recipe_tensors(m).items()}
    assert set(kept) == {f"0.fprop_x.{name}" for name in ("squares", "sums", "chosen", "age")}
    for name, tensor in recipe_tensors(again).items():
        tensor.copy_(kept[name])
    for number in (4, 5, 6, 7):
        x = tokens(10 + number, 50, 51, seed=number)
        assert step(m, number, x) == step(again, number, x)
        assert torch.equal(m(x), again(x))


def test_another_dtype_of_the_model_leaves_the_choice_as_it_is():
    m = model()
    step(m, 1, tokens(5, 6, 7))
    step(m, 2)
    before = {name: t.clone() for name, t in recipe_tensors(m).items()}
    m.to(torch.bfloat16)
    assert all(torch.equal(t, before[n]) and t.dtype == before[n].dtype for n, t in recipe_tensors(m).items())


def test_all_products_see_the_kept_channels_in_their_cast():
    """As by hand: two matmuls forward, and two kinds of columns in the weight's gradient."""
    m, x = model(), tokens(9, 20, 40).requires_grad_()
    step(m, 1, x.detach())
    set_step(m, 0, 2, 0)
    y = m(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    kept = torch.zeros(K, dtype=torch.bool)
    kept[[9, 20, 40]] = True
    w, keys = m[0].weight.detach(), m[0].keys

    def narrow(t, axis=-1):
        return ng.quantize(t, "mxfp4", axis).dequantize()

    def wide(t, axis=-1):
        return ng.quantize(t, "mxfp8", axis).dequantize()

    rest, alone = torch.where(kept, 0.0, x.detach()), torch.where(kept, x.detach(), 0.0)
    w_rest, w_alone = torch.where(kept, 0.0, w), torch.where(kept, w, 0.0)
    seen = narrow(rest) + wide(alone)
    torch.testing.assert_close(y.detach(), narrow(rest) @ narrow(w_rest).T + wide(alone) @ wide(w_alone).T)
    torch.testing.assert_close(x.grad, dy @ w)
    again = make_cast({"cast": "mxfp4", "hadamard": 32, "rounding": "stochastic"})

    def transformed(t, place):
        return emulate(t, again, 0, torch.float32, QuantContext(RandomStream(keys[place])))[0]

    dw = transformed(dy, 4).T @ transformed(torch.where(kept, 0.0, seen), 5)
    dw = torch.where(kept, wide(dy, 0).T @ wide(torch.where(kept, seen, 0.0), 0), dw)
    torch.testing.assert_close(m[0].weight.grad, dw)


def test_kept_channels_make_every_product_better():
    x = tokens(9, 20, 40)
    dy = torch.randn(48, N, generator=torch.Generator().manual_seed(2))
    error = {}
    for name in ("tetrajet2", "tetrajet2-outliers"):
        m = model(recipe(name))
        for number in (1, 2):
            set_step(m, 0, number, 0, 10)
            m.zero_grad()
            y = m(x)
            y.backward(dy)
        w = m[0].weight
        error[name] = [
            ((got - exact).norm() / exact.norm()).item()
            for got, exact in ((y.detach(), x @ w.detach().T), (w.grad, dy.T @ x))
        ]
    plain, kept = error["tetrajet2"], error["tetrajet2-outliers"]
    assert kept[0] < 0.5 * plain[0]
    assert kept[1] < 0.5 * plain[1]


def test_it_is_emulated_everywhere_and_refused_by_exporters():
    kept = recipe_with()
    assert {r.key for target in ("te", "megatron", "torchao", "qwix") for r in refusals(kept, target)} >= {
        "keep_channels",
        "keep_cast",
    }
    blackwell = Device(maker="nvidia", capability=(10, 0), library=(13, 0))
    for keys, backend in (("", "native"), (', keep_channels = 0.1, keep_cast = "bf16"', "emulated")):
        narrow = parse_recipe(f'fprop = {{cast = "mxfp8"{keys}}}', "mine")
        assert choose_backend(narrow, blackwell).name == backend
    with pytest.raises(UserError, match="each process would choose other channels"):
        ng.fully_shard(model())


def test_both_operands_that_keep_channels_are_widened_together():
    assert places_with(recipe_with(), "fprop.w") == ("fprop.x", "fprop.w", "wgrad.dy", "wgrad.x")
    widened = rule_for(recipe_with(), "wgrad.x", "")
    assert not any(c.channels.cast for c in recipe_with().with_rules([widened]).rules[0].casts.values())
