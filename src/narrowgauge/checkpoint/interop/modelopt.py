"""Writes quantized weights in the layout of NVIDIA ModelOpt that vLLM, SGLang and TensorRT-LLM read.

The codes and block scales are those of `compressed_tensors.py`, under other names:

    quant_algo     tensors of LAYER                                                      w =
    W4A16_NVFP4    weight (N, K/2), weight_scale e4m3 (N, K/16), weight_scale_2 fp32     q * s * scale_2
    MXFP8          weight e4m3, weight_scale E8M0 (N, K/32)                              q * 2^(s - 127)

`weight_scale_2` is the reciprocal of `weight_global_scale`: ModelOpt multiplies by it. Activations of NVFP4
are not quantized, because the layout would need a measured scale; those of MXFP8 are, dynamically. Both
`config.json` and `hf_quant_config.json` describe the layers.

(Source: NVIDIA/Model-Optimizer 0.47, `export/quant_utils.py`, `export/convert_hf_config.py`.)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge.checkpoint.interop.compressed_tensors import quantized_tensors
from narrowgauge.checkpoint.interop.hf_config import to_config
from narrowgauge.checkpoint.interop.huggingface import MODELOPT, write_settings
from narrowgauge.checkpoint.interop.safetensors_reader import write_tensors
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer

#: The algorithm of each format of compressed-tensors that ModelOpt has, and its block.
ALGORITHMS = {"nvfp4-pack-quantized": ("W4A16_NVFP4", 16), "mxfp8-quantized": ("MXFP8", 32)}


def write_modelopt(
    folder: Path,
    model: Transformer,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    dtype: torch.dtype,
    shard_bytes: int,
    special_tokens: Mapping[str, Any] | None = None,
) -> None:
    """Fill an empty folder with a model under its recipe; other layers are stored in `dtype`.

    Raises:
        UserError: The recipe quantizes no weights, or not all of them in one of `ALGORITHMS`, or the model is
            GPT-2.
    """
    tensors, layers = quantized_tensors(model, weights, dtype)
    schemes = {name: scheme for name, scheme in layers.items() if scheme is not None}
    formats = {scheme.format for scheme in schemes.values()}
    if not formats <= ALGORITHMS.keys() or len(formats) != 1:
        raise UserError(
            f"the layers of this run are {', '.join(sorted(formats))}, and ModelOpt's layout is written for "
            f"one of {', '.join(ALGORITHMS)}; use --to compressed-tensors"
        )
    wide = [name for name, scheme in schemes.items() if scheme.format.startswith("mx") and not scheme.inputs]
    if wide:
        raise UserError(
            f"activations of {wide[0]!r} were not MXFP8 in training, and ModelOpt's MXFP8 quantizes them; "
            "use --to compressed-tensors"
        )
    algorithm, block = ALGORITHMS[formats.pop()]
    details = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": block,
        "exclude_modules": [name for name, scheme in layers.items() if scheme is None],
    }
    producer = {
        "name": "modelopt",
        "version": "0.47.0",
    }  # the owner of the layout, by which servers recognise it
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": block,
        "ignore": details["exclude_modules"],
        "producer": producer,
    }
    values = to_config(model.config) | {"quantization_config": quantization}
    write_tensors(folder, [_renamed(name, tensor) for name, tensor in tensors], None, shard_bytes)
    write_settings(folder, values, tokenizer, dtype, special_tokens)
    text = json.dumps({"producer": producer, "quantization": details}, indent=2)
    (folder / MODELOPT).write_text(text + "\n", encoding="utf-8")


def _renamed(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The name and value of a tensor of compressed-tensors in ModelOpt's layout."""
    layer, _, part = name.rpartition(".")
    if part == "weight_global_scale":
        return f"{layer}.weight_scale_2", (1 / tensor).reshape(())
    return (f"{layer}.weight", tensor) if part == "weight_packed" else (name, tensor)
