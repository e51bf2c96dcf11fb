"""Checkpoints of a model's and an optimizer's state dicts continue to the same digits, or are refused."""

import copy
import importlib.util
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn import recipe_tensors

RECIPES = ("fp8-delayed", "nvfp4", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr", "eco")


def make(recipe, seed=0):
    torch.manual_seed(seed)
    m = ng.convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), recipe, keep=[])
    return m, ng.AdamW(m.parameters(), recipe, lr=1e-2, seed=3)


def train(m, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_goes_on(recipe, save, load):
    """Train, save, train on; and so does another model, with another past, that loads what was saved."""
    m, optimizer = make(recipe)
    train(m, optimizer, range(1, 4))
    saved = save(m, optimizer)
    expected = train(m, optimizer, range(4, 7))
    other, its_optimizer = make(recipe, seed=1)
    train(other, its_optimizer, range(11, 13))
    load(other, its_optimizer, saved)
    assert train(other, its_optimizer, range(4, 7)) == expected
    for ours, theirs in ((m.state_dict(), other.state_dict()), (recipe_tensors(m), recipe_tensors(other))):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(t, theirs[key]) for key, t in ours.items())


def through_a_file(path, state):
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_plain_state_dicts(recipe, tmp_path):
    def load(m, optimizer, saved):
        m.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])

    assert_goes_on(recipe, lambda m, o: through_a_file(tmp_path, [m.state_dict(), o.state_dict()]), load)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchs_distributed_checkpoint(recipe, tmp_path):
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be here

    def save(m, optimizer):
        weights, state = get_state_dict(m, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)

    def load(m, optimizer, saved):
        weights, state = get_state_dict(m, optimizer)
        found = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        set_state_dict(m, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    assert_goes_on(recipe, save, load)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("recipe", RECIPES)
def test_accelerates_save_state(recipe, tmp_path):
    from accelerate import Accelerator

    def prepared(m, optimizer):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(m, optimizer)
        return accelerator

    assert_goes_on(
        recipe,
        lambda m, o: prepared(m, o).save_state(tmp_path / "state"),
        lambda m, o, _: prepared(m, o).load_state(tmp_path / "state"),
    )


class Frozen(nn.Module):
    """A trained layer between two frozen ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 64))
        self.layers[0].requires_grad_(False)
        self.layers[3].requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


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
OTHERS = {
    "frozen": (Frozen, {}),
    "attention": (Attentive, {"attention.p": RANDOM, "attention.q": RANDOM}),
    "stream": (Attentive, {"stream": {"cast": "bf16", "rounding": "stochastic"}}),
}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *(("frozen", name) for name in ("fp8-delayed", "nvfp4", "msamp-o3", "bf16-sr")),
        ("attention", "bf16"),
        ("stream", "bf16"),
    ],
)
def test_modules_without_a_weight_in_the_optimizer(kind, recipe, monkeypatch):
    model, places = OTHERS[kind]

    def make_other(recipe, seed=0):
        torch.manual_seed(seed)
        m = ng.convert(model(), ng.recipe(recipe).with_places(places), keep=[])
        return m, ng.AdamW([p for p in m.parameters() if p.requires_grad], recipe, lr=1e-2, seed=3)

    monkeypatch.setitem(globals(), "make", make_other)

    def load(m, optimizer, saved):
        m.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])

    assert_goes_on(recipe, lambda m, o: copy.deepcopy([m.state_dict(), o.state_dict()]), load)


def test_a_copy_of_a_model_carries_its_own_state():
    torch.manual_seed(0)
    m = ng.convert(Attentive(), ng.recipe("bf16").with_places(OTHERS["attention"][1]), keep=[])
    twin = pickle.loads(pickle.dumps(copy.deepcopy(m)))
    optimizer, other = (ng.AdamW(each.parameters(), "bf16") for each in (m, twin))
    before = other.state_dict()
    train(m, optimizer, [1])
    saved, own = optimizer.state_dict()["state"][0], other.state_dict()["state"][0]
    key = "recipe.others.NarrowAttention.0.position"
    assert torch.equal(own[key], before["state"][0][key])
    assert not torch.equal(saved[key], own[key])


@pytest.mark.parametrize("recipe", ["msamp-o2", "bf16-sr", "eco"])
def test_the_optimizer_before_the_model_is_refused(recipe):
    first, its_optimizer = make(recipe)
    train(first, its_optimizer, [1])
    saved = its_optimizer.state_dict()
    m, optimizer = make(recipe, seed=1)
    before = {key: t.clone() for key, t in m.state_dict().items()}
    with pytest.raises(UserError, match="load the model's state dict first, and then the optimizer's"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(t, before[key]) for key, t in m.state_dict().items())


def test_a_layer_that_was_converted_twice_counts_once():
    m, optimizer = make("nvfp4")
    earlier = list(m)
    ng.convert(m, "nvfp4", keep=[])
    train(m, optimizer, [1])
    assert list(m) == earlier
    other, its_optimizer = make("nvfp4")
    other.load_state_dict(m.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert train(other, its_optimizer, [2]) == train(m, optimizer, [2])


def test_the_state_under_another_recipe_is_refused():
    (_m, optimizer), (_other, its_optimizer) = make("fp8"), make("fp8-delayed")
    with pytest.raises(UserError, match=r"of another model or recipe: 'recipe\..* here"):
        optimizer.load_state_dict(its_optimizer.state_dict())


def test_the_state_of_an_older_release_loads():
    (_m, optimizer), (_other, its_optimizer) = make("msamp-o2"), make("msamp-o2", seed=1)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        for key in [key for key in state if key.startswith("recipe.")]:
            del state[key]
    its_optimizer.load_state_dict(saved)
