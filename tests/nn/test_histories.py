"""Delayed scaling: the history by hand, and what counts as a step."""

import pytest
import torch

from narrowgauge.nn import Linear, convert, recipe_tensors, set_step
from narrowgauge.nn.histories import AmaxHistory, end_steps
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import parse_recipe, recipe


def history(length=4, **extra):
    return AmaxHistory(make_cast({"cast": "e4m3", "history": length} | extra))


def feed(h, magnitudes):
    """The scale after each step with one tensor of a magnitude."""
    scales = []
    for a in magnitudes:
        h.update(torch.tensor([0.5 * a, -a]))
        h.end_step()
        scales.append(h.scale.item())
    return scales


def f32(x):
    return torch.tensor(x).item()


def test_the_scale_is_that_of_the_largest_in_the_history():
    assert feed(history(3), [1, 7, 2, 2, 2, 4]) == [f32(448 / a) for a in (1, 7, 7, 7, 2, 4)]


def test_the_most_recent_entry():
    assert feed(history(3, history_algorithm="most_recent"), [1, 7, 2]) == [f32(448 / a) for a in (1, 7, 2)]


def test_a_margin_leaves_binades_free():
    assert feed(history(3, margin=2), [7]) == [f32(448 / 4 / 7)]


def test_ms_amps_case_of_the_window():
    """Magnitudes 0..16 six times through a window of 16: the maximum of the last 16 (MS-AMP)."""
    scales = feed(history(16), list(range(17)) * 6)
    assert scales[-1] == f32(448 / 16)
    assert scales[0] == 1, "nothing but zeros was seen"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_what_says_nothing_leaves_the_scale(bad):
    assert feed(history(2), [8, bad, 2]) == [56, 56, 56]  # nor is it an entry


def test_a_tiny_magnitude_meets_the_largest_float():
    assert feed(history(4), [1e-44]) == [torch.finfo(torch.float32).max]


def test_steps_of_many_histories_end_as_each_by_itself():
    """The histories are of four kinds, and some magnitudes say nothing."""
    kinds = [{}, {"margin": 1}, {"history_algorithm": "most_recent"}, {"cast": "e5m2"}]
    g = torch.Generator().manual_seed(0)
    together, alone = ([history(3, **kinds[i % 4]) for i in range(12)] for _ in range(2))
    for _ in range(5):
        for i, pair in enumerate(zip(together, alone, strict=True)):
            x = torch.randn(4, generator=g) * (i % 5)
            for h in pair:
                h.update(x)
        end_steps(together)
        for h in alone:
            h.end_step()
        for one, other in zip(together, alone, strict=True):
            assert all(torch.equal(t, other.tensors()[name]) for name, t in one.tensors().items())
    assert len({h.scale.item() for h in together}) > 8


def make():
    torch.manual_seed(0)
    return convert(torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 16)), "fp8-delayed")


def step(model, number, x, parts=1):
    for i, part in enumerate(x.chunk(parts)):
        set_step(model, 0, number, i * len(part))
        model(part).square().sum().backward()


def test_a_layer_quantizes_by_the_history_not_by_the_tensor_at_hand():
    layer = Linear(torch.nn.Linear(32, 16, bias=False), recipe("fp8-delayed"), 0)
    x = torch.randn(8, 32)
    for number, size in enumerate((1.0, 1.0, 1000.0), start=1):
        layer.set_position(0, number, 0)
        y = layer(size * x)
        y.sum().backward()
    # Its largest elements saturate at what the history allows.
    assert y.abs().max() < 100 * (size * (x @ layer.weight.T)).abs().max() / 1000
    layer.set_position(0, 4, 0)
    exact = size * (x @ layer.weight.detach().T)
    assert (layer(size * x) - exact).norm() < 0.06 * exact.norm()


def test_accumulation_and_recomputation_are_one_step():
    x = torch.randn(8, 32)
    whole, parts = make(), make()
    for number in (1, 2, 3):
        step(whole, number, number * x)
        step(parts, number, number * x, parts=4)
        step(parts, number, number * x, parts=4)  # again, as recomputation would
    a, b = recipe_tensors(whole), recipe_tensors(parts)
    inputs = [n for n in a if "0.fprop_x" in n]
    assert len(inputs) == 3
    assert all(torch.equal(a[n], b[n]) for n in inputs)


def test_evaluation_is_not_seen():
    model = make()
    step(model, 1, torch.randn(8, 32))
    before = {n: t.clone() for n, t in recipe_tensors(model).items()}
    with torch.no_grad():
        model(1000 * torch.randn(8, 32))
    assert all(torch.equal(before[n], t) for n, t in recipe_tensors(model).items())


def test_the_state_restores_the_run_and_is_no_part_of_the_state_dict():
    x = torch.randn(3, 8, 32)
    model, again = make(), make()
    assert set(model.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    step(model, 1, x[0])
    step(model, 2, 5 * x[1])
    set_step(again, 0, 2, 0)
    for name, tensor in recipe_tensors(again).items():
        tensor.copy_(recipe_tensors(model)[name])
    for m in (model, again):
        m.zero_grad()
        step(m, 3, x[2])
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_histories_without_set_step_or_an_optimizer_count_passes_with_dropped_gradients():
    layer = Linear(torch.nn.Linear(32, 16), recipe("fp8-delayed"), 0)
    for size in (1.0, 4.0, 2.0):
        layer(torch.full((2, 32), size)).sum().backward()
        layer.zero_grad()
    assert layer.histories["fprop.x"].entries[-2:].tolist() == [1, 4], "the last is put in by the next pass"


@pytest.mark.tier("thorough")  # compiles for seconds; test_compile.py keeps some
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own tracing
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_steps_that_end_in_compiled_code(algorithm):
    """Without `set_step` a step ends within the forward pass: in the graph, and on no tensor's value."""
    torch._dynamo.reset()
    cast = {"cast": "e4m3", "history": 3, "history_algorithm": algorithm}
    r = recipe("fp8-delayed").with_places(dict.fromkeys(("fprop", "dgrad", "wgrad"), cast))
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 48)
    eager, traced = Linear(layer, r, 0), Linear(layer, r, 0)
    run = torch.compile(traced, fullgraph=True, backend="aot_eager")
    g = torch.Generator().manual_seed(1)
    for size in (1, 8, 0, 2, 2, 2, 1):
        x, dy = size * torch.randn(8, 32, generator=g), size * torch.randn(8, 48, generator=g)
        gradients = []
        for layer in (eager, run):
            eager.zero_grad()
            layer(x).backward(dy)
            gradients.append(eager.weight.grad.clone())
        assert torch.equal(*gradients)
        for place, h in eager.histories.items():
            assert all(torch.equal(t, traced.histories[place].tensors()[n]) for n, t in h.tensors().items())
    assert eager.histories["fprop.x"].scale != 1


def test_the_state_stays_float32_when_the_model_does_not():
    x = torch.randn(8, 32)
    model = make()
    step(model, 1, x)
    set_step(model, 0, 2, 0)
    before = {n: t.clone() for n, t in recipe_tensors(model).items()}
    model.to(torch.bfloat16)
    after = recipe_tensors(model)
    assert all(t.dtype == torch.float32 and torch.equal(t, before[n]) for n, t in after.items())
    step(model, 2, x.bfloat16())
    assert all(t.dtype == torch.float32 for t in recipe_tensors(model).values())


def test_a_history_under_a_rule():
    r = parse_recipe('[[rule]]\nfrom_step = 3\nfprop = {cast = "e4m3", history = 2}', "mine.toml")
    layer = Linear(torch.nn.Linear(32, 16, bias=False), r, 0)
    for number in range(1, 6):
        layer.set_position(0, number, 0)
        layer(torch.full((2, 32), float(number))).sum().backward()
    assert layer.histories["fprop.x"].entries.tolist() == [3, 4]
