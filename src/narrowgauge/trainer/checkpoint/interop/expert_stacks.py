"""Experts as gpt-oss stores them: the weights of all experts of a layer in one stack of MXFP4 blocks.

    P_blocks   (E, N, K/32, 16) uint8    two E2M1 codes a byte, the even column low
    P_scales   (E, N, K/32) E8M0         w = q * 2^(s - 127)

P is `LAYER.experts.gate_up_proj` or `.down_proj`. In `gate_up_proj` the rows of gate precede the rows of up,
as transformers 5 stacks the experts of Mixtral and Qwen3. (gpt-oss itself interleaves them, and is not
supported.) Each value has 2 bits of mantissa and a power of two, so float32 represents it exactly. The scale
code 255 is NaN (OCP MX 1.0, section 5.4.1), and a folder that contains it is refused.

(Source: `integrations/mxfp4.py` of Hugging Face transformers, `convert_moe_packed_tensors`.)

Legend: E experts, N outputs, K inputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.safetensors_reader import TensorFolder

BLOCKS, SCALES = PARTS = "_blocks", "_scales"
_BYTES = 16  # of the codes in a block
#: The layers of an expert in each matrix, for `block_sparse_moe.experts` (Mixtral) and for the others.
_LAYERS: dict[str, dict[bool, tuple[str, ...]]] = {
    "gate_up_proj": {True: ("w1", "w3"), False: ("gate_proj", "up_proj")},
    "down_proj": {True: ("w2",), False: ("down_proj",)},
}


@dataclass(frozen=True)
class StackedWeight:
    """The location of one weight in a stack: an expert, and rows of its matrix."""

    stack: str
    expert: int
    rows: slice

    def read(self, files: TensorFolder) -> dict[str, torch.Tensor]:
        """Codes and scales, under the names that compressed-tensors gives a layer with the same bytes."""
        blocks, scales = (files.read_stored(self.stack + part, (self.expert, self.rows)) for part in PARTS)
        return {"weight_packed": blocks.flatten(-2), "weight_scale": scales}


def stacked_weights(files: TensorFolder) -> Mapping[str, StackedWeight]:
    """The weights of all stacked experts, by the names they have in a folder with one tensor for each."""
    stacks = (name.removesuffix(BLOCKS) for name in files.file_of if name.endswith(BLOCKS))
    return {name: weight for stack in stacks for name, weight in _weights_of(stack, files)}


def _weights_of(stack: str, files: TensorFolder) -> Iterator[tuple[str, StackedWeight]]:
    experts, _, matrix = stack.rpartition(".")
    if matrix not in _LAYERS:
        return
    shape = files.shape(stack + BLOCKS)
    scales = files.shape(stack + SCALES) if stack + SCALES in files.file_of else None
    layers = _LAYERS[matrix]["block_sparse_moe." in experts]
    if len(shape) != 4 or 0 in shape or shape[3] != _BYTES or shape[1] % len(layers) or scales != shape[:3]:
        raise UserError(
            f"the experts {stack!r} in {files.folder} have blocks of shape {shape} and scales of shape "
            f"{scales}, and (experts, outputs, inputs / 32, 16) and (experts, outputs, inputs / 32) are "
            "read; give the unquantized model"
        )
    count, rows = shape[0], shape[1] // len(layers)
    for expert in range(count):
        for i, layer in enumerate(layers):
            place = StackedWeight(stack, expert, slice(i * rows, (i + 1) * rows))
            yield f"{experts}.{expert}.{layer}.weight", place
