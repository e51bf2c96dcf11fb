"""What two processes do in the tests of integrations: Hugging Face's Trainer and Lightning."""

import torch.distributed as dist

from nn.own_loop import numbers_of

LR = 1e-2


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

    kwargs = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    whole, first, again = Model(recipe), Model(recipe), Model(recipe, seed=1)
    fit(whole, recipe, folder, **kwargs)
    fit(first, recipe, folder, steps=3, **kwargs).save_checkpoint(f"{folder}/three.ckpt")
    fit(again, recipe, folder, ckpt=f"{folder}/three.ckpt", **kwargs)
    same = same_everywhere(whole) and same_everywhere(again)
    return {"losses": whole.losses, "again": first.losses + again.losses, "same": same}
