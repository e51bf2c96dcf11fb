"""Dequantizes the weights of other programs to float32.

A quantized linear layer LAYER has codes and scales in place of a LAYER.weight of 16 bits or more:

    layout                      tensors of LAYER                                          w =
    DeepSeek, transformers fp8  weight e4m3, weight_scale_inv (ceil N/b, ceil K/b)        q * s
    compressed-tensors, FP8     weight e4m3, weight_scale (1), (N, 1) or blocks           q * s
      MXFP8                     weight e4m3, weight_scale E8M0 (N, K/32)                  q * 2^(s - 127)
      MXFP4, MXFP6              weight_packed (N, K/2 or 3K/4), weight_scale E8M0         q * 2^(s - 127)
      NVFP4                     weight_packed (N, K/2), weight_scale e4m3 (N, K/16),
                                  weight_global_scale (1)                                 q * (s / global)
    ModelOpt, FP8               weight e4m3, weight_scale (1)                             q * s
      NVFP4                     weight (N, K/2), weight_scale e4m3 (N, K/16),
                                  weight_scale_2 (1)                                      q * (s * scale_2)
    gpt-oss, MXFP4              experts in stacks (below)                                 q * 2^(s - 127)

q has the values of its format, N rows and K columns. Everything is computed in float32, which rounds only the
multiplication by an fp32 scale, once. Scales of activations and of a KV cache are not weights, and are
skipped.

gpt-oss stores the experts of a layer in one stack of MXFP4 blocks, of E experts, N outputs and K inputs:

    P_blocks   (E, N, K/32, 16) uint8    two E2M1 codes a byte, the even column low
    P_scales   (E, N, K/32) E8M0

P is `LAYER.experts.gate_up_proj` or `.down_proj`. In `gate_up_proj` the rows of gate precede the rows of up,
as transformers 5 stacks the experts of Mixtral and Qwen3. (gpt-oss itself interleaves them, and is not
supported.) The scale code 255 is NaN (OCP MX 1.0, section 5.4.1), and a folder that contains it is refused.

Scales that no quantizer makes (0, negative, inverted or left out) would load without an error, and are
refused. The bounds are those of trained networks: the largest value of a linear layer's weight lies between
2^-16 and 100. A scale that is wrong by less is only seen beside the run (`read_back.py`).

(Sources: DeepSeek-V3, `inference/kernel.py`; vllm-project/compressed-tensors 0.20, `compressors/`;
NVIDIA/Model-Optimizer 0.47, `modelopt/torch/quantization/qtensor/nvfp4_tensor.py`; `integrations/mxfp4.py` of
Hugging Face transformers, `convert_moe_packed_tensors`.)
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from narrowgauge.formats import decode, format, unpack
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import PRECISIONS, TensorFolder
from narrowgauge.trainer.checkpoint.store.before_save import is_finite

METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
_NO_WEIGHT = ("input_scale", "input_global_scale", "weight_shape", "k_scale", "v_scale", "activation_scale")
_BESIDE = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
_SMALLEST, _LARGEST, _ZERO = 2.0**-16, 100.0, 2.0**-60

BLOCKS, SCALES = _STACKED = "_blocks", "_scales"
_BYTES = 16  # of the codes in a block
#: The layers of an expert in each matrix, for `block_sparse_moe.experts` (Mixtral) and for the others.
_LAYERS: dict[str, dict[bool, tuple[str, ...]]] = {
    "gate_up_proj": {True: ("w1", "w3"), False: ("gate_proj", "up_proj")},
    "down_proj": {True: ("w2",), False: ("down_proj",)},
}


def require_readable(quantization: Mapping[str, Any], where: str) -> None:
    """Refuse a `quantization_config` whose `quant_method` is not in `METHODS`, or that rotates the model."""
    if not isinstance(quantization, Mapping):
        raise UserError(f"{where}: quantization_config = {quantization!r} is not a table; fix the file")
    method = str(quantization.get("quant_method", ""))
    if method not in METHODS:
        raise UserError(
            f"{where}: its weights are quantized by {method!r}, and only {', '.join(METHODS)} are read; "
            "give the unquantized model"
        )
    places = re.findall(r'"location": "(\w+)"', json.dumps(quantization.get("transform_config")))
    online = sorted(set(places) - {"weight_input", "weight_output"})  # these are already in the weights
    if online:
        raise UserError(
            f"{where}: its transform_config rotates what is computed at {online[0]!r}, so the weights are of "
            "a rotated model (QuIP, SpinQuant), which is not read here; give the unquantized model"
        )


class QuantizedFolder(TensorFolder):
    """The dequantized weights of a folder, under the names of the unquantized model."""

    def __init__(self, folder: Path, quantization: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self.precisions: set[str] = set()  # of the weights that were read
        self._block = _block_of(quantization)
        # Of each weight in a stack: the stack, its expert, and its rows of that expert's matrix.
        self._in_stack: dict[str, tuple[str, int, slice]] = {}
        stacks = [name.removesuffix(BLOCKS) for name in self.file_of if name.endswith(BLOCKS)]
        stacks = [stack for stack in stacks if stack.rpartition(".")[2] in _LAYERS]
        for stack in stacks:
            self._add_stack(stack)
        in_stacks = {stack + part for stack in stacks for part in _STACKED}
        plain = []
        for stored in self.file_of:
            layer, _, last = stored.rpartition(".")
            if last not in _NO_WEIGHT and stored not in in_stacks:
                plain.append(f"{layer}.weight" if last in _BESIDE else stored)
        self.names = [*dict.fromkeys(plain), *self._in_stack]

    def read(self, name: str) -> torch.Tensor:
        """A weight as float32; a `UserError` if it is damaged, in an unknown layout, or not finite."""
        if parts := self._parts(name):
            try:
                weight, precision = dequantize(parts, self._block)
            except (ValueError, RuntimeError) as error:
                raise UserError(
                    f"the weights of {name.removesuffix('.weight')!r} in {self.folder} cannot be decoded: "
                    f"{error}; give the unquantized model"
                ) from None
        else:
            weight = self.read_stored(name)
            if weight.dtype not in PRECISIONS:
                raise UserError(
                    f"tensor {name!r} in {self.folder / self.file_of[name]} is {weight.dtype}, and only "
                    "fp32, bf16 and fp16 are read here; give the unquantized model"
                )
            precision = PRECISIONS[weight.dtype]
        if not is_finite(weight):
            raise UserError(
                f"tensor {name!r} in {self.folder} holds a NaN or an infinity; give undamaged weights"
            )
        self.precisions.add(precision)
        return weight.float()

    def _parts(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors that make up a quantized weight; none if it is not quantized.

        Those of a stack have the names that compressed-tensors gives a layer with the same bytes.
        """
        if name in self._in_stack:
            stack, expert, rows = self._in_stack[name]
            blocks, scales = (self.read_stored(stack + part, (expert, rows)) for part in _STACKED)
            return {"weight_packed": blocks.flatten(-2), "weight_scale": scales}
        layer = name.removesuffix("weight")
        found = [part for part in _BESIDE if layer + part in self.file_of] if name.endswith(".weight") else []
        if found and name in self.file_of:
            found.append("weight")
        return {part: self.read_stored(layer + part) for part in found}

    def _add_stack(self, stack: str) -> None:
        """Add the weights of the experts in a stack, by the names that they have in tensors of their own."""
        experts, _, matrix = stack.rpartition(".")
        shape = self.shape(stack + BLOCKS)
        scales = self.shape(stack + SCALES) if stack + SCALES in self.file_of else None
        layers = _LAYERS[matrix]["block_sparse_moe." in experts]
        is_even = len(shape) == 4 and 0 not in shape and shape[3] == _BYTES and shape[1] % len(layers) == 0
        if not is_even or scales != shape[:3]:
            raise UserError(
                f"the experts {stack!r} in {self.folder} have blocks of shape {shape} and scales of shape "
                f"{scales}, and (experts, outputs, inputs / 32, 16) and (experts, outputs, inputs / 32) are "
                "read; give the unquantized model"
            )
        rows = shape[1] // len(layers)
        for expert in range(shape[0]):
            for i, layer in enumerate(layers):
                place = stack, expert, slice(i * rows, (i + 1) * rows)
                self._in_stack[f"{experts}.{expert}.{layer}.weight"] = place


def dequantize(parts: Mapping[str, torch.Tensor], block: tuple[int, int]) -> tuple[torch.Tensor, str]:
    """The values of a layer's weight, (N, K) float32, and the name of the format they were stored in.

    Args:
        parts: The tensors of the layer by the last part of their names.
        block: Rows and columns of an FP8 block whose scales form a matrix.

    Raises:
        ValueError: The tensors are in no layout of this module, or have scales that no quantizer makes.
    """
    codes = parts.get("weight_packed", parts.get("weight"))
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if codes is None or scale is None:
        raise ValueError(f"there is no {'weight_scale' if scale is None else 'weight'}")
    if codes.ndim != 2:
        raise ValueError(f"the codes have {codes.ndim} dimensions")
    is_e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if codes.dtype == torch.float8_e4m3fn and not is_e8m0:
        return times_scale(codes.float(), _fp8_scale(scale.float(), codes.shape, block)), "fp8"
    if codes.dtype == torch.float8_e4m3fn:
        q_NK, kind = codes.float(), "mxfp8"
    elif codes.dtype != torch.uint8 or scale.ndim != 2:
        raise ValueError(f"codes are {codes.dtype}, scales {scale.dtype} in {scale.ndim} dimensions")
    else:
        element, kind = _packed_as(codes, scale, is_e8m0)
        columns = codes.shape[1] * 8 // format(element).bits
        q_NK = decode(unpack(codes, format(element), columns), format(element))
    of_tensor = None
    if is_e8m0:
        scale = decode(scale.view(torch.uint8), format("e8m0"))
    else:
        scale, of_tensor = _nvfp4_scale(scale.float(), parts)
    N, K = q_NK.shape
    if scale.ndim != 2 or scale.shape[0] != N or not scale.shape[1] or K % scale.shape[1]:
        raise ValueError(f"scales of shape {tuple(scale.shape)} for {N} x {K} codes")
    return times_scale(q_NK, scale.repeat_interleave(K // scale.shape[1], 1), of_tensor=of_tensor), kind


def _packed_as(codes: torch.Tensor, scale: torch.Tensor, is_e8m0: bool) -> tuple[str, str]:
    """The element of packed codes, and the name of their format."""
    if scale.dtype == torch.float8_e4m3fn:
        return "e2m1", "nvfp4"
    if not is_e8m0:
        raise ValueError(f"packed codes have scales of {scale.dtype}")
    width = 32 * scale.shape[1]
    for name, kind in (("e2m1", "mxfp4"), ("e2m3", "mxfp6")):
        if codes.shape[1] * 8 == width * format(name).bits:
            return name, kind
    raise ValueError(f"{codes.shape[1]} bytes a row do not hold {width} codes of 4 or 6 bits")


def times_scale(
    q: torch.Tensor, scale: torch.Tensor, lacks_scale: bool = False, of_tensor: float | None = None
) -> torch.Tensor:
    """The values of codes times their scales; raises `ValueError` on scales that no quantizer makes.

    `lacks_scale`: the scale of the tensor is missing. `of_tensor`: that scale, a factor of all in `scale`.
    """
    weight = q * scale
    if float(scale.min()) < 0:
        raise ValueError("a scale is negative")
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest < _ZERO and bool(q.any()):
        raise ValueError("all scales are 0")
    if largest <= _ZERO or _SMALLEST <= largest <= _LARGEST:
        return weight
    if lacks_scale and largest > _LARGEST:
        raise ValueError(f"its values reach {largest:.2g}, and the scale of the tensor is missing")
    inverted = weight / of_tensor**2 if of_tensor else q / scale
    other = float(inverted.abs().nan_to_num(0, 0, 0).max())
    if math.isfinite(largest) and _SMALLEST <= other <= _LARGEST:
        raise ValueError(
            f"its values reach {largest:.2g}, and {other:.2g} with the reciprocal of the scale, so that is "
            "what was stored"
        )
    return weight


def _nvfp4_scale(scale: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The float32 scale of each block, combined with the scale of the tensor; and the latter as a factor."""
    if "weight_global_scale" in parts:
        divisor = parts["weight_global_scale"].float()
        return scale / divisor, float(1 / divisor.max())
    if "weight_scale_2" in parts:
        factor = parts["weight_scale_2"].float()
        return scale * factor, float(factor.max())
    raise ValueError("there is neither a weight_global_scale nor a weight_scale_2")


def _fp8_scale(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The scales of a tensor, its rows or its blocks, in a shape that broadcasts to (N, K)."""
    N, K = shape
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.shape in ((N,), (N, 1)):
        return scale.reshape(N, 1)
    rows, columns = block
    if scale.shape != (-(-N // rows), -(-K // columns)):
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} for {N} x {K} codes in blocks of {rows}x{columns}"
        )
    return scale.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]


def _block_of(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 block whose scales form a matrix: DeepSeek's, or compressed-tensors'."""
    groups = quantization.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    weights = [w for w in (group.get("weights") for group in groups) if isinstance(w, dict)]
    said = [quantization.get("weight_block_size"), *[w.get("block_structure") for w in weights]]
    for block in said:
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return block[0], block[1]
    return 128, 128
