"""What places remember of earlier steps: amax histories, a largest magnitude held for some steps, and the
channels kept in another cast. First what holds for each, then each by hand."""

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import RandomStream, decode
from narrowgauge.kernels.amax import raise_amax
from narrowgauge.nn import convert, discard_step, recipe_tensors, set_step
from narrowgauge.nn.histories import AmaxHistory, end_steps
from narrowgauge.quantization import QuantContext, emulate, make_cast, quantize_in_context
from narrowgauge.recipes import Recipe, parse_recipe
from oracle import reference_quantize

K, N = 64, 32
HELD = {"element": "e2m1", "block": 16, "scale": "e5m3", "tensor_scale": "tensor", "refresh": 3}
STOCHASTIC = 'cast = "mxfp4", hadamard = 32, rounding = "stochastic"'


def keeping(**keys):
    """Both operands of fprop keep 5 % of the channels (3), fprop.x with more keys."""
    more = "".join(f", {k} = {v}" for k, v in keys.items())
    x = 'cast = "mxfp4", keep_channels = 0.05, keep_cast = "mxfp8"'
    wgrad = f'wgrad.dy = {{{STOCHASTIC}, keep_cast = "mxfp8"}}\n'
    wgrad += f'wgrad.x = {{{STOCHASTIC}, of = "fprop.x", keep_channels = 0.05, keep_cast = "mxfp8"}}\n'
    return parse_recipe(f'compute = "fp32"\nfprop.x = {{{x}{more}}}\nfprop.w = {{{x}}}\n{wgrad}', "kept")


#: By kind: a recipe, and the names of the state of fprop.x.
KINDS = {
    "history": ("fp8-delayed", {"amax", "entries", "scale"}),
    "held": (Recipe.from_dict({"compute": "fp32", "fprop.x": HELD}), {"amax", "held", "age"}),
    "kept": (keeping(keep_steps=2, keep_every=3), {"squares", "sums", "chosen", "age"}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def model(under):
    torch.manual_seed(0)
    return convert(torch.nn.Sequential(torch.nn.Linear(K, N, bias=False)), under)


def tokens(*large, seed=0, count=48, factor=30):
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(seed))
    x[:, list(large)] *= factor
    return x


def step(m, number, *parts):
    """The passes of a step; the outputs."""
    outputs = []
    for i, x in enumerate(parts):
        set_step(m, 0, number, 48 * i)
        outputs.append(m(x))
    return [y.detach() for y in outputs]


def state(m):
    return {name: t.clone() for name, t in recipe_tensors(m).items()}


@every_kind
def test_evaluation_is_not_seen_and_another_dtype_changes_nothing(kind):
    m = model(KINDS[kind][0])
    step(m, 1, tokens(5, 6, 7))
    set_step(m, 0, 2, 0)
    before = state(m)
    assert {n.rpartition(".")[2] for n in before if "fprop_x" in n} == KINDS[kind][1]
    assert set(m.state_dict()) == {"0.weight"}
    with torch.no_grad():
        m.eval()(1000 * tokens(1, 2, 3))
    after = recipe_tensors(m.to(torch.bfloat16))
    assert all(torch.equal(t, after[n]) and t.dtype == after[n].dtype for n, t in before.items())


@every_kind
def test_accumulated_passes_are_one_step_and_one_that_is_not_taken_is_forgotten(kind):
    whole, parts = (model(KINDS[kind][0]) for _ in range(2))
    step(parts, 1, 5 * tokens(3))
    discard_step(parts)
    for number in (1, 2, 3):
        x = number * tokens(number, 2 * number, 30)
        step(whole, number, x)
        step(parts, number, *x.chunk(4))
    for m in (whole, parts):
        set_step(m, 0, 4, 0)
    assert all(torch.allclose(t, recipe_tensors(parts)[n], rtol=1e-5) for n, t in state(whole).items())


def history(length=4, **extra):
    return AmaxHistory(make_cast({"cast": "e4m3", "history": length} | extra))


def feed(h, magnitudes):
    """The scale after each step with one tensor of a magnitude."""
    scales = []
    for a in magnitudes:
        raise_amax(h.amax, torch.tensor([0.5 * a, -a]))
        h.end_step()
        scales.append(h.scale.item())
    return scales


#: A history, the magnitudes of steps, and those from which the scale is 448 / magnitude.
HISTORIES = {
    "the largest of the window": ({"length": 3}, [1, 7, 2, 2, 2, 4], [1, 7, 7, 7, 2, 4]),
    "the most recent": ({"length": 3, "history_algorithm": "most_recent"}, [1, 7, 2], [1, 7, 2]),
    "a margin in binades": ({"margin": 2}, [7], [4 * 7]),
    "MS-AMP's window": ({"length": 16}, list(range(17)) * 6, [448, *([16] * 101)]),
    "NaN says nothing": ({"length": 2}, [8, float("nan"), 2], [8, 8, 8]),
    "zero says nothing": ({"length": 2}, [8, 0.0, 2], [8, 8, 8]),
}


@pytest.mark.parametrize("case", HISTORIES)
def test_the_scale_follows_from_the_history(case):
    options, magnitudes, expected = HISTORIES[case]
    scales = feed(history(**options), magnitudes)
    by_hand = [torch.tensor(448 / a).item() for a in expected]
    assert scales[:1] + scales[-6:] == by_hand[:1] + by_hand[-6:]
    assert feed(history(), [1e-44]) == [torch.finfo(torch.float32).max]


def test_steps_of_many_histories_end_as_each_by_itself():
    """The histories are of four kinds, and some magnitudes say nothing."""
    kinds = [{}, {"margin": 1}, {"history_algorithm": "most_recent"}, {"cast": "e5m2"}]
    g = torch.Generator().manual_seed(0)
    together, alone = ([history(3, **kinds[i % 4]) for i in range(12)] for _ in range(2))
    for _ in range(5):
        for i, pair in enumerate(zip(together, alone, strict=True)):
            x = torch.randn(4, generator=g) * (i % 5)
            for h in pair:
                raise_amax(h.amax, x)
        end_steps(together)
        for one, other in zip(together, alone, strict=True):
            other.end_step()
            assert all(torch.equal(t, other.tensors()[name]) for name, t in one.tensors().items())
    assert len({h.scale.item() for h in together}) > 8


@pytest.mark.parametrize("scale", ["e5m3", "e4m3", "bf16"])
@pytest.mark.parametrize("held", [0.0, 0.37, 11.0])
def test_under_a_held_magnitude_as_by_hand(scale, held):
    x, c = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)), make_cast(HELD | {"scale": scale})
    q = quantize_in_context(x, c, -1, QuantContext(held=torch.tensor(held)))
    hand = reference_quantize(x.numpy(), c, held=held)
    np.testing.assert_array_equal(decode(q.codes, c.element).numpy(), hand.values)
    np.testing.assert_array_equal(q.scales.numpy().ravel(), np.array(list(hand.scales.values()), np.float32))
    assert q.tensor_scale.item() == np.float32(hand.tensor_scale)


def test_a_magnitude_is_taken_every_third_step_and_numbers_beyond_it_go_as_far_as_scales_do():
    m, held = model(KINDS["held"][0]), []
    for number, largest in enumerate([4.0, 8, 2, 6, 1, 9, 5, 48], start=1):
        set_step(m, 0, number, 0)
        held.append(recipe_tensors(m)["0.fprop_x.held"].item())
        m(torch.full((4, K), largest))
        m(torch.full((4, K), largest / 2))
    assert held == [0, 4, 4, 4, 6, 6, 6, 5]
    m[0].weight.data = torch.eye(N, K)
    beyond = m(torch.full((1, K), 40.0))  # under a scale of 8 x 448
    torch.testing.assert_close(beyond, torch.full((1, N), 40.0), rtol=1e-6, atol=0)
    assert m(torch.full((1, K), 6000.0)).max().item() == pytest.approx(61440 / 448 * 5, rel=1e-6)


def kept(m):
    return recipe_tensors(m)["0.fprop_x.chosen"].nonzero().flatten().tolist()


def test_channels_are_chosen_of_the_whole_step_once_or_over_some_steps_and_anew():
    once, anew, found = model(keeping()), model(KINDS["kept"][0]), []
    inputs = [(tokens(5, count=8), tokens(9, 20, 40, seed=1)), *[(tokens(1, 2, 3),)] * 3]
    for number, parts in enumerate(inputs, start=1):
        step(once, number, *parts)
        found.append(kept(once))
    assert found == [[], *[[9, 20, 40]] * 3]
    large = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12), (1, 2, 3), ()]
    found = []
    for number, channels in enumerate(large, start=1):
        step(anew, number, tokens(*channels, factor=150 if number == 2 else 30))
        found.append(kept(anew))
    assert found[:5] == [[], [1, 2, 3], [4, 5, 6], [4, 5, 6], [10, 11, 12]]
    assert set(found[5]) < {1, 2, 3, 10, 11, 12}, "of both steps"


def test_all_products_see_the_kept_channels_in_their_cast():
    """As by hand: two matmuls forward, and two kinds of columns in the weight's gradient."""
    m, x = model(keeping()), tokens(9, 20, 40).requires_grad_()
    step(m, 1, x.detach())
    set_step(m, 0, 2, 0)
    y = m(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    kept = torch.isin(torch.arange(K), torch.tensor([9, 20, 40]))
    w, keys = m[0].weight.detach(), m[0].keys

    def narrow(t):
        return ng.quantize(t, "mxfp4").dequantize()

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
