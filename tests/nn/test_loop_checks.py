"""A custom training loop: what torch's tools do with narrow gradients and weights, or refuse to do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.quantization import gradient_of, state_of

NARROW_GRADIENTS = ("bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3")
ONLY_GRADIENT = {"weight": "fp32", "master": "none"}


@pytest.fixture
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(recipe: str | ng.Recipe) -> nn.Module:
    torch.manual_seed(0)
    return ng.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), recipe)


def backward(m: nn.Module, seed: int = 1) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    m(x).square().sum().backward()


def weights(m: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in m.state_dict().values()]


@pytest.mark.parametrize("name", NARROW_GRADIENTS)
def test_torchs_clipping_sees_narrow_gradients_and_scales_them(name):
    m = model(name)
    optimizer = ng.AdamW(m.parameters(), name)
    backward(m)
    expected = torch.linalg.vector_norm(torch.stack([gradient_of(p).norm() for p in m.parameters()]))
    norm = nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), torch.tensor(1.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", NARROW_GRADIENTS)
def test_the_models_zero_grad_drops_narrow_gradients(name):
    """Else the gradients of all steps would be added up: this is how most trainers begin a step."""
    results = []
    for is_the_models in (True, False):
        m = model(name)
        optimizer = ng.AdamW(m.parameters(), name, lr=1e-2)
        for seed in range(3):
            backward(m, seed)
            optimizer.step()
            (m if is_the_models else optimizer).zero_grad()
        results.append(weights(m))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_gradient_that_was_read_is_summed_on():
    m = model("msamp-o2")
    backward(m, 1)
    first = m[0].weight.grad.clone()
    backward(m, 2)
    alone = model("msamp-o2")
    backward(alone, 2)
    second = gradient_of(alone[0].weight)
    atol = 0.1 * second.abs().max().item()
    torch.testing.assert_close(m[0].weight.grad, first + second, rtol=0.1, atol=atol)


def test_torchs_optimizer_moves_plain_weights_by_narrow_gradients():
    m = model(ng.recipe("msamp-o1").with_places(ONLY_GRADIENT))
    backward(m)
    expected = [p.detach() - 0.01 * gradient_of(p) for p in m.parameters()]
    torch.optim.SGD(m.parameters(), lr=0.01).step()
    for p, moved in zip(m.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), moved, rtol=1e-6, atol=1e-7)


def test_wrapping_and_a_copy_of_its_values_leave_a_weight_its_master(group):
    m = model("msamp-o3")
    with torch.no_grad():
        m[0].weight.mul_(1.01)
        masters = [state_of(p).master.read() for p in (m[0].weight, m[2].weight)]
        m[0].weight.copy_(m[0].weight.clone())
    DistributedDataParallel(m)(torch.randn(4, 64))
    for p, master in zip((m[0].weight, m[2].weight), masters, strict=True):
        assert torch.equal(state_of(p).master.read(), master)
        assert not torch.equal(p, master), "the master is finer than the weight"
    with torch.no_grad():
        m[0].weight.copy_(other := torch.randn(64, 64))
    torch.testing.assert_close(state_of(m[0].weight).master.read(), other, rtol=1e-3, atol=1e-5)


def test_ddp_is_asked_for_the_recipe_that_a_model_is_under_now(group):
    m = model("msamp-o2")
    wrapped = DistributedDataParallel(ng.convert(m, "fp8"))
    wrapped(torch.randn(4, 64)).sum().backward()
    assert all(p.grad is not None for p in m.parameters())


def test_ddp_is_prepared_for_the_module_that_it_wraps_and_its_recipe(group):
    m = ng.prepare_ddp(model("msamp-o2"))
    wrapped = DistributedDataParallel(nn.Sequential(m))
    with pytest.raises(UserError, match="give prepare_ddp the very module that is wrapped"):
        wrapped(torch.randn(4, 64))
    m = ng.convert(ng.prepare_ddp(model("msamp-o2")), "fp8")
    wrapped = DistributedDataParallel(m)
    with pytest.raises(
        UserError, match=r"0\.weight is under another recipe than when prepare_ddp was called"
    ):
        wrapped(torch.randn(4, 64))


def test_ddp_needs_a_wide_gradient(group):
    m = ng.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), "msamp-o2")
    with pytest.raises(UserError, match="needs a trainable parameter whose gradient is fp32"):
        ng.prepare_ddp(m)


def test_an_output_that_ddp_cannot_see_into_is_refused(group):
    class Box(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model("msamp-o2")

        def forward(self, x):
            return {"a set": {self.inner(x)}}

    wrapped = DistributedDataParallel(ng.prepare_ddp(Box()))
    with pytest.raises(UserError, match="no tensor with a gradient was found in the output"):
        wrapped(torch.randn(4, 64))


def test_ddp_around_wide_gradients_is_not(group):
    wide = {"weight": "fp32", "master": "none", "grad": "fp32", "reduce": "fp32"}
    recipe = ng.recipe("msamp-o2").with_places(wide)
    wrapped = DistributedDataParallel(model(recipe))
    wrapped(torch.randn(4, 64)).sum().backward()


@pytest.mark.filterwarnings("ignore:converted .* matmul weights")  # its attention's
@pytest.mark.parametrize("name", ["mxfp4", "msamp-o2"])
def test_torchs_encoder_computes_under_the_recipe_in_evaluation_too(name):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = ng.convert(nn.TransformerEncoder(layer, 2), name)
    x = torch.randn(2, 8, 64)
    expected = encoder.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(x), expected, rtol=1e-5, atol=1e-5)


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
    steps(m, 20)  # warned once


def test_no_loop_is_warned_that_says_steps_or_never_did_or_needs_none():
    ng.set_step(deterministic := model("mxfp8"), 0, 1, 0)
    ng.set_step(told := model("fp8-delayed"), 0, 1, 0)
    ng.set_step(evaluated := model("fp8-delayed"), 0, 1, 0)
    ng.step(told)
    for m in (deterministic, told, model("fp8-delayed")):
        steps(m, 12)
    assert evaluated[0].steps_unset == 0, "no pass of its own"


TIMED = """
name = "later"
[fprop]
x = "e4m3"
[[rule]]
{when}
fprop = {{ x = "bf16" }}
"""


@pytest.mark.parametrize("when", ["from_share = 0.5", "from_step = 3", 'from = "decay"'])
def test_a_rule_that_waits_needs_a_loop_that_says_the_step(tmp_path, when):
    (tmp_path / "later.toml").write_text(TIMED.format(when=when))
    m = model(ng.load_recipe(tmp_path / "later.toml"))
    with pytest.raises(UserError, match=r"'later' starts at a step.*call narrowgauge\.set_step"):
        backward(m)
    with torch.no_grad():
        m(torch.randn(2, 64))  # evaluation needs no step
    if "share" in when:
        with pytest.raises(UserError, match="give set_step the argument `steps`"):
            ng.set_step(m, 0, 1, 0)
    if "decay" in when:
        with pytest.raises(UserError, match="give set_step the argument `decay`"):
            ng.set_step(m, 0, 1, 0, 10)
    ng.set_step(m, 0, 1, 0, 10, decay=6)
    assert m[0].spec.casts["fprop.x"].name == "e4m3"
    ng.set_step(m, 0, 6, 0, 10, decay=6)
    assert m[0].spec.casts["fprop.x"].name == "bf16"
    backward(m)
