"""An MLP in one function is the three functions one after the other, bit for bit: loss and all gradients."""

from dataclasses import replace

import pytest
import torch

from kernels.common import assert_same, native, needs_products, normal
from narrowgauge.kernels.recompute import contexts, once
from narrowgauge.models.mlp import mlp
from narrowgauge.nn import Linear, fused, recipe_tensors, set_step
from narrowgauge.nn.linear import accumulating
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import QuantizedState, make_cast, quantize


def trained(name, device, recompute, steps):
    """Losses of some steps of two micro-batches, gradients that are added to others, and histories."""
    model, losses = native(name, device), []
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0**-8)
    model.recompute, model.selective = recompute, True
    for number in range(1, steps + 1):
        set_step(model, 0, number, 0)
        with accumulating(model, keeps_codes=not recompute):
            for i in range(2):
                g = torch.Generator().manual_seed(10 * number + i)
                loss = model.loss(*torch.randint(31, (2, 1, 5), generator=g).to(device))
                loss.backward()
                losses.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                p += number * p.grad  # so that tensors outgrow the scales of earlier steps
    assert len(set(map(float, losses))) == 2 * steps
    return [*losses, *(p.grad for p in model.parameters()), *recipe_tensors(model).values()]


@pytest.mark.tier("nightly", keep=("fp8-1",))
@pytest.mark.tier("thorough")
@needs_products
@pytest.mark.parametrize(("name", "steps"), [("fp8", 1), ("fp8-delayed", 2)])
def test_one_function_gives_the_digits_of_three(name, steps, device, monkeypatch):
    """SwiGLU runs in the first pass only where it is recomputed: in the second its result is not read."""
    from narrowgauge.kernels.triton import activation, swiglu_codes

    functions, passes, function = [], [], fused.swiglu_mlp
    monkeypatch.setattr(fused, "swiglu_mlp", lambda *a: functions.append(1) or function(*a))
    for module, launch in ((activation, "launch_swiglu"), (swiglu_codes, "launch_swiglu_codes")):
        right = getattr(module, launch)
        monkeypatch.setattr(module, launch, lambda *a, right=right: passes.append(1) or right(*a))
    found, again = (trained(name, device, recompute, steps) for recompute in (0, 1))
    assert (len(functions), len(passes)) == (2 * steps * (1 + 2), 2 * steps * (1 + 1))
    monkeypatch.setattr(Linear, "after_swiglu", lambda *_: None)
    separate = trained(name, device, 0, steps)
    assert_same(found, separate)
    assert_same(again, separate)


def trained_block(device, gathered=lambda layer: None):
    """The result of the MLP and the gradients of its input and weights, which FSDP may have `gathered`."""
    block = native("fp8", device).blocks[0]
    for layer in (block.gate_up, block.down):
        if (weight := gathered(layer)) is not None:
            layer.weight, layer.is_sharded = torch.nn.Parameter(weight), True
    x = normal(1, 3, 32, dtype=torch.bfloat16).to(device).requires_grad_()
    y = mlp(block, x)
    (y * y.detach()).sum().backward()
    return y, x.grad, block.gate_up.weight.grad, block.down.weight.grad


@needs_products
def test_gathered_weights_are_read_again_in_the_backward_pass(device):
    """The digits equal whole weights', whose codes are kept."""

    def gathered(layer):
        q = quantize(layer.weight.detach(), layer.recipe.gather)
        return GatheredWeight(q.codes, q.scales, q.cast, True)

    assert_same(trained_block(device, gathered), trained_block(device))


@pytest.mark.tier("thorough")
@needs_products
@pytest.mark.parametrize("name", ["fp16-scaled", "bf16", "e4m3"])
def test_weights_that_are_narrow_at_rest_are_quantized_in_both_passes(name, device, monkeypatch):
    """Matmuls do not take such codes as they are sent; e4m3 might be another scale's."""

    def gathered(layer):
        at_rest = QuantizedState(layer.weight.shape, make_cast(name), device)
        at_rest.write(layer.weight.detach().float())
        numbers, scale = [*at_rest.tensors.values(), None][:2]
        return GatheredWeight(numbers, scale, at_rest.cast, False)

    as_one = trained_block(device, gathered)
    monkeypatch.setattr(Linear, "after_swiglu", lambda *_: None)
    assert_same(as_one, trained_block(device, gathered))


@needs_products
def test_where_it_may_not_all_three_are_called(device):
    model = native("fp8", device)
    gate_up, down = model.blocks[0].gate_up, model.blocks[0].down
    x = torch.ones(1, 2, 32, dtype=torch.bfloat16, device=device, requires_grad=True)

    def is_one():
        return down.after_swiglu(gate_up, x) is not None

    assert is_one()
    assert (gate_up.calls, down.calls) == (1, 1), "one function is a call of both layers"
    assert down.after_swiglu(torch.nn.Linear(32, 64), x) is None
    assert down.after_swiglu(gate_up, x.float()) is None
    assert down.after_swiglu(gate_up, x.detach()) is None
    with torch.no_grad():
        assert not is_one()
    hook = gate_up.register_forward_hook(lambda *_: None)
    assert not is_one()
    hook.remove()
    down.weight.requires_grad_(False)
    assert not is_one()
    down.weight.requires_grad_(True)
    delayed = {p: c.having(history=4) for p, c in down.spec.casts.items()}
    for other in (replace(down.spec, native=False), replace(down.spec, casts=delayed)):
        narrow, down.spec = down.spec, other
        assert not is_one()
        down.spec = narrow
    down.observer = object()
    assert not is_one()
    down.observer = None
    assert is_one()


def test_a_small_result_is_kept_between_two_passes():
    made = iter(range(9))
    assert [once(lambda: next(made)) for _ in range(2)] == [0, 1], "outside a checkpoint each is made"
    first, second = contexts()
    with first:
        assert [once(lambda: next(made)) for _ in range(2)] == [2, 3]
    with second:
        assert [once(lambda: next(made)) for _ in range(2)] == [2, 3]
