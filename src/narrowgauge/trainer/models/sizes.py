"""The named models, as data.

`debug` and `gpt2-debug` are for a laptop and for tests, `ladder-1m` for many long runs on a CPU
(`experiments/ladder.toml`); all their dimensions are multiples of 128, so that every block shape of every
recipe fits. The others are published models, with their published dimensions:

    gpt2-*        the four released sizes
    gpt3-*        the GPT scripts of MS-AMP's examples for Megatron-LM (settings: `training/config/shipped/`)
    llama3-*      1B and 3B are from Llama 3.2, 8B, 70B and 405B from Llama 3.1
    qwen2.5-*     the base models
    tinyllama-1.1b
    moe-debug     `debug` with eight experts
    mixtral-8x7b, qwen3-30b-a3b    mixtures of experts, from the `config.json` of Mixtral-8x7B-v0.1 and
                  Qwen3-30B-A3B-Base (arXiv 2401.04088, table 1; arXiv 2505.09388, table 2)

`tests/models/test_count.py` compares the parameter count of each with the published one.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.models.config import ModelConfig


def _model(
    family: Mapping[str, Any], dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, **others: Any
) -> dict[str, Any]:
    """What a family has in common, a model's dimensions (`kv_heads` 0: as many as heads), and other keys."""
    dimensions = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn_dim": ffn_dim}
    return {**family, **dimensions, **others}


# `initializer_range` in the `config.json` of every published model below except GPT-3.
_STD = {"initial_std": 0.02}
_GPT2 = _STD | {"vocab_size": 50257, "max_sequence_length": 1024, "positions": "learned", "norm": "layer"}
_GPT2 |= {"mlp": "gelu", "bias": True, "tied_head": True}
_GPT3 = _GPT2 | {"max_sequence_length": 2048}
_LLAMA2 = _STD | {"vocab_size": 32000, "max_sequence_length": 2048}
_LLAMA3 = _STD | {"vocab_size": 128256, "max_sequence_length": 131072, "rope_theta": 500_000.0}
_LLAMA3 |= {"rope_original_positions": 8192, "rope_factor": 8.0}
_LLAMA3_SMALL = _LLAMA3 | {"rope_factor": 32.0, "tied_head": True}
_QWEN = _STD | {"vocab_size": 151936, "max_sequence_length": 32768, "rope_theta": 1_000_000.0}
_QWEN |= {"norm_eps": 1e-6}
_QWEN2 = _QWEN | {"qkv_bias": True}
_QWEN2_SMALL = _QWEN2 | {"tied_head": True}
_MIXTRAL = _LLAMA2 | {"max_sequence_length": 32768, "rope_theta": 1_000_000.0, "experts": 8}
_QWEN3_MOE = _QWEN | {"qk_norm": True, "head_dim": 128, "experts": 128, "experts_per_token": 8}
_DEBUG = {"vocab_size": 4096, "max_sequence_length": 1024}

SIZES: dict[str, dict[str, Any]] = {  # a family, then dim, layers, heads, kv_heads and ffn_dim
    "debug": _model(_DEBUG, 256, 4, 4, 2, 768),
    "ladder-1m": _model(_DEBUG, 128, 4, 4, 0, 384, vocab_size=2048, tied_head=True),
    "gpt2-debug": _model(_GPT2, 256, 4, 4, 0, 1024, vocab_size=4096, initial_std=0.0),
    "gpt2-124m": _model(_GPT2, 768, 12, 12, 0, 3072),
    "gpt2-350m": _model(_GPT2, 1024, 24, 16, 0, 4096),
    "gpt2-774m": _model(_GPT2, 1280, 36, 20, 0, 5120),
    "gpt2-1558m": _model(_GPT2, 1600, 48, 25, 0, 6400),
    "gpt3-345m": _model(_GPT3, 1024, 24, 16, 0, 4096, max_sequence_length=1024),
    "gpt3-6.7b": _model(_GPT3, 4096, 32, 32, 0, 16384, initial_std=0.0099),
    "gpt3-13b": _model(_GPT3, 5120, 40, 40, 0, 20480, initial_std=0.0099),
    "llama3-1b": _model(_LLAMA3_SMALL, 2048, 16, 32, 8, 8192),
    "llama3-3b": _model(_LLAMA3_SMALL, 3072, 28, 24, 8, 8192),
    "llama3-8b": _model(_LLAMA3, 4096, 32, 32, 8, 14336),
    "llama3-70b": _model(_LLAMA3, 8192, 80, 64, 8, 28672),
    "llama3-405b": _model(_LLAMA3, 16384, 126, 128, 8, 53248),
    "qwen2.5-0.5b": _model(_QWEN2_SMALL, 896, 24, 14, 2, 4864),
    "qwen2.5-1.5b": _model(_QWEN2_SMALL, 1536, 28, 12, 2, 8960, max_sequence_length=131072),
    "qwen2.5-3b": _model(_QWEN2_SMALL, 2048, 36, 16, 2, 11008),
    "qwen2.5-7b": _model(_QWEN2, 3584, 28, 28, 4, 18944, vocab_size=152064, max_sequence_length=131072),
    "tinyllama-1.1b": _model(_LLAMA2, 2048, 22, 32, 4, 5632),
    "moe-debug": _model(_DEBUG, 256, 4, 4, 2, 256, experts=8),
    "mixtral-8x7b": _model(_MIXTRAL, 4096, 32, 32, 8, 14336),
    "qwen3-30b-a3b": _model(_QWEN3_MOE, 2048, 48, 32, 4, 768),
}

#: The name of a model that is not listed: its configuration sets all dimensions.
CUSTOM = "custom"

#: Other names of the same models.
ALIASES = {
    "gpt2": "gpt2-124m",
    "gpt2-medium": "gpt2-350m",
    "gpt2-355m": "gpt2-350m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
    "gpt2-1.6b": "gpt2-1558m",
}


def model_names() -> list[str]:
    """The names that `model_config` accepts, smallest first within a family."""
    return list(SIZES)


def model_config(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a named model, with any of its keys replaced.

    Derived keys follow the overrides: `model_config("gpt2-124m", heads=6)` has six key-value heads, of width
    128.

    Raises:
        UserError: The name or a key is unknown, or the values are incompatible.

    >>> model_config("debug", layers=2).layers
    2
    """
    size = {} if name == CUSTOM else SIZES.get(ALIASES.get(str(name), str(name)))
    if size is None:
        if str(name).endswith(".toml"):
            raise UserError(
                f"unknown model {name!r}; a custom model is the [model] section of a configuration file, "
                f"passed without --model: narrowgauge train {name}"
            )
        raise unknown("model", name, SIZES)
    keys = [field.name for field in fields(ModelConfig)]
    for key in overrides:
        if key not in keys:
            raise unknown("model key", key, keys)
    needed = [f.name for f in fields(ModelConfig) if f.default is MISSING]
    if missing := [key for key in needed if key not in size | overrides]:
        raise UserError(
            f"a model called {name!r} has no preset dimensions, and model.{missing[0]} is not given; "
            f"give {', '.join(needed)}"
        )
    return ModelConfig(**(size | overrides))


def name_of(config: ModelConfig) -> str:
    """The name of a configuration's model, whatever its longest sequence; `custom` for an unnamed one."""
    for name in SIZES:
        named = model_config(name, max_sequence_length=config.max_sequence_length)
        if replace(named, initial_std=config.initial_std) == config:
            return name
    return CUSTOM
