"""`bench --verify` runs every variant of every kernel that a step launches, counted on imagined GPUs."""

from functools import cache

import pytest
import torch

from narrowgauge.bench.verify.kernel_checks import kernel_checks
from narrowgauge.data import Batch
from narrowgauge.devices import imagine
from narrowgauge.recipes import named_device, recipe_names
from narrowgauge.simulate.recorder import Recorder
from narrowgauge.training import make_config
from narrowgauge.training.step.trainer import Trainer

META = torch.device("meta")
# What a variant is compiled for besides what `Launch` specializes: switches, not sizes.
MODELS = ("qwen2.5-0.5b", "gpt2-124m")


def variant(work):
    """The name of a kernel, and which of its switches are on."""
    switches = [n for n in work.numbers if isinstance(n, tuple) and isinstance(n[1], bool | str)]
    return work.name, tuple(switches)


class Launches(Recorder):
    """The variants of kernels that are launched."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def told(self, work):
        if work.name.startswith("triton"):
            self.found.add(variant(work))


def launches_of(gpu, run):
    recorder = Launches()
    with imagine(named_device(gpu), recorder.told), recorder:
        run()
    return recorder.found


def step(recipe, model, **places):
    config = make_config(
        {
            "model": {"name": model, "layers": 1},
            "data": {"sequence_length": 128},
            "training": {"batch_size": 4, "micro_batch_size": 2},
            "recipe": {"name": recipe} | places,
        }
    )
    x_BT = torch.empty(2, 128, dtype=torch.int64, device=META)
    Trainer.begin(config.plan, META).train_step(iter([Batch(x_BT, x_BT, x_BT.numel())] * 2))


@pytest.mark.tier("thorough", keep=("h200-qwen2.5-0.5b-fp8",))
@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_each_variant_that_a_step_launches_is_verified(gpu, model, recipe, verified):
    missing = launches_of(gpu, lambda: step(recipe, model)) - verified(gpu)
    assert not missing


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed"])
def test_a_head_in_fp8_is_verified(recipe, verified):
    """Its loss writes codes, which no shipped recipe asks for."""
    launched = launches_of("h200", lambda: step(recipe, MODELS[0], keep="none"))
    assert any("gradient_codes" in name for name, _ in launched)
    assert not launched - verified("h200")


@pytest.fixture(scope="module")
def verified():
    """The variants that the checks of kernels launch on a GPU, found once."""

    @cache
    def found(gpu):
        return launches_of(gpu, lambda: [run_once(check) for check in kernel_checks(META, "")])

    return found


def run_once(check):
    """The operation of a check, at its small shape."""
    (operation,) = check.run.args
    operation.run(META, operation.small)
