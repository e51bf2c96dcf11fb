"""What ranks do in the tests of memory: take one step, and return its memory and the expected memory."""

import torch
import torch.distributed as dist

from narrowgauge.data import open_data
from narrowgauge.distributed import CommCounter, Mesh
from narrowgauge.runs.loop.parallel_dims import parallel_dims_of
from narrowgauge.simulate import MemoryTracker
from narrowgauge.training.config.config import make_config
from narrowgauge.training.step.trainer import Trainer

CPU = torch.device("cpu")


def account(values):
    """(bytes by class, bytes sent by purpose) of the first step of this rank."""
    config = make_config(values)
    d = config.data
    data = open_data(d.source, d.tokenizer, d.weights, lambda *_: None)
    trainer = Trainer.begin(config.plan, CPU, Mesh(parallel_dims_of(config, dist.get_world_size()), CPU))
    with trainer.batches(data.train) as batches, CommCounter() as traffic, MemoryTracker(CPU) as watch:
        trainer.train_step(batches, watch.after_forward)
    return watch.measured(trainer).as_json(), dict(traffic.sent)
