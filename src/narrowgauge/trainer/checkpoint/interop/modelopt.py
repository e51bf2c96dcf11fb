"""Writes quantized weights in the layout of NVIDIA ModelOpt that vLLM, SGLang and TensorRT-LLM read.

The codes and block scales of `compressed_tensors.py`, under other names:

    quant_algo                 tensors of LAYER                                          w =
    W4A16_NVFP4                weight (N, K/2), weight_scale e4m3 (N, K/16),
                                 weight_scale_2 fp32                                     q * s * scale_2
    NVFP4                      the same, and input_scale fp32
    FP8                        weight e4m3, weight_scale fp32, input_scale fp32          q * s
    FP8_PER_CHANNEL_PER_TOKEN  weight e4m3, weight_scale fp32 (N)                        q * s
    MXFP8                      weight e4m3, weight_scale E8M0 (N, K/32)                  q * 2^(s - 127)

`weight_scale_2` and `input_scale` of NVFP4 are the reciprocals of `weight_global_scale` and
`input_global_scale`: ModelOpt multiplies by them. A layer has one algorithm, with its activations, so what
compressed-tensors describes as another pair is refused. Both `config.json` and `hf_quant_config.json`
describe the layers.

(Source: NVIDIA/Model-Optimizer 0.47, `export/quant_utils.py`, `export/convert_hf_config.py`.)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.compressed_tensors import CompressionScheme, Layers, Tensors
from narrowgauge.trainer.checkpoint.interop.huggingface import MODELOPT

#: By the format of compressed-tensors, the strategy of weights, and `dynamic` of activations (None: wide):
#: the algorithm, and its block.
ALGORITHMS: Mapping[tuple[str, str, object], tuple[str, int | None]] = {
    ("nvfp4-pack-quantized", "tensor_group", None): ("W4A16_NVFP4", 16),
    ("nvfp4-pack-quantized", "tensor_group", "local"): ("NVFP4", 16),
    ("float-quantized", "tensor", False): ("FP8", None),
    ("float-quantized", "channel", True): ("FP8_PER_CHANNEL_PER_TOKEN", None),
    ("mxfp8-quantized", "group", True): ("MXFP8", 32),
}

_RECIPROCALS = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}
_WORDS: Mapping[object, str] = {
    None: "that are wide",
    True: "in dynamic scales",
    False: "in one scale",
    "local": "in NVFP4",
}


def in_modelopt(folder: Path, tensors: Tensors, layers: Layers) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the `quantization_config` in this layout; its own file is written into the folder."""
    algorithm, block = _algorithm({name: scheme for name, scheme in layers.items() if scheme is not None})
    group = {"quant_algo": algorithm} | ({} if block is None else {"group_size": block})
    wide = [name for name, scheme in layers.items() if scheme is None]
    producer = {"name": "modelopt", "version": "0.47.0"}  # by which servers recognise the layout
    details = {**group, "kv_cache_quant_algo": None, "exclude_modules": wide}
    text = json.dumps({"producer": producer, "quantization": details}, indent=2)
    (folder / MODELOPT).write_text(text + "\n", encoding="utf-8")
    quantization = {"quant_method": "modelopt", **group, "ignore": wide, "producer": producer}
    return [_renamed(name, tensor) for name, tensor in tensors], quantization


def _algorithm(schemes: Mapping[str, CompressionScheme]) -> tuple[str, int | None]:
    """The algorithm of all layers, and its block."""
    kinds = {name: _kind(scheme) for name, scheme in schemes.items()}
    unknown = [name for name, kind in kinds.items() if kind not in ALGORITHMS]
    if unknown or len(set(kinds.values())) != 1:
        name = unknown[0] if unknown else next(iter(kinds))
        needs_scale = schemes[name].format == "float-quantized" and kinds[name][1] == "tensor"
        raise UserError(
            f"layer {name!r} has weights of {schemes[name].format} ({kinds[name][1]}) with activations "
            f"{_WORDS[kinds[name][2]]}, and ModelOpt's layout is written for one of "
            f"{', '.join(name for name, _ in ALGORITHMS.values())} in all layers; use --to compressed-tensors"
            + (", or --calibrate TEXT for FP8" if needs_scale else "")
        )
    return ALGORITHMS[next(iter(kinds.values()))]


def _kind(scheme: CompressionScheme) -> tuple[str, str, object]:
    dynamic = None if scheme.inputs is None else scheme.inputs["dynamic"]
    return scheme.format, scheme.weights["strategy"], dynamic


def _renamed(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The name and value of a tensor of compressed-tensors in ModelOpt's layout."""
    layer, _, part = name.rpartition(".")
    if part in _RECIPROCALS:
        return f"{layer}.{_RECIPROCALS[part]}", (1 / tensor).reshape(())
    if tensor.dtype == torch.float32 and part in ("weight_scale", "input_scale"):
        return name, tensor.reshape(-1) if tensor.numel() > 1 else tensor.reshape(())
    return (f"{layer}.weight", tensor) if part == "weight_packed" else (name, tensor)
