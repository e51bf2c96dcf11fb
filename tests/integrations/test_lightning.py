"""Lightning's Trainer and Fabric under a recipe: the real package on the CPU, against loops without it."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.system.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # of others' packages


@pytest.mark.tier("thorough", keep=("nvfp4", "msamp-o3"))
@pytest.mark.parametrize("recipe", ["fp32", "mxfp8", "nvfp4", "msamp-o3"])
def test_as_in_a_loop_of_ones_own(pl, recipe, tmp_path):
    m = pl.Model(recipe)
    pl.fit(m, recipe, tmp_path)
    assert m.losses == pl.own_loop(recipe)


def test_a_rule_that_waits_for_the_decay_is_told_its_step(pl, tmp_path):
    plain, finish = pl.Model("nvfp4"), pl.Model("nvfp4-finish")
    pl.fit(plain, "nvfp4", tmp_path)
    pl.fit(finish, "nvfp4-finish", tmp_path, decay_step=4)
    assert plain.losses[:6] == finish.losses[:6]  # two micro-batches a step
    assert plain.losses[6] != finish.losses[6]


CASES = [(name, False) for name in ("fp8-delayed", "nvfp4", "msamp-o3")]
CASES += [
    (name, True) for name in ("nvfp4", "msamp-o3", "fp8-delayed", "msamp-o1", "msamp-o2", "bf16-sr", "eco")
]


@pytest.mark.tier("thorough", keep=5, nightly=6)
@pytest.mark.parametrize(("recipe", "by_hand"), CASES)
def test_resumed_by_lightnings_own_means_to_the_last_digit(pl, recipe, by_hand, tmp_path):
    """With the plugin, and without it for a model that was converted by hand."""
    whole, first, again = pl.Model(recipe), pl.Model(recipe), pl.Model(recipe, seed=1)
    for m in (whole, first, again) if by_hand else ():
        ng.convert(m, recipe)
    pl.fit(whole, recipe, tmp_path, by_hand=by_hand)
    pl.fit(first, recipe, tmp_path, steps=3, by_hand=by_hand).save_checkpoint(tmp_path / "three.ckpt")
    pl.fit(again, recipe, tmp_path, ckpt=tmp_path / "three.ckpt", by_hand=by_hand)
    assert first.losses + again.losses == whole.losses
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


@pytest.mark.parametrize("recipe", ["nvfp4", "msamp-o3"])
def test_fabric_as_in_a_loop_of_ones_own_and_resumed(pl, recipe, tmp_path):
    fabric, m, optimizer, state = pl.fabric_of(recipe)
    losses = pl.steps_of(fabric, m, optimizer, range(1, 4))
    fabric.save(tmp_path / "three.ckpt", state)
    losses += pl.steps_of(fabric, m, optimizer, range(4, 7))
    assert losses == pl.own_loop(recipe)
    fabric, m, optimizer, state = pl.fabric_of(recipe, seed=1)
    fabric.load(tmp_path / "three.ckpt", state)
    assert pl.steps_of(fabric, m, optimizer, range(4, 7)) == losses[6:]


def test_refusals_name_the_way_out(pl):
    fabric = pl.Fabric(accelerator="cpu", plugins=[pl.NarrowPrecision("nvfp4")])
    with pytest.raises(UserError, match=r"call fabric\.setup before"):
        fabric.strategy.precision.load_state_dict({"step": 1})
    fabric.setup(pl.net())
    with pytest.raises(UserError, match="one NarrowPrecision counts the steps of one model"):
        fabric.setup(pl.net())
