"""A custom training loop is saved and resumed bit for bit, under every recipe."""

import io

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UserError
from narrowgauge.nn import recipe_tensors
from narrowgauge.quantization import state_of
from narrowgauge.recipes import recipe, recipe_names

STEPS = 6
OF_LINEARS = [name for name in recipe_names() if not recipe(name).narrows_attention]


def waits_for_a_step(name):
    """Whether a loop has to call `set_step` under a recipe; without it the first forward pass is refused."""
    return any(rule.is_timed for rule in recipe(name).rules)


def make(recipe):
    torch.manual_seed(0)
    m = ng.convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), recipe)
    return m, ng.AdamW(m.parameters(), recipe, lr=1e-2, seed=3)


def train(m, optimizer, steps, says_step):
    for step in steps:
        if says_step:
            ng.set_step(m, 7, step, 0, STEPS, decay=5)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.tier("thorough", keep=("fp8-delayed", "nvfp4", "msamp-o3", "bf16-sr", "coat"))
@pytest.mark.parametrize(
    ("name", "says_step"),
    [(n, says) for n in OF_LINEARS for says in (True, False) if says or not waits_for_a_step(n)],
)
def test_it_goes_on_to_the_same_digits(name, says_step):
    m, optimizer = make(name)
    train(m, optimizer, range(1, 4), says_step)
    saved = through_a_file(ng.state_dict(m, optimizer))
    train(m, optimizer, range(4, STEPS + 1), says_step)

    other, its_optimizer = make(name)
    train(other, its_optimizer, range(11, 13), says_step)  # its state is anything
    ng.load_state_dict(other, its_optimizer, saved)
    train(other, its_optimizer, range(4, STEPS + 1), says_step)

    for ours, theirs in ((m.state_dict(), other.state_dict()), (recipe_tensors(m), recipe_tensors(other))):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    moments, its_moments = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
    assert all(torch.equal(t, its_moments[i][key]) for i, s in moments.items() for key, t in s.items())


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4"])
def test_so_it_does_with_an_optimizer_of_torchs(name):
    """With histories and random bits, which its own state dict lacks."""

    def made():
        m = make(name)[0]
        return m, torch.optim.AdamW(m.parameters(), lr=1e-2)

    m, optimizer = made()
    train(m, optimizer, range(1, 4), says_step=False)
    saved = through_a_file(ng.state_dict(m, optimizer))
    train(m, optimizer, range(4, STEPS + 1), says_step=False)
    other, its_optimizer = made()
    train(other, its_optimizer, range(11, 13), says_step=False)
    ng.load_state_dict(other, its_optimizer, saved)
    train(other, its_optimizer, range(4, STEPS + 1), says_step=False)
    for ours, theirs in ((m.state_dict(), other.state_dict()), (recipe_tensors(m), recipe_tensors(other))):
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


def test_the_state_of_another_recipe_is_refused_before_anything_changes():
    m, optimizer = make("msamp-o2")
    saved = through_a_file(ng.state_dict(m, optimizer))
    other, its_optimizer = make("fp8")
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    with pytest.raises(UserError, match=r"another model or recipe: .* use the model and recipe that"):
        ng.load_state_dict(other, its_optimizer, saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())


def test_a_state_without_an_optimizers_is_refused():
    m, optimizer = make("fp8")
    with pytest.raises(UserError, match="no optimizer state; pass None as the optimizer"):
        ng.load_state_dict(m, optimizer, ng.state_dict(m))
    ng.load_state_dict(m, None, ng.state_dict(m))


def test_it_waits_for_the_copies_to_the_host_that_it_holds(monkeypatch):
    """As a step leaves them under way on a GPU."""
    m, optimizer = make("msamp-o3")
    master, moment = state_of(m[0].weight).master, optimizer.state[m[0].weight]["m"]
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    for state in (master, moment):
        state.on_host, state.device = True, torch.device("cuda", int(state is moment))
    for take, devices in (
        (lambda: ng.state_dict(m, optimizer), [0, 1]),
        (lambda: recipe_tensors(m), [0]),
        (optimizer.state_dict, [1, 0]),
        (lambda: optimizer.tensors({p: n for n, p in m.named_parameters()}), [1]),
    ):
        waits.clear()
        take()
        assert [device.index for device in waits] == devices


@pytest.mark.parametrize("name", ["fp8-delayed", "msamp-o3", "nvfp4", "coat"])
def test_the_default_dtype_of_the_process_changes_nothing(name):
    """In bf16 a count of steps would end at 256, and scales would lose 16 bits."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        m, optimizer = make(name)
        torch.set_default_dtype(dtype)
        try:
            ng.convert(m, name)  # its state is made here
            optimizer = ng.AdamW(m.parameters(), name, lr=1e-2, seed=3)
            train(m, optimizer, range(1, 3), True)
            tensors = {**recipe_tensors(m), **optimizer.tensors({p: n for n, p in m.named_parameters()})}
            found.append({key: tensor.clone() for key, tensor in tensors.items()})
        finally:
            torch.set_default_dtype(torch.float32)
    one, other = found
    assert all(t.dtype == other[key].dtype and torch.equal(t, other[key]) for key, t in one.items())


@pytest.mark.parametrize("when", ["from_step = 3", "from_share = 0.3"])
def test_a_model_that_was_loaded_evaluates_in_the_casts_of_its_step(when, tmp_path):
    (tmp_path / "later.toml").write_text(
        f'name = "later"\nfprop = "mxfp4"\n[[rule]]\n{when}\nfprop = "bf16"\n'
    )
    later = ng.load_recipe(tmp_path / "later.toml")
    m, optimizer = make(later)
    train(m, optimizer, range(1, 5), True)
    again, its_optimizer = make(later)
    ng.load_state_dict(again, its_optimizer, through_a_file(ng.state_dict(m, optimizer)))
    with torch.no_grad():
        assert torch.equal(again(torch.eye(64)), m(torch.eye(64)))


@pytest.mark.parametrize("names", [("fp8", "nvfp4"), ("nvfp4", "fp8")])
def test_a_state_with_other_random_streams_is_refused(names):
    saved, into = (make(name)[0] for name in names)
    with pytest.raises(UserError, match=r"'0' is torch\.int64 \(\d+,\) there and torch\.int64 \(\d+,\) here"):
        ng.load_state_dict(into, None, ng.state_dict(saved))
