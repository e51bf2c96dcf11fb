"""Optimizers of torch and of others over narrow weights: what they compute is rounded once, or is refused."""

import pytest
import torch
from torch import nn, optim

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.quantization import state_of, stored_tensor

#: How each makes its optimizer, at a rate at which it learns in STEPS steps.
OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=3e-3),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=3e-3, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "SGD, fused": lambda p: optim.SGD(p, lr=1.0, momentum=0.9, fused=True),
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=3e-3, foreach=True, amsgrad=True),
    "SGD, foreach": lambda p: optim.SGD(p, lr=2.0, foreach=True, weight_decay=1e-4),
    "Adam": lambda p: optim.Adam(p, lr=3e-3, weight_decay=1e-4),
    "NAdam": lambda p: optim.NAdam(p, lr=3e-3, decoupled_weight_decay=True, weight_decay=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=2e-2),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=3.0),
    "Adamax": lambda p: optim.Adamax(p, lr=5e-3),
    "ASGD": lambda p: optim.ASGD(p, lr=2.0, t0=5),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.3, max_iter=3),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: optim.Muon([x for x in p if x.ndim == 2], lr=5e-3),
}
STEPS = 20


def pair(name, width=32):
    """A model under a recipe, and a plain one with the same values."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)))
    m, twin = ng.convert(models[0], name, keep=[]), models[1]
    twin.load_state_dict({k: v.detach().clone() for k, v in m.state_dict().items()})
    return m, twin


def problem(m):
    """The loss of a model as a function without arguments, always of the same batch."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 16, generator=g), torch.randn(16, 16, generator=g)
    y = (x @ w).tanh()
    return lambda: (m(x) - y).square().mean()


def learned(m, optimizer):
    """By how much the loss falls."""
    loss_of = problem(m)

    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    with torch.no_grad():
        before = loss_of().item()
    for _ in range(STEPS):
        optimizer.step(closure)
    with torch.no_grad():
        return before - loss_of().item()


def share(name, make, width=32):
    """What a model learns under a recipe, as a share of what its fp32 twin learns by the same optimizer."""
    m, twin = pair(name, width)
    return learned(m, make([*m.parameters()])) / learned(twin, make([*twin.parameters()]))


@pytest.mark.tier("thorough", keep=3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torchs_optimizers_learn_what_they_learn_in_fp32(optimizer):
    assert share("bf16-sr", OPTIMIZERS[optimizer]) > 0.98


@pytest.mark.tier("thorough", keep=("msamp-o2-SGD, foreach",))
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW, fused", "SGD, foreach"])
@pytest.mark.parametrize("name", ["msamp-o1", "msamp-o2", "msamp-o3"])
def test_so_they_do_over_scaled_weights_and_masters(name, optimizer):
    assert share(name, OPTIMIZERS[optimizer]) > 0.95


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW, fused", "AdamW, foreach", "NAdam"])
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2", "msamp-o3"])
def test_a_step_is_rounded_once(name, optimizer):
    """To the digit of its fp32 result written at once; decay and addition alone would each be rounded."""
    m, _ = pair(name)
    problem(m)().backward()
    layer = m[0]
    wide = nn.Parameter(state_of(layer.weight).widest())
    wide.grad = layer.weight.grad.clone()
    OPTIMIZERS[optimizer](m.parameters()).step()
    OPTIMIZERS[optimizer]([wide]).step()
    found, stored = layer.weight.detach().clone(), stored_tensor(layer.weight)
    with torch.no_grad():
        layer.weight.copy_(wide)
    if name == "bf16-sr":  # up or down, with random bits
        assert (found - wide).abs().max() <= 2**-7 * wide.abs().max()
        assert not torch.equal(found, layer.weight)
    else:
        assert torch.equal(found, layer.weight)
    assert stored.dtype == stored_tensor(layer.weight).dtype


def test_updates_wait_for_a_read_and_no_longer():
    m, _ = pair("msamp-o2")
    record, before = state_of(m[0].weight), m[0].weight.detach().clone()
    with torch.no_grad():
        for _ in range(3):  # together they reach the next value, each alone would not
            m[0].weight.mul_(1 + 2**-13)
        assert record.updated is not None
        m[2].weight.mul_(2)
    assert record.updated is None, "the update of another weight rounds it, so that few are float32"
    assert not torch.equal(m[0].weight, before)
    optim.SGD([nn.Parameter(torch.zeros(1))]).step()
    assert state_of(m[2].weight).updated is None


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW, fused", "SGD, foreach", "LBFGS"])
def test_eco_refuses_them_and_changes_nothing(optimizer):
    m, _ = pair("eco")
    made = OPTIMIZERS[optimizer]([m[0].weight, m[2].weight])
    before = [p.detach().clone() for p in m.parameters()]
    loss_of = problem(m)

    def closure():
        loss = loss_of()
        loss.backward()
        return loss

    with pytest.raises(
        UserError, match=r"cannot update a weight .* first moment of AdamW: update it with narrow"
    ):
        made.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, m.parameters(), strict=True))


def computed_in_fp32_and_copied(p):
    """An optimizer that ends in `copy_`, as Hugging Face's and fairseq's do."""

    class Descent(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
            for p in self.param_groups[0]["params"]:
                wide = p.data.float()
                wide.add_(p.grad, alpha=-0.02)  # small against the steps of bfloat16
                p.data.copy_(wide)
            return loss

    return Descent(p, {})


def test_an_update_that_is_copied_survives_on_average():
    assert share("bf16-sr", computed_in_fp32_and_copied) > 0.95


@pytest.mark.tier("thorough", keep=("bf16-sr",))
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2"])
def test_schedule_free_learns_what_it_learns_in_fp32(name):
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")

    def make(p):
        optimizer = schedulefree.AdamWScheduleFree(p, lr=3e-3)
        optimizer.train()
        return optimizer

    assert share(name, make) > 0.98


@pytest.mark.tier("thorough", keep=("bf16-sr",))
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2"])
def test_8_bit_optimizers_of_bitsandbytes_learn_what_they_learn_in_fp32(name):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    assert share(name, lambda p: bitsandbytes.optim.AdamW8bit(p, lr=3e-3, min_8bit_size=16)) > 0.98


@pytest.mark.tier("thorough")  # the refusal is quick
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("name", ["bf16-sr", "msamp-o2"])
def test_optimizers_of_torchao_learn_what_they_learn_in_fp32(name, kind):
    theirs = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    with torch.compiler.set_stance("force_eager"):
        assert share(name, lambda p: getattr(theirs, kind)(p, lr=3e-3), width=256) > 0.98


def test_an_optimizer_that_compiles_its_step_is_refused():
    m, _ = pair("bf16-sr")
    with pytest.raises(Exception, match=r"copy_ in compiled code cannot .*set_stance\('force_eager'\)"):
        torch.compile(lambda p: p.copy_(2 * p), backend="eager", fullgraph=True)(m[0].weight.detach())
