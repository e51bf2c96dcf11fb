"""Lightning's Trainer and Fabric under a recipe: the real package on the CPU, against loops without it."""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import UserError

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning import Fabric, LightningModule, Trainer

from narrowgauge.integrations.lightning import NarrowPrecision

pytestmark = pytest.mark.filterwarnings("ignore")  # of others' packages
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def batches(count=12):
    return [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(count)]


class Model(LightningModule):
    def __init__(self, recipe, seed=0):
        super().__init__()
        self.net, self.recipe, self.losses = net(seed), recipe, []

    def training_step(self, _, number):
        x = batches()[number]  # also after a resume, which a plain list of batches begins again
        loss = (self.net(x) - x.roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return ng.AdamW(self.parameters(), self.recipe, lr=1e-2)


def own_loop(recipe, steps=6):
    m = Model(recipe)
    ng.convert(m, recipe)
    optimizer = m.configure_optimizers()
    for step in range(1, steps + 1):
        for part in range(2):
            ng.set_step(m, 0, step, 4 * part)
            (m.training_step(None, 2 * (step - 1) + part) / 2).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return m.losses


def fit(m, recipe, path, steps=6, ckpt=None, decay_step=None, **more):
    trainer = Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        plugins=[] if more.pop("by_hand", False) else [NarrowPrecision(recipe, decay_step=decay_step)],
        default_root_dir=path,
        enable_checkpointing=False,
        **QUIET,
        **more,
    )
    trainer.fit(m, torch.utils.data.DataLoader(batches(), batch_size=None), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize("recipe", ["fp32", "mxfp8", "nvfp4", "msamp-o3"])
def test_as_in_a_loop_of_ones_own(recipe, tmp_path):
    m = Model(recipe)
    fit(m, recipe, tmp_path)
    assert m.losses == own_loop(recipe)


def test_a_rule_that_waits_for_the_decay_is_told_its_step(tmp_path):
    plain, finish = Model("nvfp4"), Model("nvfp4-finish")
    fit(plain, "nvfp4", tmp_path)
    fit(finish, "nvfp4-finish", tmp_path, decay_step=4)
    assert plain.losses[:6] == finish.losses[:6]  # two micro-batches a step
    assert plain.losses[6] != finish.losses[6]


def test_under_fp32_lightnings_own_losses(tmp_path):
    mine, plain = Model("fp32"), Model("fp32")
    plain.configure_optimizers = lambda: torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    fit(mine, "fp32", tmp_path)
    trainer = Trainer(
        max_steps=6, accumulate_grad_batches=2, enable_checkpointing=False, default_root_dir=tmp_path, **QUIET
    )
    trainer.gradient_clip_val = None
    trainer.fit(plain, torch.utils.data.DataLoader(batches(), batch_size=None))
    assert mine.losses[:2] == plain.losses[:2]  # before the first update; clipping differs after it


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "msamp-o3"])
def test_resumed_by_lightnings_own_means_to_the_last_digit(recipe, tmp_path):
    whole, first, again = Model(recipe), Model(recipe), Model(recipe, seed=1)
    fit(whole, recipe, tmp_path)
    fit(first, recipe, tmp_path, steps=3).save_checkpoint(tmp_path / "three.ckpt")
    fit(again, recipe, tmp_path, ckpt=tmp_path / "three.ckpt")
    assert first.losses + again.losses == whole.losses
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


@pytest.mark.tier("thorough", keep=("nvfp4", "msamp-o3"))
@pytest.mark.parametrize(
    "recipe", ["fp8-delayed", "nvfp4", "msamp-o1", "msamp-o2", "msamp-o3", "bf16-sr", "eco"]
)
def test_a_model_converted_by_hand_resumes_to_the_last_digit_without_the_plugin(recipe, tmp_path):
    whole, first, again = Model(recipe), Model(recipe), Model(recipe, seed=1)
    for m in (whole, first, again):
        ng.convert(m, recipe)
    fit(whole, recipe, tmp_path, by_hand=True)
    fit(first, recipe, tmp_path, steps=3, by_hand=True).save_checkpoint(tmp_path / "three.ckpt")
    fit(again, recipe, tmp_path, ckpt=tmp_path / "three.ckpt", by_hand=True)
    assert first.losses + again.losses == whole.losses
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def fabric_of(recipe, seed=0):
    fabric = Fabric(accelerator="cpu", plugins=[NarrowPrecision(recipe)])
    m = net(seed)
    converted = fabric.setup(m)
    optimizer = fabric.setup_optimizers(ng.AdamW(m.parameters(), recipe, lr=1e-2))
    state = {"model": converted, "optimizer": optimizer, "precision": fabric.strategy.precision}
    return fabric, converted, optimizer, state


def steps_of(fabric, m, optimizer, steps):
    losses = []
    for step in steps:
        for part in range(2):
            x = batches()[2 * (step - 1) + part]
            loss = (m(x) - x.roll(1, 1)).square().mean()
            fabric.backward(loss / 2)
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("recipe", ["fp32", "nvfp4", "msamp-o3"])
def test_fabric_as_in_a_loop_of_ones_own_and_resumed(recipe, tmp_path):
    fabric, m, optimizer, state = fabric_of(recipe)
    losses = steps_of(fabric, m, optimizer, range(1, 4))
    fabric.save(tmp_path / "three.ckpt", state)
    losses += steps_of(fabric, m, optimizer, range(4, 7))
    assert losses == own_loop(recipe)
    fabric, m, optimizer, state = fabric_of(recipe, seed=1)
    fabric.load(tmp_path / "three.ckpt", state)
    assert steps_of(fabric, m, optimizer, range(4, 7)) == losses[6:]


def test_refusals_name_the_way_out():
    fabric = Fabric(accelerator="cpu", plugins=[NarrowPrecision("nvfp4")])
    with pytest.raises(UserError, match=r"call fabric\.setup before"):
        fabric.strategy.precision.load_state_dict({"step": 1})
    fabric.setup(net())
    with pytest.raises(UserError, match="one NarrowPrecision counts the steps of one model"):
        fabric.setup(net())
