"""A whole model with kernels is the model without them, as far as the rounding of its numbers reaches.

With fp32 inside, the two differ in the order of a few sums and in exponentials: some ulps at each of some
twenty operations one after the other, so 1e-5 of a gradient's norm is wide, and a wrong formula is far above.
With bf16 inside such an ulp of fp32 moves some numbers over the edge between two bf16, by 2^-8 of them; were
it all numbers of all operations, and independently, that would be some 2^-8 * sqrt(20) = 2 %.
"""

import pytest
import torch

from narrowgauge.kernels import dispatch as where
from narrowgauge.models import Transformer, generate, initialize, model_config
from narrowgauge.nn import NarrowResidual, convert
from narrowgauge.recipes import recipe

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # numpy's, of the interpreter
TINY = {"dim": 48, "layers": 2, "heads": 4, "ffn_dim": 40, "vocab_size": 61, "max_sequence_length": 16}
MODELS = {"llama": ("debug", TINY | {"kv_heads": 2}), "gpt2": ("gpt2-debug", TINY)}
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def model_of(name, dtype, device):
    base, overrides = MODELS[name]
    model = Transformer(model_config(base, **overrides), dtype)
    initialize(model, 0)
    for n, p in model.named_parameters():
        if "norm" in n or n.endswith("bias"):
            torch.nn.init.normal_(p, 1 if n.endswith("weight") else 0, 0.2)
    for module in model.modules():  # the stream, the norms and the embedding stay in fp32
        if isinstance(module, torch.nn.Linear) and module is not model.head:
            module.to(dtype)
    if dtype != torch.float32:
        model.head = (
            model.head.to(dtype) if model.head.weight is not model.embedding.weight else _Cast(model.head)
        )
    return model.to(device)


class _Cast(torch.nn.Linear):
    """A head with an fp32 weight, tied or not, for inputs in any dtype."""

    def __init__(self, head):
        super().__init__(*reversed(head.weight.shape), bias=False)
        self.weight = head.weight

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype))


def loss_and_gradients(model, position_BT=None):
    device = model.embedding.weight.device
    x_BT, y_BT = (
        torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(s)).to(device) for s in (0, 1)
    )
    model.zero_grad()
    loss = model.loss(x_BT, y_BT, None if position_BT is None else position_BT.to(device))
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.fixture
def without(monkeypatch):
    """To call a function where no kernels run."""

    def call(function, *args):
        with monkeypatch.context() as m:
            m.setattr(where, "can_compile", lambda: False)
            return function(*args)

    return call


def assert_near(got, expected, near):
    assert got[0] == pytest.approx(expected[0], rel=near)
    for name, g in got[1].items():
        off = torch.linalg.vector_norm(g.double() - expected[1][name].double())
        assert off <= near * torch.linalg.vector_norm(expected[1][name].double()), name


@pytest.mark.tier("thorough")  # each kernel has its own test in the interpreter
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_all_gradients(device, without, name, dtype):
    torch.manual_seed(0)
    model = model_of(name, dtype, device)
    got = loss_and_gradients(model)
    assert_near(got, without(loss_and_gradients, model), NEAR[dtype])
    again = loss_and_gradients(model)
    assert again[0] == got[0]
    assert all(torch.equal(again[1][n], g) for n, g in got[1].items()), "the kernels are deterministic"
    model.recompute = 1
    recomputed = loss_and_gradients(model)
    assert recomputed[0] == got[0]
    assert all(torch.equal(recomputed[1][n], g) for n, g in got[1].items())


@pytest.mark.tier("thorough")
@pytest.mark.filterwarnings("ignore:.*overrides the forward pass")  # of the head
@pytest.mark.parametrize("name", MODELS)
def test_norms_sum_a_narrow_stream_with_the_digits_of_its_points(device, without, name):
    """With a hook, each point of the stream is called; kernels add where it is not."""
    torch.manual_seed(0)
    model = convert(model_of(name, torch.bfloat16, device), recipe("bf16").with_places({"stream": "bf16"}))
    points = [m for m in model.modules() if isinstance(m, NarrowResidual)]
    called = []
    fused = loss_and_gradients(model)
    handles = [p.register_forward_hook(lambda *_: called.append(1)) for p in points[1:]]
    separate = loss_and_gradients(model)
    assert len(called) == 2 * TINY["layers"]
    assert fused[0] == separate[0]
    assert all(torch.equal(separate[1][n], g) for n, g in fused[1].items())
    for handle in handles:
        handle.remove()
    assert_near(fused, without(loss_and_gradients, model), NEAR[torch.bfloat16])


@pytest.mark.tier("thorough")
def test_documents_that_are_kept_apart(device, without):
    torch.manual_seed(0)
    model = model_of("llama", torch.float32, device)
    position_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], list(range(9))])
    got = loss_and_gradients(model, position_BT)
    assert_near(got, without(loss_and_gradients, model, position_BT), 1e-5)


@pytest.mark.tier("thorough", keep=("gpt2",))
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_its_cache(device, without, name):
    torch.manual_seed(0)
    model = model_of(name, torch.float32, device)
    prompt = [5, 17, 3]

    def tokens():
        return list(generate(model, prompt, max_new_tokens=4, temperature=0))

    assert tokens() == without(tokens)


@pytest.mark.tier("thorough")
@pytest.mark.filterwarnings("ignore:.*overrides the forward pass")  # of the tied head
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_but_that_after_attention_receives_the_amax_of_its_input(device, name):
    """What the norms and the activation emit; the attention is not ours."""
    torch.manual_seed(0)
    model = model_of(name, torch.bfloat16, device)
    model, received = convert(model, "fp8", keep=["head"]), {}

    def receive(n):
        return lambda _, x, options: received.update({n: (options.get("known"), x[0])})

    for n, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(receive(n), with_kwargs=True)
    loss_and_gradients(model)
    for n, (known, x) in received.items():
        if n.endswith(("attention_out", "head")):
            assert known is None
        else:
            assert torch.equal(known.of(x), x.detach().float().abs().max()), n


@pytest.mark.tier("thorough")
def test_a_hook_that_changes_the_norm_leaves_no_amax_that_is_wrong(device):
    """It returns another tensor, or writes to this one; either way the cast reads what the layer gets."""
    torch.manual_seed(0)
    model = convert(model_of("llama", torch.bfloat16, device), "fp8", keep=["head"])
    found = []
    for hook in (
        lambda _, __, out: (out[0], out[1] * 8),
        lambda _, __, out: (out[0], out[1] * 8, out[2]),
        lambda _, __, out: out[1].mul_(8) is None,
    ):
        with torch.no_grad():
            handle = model.blocks[0].attention_norm.register_forward_hook(
                lambda *a, hook=hook: hook(*a) or None
            )
            found.append(model(torch.arange(9, device=device)[None]))
            handle.remove()
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.tier("thorough")
def test_a_hook_on_a_product_sees_its_bias_added(device):
    """Though without one a kernel behind the product adds it."""
    with pytest.warns(UserWarning, match="overrides the forward pass"):  # of the head
        model = convert(model_of("gpt2", torch.bfloat16, device), "bf16")
    seen = []
    qkv = model.blocks[0].qkv
    handle = qkv.register_forward_hook(lambda _, x, y: seen.append((x[0], y)))
    loss, gradients = loss_and_gradients(model)
    handle.remove()
    (x_BTD, y_BTC), *_ = seen
    assert torch.equal(y_BTC, qkv(x_BTD))
    again, its_gradients = loss_and_gradients(model)
    assert loss == pytest.approx(again, rel=NEAR[torch.bfloat16])
    assert gradients.keys() == its_gradients.keys()
