"""What the tests of a custom training loop share: a small model, its training, the rows of the page."""

import io
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "your-own-loop.md").read_text(encoding="utf-8")
WIDE = ("fp8-delayed", "nvfp4", "coat")  # their weights and gradients are fp32
NARROW = ("bf16-sr", "msamp-o3")
ROWS = {
    "`torch.compile`",  # test_compile.py
    "`nn.init`, writing to a weight in place",  # idioms.py, as the next one
    "averaged weights (`AveragedModel`)",
    "a second derivative (gradient penalties, Hessians)",  # test_second_derivative.py
    "adapters around a layer (LoRA)",  # test_own_loop.py: as PEFT lays them
    "Hugging Face `Trainer`",  # integrations/test_transformers.py
    "optimizers of torch's, schedule-free, bitsandbytes",  # test_other_optimizers.py
    "`torch.save` of a state dict",  # optim/test_loop_state.py
    "gradient accumulation",  # test_accumulation.py, test_weight_state.py
    "tied weights",  # test_laws.py, test_weight_state.py
    "both `state_dict`s, as DCP, accelerate and Lightning save them: resume",  # optim/test_loop_state.py
}


def row(title, also=()):
    """The test of a row of the page, under recipes of each column, and in the thorough tier others."""
    ROWS.add(title)
    others = [pytest.param(n, marks=pytest.mark.tier("thorough")) for n in also if n not in WIDE]
    return pytest.mark.parametrize("name", [*WIDE, *NARROW, *others])


def model(name, seed=0, width=32, **options):
    torch.manual_seed(seed)
    layers = nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)
    return ng.convert(nn.Sequential(*layers), name, **options)


def batch(number=1, width=32):
    return torch.randn(16, width, generator=torch.Generator().manual_seed(number))


def train(m, name, run=None, numbers=(1, 2, 3), says_step=False):
    """Weights after some steps; `run` calls the model."""
    return go_on(m, ng.AdamW(m.parameters(), name, lr=1e-2), numbers, run, says_step)


def go_on(m, optimizer, numbers, run=None, says_step=False):
    """Weights after some more steps."""
    width = next(m.parameters()).shape[1]
    for number in numbers:
        if says_step:
            ng.set_step(m, 0, number, 0, 20, 15)
        (run or m)(batch(number, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers_of(m)


def through_a_file(saved, weights_only=True):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def numbers_of(m):
    return {key: tensor.clone() for key, tensor in m.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def is_on_page(error):
    """Whether the page shows a sentence."""
    return " ".join(str(error).split()) in " ".join(PAGE.split())
