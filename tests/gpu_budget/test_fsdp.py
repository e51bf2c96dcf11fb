"""What narrow weights cost a process under FSDP2, compared with torch's FSDP2 of bf16 weights.

A step of one of several processes is counted on an imagined H200, under torch's own FSDP2. What the network
does is not counted.
"""

from collections import Counter
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowgauge.distributed import ParallelDims
from narrowgauge.recipes import named_device
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.distributed.parallel import parallelize
from narrowgauge.trainer.simulate import H200
from narrowgauge.trainer.simulate.count import Total
from narrowgauge.trainer.simulate.recorder import Recorder
from narrowgauge.trainer.simulate.step import simulated_mesh
from narrowgauge.trainer.training import make_config
from narrowgauge.trainer.training.step.trainer import Trainer

META = torch.device("meta")
FIRST, NEXT, SCALES = "the first micro-batch", "each that follows", "new scales after the update"


def plain_fsdp(module, mesh):
    """FSDP2 as torch has it: blocks are gathered in bf16, gradients summed in fp32.

    The root's embedding stays fp32, as the residual stream that it begins is in this model.
    """
    is_root = isinstance(module, parallelize.Objective)
    policy = MixedPrecisionPolicy(
        param_dtype=None if is_root else torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy, reshard_after_forward=not is_root)


class Phases:
    """Reports to the recorder which micro-batch begins; it stands where gauges would read the step."""

    def __init__(self, recorder):
        self.recorder = recorder

    def begin_micro_batch(self, is_first, is_last):
        self.recorder.phase = FIRST if is_first else NEXT

    def after_backward(self):
        self.recorder.phase = ""

    after_step = after_backward


@cache
def events_of(model, recipe, layers, world=1, is_plain=False, micro_batch=16, length=1024):
    """The events of a step of two micro-batches that other steps went before, but for clipping and update."""
    config = make_config(
        {
            "model": {"name": model, "layers": layers},
            "data": {"sequence_length": length},
            "training": {"batch_size": 2 * micro_batch * world, "micro_batch_size": micro_batch},
            "recipe": {"name": recipe},
            "parallel": {"shard": world},
        }
    )
    recorder = Recorder()
    shard = patch.object(parallelize, "_apply_fsdp", plain_fsdp if is_plain else parallelize._apply_fsdp)
    with (
        simulated_mesh(ParallelDims(shard=world)) as mesh,
        shard,
        imagine(named_device("h200"), recorder.told),
        recorder.watching(),
    ):
        trainer = Trainer.begin(config, META, mesh)
        renew = trainer.engine.after_update
        renew()
        trainer.engine.after_update = partial(_in_phase, recorder, renew)
        x_BT = torch.empty(micro_batch, length, dtype=torch.int64, device=META)
        trainer.train_step(iter([Batch(x_BT, x_BT, x_BT.numel(), None)] * 2), gauges=Phases(recorder))
    assert not [place for phase, place in recorder.waits if phase in (FIRST, NEXT, SCALES)]
    return recorder.events


def _in_phase(recorder, renew):
    recorder.phase = SCALES
    renew()
    recorder.phase = ""


def seconds_of(model, recipe, layers, micro_batches, **options):
    """Calibrated seconds of the device for a step of n micro-batches, of all layers, from few."""
    few, more = (_totals(events_of(model, recipe, n, **options)) for n in (2, 3))
    whole = {phase: few[phase] + (layers - 2) * (more[phase] - few[phase]) for phase in few}
    return whole[FIRST] + (micro_batches - 1) * whole[NEXT] + whole[SCALES]


def _totals(events):
    speeds = H200.calibrated()
    phases = (FIRST, NEXT, SCALES)
    return {p: Total.of([e for e in events if e.phase == p], 0, 0, speeds).seconds for p in phases}


MODEL, LAYERS, WORLD = "qwen2.5-1.5b", 28, 8


@pytest.mark.tier("thorough")
def test_fsdp_adds_hardly_more_to_fp8_than_plain_fsdp_adds_to_bf16():
    """A step of 524,288 tokens on eight GPUs: four micro-batches of 16 x 1024 tokens each."""
    fp8, fp8_alone, plain, alone = (
        seconds_of(MODEL, recipe, LAYERS, 4, world=world, is_plain=is_plain)
        for recipe, is_plain in (("fp8", False), ("bf16", True))
        for world in (WORLD, 1)
    )
    assert fp8 / (fp8_alone + plain - alone) - 1 <= 0.03
    assert fp8 / plain < 0.78, "fp8 stays as much faster as it is on one GPU"


def test_a_shard_is_read_twice_a_step_by_one_launch_each():
    """Once for its largest magnitude, once for its codes: these are kept while the weight is the same."""
    events = events_of(MODEL, "fp8", 3, world=WORLD)
    weights = 3 * 4  # the layers of a block
    launches = Counter((e.phase, e.name) for e in events)
    assert launches[FIRST, "triton cast_given"] - launches[NEXT, "triton cast_given"] == weights
    assert launches[SCALES, "triton largest"] == weights
    assert sum(e.phase == SCALES for e in events) < weights + 30
