"""Small models and a wide one, trained from recorded launches and one by one, bit for bit.

tests/kernels/test_micro_batch_graph.py repeats recorded launches in the interpreter.
"""

import os

import pytest

from gpu.compare import same
from gpu.steps import SIZES, config_of, strictly, weights_and_losses
from narrowgauge.trainer.training.step.build_model import note_verified

ADVICE = "leave training.graph out: runs here then record no graphs"
#: Two layers at the width of Qwen2.5-1.5B, as many tokens as its matrices need to be filled.
WIDE = {"name": "qwen2.5-1.5b", "layers": 2, "vocab_size": 4096}
CASES = {name: (name, SIZES, 128) for name in ("bf16", "fp8", "fp8-delayed", "nvfp4")}
CASES["a wide model under fp8"] = ("fp8", WIDE, 1024)
AGREED = set()
CACHE = os.environ.get("NARROWGAUGE_CACHE")  # the user's; tests have their own


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_are_the_steps_one_by_one(name, gpu):
    recipe, sizes, length = CASES[name]
    one, other = (config_of(recipe, False, length=length, sizes=sizes, graph=g) for g in (True, False))
    with strictly(gpu):
        same(weights_and_losses(one, gpu), weights_and_losses(other, gpu))
    AGREED.add(name)


def test_runs_here_record_their_micro_batches(gpu, monkeypatch):
    """From now on, under `training.graph = "auto"`, if all the others agreed."""
    if CACHE:
        monkeypatch.setenv("NARROWGAUGE_CACHE", CACHE)
    else:
        monkeypatch.delenv("NARROWGAUGE_CACHE")
    note_verified(gpu, set(CASES) == AGREED)
    assert set(CASES) == AGREED
