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

from dataclasses import MISSING, fields, replace
from typing import Any

from narrowgauge.system.errors import UserError, unknown
from narrowgauge.trainer.models.config import ModelConfig

# `initializer_range` in the `config.json` of every published model below except GPT-3.
_STD = 0.02

_GPT2 = {
    "vocab_size": 50257,
    "max_sequence_length": 1024,
    "positions": "learned",
    "norm": "layer",
    "mlp": "gelu",
    "bias": True,
    "tied_head": True,
    "initial_std": _STD,
}
_GPT3 = _GPT2 | {"max_sequence_length": 2048}
_LLAMA3 = {
    "vocab_size": 128256,
    "max_sequence_length": 131072,
    "rope_theta": 500_000.0,
    "rope_original_positions": 8192,
    "initial_std": _STD,
}

_QWEN2 = {
    "vocab_size": 151936,
    "max_sequence_length": 32768,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-6,
    "qkv_bias": True,
    "initial_std": _STD,
}

SIZES: dict[str, dict[str, Any]] = {
    "debug": {
        "dim": 256,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 768,
        "vocab_size": 4096,
        "max_sequence_length": 1024,
    },
    "ladder-1m": {
        "dim": 128,
        "layers": 4,
        "heads": 4,
        "ffn_dim": 384,
        "vocab_size": 2048,
        "max_sequence_length": 1024,
        "tied_head": True,
    },
    "gpt2-debug": _GPT2
    | {"dim": 256, "layers": 4, "heads": 4, "ffn_dim": 1024, "vocab_size": 4096, "initial_std": 0.0},
    "gpt2-124m": _GPT2 | {"dim": 768, "layers": 12, "heads": 12, "ffn_dim": 3072},
    "gpt2-350m": _GPT2 | {"dim": 1024, "layers": 24, "heads": 16, "ffn_dim": 4096},
    "gpt2-774m": _GPT2 | {"dim": 1280, "layers": 36, "heads": 20, "ffn_dim": 5120},
    "gpt2-1558m": _GPT2 | {"dim": 1600, "layers": 48, "heads": 25, "ffn_dim": 6400},
    "gpt3-345m": _GPT3
    | {"dim": 1024, "layers": 24, "heads": 16, "ffn_dim": 4096, "max_sequence_length": 1024},
    "gpt3-6.7b": _GPT3 | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 16384, "initial_std": 0.0099},
    "gpt3-13b": _GPT3 | {"dim": 5120, "layers": 40, "heads": 40, "ffn_dim": 20480, "initial_std": 0.0099},
    "llama3-1b": _LLAMA3
    | {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn_dim": 8192}
    | {"rope_factor": 32.0, "tied_head": True},
    "llama3-3b": _LLAMA3
    | {"dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn_dim": 8192}
    | {"rope_factor": 32.0, "tied_head": True},
    "llama3-8b": _LLAMA3
    | {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
    | {"rope_factor": 8.0},
    "llama3-70b": _LLAMA3
    | {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn_dim": 28672}
    | {"rope_factor": 8.0},
    "llama3-405b": _LLAMA3
    | {"dim": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn_dim": 53248}
    | {"rope_factor": 8.0},
    "qwen2.5-0.5b": _QWEN2
    | {"dim": 896, "layers": 24, "heads": 14, "kv_heads": 2, "ffn_dim": 4864, "tied_head": True},
    "qwen2.5-1.5b": _QWEN2
    | {"dim": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn_dim": 8960, "tied_head": True}
    | {"max_sequence_length": 131072},
    "qwen2.5-3b": _QWEN2
    | {"dim": 2048, "layers": 36, "heads": 16, "kv_heads": 2, "ffn_dim": 11008, "tied_head": True},
    "qwen2.5-7b": _QWEN2
    | {"dim": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "ffn_dim": 18944, "vocab_size": 152064}
    | {"max_sequence_length": 131072},
    "tinyllama-1.1b": {"dim": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "ffn_dim": 5632}
    | {"vocab_size": 32000, "max_sequence_length": 2048, "initial_std": _STD},
    "moe-debug": {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 256, "experts": 8}
    | {"vocab_size": 4096, "max_sequence_length": 1024},
    "mixtral-8x7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
    | {"vocab_size": 32000, "max_sequence_length": 32768, "rope_theta": 1_000_000.0, "experts": 8}
    | {"initial_std": _STD},
    "qwen3-30b-a3b": {"dim": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "head_dim": 128}
    | {"ffn_dim": 768, "experts": 128, "experts_per_token": 8, "qk_norm": True, "norm_eps": 1e-6}
    | {"vocab_size": 151936, "max_sequence_length": 32768, "rope_theta": 1_000_000.0, "initial_std": _STD},
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
