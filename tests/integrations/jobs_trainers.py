"""What two processes do in the tests of integrations: Hugging Face's Trainer, Lightning and Fabric."""

import os

import torch
import torch.distributed as dist
from torch import nn

import narrowgauge as ng
from nn.own_loop import numbers_of

LR = 1e-2


def dist_world():
    return int(os.environ["WORLD_SIZE"])


def same_everywhere(model):
    """Whether all processes have the same weights, bit for bit."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {name: t.float().tolist() for name, t in numbers_of(model).items()})
    return all(other == found[0] for other in found)


def trainer(recipe, folder):
    """Losses of the whole batch, whether replicas are the same, and the losses of a continued training."""
    from integrations.hugging_face import losses_of, model, trainer_of
    from narrowgauge.integrations.transformers import trainer_kwargs

    def run(seed, **more):
        given = trainer_kwargs(model(seed), recipe, lr=LR, weight_decay=0.0)
        trained = trainer_of(folder, given, use_cpu=True, per_device_train_batch_size=1, **more)
        trained.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if seed else None)
        return trained

    whole = run(0, save_strategy="steps", save_steps=3)
    again = run(1, save_strategy="steps", save_steps=3)
    same = same_everywhere(whole.model) and same_everywhere(again.model)
    return {"losses": losses_of(whole), "same": same, "again": losses_of(again)}


def lightning(recipe, folder):
    """Losses of this process, and whether the replicas are the same, also after going on."""
    from integrations.lightning_runs import Model as OneProcess
    from integrations.lightning_runs import batches, fit

    class Model(OneProcess):
        def training_step(self, _, number):
            x = batches()[(number + 5 * self.global_rank) % 12]
            loss = (self.net(x) - x.roll(1, 1)).square().mean()
            self.losses.append(loss.item())
            return loss

    kwargs = {"strategy": "ddp", "devices": dist_world(), "use_distributed_sampler": False}
    whole, first, again = Model(recipe), Model(recipe), Model(recipe, seed=1)
    fit(whole, recipe, folder, **kwargs)
    fit(first, recipe, folder, steps=3, **kwargs).save_checkpoint(f"{folder}/three.ckpt")
    fit(again, recipe, folder, ckpt=f"{folder}/three.ckpt", **kwargs)
    same = same_everywhere(whole) and same_everywhere(again)
    return {"losses": whole.losses, "again": first.losses + again.losses, "same": same}


def accelerated(recipe, folder, is_prepared=False, has_adapters=False):
    """The same in a loop around accelerate, which saves after three steps."""
    how = (recipe, folder, is_prepared, has_adapters)
    losses, same = accelerated_from(0, *how)
    again, same_again = accelerated_from(3, *how)
    return {"losses": losses, "again": losses[:3] + again, "same": same and same_again}


def accelerated_from(start, recipe, folder, is_prepared, has_adapters):
    """Losses of this process from step `start` on, and whether the replicas are the same.

    Models begin from weights of their own on each process and at each start.
    """
    from accelerate import Accelerator

    from integrations.lightning_runs import batches, net

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    m = ng.convert(net(seed=10 * start + rank), recipe)
    if has_adapters:
        import peft

        m = peft.get_peft_model(m, peft.LoraConfig(target_modules=["0", "2"], r=4))
    m = ng.prepare_ddp(m) if is_prepared else m
    trained = [p for p in m.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(m, ng.AdamW(trained, recipe, lr=LR))
    if start:
        accelerator.load_state(folder)
    losses = []
    for number in range(start, 6):
        x = batches()[2 * number + rank]
        loss = (model(x) - x.roll(1, 1)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not start and number == 2:
            accelerator.save_state(folder)
    return losses, same_everywhere(m)


def fabric(recipe):
    """The same in Fabric."""
    from lightning import Fabric

    from integrations.lightning_runs import batches, net
    from narrowgauge.integrations.lightning import NarrowPrecision

    plug = Fabric(accelerator="cpu", strategy="ddp", devices=dist_world(), plugins=[NarrowPrecision(recipe)])
    plug.launch()
    m = net(seed=plug.global_rank)
    model = plug.setup(m)
    optimizer = plug.setup_optimizers(ng.AdamW(m.parameters(), recipe, lr=LR))
    losses = []
    for number in range(4):
        x = batches()[2 * number + plug.global_rank]
        loss = (model(x) - x.roll(1, 1)).square().mean()
        plug.backward(loss)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "same": same_everywhere(m), "alone": own_loop(recipe)}


def own_loop(recipe, steps=4):
    """What Fabric's loop computes, in one process that has all sequences of a step."""
    from integrations.lightning_runs import batches, net

    m = ng.convert(net(), recipe)
    optimizer = ng.AdamW(m.parameters(), recipe, lr=LR)
    losses = []
    for number in range(steps):
        for rank in range(2):
            x = batches()[2 * number + rank]
            ng.set_step(m, 0, number + 1, 4 * rank)
            loss = (m(x) - x.roll(1, 1)).square().mean()
            (loss / 2).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses
