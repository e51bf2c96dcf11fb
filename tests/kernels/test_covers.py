"""The table runs every variant of every kernel that a step launches, counted on imagined GPUs."""

from functools import cache
from itertools import product

import pytest
import torch

from gpu.table import OPERATIONS
from narrowgauge.recipes import named_device, recipe_names
from narrowgauge.system.devices import imagine
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.simulate.recorder import Recorder
from narrowgauge.trainer.training.step.trainer import Trainer
from support.covering import covering, properties_of, representatives
from support.runs import config_of

META = torch.device("meta")
# What a variant is compiled for besides what a launch specializes: switches, not sizes.
MODELS = ("qwen2.5-0.5b", "gpt2-124m")
SITES = {(gpu, model): (gpu, model) for gpu in ("h200", "b200") for model in MODELS}
FEW = covering({name: properties_of(name) for name in sorted(representatives())}, SITES)
EVERY = sorted(product(recipe_names(), SITES), key=lambda case: case not in FEW)  # the few first


def switches_in(value):
    """The switches of a constant, or of the eight of a grid."""
    values = value if isinstance(value, tuple) and len(value) == 8 else (value,)
    return tuple(v for v in values if isinstance(v, bool | str))


class Launches(Recorder):
    """The variants of kernels that are launched: a name, and which switches are on."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def told(self, work):
        if work.name.startswith("triton"):
            constants = [n for n in work.scalars if isinstance(n, tuple)]
            self.found.add((work.name, tuple((name, switches_in(value)) for name, value in constants)))


def launches_of(gpu, run):
    recorder = Launches()
    with imagine(named_device(gpu), recorder.on_launch), recorder:
        run()
    return recorder.found


def step(recipe, model):
    config = config_of(recipe, {"name": model, "layers": 1}, 128, batch_size=4)
    x_BT = torch.empty(2, 128, dtype=torch.int64, device=META)
    Trainer.begin(config, META).train_step(iter([Batch(x_BT, x_BT, x_BT.numel())] * 2))


@cache
def verified(gpu):
    """The variants that the table launches on a GPU, at their small shapes."""
    return launches_of(gpu, lambda: [o.run(META, o.small) for o in OPERATIONS.values()])


@pytest.mark.tier("thorough", keep=1, nightly=len(FEW))
@pytest.mark.parametrize(("recipe", "site"), EVERY)
def test_each_variant_that_a_step_launches_is_verified(recipe, site):
    gpu, model = site
    assert not launches_of(gpu, lambda: step(recipe, model)) - verified(gpu)
