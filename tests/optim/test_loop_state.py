"""A saved model and optimizer continue to the same digits, whoever saves them, or are refused."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import narrowgauge as ng
from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn import recipe_tensors
from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.system.errors import UserError
from nn.own_loop import is_on_page, through_a_file
from nn.own_loop import model as small_model
from support.fault_table import case

STEPS = 6
NARROW = ("fp8-delayed", "nvfp4", "msamp-o3", "bf16-sr")
OF_LINEARS = [name for name in recipe_names() if not recipe(name).narrows_attention]


def make(recipe, seed=0, optimizer=ng.AdamW):
    m = small_model(recipe, seed, width=64, keep=[])
    if optimizer is not ng.AdamW:
        return m, optimizer(m.parameters(), lr=1e-2)
    return m, ng.AdamW(m.parameters(), recipe, lr=1e-2, seed=3)


def train(m, optimizer, steps, says_step=False):
    losses = []
    for step in steps:
        if says_step:
            ng.set_step(m, 7, step, 0, STEPS, decay=5)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tensors_of(m, optimizer):
    """All that goes on."""
    state = optimizer.state_dict()["state"]
    moments = {f"{i} {key}": t for i, s in state.items() for key, t in s.items()}
    return {**m.state_dict(), **recipe_tensors(m), **moments}


def assert_goes_on(made, save, load, says_step=False):
    """Train, save, train on; and so does another model, with another past, that loads what was saved."""
    m, optimizer = made(0)
    train(m, optimizer, range(1, 4), says_step)
    saved = save(m, optimizer)
    expected = train(m, optimizer, range(4, STEPS + 1), says_step)
    other, its_optimizer = made(1)
    train(other, its_optimizer, range(11, 13), says_step)
    load(other, its_optimizer, saved)
    assert train(other, its_optimizer, range(4, STEPS + 1), says_step) == expected
    ours, theirs = tensors_of(m, optimizer), tensors_of(other, its_optimizer)
    assert ours.keys() == theirs.keys()
    assert [key for key, t in ours.items() if t.dtype != theirs[key].dtype or not t.equal(theirs[key])] == []


def by_us(_):
    return lambda m, o: through_a_file(ng.state_dict(m, o)), ng.load_state_dict


def by_two_state_dicts(_):
    def load(m, optimizer, saved):
        m.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])

    return lambda m, o: through_a_file([m.state_dict(), o.state_dict()]), load


def by_dcp(path):
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here

    def save(m, optimizer):
        weights, state = get_state_dict(m, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path, no_dist=True)

    def load(m, optimizer, _):
        weights, state = get_state_dict(m, optimizer)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        set_state_dict(m, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return save, load


@case("E7", tier="quick")
@pytest.mark.tier("thorough", keep=NARROW)
@pytest.mark.parametrize("says_step", [True, False])
@pytest.mark.parametrize("name", OF_LINEARS)
def test_a_loop_of_ones_own_goes_on_under_every_recipe(name, says_step, tmp_path):
    if not says_step and any(rule.is_timed for rule in recipe(name).rules):
        says_step = True  # without a step its first forward pass is refused
    assert_goes_on(lambda seed: make(name, seed), *by_us(tmp_path), says_step)


@pytest.mark.tier("nightly", keep=NARROW)
@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("by", [by_two_state_dicts, by_dcp])
@pytest.mark.parametrize("name", [*NARROW, "msamp-o1", "msamp-o2", "eco"])
def test_others_save_and_load_it(name, by, tmp_path):
    assert_goes_on(lambda seed: make(name, seed), *by(tmp_path))


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4"])
def test_so_it_does_with_an_optimizer_of_torchs(name, tmp_path):
    """With histories and random bits, which its own state dict lacks."""
    assert_goes_on(lambda seed: make(name, seed, torch.optim.AdamW), *by_us(tmp_path))


def frozen():
    """A trained layer between two frozen ones."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 64))
    layers[0].requires_grad_(False)
    layers[3].requires_grad_(False)
    return layers


def adapted():
    """Frozen layers, and parameters that train, as those of adapters."""
    return frozen().requires_grad_(False).append(nn.LayerNorm(64))


class Attentive(nn.Module):
    """The attention and the residual stream of the package's own model, and a layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.attention, self.residual = nn.Linear(64, 64), Attention(), Residual()

    def forward(self, x):
        heads = self.layer(x).view(1, -1, 4, 16).transpose(1, 2)
        y = self.attention(heads, heads, heads).transpose(1, 2).reshape(1, *x.shape)
        return self.residual(x[None], y)


RANDOM = {"cast": "e4m3", "rounding": "stochastic"}
ATTENTION = {"attention.p": RANDOM, "attention.q": RANDOM}
OTHERS = [
    *[(frozen, name, {}) for name in NARROW],
    *[(adapted, name, {}) for name in NARROW],
    (Attentive, "bf16", ATTENTION),
    (Attentive, "bf16", {"stream": {"cast": "bf16", "rounding": "stochastic"}}),
]


@pytest.mark.parametrize(("model", "name", "places"), OTHERS)
def test_modules_without_a_weight_in_the_optimizer(model, name, places, tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        m = ng.convert(model(), ng.recipe(name).with_places(places), keep=[])
        optimizer = ng.AdamW([p for p in m.parameters() if p.requires_grad], name, lr=1e-2, seed=3)
        optimizer.model = m if model is adapted else None  # no layer's weight leads to it
        return m, optimizer

    _, load = by_two_state_dicts(tmp_path)
    assert_goes_on(made, lambda m, o: copy.deepcopy([m.state_dict(), o.state_dict()]), load)


def our_state(saved, into):
    ng.load_state_dict(*into, ng.state_dict(*saved))


def optimizers_state(saved, into):
    into[1].load_state_dict(saved[1].state_dict())


#: What was saved, what it is loaded into, by what, and what the refusal says.
REFUSED = [
    ("msamp-o2", "fp8", our_state, r"another model or recipe: .* use the model and recipe that"),
    ("fp8-delayed", "fp8", optimizers_state, r"of another model or recipe: 'recipe\..* here"),
    ("fp8", "nvfp4", our_state, r"'0' is torch\.int64 \(\d+,\) there and torch\.int64 \(\d+,\) here"),
    *[(n, n, optimizers_state, "load the model's state dict first") for n in ("msamp-o2", "bf16-sr", "eco")],
    (
        "fp8",
        "fp8",
        lambda saved, into: ng.load_state_dict(*into, ng.state_dict(saved[0])),
        "pass None as the",
    ),
]


@pytest.mark.parametrize(("of", "name", "load", "says"), REFUSED)
def test_another_state_is_refused_before_anything_changes(of, name, load, says):
    first, its_optimizer = make(of)
    train(first, its_optimizer, [1])
    m, optimizer = make(name, seed=1)
    before = {key: t.clone() for key, t in m.state_dict().items()}
    with pytest.raises(UserError, match=says) as raised:
        load((first, its_optimizer), (m, optimizer))
    assert "first" not in says or is_on_page(raised.value)
    assert all(torch.equal(t, before[key]) for key, t in m.state_dict().items())
    ng.load_state_dict(m, None, ng.state_dict(m))


@pytest.mark.parametrize("when", ["from_step = 3", "from_share = 0.3"])
def test_a_model_that_was_loaded_evaluates_in_the_casts_of_its_step(when, tmp_path):
    path = tmp_path / "later.toml"
    path.write_text(f'name = "later"\nfprop = "mxfp4"\n[[rule]]\n{when}\nfprop = "bf16"\n')
    later = ng.load_recipe(path)
    m, optimizer = make(later)
    train(m, optimizer, range(1, 5), True)
    again, its_optimizer = make(later)
    ng.load_state_dict(again, its_optimizer, through_a_file(ng.state_dict(m, optimizer)))
    with torch.no_grad():
        assert torch.equal(again(torch.eye(64)), m(torch.eye(64)))
