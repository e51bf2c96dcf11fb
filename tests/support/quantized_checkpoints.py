"""Sound quantized checkpoints of two Llama blocks, as the programs of other people write them.

Each function writes a folder or a file, with weights of a normal network, and returns its path. Codes and
scales come from the named package; only names and `config.json` are written here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BLOCKS, DIM, FFN = 4, 128, 256
SHAPES = {
    **{f"self_attn.{name}": (DIM, DIM) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{"mlp.gate_proj": (FFN, DIM), "mlp.up_proj": (FFN, DIM), "mlp.down_proj": (DIM, FFN)},
}
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
LAYERS = [f"model.layers.{i}.{name}" for i in range(BLOCKS) for name in SHAPES]
Parts = dict[str, torch.Tensor]


def weight_of(layer: str) -> torch.Tensor:
    """The same numbers for a layer at every call."""
    seed = torch.Generator().manual_seed(LAYERS.index(layer))
    return torch.randn(SHAPES[layer.split(".", 3)[3]], generator=seed) * 0.05


def wide_tensors() -> Parts:
    """Embedding, norms and head, in bf16."""
    seed = torch.Generator().manual_seed(99)
    found = {
        name: torch.randn(160, DIM, generator=seed)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    found |= {f"model.layers.{i}.input_layernorm.weight": torch.ones(DIM) for i in range(BLOCKS)}
    return {name: t.bfloat16() for name, t in found.items()}


def amax_of(layer: str) -> torch.Tensor:
    """The largest magnitude of a layer and those that are fused with it."""
    head, _, last = layer.rpartition(".")
    group = next((group for group in FUSED if last in group), {last})
    return torch.stack([weight_of(f"{head}.{name}").abs().max() for name in group]).max()


def write(folder: Path, tensors: Parts, quantization: dict[str, Any], **metadata: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: t.contiguous() for name, t in (wide_tensors() | tensors).items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt", **metadata})
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compressed(folder: Path, preset: str) -> Path:
    """By compressed-tensors, under one of its preset schemes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    args, names = scheme.weights, {"NVFP4": "nvfp4-pack-quantized", "NVFP4A16": "nvfp4-pack-quantized"}
    name = names.get(preset, f"{preset[:5].lower()}-pack-quantized" if preset.startswith("MXFP4") else "")
    name = name or ("mxfp8-quantized" if preset.startswith("MXFP8") else "")
    name = name or ("pack-quantized" if preset.startswith("W4A16") else "float-quantized")
    compressor = BaseCompressor.get_value_from_registry(name)
    tensors: Parts = {}
    for layer in LAYERS:
        w = weight_of(layer)
        state: Parts = {"weight": w}
        group = args.group_size if args.group_size and args.group_size > 0 else None
        is_row = args.strategy == "channel"
        split = w.unflatten(1, (-1, group)) if group else w if is_row else w.reshape(1, -1)
        low, high = (end[:, None] if is_row else end for end in (split.amin(-1), split.amax(-1)))
        if "NVFP4" in preset:
            state["weight_global_scale"] = generate_gparam(-amax_of(layer), amax_of(layer))
            if preset == "NVFP4":
                state["input_global_scale"] = generate_gparam(torch.tensor(-8.0), torch.tensor(8.0))
        elif preset == "FP8":
            state["input_scale"] = torch.tensor([8.0 / 448])
        scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        done = compressor.compress(state, scheme)
        tensors |= {f"{layer}.{part}": t for part, t in done.items() if isinstance(t, torch.Tensor)}
    said = {"config_groups": {"group_0": json.loads(scheme.model_dump_json()) | {"format": name}}}
    said |= {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"]}
    return write(folder, tensors, said)


def torchao(folder: Path, kind: str) -> Path:
    """By torchao, through its support of safetensors."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = Float8WeightOnlyConfig() if kind == "fp8" else Int8WeightOnlyConfig(version=2)
    state: dict[str, Any] = {}
    for layer in LAYERS:
        w = weight_of(layer)
        linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight.data.copy_(w)
        quantize_(linear, config)
        state[f"{layer}.weight"] = linear.weight
    tensors, metadata = flatten_tensor_state_dict(state)
    return write(folder, tensors, {"quant_method": "torchao", "quant_type": {}}, **metadata)


def modelopt(folder: Path, kind: str) -> Path:
    """By ModelOpt's quantized tensors, in the names of its export."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors: Parts = {}
    for layer in LAYERS:
        w = weight_of(layer)
        if kind == "NVFP4":
            second = amax_of(layer) / 2688
            q, scale, second = NVFP4QTensor.quantize(w, 16, weights_scaling_factor_2=second)
            state = {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": second}
            state["input_scale"] = torch.tensor(8.0 / 2688)
        else:
            scale = amax_of(layer) / 448
            state = {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
            state["input_scale"] = torch.tensor(8.0 / 448)
        tensors |= {f"{layer}.{part}": t for part, t in state.items()}
    said = {"quant_algo": kind, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    return write(folder, tensors, {"quant_method": "modelopt", "quantization": said})


def deepseek(folder: Path) -> Path:
    """As DeepSeek's own conversion writes it: blocks of 128 x 128, `weight_scale_inv` multiplied."""
    tensors: Parts = {}
    for layer in LAYERS:
        w = weight_of(layer)
        blocks = w.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        q = (w / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
        tensors |= {f"{layer}.weight": q, f"{layer}.weight_scale_inv": scale}
    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    return write(folder, tensors, said)


def gguf(folder: Path, kind: str) -> Path:
    """By the package of llama.cpp."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / "model.gguf", GGMLQuantizationType[kind]
    writer = GGUFWriter(path, "llama")
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in LAYERS:
        _, _, block, *rest = layer.split(".")
        name = f"blk.{block}.{dict(zip(SHAPES, names, strict=True))['.'.join(rest)]}.weight"
        writer.add_tensor(name, quantize(weight_of(layer).numpy(), number), raw_dtype=number)
    for name, t in wide_tensors().items():
        writer.add_tensor(name, t.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Name: (the package that writes it, the function that does).
SOUND: dict[str, tuple[str, Callable[[Path], Path]]] = {
    **{
        f"ct-{preset}": ("compressed_tensors", lambda f, p=preset: compressed(f, p))
        for preset in ("NVFP4", "NVFP4A16", "MXFP4", "MXFP8", "FP8", "FP8_DYNAMIC", "W4A16")
    },
    **{f"torchao-{kind}": ("torchao", lambda f, k=kind: torchao(f, k)) for kind in ("fp8", "int8")},
    **{f"modelopt-{kind}": ("modelopt", lambda f, k=kind: modelopt(f, k)) for kind in ("NVFP4", "FP8")},
    "deepseek": ("torch", deepseek),
    **{
        f"gguf-{kind}": ("gguf", lambda f, k=kind: gguf(f, k))
        for kind in ("Q8_0", "Q4_0", "Q5_1", "MXFP4", "BF16")
    },
}
