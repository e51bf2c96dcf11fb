"""Weights, masters and gradients in low precision: bytes, sums over micro-batches, what others see."""

import copy
import gc
import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.formats import random_stream
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import Linear, convert, recipe_tensors, set_step
from narrowgauge.optim import AdamW, parameter_groups
from narrowgauge.quantization import (
    GradientState,
    NarrowTensor,
    QuantizedState,
    gradient_of,
    make_cast,
    plain_gradient,
    state_of,
    stored_tensor,
)
from narrowgauge.recipes import parse_recipe, recipe

K, N = 96, 128
STATE_RECIPES = ["bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "coat"]
STORED = {
    "bf16-sr": torch.bfloat16,
    "msamp-o1": torch.float16,
    "msamp-o2": torch.float16,
    "msamp-o3": torch.float8_e4m3fn,
    "coat": torch.float32,
}
BYTES = {"bf16": 16, "fp8": 16, "bf16-sr": 12, "msamp-o1": 11, "msamp-o2": 6, "msamp-o3": 7}


def make(name, bias=True):
    torch.manual_seed(0)
    return convert(torch.nn.Linear(K, N, bias=bias), name)


def batch(seed=0, m=64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, K, generator=g), torch.randn(m, N, generator=g)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.13 widens gradients")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("msamp-o2", torch.bfloat16), ("msamp-o3", torch.bfloat16), ("bf16-sr", torch.float32)],
)
def test_fp8_gradients_come_from_the_product_as_it_wrote_them(name, dtype):
    """Not widened to fp32 and back; unless other code reads the weight, whose gradients are then summed."""
    layers, seen = [make(name) for _ in range(2)], []
    layers[1].weight.square().sum()
    for layer in layers:
        layer.weight.register_hook(lambda g: seen.append(g.dtype))
        layer(batch()[0]).square().mean().backward()
    assert seen == [dtype, torch.float32]
    a, b = (state_of(layer.weight).gradient.tensors for layer in layers)
    assert all(torch.equal(a[key], b[key]) for key in a)
    w, x = layers[0].weight, batch()[0]
    assert torch.autograd.grad(layers[0](x).square().mean(), w)[0].dtype == w.dtype


def stored(parameter, optimizer):
    """Every tensor that is kept for a parameter."""
    state = state_of(parameter)
    parts = [*state.by_place().values(), *optimizer.moments(parameter).values()]
    tensors = [t for part in parts for t in part.tensors.values()]
    if state.weight is None:
        tensors.append(parameter)
    if state.gradient is None:
        tensors.append(parameter.grad)
    return {t.data_ptr(): t.numel() * t.element_size() for t in tensors}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_a_parameter(name):
    """Facts of MS-AMP's table; scales cost less than one percent."""
    layer = make(name, bias=False)
    optimizer = AdamW(layer.parameters(), name)
    layer(batch()[0]).sum().backward()
    optimizer.step()
    per_parameter = sum(stored(layer.weight, optimizer).values()) / (K * N)
    assert BYTES[name] <= per_parameter < 1.01 * BYTES[name]


@pytest.mark.parametrize("name", STATE_RECIPES)
def test_the_parameter_shows_values_and_its_record_stores_codes(name):
    layer = make(name)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.dtype == layer.bias.dtype == torch.float32
    assert stored_tensor(layer.weight).dtype == STORED[name]
    assert isinstance(layer.weight, NarrowTensor) == (name != "coat")


@pytest.mark.parametrize("name", STATE_RECIPES)
def test_products_see_the_stored_numbers(name):
    layer, x, dy = make(name), *batch()
    plain = torch.nn.Linear(K, N)
    plain.load_state_dict(layer.state_dict())
    state = dict.fromkeys(("weight", "grad", "m", "v"), "fp32") | {"master": "none"}
    other = Linear(plain, recipe(name).with_places(state), 0)
    results = []
    for each in (layer, other):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.backward(dy)
        results.append((y, leaf.grad, each.bias.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    gradient = gradient_of(layer.weight)
    expected = other.weight.grad
    if name != "coat":
        assert plain_gradient(layer.weight) is None
        assert torch.equal(layer.weight.grad, gradient)
        rounded = QuantizedState(expected.shape, state_of(layer.weight).gradient.cast)
        rounded.write(expected)
        step = (rounded.read() - expected).abs().max() * 2
        assert ((gradient - expected).abs() <= expected.abs() * 2.0**-3 + step).all()
    else:
        assert torch.equal(gradient, expected)


class TestMicroBatches:
    @pytest.mark.parametrize("cast", ["e4m3", "e5m2", {"cast": "e4m3", "power_of_two": True}, "bf16", "fp32"])
    @pytest.mark.parametrize("size", [32, 96])
    def test_each_is_added_to_what_was_read_and_rounded_once(self, size, cast):
        """MS-AMP's case: ten rounds, bit for bit dequantize, add, quantize."""
        cast = make_cast(cast)
        gradient, oracle = (kind(torch.Size((size, size)), cast) for kind in (GradientState, QuantizedState))
        for n in range(10):
            x = torch.randn(size, size, generator=torch.Generator().manual_seed(n))
            gradient.add(x, None)
            oracle.write(oracle.read() + x if n else x)
            assert all(torch.equal(t, oracle.tensors[k]) for k, t in gradient.tensors.items())

    def test_nothing_small_is_lost_on_average(self):
        """A thousand contributions, each less than half a step of the sum's format."""
        cast = make_cast({"cast": "e4m3", "rounding": "stochastic"})
        sums = {}
        for name, is_random in (("nearest", False), ("stochastic", True)):
            gradient = GradientState(torch.Size((64, 64)), cast)
            start = torch.ones(64, 64)
            start[0, 0] = 448.0  # which keeps the scale at 1, and the step at 1.0 an eighth
            gradient.add(start, None)
            for n in range(64):
                gradient.add(torch.full((64, 64), 1 / 64), random_stream(0, n, 5) if is_random else None)
            sums[name] = gradient.read()[1:].mean().item()
        assert sums["nearest"] == pytest.approx(1.0, abs=0.02)
        assert sums["stochastic"] == pytest.approx(2.0, abs=0.02)

    @pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2"])
    def test_random_bits_differ_from_batch_to_batch_and_repeat(self, name):
        x, dy = batch()

        def gradient(*first_samples):
            layer = make(name)
            for first in first_samples:
                set_step(layer, 0, 3, first)
                layer(x.roll(first % 64, 0)).backward(dy)
            return gradient_of(layer.weight).clone()

        assert torch.equal(gradient(0, 5), gradient(0, 5))
        assert not torch.equal(gradient(0, 5), gradient(0, 5 + x.numel()))  # the same tensor, elsewhere

    @pytest.mark.parametrize("name", ["msamp-o1", "bf16-sr"])
    def test_their_sum_is_the_whole_batchs(self, name):
        x, dy = batch(m=128)
        whole, parts = make(name), make(name)
        set_step(whole, 0, 1, 0)
        whole(x).backward(dy)
        for i in range(4):
            set_step(parts, 0, 1, i)
            parts(x[32 * i : 32 * i + 32]).backward(dy[32 * i : 32 * i + 32])
        a, b = gradient_of(whole.weight), gradient_of(parts.weight)
        assert (a - b).norm() < 0.12 * a.norm()


class TestWhatOthersSee:
    @pytest.mark.parametrize("name", STATE_RECIPES)
    def test_a_state_dict_has_plain_names_and_plain_numbers(self, name):
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(N, K))
        keys, before = list(plain.state_dict()), plain[0].weight.detach().clone()
        saved = convert(plain, name).state_dict()
        assert list(saved) == keys
        assert all(t.is_floating_point() and t.element_size() > 1 for t in saved.values())
        tolerance = {"msamp-o3": 2.0**-4, "bf16-sr": 2.0**-8}.get(name, 2.0**-11)
        torch.testing.assert_close(saved["0.weight"].float(), before, rtol=tolerance, atol=1e-3)

    @pytest.mark.parametrize("name", STATE_RECIPES)
    def test_it_loads_what_it_saved(self, name):
        a, b = make(name), make(name)
        b.load_state_dict({k: torch.randn_like(v.float()) for k, v in a.state_dict().items()})
        assert not torch.equal(a(batch()[0]), b(batch()[0]))
        b.load_state_dict(a.state_dict())
        assert torch.equal(a(batch()[0]), b(batch()[0]))

    def test_a_master_is_loaded_too(self):
        a, b = make("msamp-o3"), make("msamp-o3")
        numbers = {k: torch.randn_like(v) for k, v in a.state_dict().items()}
        b.load_state_dict(numbers)
        torch.testing.assert_close(state_of(b.weight).master.read(), numbers["weight"], rtol=2.0**-10, atol=0)

    @pytest.mark.parametrize("name", STATE_RECIPES)
    def test_a_copy_is_whole(self, name):
        layer = make(name)
        other = copy.deepcopy(layer)
        x, dy = batch()
        optimizer = AdamW(other.parameters(), name, lr=1e-2)
        before = layer(x).clone()
        other(x).backward(dy)
        optimizer.step()
        assert torch.equal(layer(x), before)
        assert not torch.equal(other(x), before)

    @pytest.mark.parametrize("name", STATE_RECIPES)
    def test_another_dtype_for_the_model_leaves_stored_weights_alone(self, name):
        layer, x = make(name), batch()[0]
        before = layer(x)
        layer.to(torch.bfloat16)
        assert layer.weight.dtype == torch.bfloat16
        assert name == "coat" or stored_tensor(layer.weight).dtype == STORED[name]
        layer.to(torch.float32)
        if name != "coat":
            torch.testing.assert_close(layer(x), before, rtol=2.0**-6, atol=1e-2)

    @pytest.mark.parametrize("name", STATE_RECIPES)
    def test_what_a_checkpoint_holds_beside_parameters(self, name):
        found = set(recipe_tensors(convert(torch.nn.Sequential(torch.nn.Linear(K, N)), name)))
        scale = {"msamp-o1": {"0.weight.scale"}, "msamp-o2": {"0.weight.scale"}}
        scale["msamp-o3"] = {"0.weight.scales", "0.master.values", "0.master.scale"}
        learning = ("grad", "reduce") if name.startswith("msamp") else ()
        prescale = {f"0.{place}.{key}" for place in learning for key in ("mu", "overflowed")}
        assert found == scale.get(name, set()) | prescale

    def test_a_conv1d_of_hugging_face(self):
        transformers = pytest.importorskip("transformers", reason="needs transformers")
        torch.manual_seed(0)
        conv = transformers.pytorch_utils.Conv1D(N, K)
        plain = torch.nn.Linear(K, N)
        with torch.no_grad():
            plain.weight.copy_(conv.weight.T)
            plain.bias.copy_(conv.bias)
        a, b = convert(conv, "msamp-o2"), convert(plain, "msamp-o2")
        x, dy = batch()
        for layer in (a, b):
            set_step(layer, 0, 1, 0)
            layer(x).backward(dy)
        assert torch.equal(a(x), b(x))
        difference = gradient_of(a.weight).T - gradient_of(b.weight)
        assert difference.norm() < 0.1 * gradient_of(b.weight).norm()  # other random bits


class TestWhatStaysWide:
    def test_a_head_that_is_the_embedding(self):
        text = recipe("msamp-o2").text.replace('modules = ["head", "lm_head"]', "modules = []")
        model = Transformer(model_config("gpt2-debug"), torch.bfloat16)
        initialize(model, 0)
        convert(model, parse_recipe(text, "no keep"))
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.dtype == torch.float32
        assert stored_tensor(model.blocks[0].up.weight).dtype == torch.float16

    def test_kept_layers(self):
        model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(N, K))
        convert(model, "msamp-o3", keep=["1"])
        stored = [stored_tensor(layer.weight).dtype for layer in model]
        assert stored == [torch.float8_e4m3fn, torch.float32]

    def test_frozen_weights_are_narrow_and_have_no_gradient(self):
        torch.manual_seed(0)
        layer = torch.nn.Linear(K, N)
        layer.weight.requires_grad_(False)
        layer = convert(layer, "msamp-o2")
        layer(batch()[0]).sum().backward()
        assert stored_tensor(layer.weight).dtype == torch.float16
        assert state_of(layer.weight).gradient.is_empty
        assert layer.bias.grad is not None


@pytest.mark.tier("thorough")
@pytest.mark.parametrize("name", STATE_RECIPES)
def test_nothing_is_kept_after_the_backward_pass(name):
    """Bytes of live tensors, counted: what a step leaves behind is its parameters' state."""

    gc.collect()
    gc.freeze()  # what is there already, which is all that other tests have imported, is not looked at again

    def live():
        gc.collect()
        tensors = (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))
        storages = (t.untyped_storage() for t in tensors)
        return {s.data_ptr(): s.nbytes() for s in storages}

    torch.manual_seed(0)
    model = convert(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))), name)
    optimizer = AdamW(parameter_groups(model, 0.1), name)

    def step(n):
        set_step(model, 0, n, 0)
        model(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    before = live()
    step(2)
    left = {p: n for p, n in live().items() if p not in before}
    assert sum(left.values()) <= 4096  # a few keys and counters; one activation is 262144


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stays_so(poison):
    layer, (x, dy) = make("msamp-o2"), batch()
    dy[3, 4] = poison
    layer(x).backward(dy)
    assert not gradient_of(layer.weight).isfinite().all()
    layer(x).backward(batch()[1])
    assert not gradient_of(layer.weight).isfinite().all()


@pytest.mark.tier("thorough")
def test_any_products_go_with_any_state():
    for name in ng.recipe_names():
        if name == "fp16":
            continue
        state = {"weight": "bf16", "master": "fp16-scaled", "grad": "mxfp8", "m": "coat", "v": "bf16"}
        r = recipe(name).with_places({**state, "attention": recipe(name).compute})
        torch.manual_seed(0)
        model = convert(torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Linear(N, K)), r)
        optimizer = AdamW(model.parameters(), r, lr=1e-2)
        losses = []
        for n in range(6):
            set_step(model, 0, n + 1, 0, steps=6, decay=4)
            optimizer.zero_grad()
            loss = (model(batch()[0]) - batch()[0]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[1], name


@pytest.mark.tier("thorough")  # compiles for seconds
@pytest.mark.filterwarnings(  # torch's own
    "ignore::DeprecationWarning",
    "ignore:Dynamo detected a call to a",
    "ignore:The .grad attribute of a Tensor",
)
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2", "msamp-o3"])
def test_compiled_code_goes_around_it(name):
    torch._dynamo.reset()
    x, dy = batch()
    results = []
    for compiled in (False, True):
        model = convert(torch.nn.Sequential(make("fp32"), torch.nn.GELU()), name)
        set_step(model, 0, 1, 0)
        y = (torch.compile(model, backend="aot_eager") if compiled else model)(x)
        y.backward(dy)
        results.append((y, gradient_of(model[0].weight), model[0].bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
