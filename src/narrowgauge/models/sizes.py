"""The named models, as data.

`debug` and `gpt2-debug` are for a laptop and for tests; all their dimensions are multiples of 128, so that
every block shape of every recipe fits. The others are the published models, by their published dimensions.
"""

from dataclasses import fields
from typing import Any

from narrowgauge.errors import unknown
from narrowgauge.models.config import ModelConfig

_GPT2 = {
    "vocab_size": 50257,
    "max_sequence_length": 1024,
    "positions": "learned",
    "norm": "layer",
    "mlp": "gelu",
    "bias": True,
    "tied_head": True,
}
_GPT3 = _GPT2 | {"max_sequence_length": 2048}
_LLAMA3 = {
    "vocab_size": 128256,
    "max_sequence_length": 131072,
    "rope_theta": 500_000.0,
    "rope_original_positions": 8192,
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
    "gpt2-debug": _GPT2 | {"dim": 256, "layers": 4, "heads": 4, "ffn_dim": 1024, "vocab_size": 4096},
    "gpt2-124m": _GPT2 | {"dim": 768, "layers": 12, "heads": 12, "ffn_dim": 3072},
    "gpt2-355m": _GPT2 | {"dim": 1024, "layers": 24, "heads": 16, "ffn_dim": 4096},
    "gpt2-774m": _GPT2 | {"dim": 1280, "layers": 36, "heads": 20, "ffn_dim": 5120},
    "gpt2-1.6b": _GPT2 | {"dim": 1600, "layers": 48, "heads": 25, "ffn_dim": 6400},
    "gpt3-6.7b": _GPT3 | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 16384},
    "gpt3-13b": _GPT3 | {"dim": 5120, "layers": 40, "heads": 40, "ffn_dim": 20480},
    "llama3-1b": _LLAMA3
    | {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn_dim": 8192}
    | {"rope_factor": 32.0, "tied_head": True},
    "llama3-3b": _LLAMA3
    | {"dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "ffn_dim": 8192}
    | {"rope_factor": 32.0, "tied_head": True},
    "llama3-8b": _LLAMA3
    | {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn_dim": 14336}
    | {"rope_factor": 8.0},
}


def model_names() -> list[str]:
    """The names that `model_config` takes, smallest first within a family."""
    return list(SIZES)


def model_config(name: str, **overrides: Any) -> ModelConfig:
    """The configuration of a named model, with any of its keys replaced.

    Derived keys follow the overrides: `model_config("gpt2-124m", heads=6)` has six key-value heads, of width
    128. Raises UserError for an unknown name or key, and for values that do not fit together.

    >>> model_config("debug", layers=2).layers
    2
    """
    if name not in SIZES:
        raise unknown("model", name, SIZES)
    keys = [field.name for field in fields(ModelConfig)]
    for key in overrides:
        if key not in keys:
            raise unknown("model key", key, keys)
    return ModelConfig(**(SIZES[name] | overrides))
