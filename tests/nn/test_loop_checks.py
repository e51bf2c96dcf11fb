"""A custom training loop: what torch's tools do with narrow gradients and weights, or refuse to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.nn import EqualShare, LinearShards
from narrowgauge.quantization import state_of
from narrowgauge.system.errors import UserError
from nn import own_loop


@pytest.fixture
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(recipe):
    return own_loop.model(recipe, width=64)


def backward(m, seed=1):
    m(own_loop.batch(seed, 64)).square().sum().backward()


@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o1", "msamp-o3"])
def test_the_models_zero_grad_drops_narrow_gradients(name):
    """Else the gradients of all steps would be added up: this is how most trainers begin a step."""
    m = model(name)
    optimizer = ng.AdamW(m.parameters(), name, lr=1e-2)
    optimizer.zero_grad = m.zero_grad
    own_loop.assert_same(own_loop.go_on(m, optimizer, (1, 2, 3)), own_loop.train(model(name), name))


def test_wrapping_and_a_copy_of_its_values_leave_a_weight_its_master(group):
    m = model("msamp-o3")
    weights = m[0].weight, m[2].weight
    with torch.no_grad():
        m[0].weight.mul_(1.01)
        masters = [state_of(p).master.read() for p in weights]
        m[0].weight.copy_(m[0].weight.clone())
    DistributedDataParallel(m)(torch.randn(4, 64))
    for p, master in zip(weights, masters, strict=True):
        assert torch.equal(state_of(p).master.read(), master)
        assert not torch.equal(p, master), "the master is finer than the weight"
    with torch.no_grad():
        m[0].weight.copy_(other := torch.randn(64, 64))
    torch.testing.assert_close(state_of(m[0].weight).master.read(), other, rtol=1e-3, atol=1e-5)


def boxed(m):
    """A model whose output DDP cannot see into."""
    m.register_forward_hook(lambda _, args, y: {"a set": {y}})
    return m


#: What is wrapped, and the words of the error; "" where nothing is wrong.
WRAPPED = {
    "another module": (
        lambda: nn.Sequential(ng.prepare_ddp(model("msamp-o2"))),
        "give prepare_ddp the very module that is wrapped",
    ),
    "another recipe": (
        lambda: ng.convert(ng.prepare_ddp(model("msamp-o2")), "fp8"),
        r"0\.weight is under another recipe than when prepare_ddp was called",
    ),
    "no wide gradient": (
        lambda: ng.prepare_ddp(ng.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), "msamp-o2")),
        "needs a trainable parameter whose gradient is fp32",
    ),
    "a box": (
        lambda: ng.prepare_ddp(boxed(model("msamp-o2"))),
        "no tensor with a gradient was found in the output",
    ),
    "converted again": (lambda: ng.convert(model("msamp-o2"), "fp8"), ""),
}


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.usefixtures("group")
def test_ddp_is_refused_where_gradients_would_be_lost(case):
    make, words = WRAPPED[case]
    if words:
        with pytest.raises(UserError, match=words):
            DistributedDataParallel(make())(torch.randn(4, 64))
        return
    m = make()
    DistributedDataParallel(m)(torch.randn(4, 64)).sum().backward()
    assert all(p.grad is not None for p in m.parameters())


def steps(m, count):
    """Optimizer steps of two micro-batches each, which say no step."""
    optimizer = torch.optim.SGD(m.parameters(), lr=1e-3)
    for seed in range(count):
        backward(m, seed)
        backward(m, seed + count)
        optimizer.step()


@pytest.mark.parametrize("name", ["nvfp4", "fp8-delayed"])
def test_a_loop_that_stops_saying_the_step_is_warned(name):
    m = model(name)
    ng.set_step(m, 0, 1, 0)
    steps(m, 9)
    ng.set_step(m, 0, 2, 0)
    steps(m, 9)  # several updates in one step, as adversarial training makes them
    with pytest.warns(UserWarning, match=r"10 optimizer steps .* set step 2; .* call narrowgauge\.set_step"):
        steps(m, 1)
    steps(m, 3)  # warned once


def test_no_loop_is_warned_that_says_steps_or_never_did_or_needs_none():
    ng.set_step(deterministic := model("mxfp8"), 0, 1, 0)
    ng.set_step(told := model("fp8-delayed"), 0, 1, 0)
    ng.set_step(evaluated := model("fp8-delayed"), 0, 1, 0)
    ng.step(told)
    for m in (deterministic, told, model("fp8-delayed")):
        steps(m, 11)
    assert evaluated[0].steps_unset == 0, "no pass of its own"


#: When a rule begins, the arguments of `set_step` that it needs, and the one that is asked for.
WHEN = {
    "from_share = 0.5": ((10,), "steps"),
    "from_step = 3": ((), ""),
    'from = "decay"': ((10, 6), "decay"),
}


@pytest.mark.parametrize("when", WHEN)
def test_a_rule_that_waits_needs_a_loop_that_says_the_step(when):
    arguments, asked = WHEN[when]
    text = f'[fprop]\nx = "e4m3"\n[[rule]]\n{when}\nfprop = {{ x = "bf16" }}'
    m = model(ng.recipes.parse_recipe(text, "later.toml"))
    with pytest.raises(UserError, match=r"'later' starts at a step.*call narrowgauge\.set_step"):
        backward(m)
    with torch.no_grad():
        m(torch.randn(2, 64))  # evaluation needs no step
    if asked:
        with pytest.raises(UserError, match=f"give set_step the argument `{asked}`"):
            ng.set_step(m, 0, 1, 0, *arguments[:-1])
    for step, cast in ((1, "e4m3"), (6, "bf16")):
        ng.set_step(m, 0, step, 0, *arguments)
        assert m[0].spec.casts["fprop.x"].name == cast
    backward(m)


def test_a_weights_gradient_over_some_of_the_tokens_is_not_rounded(group):
    m = model("fp8")
    half = EqualShare(0, 2, (dist.group.WORLD,))
    for shards, is_rounded in ((LinearShards(), True), (LinearShards(half), False)):
        m[0].shards, m[0].weight.grad = shards, None
        backward(m)
        dw = m[0].weight.grad
        assert torch.equal(dw, dw.bfloat16().float()) == is_rounded


@pytest.mark.filterwarnings("ignore:converted .* matmul weights")  # its attention's
@pytest.mark.parametrize("name", ["mxfp4", "msamp-o2"])
def test_torchs_encoder_computes_under_the_recipe_in_evaluation_too(name):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder, x = ng.convert(nn.TransformerEncoder(layer, 2), name), torch.randn(2, 8, 64)
    expected = encoder.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(x), expected, rtol=1e-5, atol=1e-5)
