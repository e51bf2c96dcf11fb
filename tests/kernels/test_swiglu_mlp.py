"""An MLP in one function is the three functions one after the other, bit for bit: loss and all gradients."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.kernels.recompute import contexts, once
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.models.mlp import mlp
from narrowgauge.nn import Linear, convert, fused, recipe_tensors, set_step
from narrowgauge.nn.linear import accumulating
from narrowgauge.nn.weight import GatheredWeight
from narrowgauge.quantization import QuantizedState, make_cast, quantize
from narrowgauge.recipes import recipe

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # numpy's, of the interpreter
TINY = {"dim": 32, "layers": 1, "heads": 2, "ffn_dim": 32, "vocab_size": 31, "max_sequence_length": 16}
HAS_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_products = pytest.mark.skipif(not HAS_PRODUCTS, reason="torch before 2.13 has no CPU kernel")


def native(name, device):
    """A model whose matmuls are native: torch has those with a scale a tensor on a CPU as well."""
    model = Transformer(model_config("debug", **TINY), torch.bfloat16)
    initialize(model, 0)
    convert(model.to(device), recipe(name))
    for module in model.modules():
        if isinstance(module, Linear) and module is not model.head:
            module.spec = replace(module.spec, native=True)
    return model


def trained(model, recompute=0):
    """The loss of a micro-batch, and the gradients, added to those that wait."""
    device = model.head.weight.device
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0**-8)
    model.recompute, model.selective = recompute, True
    ids_2BT = torch.randint(31, (2, 1, 5), generator=torch.Generator().manual_seed(0)).to(device)
    with accumulating(model, keeps_codes=True):
        loss = model.loss(*ids_2BT)
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.tier("thorough")
@needs_products
def test_one_function_gives_the_digits_of_three(device, monkeypatch):
    """SwiGLU runs in the first pass only where it is recomputed: in the second its result is not read."""
    from narrowgauge.kernels.triton import activation

    model, functions, passes = native("fp8", device), [], []
    function, launch = fused.swiglu_mlp, activation.launch_swiglu
    monkeypatch.setattr(fused, "swiglu_mlp", lambda *a: functions.append(1) or function(*a))
    monkeypatch.setattr(activation, "launch_swiglu", lambda x: passes.append(1) or launch(x))
    found, again = trained(model), trained(model, recompute=1)
    assert (len(functions), len(passes)) == (1 + 2, 1 + 1)
    monkeypatch.setattr(Linear, "after_swiglu", lambda *_: None)
    separate = trained(model)
    for other in (found, again):
        assert other[0] == separate[0]
        assert all(torch.equal(g, h) for g, h in zip(other[1], separate[1], strict=True))


def steps_under_delayed_scales(device, recompute):
    """Losses and gradients of three steps of two micro-batches, and what the histories hold after them."""
    model = native("fp8-delayed", device)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0**-8)
    model.recompute, model.selective, losses = recompute, True, []
    for number in (1, 2, 3):
        set_step(model, 0, number, 0)
        with accumulating(model, keeps_codes=not recompute):
            for i in range(2):
                g = torch.Generator().manual_seed(10 * number + i)
                loss = model.loss(*torch.randint(31, (2, 1, 5), generator=g).to(device))
                loss.backward()
                losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p += number * p.grad  # so that tensors outgrow the scales of earlier steps
    return losses, [p.grad for p in model.parameters()], list(recipe_tensors(model).values())


@pytest.mark.tier("thorough")
@needs_products
def test_one_function_gives_the_digits_of_three_under_delayed_scales(device, monkeypatch):
    functions, function = [], fused.swiglu_mlp
    monkeypatch.setattr(fused, "swiglu_mlp", lambda *a: functions.append(1) or function(*a))
    found = steps_under_delayed_scales(device, 0)
    assert len(functions) == 6
    again = steps_under_delayed_scales(device, 1)
    assert len(functions) == 6 + 12
    monkeypatch.setattr(Linear, "after_swiglu", lambda *_: None)
    losses, gradients, histories = steps_under_delayed_scales(device, 0)
    assert len(set(losses)) == 6
    for other in (found, again):
        assert other[0] == losses
        assert all(torch.equal(g, h) for g, h in zip(other[1], gradients, strict=True))
        assert all(torch.equal(g, h) for g, h in zip(other[2], histories, strict=True))


def trained_mlp(device, is_gathered):
    """The result of the MLP and the gradients of its input and weights, which may be gathered by FSDP."""
    block = native("fp8", device).blocks[0]
    for layer in (block.gate_up, block.down) if is_gathered else ():
        q, layer.is_sharded = quantize(layer.weight.detach(), layer.recipe.gather), True
        layer.weight = torch.nn.Parameter(GatheredWeight(q.codes, q.scales, q.cast, True))
    return trained_block(block, device)


def trained_block(block, device):
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.to(device).requires_grad_()
    y = mlp(block, x)
    (y * y.detach()).sum().backward()
    return y, x.grad, block.gate_up.weight.grad, block.down.weight.grad


@needs_products
def test_gathered_weights_are_read_again_in_the_backward_pass(device):
    """The digits equal whole weights', whose codes are kept."""
    whole, found = trained_mlp(device, False), trained_mlp(device, True)
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@pytest.mark.tier("thorough")
@needs_products
@pytest.mark.parametrize("name", ["fp16-scaled", "bf16", "e4m3"])
def test_weights_that_are_narrow_at_rest_are_quantized_in_both_passes(name, device, monkeypatch):
    """Matmuls do not take such codes as they are sent; e4m3 might be another scale's."""

    def trained():
        block = native("fp8", device).blocks[0]
        for layer in (block.gate_up, block.down):
            at_rest, layer.is_sharded = QuantizedState(layer.weight.shape, make_cast(name), device), True
            at_rest.write(layer.weight.detach().float())
            numbers, scale = [*at_rest.tensors.values(), None][:2]
            layer.weight = torch.nn.Parameter(GatheredWeight(numbers, scale, at_rest.cast, False))
        return trained_block(block, device)

    as_one = trained()
    monkeypatch.setattr(Linear, "after_swiglu", lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(as_one, trained(), strict=True))


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
