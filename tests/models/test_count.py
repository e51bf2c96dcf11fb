"""Parameters and FLOPs of a model: as published, as its tensors have them, and as torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from narrowgauge.trainer.models import (
    Transformer,
    count_parameters,
    flops_per_token,
    model_config,
    model_names,
)

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-1.6b": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "tinyllama-1.1b": 1_100_048_384,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


def test_counts_are_those_that_are_published():
    """And active parameters: 12.9 and 3.3 billion (arXiv 2401.04088; arXiv 2505.09388, table 2)."""
    assert {name: count_parameters(model_config(name)) for name in PUBLISHED} == PUBLISHED
    for name, active, near in (("mixtral-8x7b", 12.9e9, 0.005), ("qwen3-30b-a3b", 3.3e9, 0.02)):
        assert count_parameters(model_config(name), active=True) == pytest.approx(active, rel=near)
    assert count_parameters(model_config("debug"), active=True) == count_parameters(model_config("debug"))


CHOICES = [
    {"norm": "layer"},
    {"bias": True},
    {"norm": "layer", "bias": True},
    {"qkv_bias": True},
    {"bias": True, "qkv_bias": False},
    {"mlp": "gelu", "bias": True},
    {"positions": "learned"},
    {"tied_head": True},
    {"head_dim": 32},
    {"qk_norm": True, "head_dim": 32},
    {"experts": 3, "bias": True, "mlp": "gelu"},
]


@pytest.mark.parametrize("layers", [1, 3])
def test_counts_equal_the_real_models(layers):
    """Counts hold for every size, which is linear in its layers, and for every option."""
    configs = [model_config(name, layers=layers) for name in model_names()]
    for config in [*configs, *(model_config("debug", layers=layers, **choice) for choice in CHOICES)]:
        with torch.device("meta"):
            model = Transformer(config)
        assert count_parameters(config) == sum(p.numel() for p in model.parameters()), config


@pytest.mark.parametrize("name", ["debug", "gpt2-debug", "moe-debug"])
def test_flops_equal_what_torch_counts_for_the_linear_layers(name):
    config, (B, T, V) = model_config(name), (2, 128, 4096)
    with torch.device("cpu" if config.experts else "meta"):  # which experts compute depends on values
        model = Transformer(config)
    ids_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))  # for all experts
    ids_BT = ids_BT.to(model.embedding.weight.device)
    with FlopCounterMode(display=False) as counter:
        model.loss(ids_BT, ids_BT).backward()
    counts = counter.get_flop_counts()["Global"]
    gemms = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    attention = 12 * config.layers * config.heads * config.head_dim * T
    assert gemms == B * T * (flops_per_token(config, T) - attention)
