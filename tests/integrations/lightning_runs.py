"""Lightning's Trainer and Fabric on a tiny model: what tests in one process and in several share."""

import torch
from lightning import Fabric, LightningModule, Trainer
from torch import nn

import narrowgauge as ng
from narrowgauge.integrations.lightning import NarrowPrecision

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
