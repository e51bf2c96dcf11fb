"""TransformerEngine's references in PyTorch against the vectors.

    export TRANSFORMER_ENGINE=CHECKOUT
    python -m narrowgauge.conformance conformance/adapters/transformer_engine_adapter.py

Written for commit d0067d0. The references are what its own tests hold its kernels against: NVFP4 with
four-over-six, row scales and the Hadamard transform, FP8 under a current scale, and FP8 in blocks. They have
no reference of MX. They return the amax; the tensor scale is what their product divides by it.
"""

from importlib import import_module

import torch
from checkouts import folder, package
from shared import checked_out

version = checked_out("TRANSFORMER_ENGINE")

ROOT = folder("TRANSFORMER_ENGINE", "transformer_engine")


class Quantizer:
    """What the references ask of their base class."""

    def __init__(self, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


package("transformer_engine", ROOT)
package("transformer_engine.pytorch", ROOT / "pytorch")
package("transformer_engine.pytorch.custom_recipes", ROOT / "pytorch" / "custom_recipes")
package("transformer_engine.pytorch.tensor")
package("transformer_engine.pytorch.tensor.utils", is_custom=None)
package("transformer_engine.pytorch.quantized_tensor", QuantizedTensorStorage=object, Quantizer=Quantizer)
package("references", folder("TRANSFORMER_ENGINE", "tests/pytorch/references"))
nvfp4 = import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
current = import_module("transformer_engine.pytorch.custom_recipes.reference_current_scaling")
blockwise = import_module("references.blockwise_quantizer_reference")

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
READ = {"name", "element", "scale", "block", "tensor_scale", "power_of_two", "input"}
READ |= {"candidates", "choose", "hadamard"}


def quantize(x, cast):
    """Codes and scales as the references compute them."""
    if set(cast) - READ:
        raise NotImplementedError
    data = torch.from_numpy(x).to(DTYPES[cast["input"]]).contiguous()
    match cast["scale"], cast.get("block"), cast.get("tensor_scale"):
        case "fp32", None | [1 | 128, 128], _ if cast["element"] in FP8:
            return fp8(data, cast)
        case "e4m3", [1 | 16, 16], "tensor" | "row" if cast["element"] == "e2m1":
            return fp4(data, cast)
    raise NotImplementedError


def fp8(data, cast):
    """`CurrentScalingQuantizerRef`, and `BlockwiseQuantizerReference`."""
    dtype, power_of_two = FP8[cast["element"]], cast.get("power_of_two", False)
    if cast.get("block") is None:
        quantizer = current.CurrentScalingQuantizerRef(dtype, columnwise=False, pow_2_scales=power_of_two)
        codes, scales, *_ = quantizer._quantize(data)
    else:
        made = blockwise.BlockwiseQuantizerReference().quantize(
            data,
            dtype,
            pow_2_scales=power_of_two,
            quant_tile_shape=tuple(cast["block"]),
            munge_scale_shapes=False,
        )
        codes, scales = made.data, made.scale
    return codes.view(torch.uint8).numpy(), scales.numpy()


def fp4(data, cast):
    """`NVFP4QuantizerRef`; its transform is that of the columnwise tensor."""
    kind, block, is_turned = cast.get("choose", "mae"), tuple(cast["block"]), "hadamard" in cast
    if cast.get("candidates", [6, 4]) != [6, 4] or kind == "max" or cast.get("hadamard", 16) != 16:
        raise NotImplementedError
    rows, columns = data.shape
    data = torch.nn.functional.pad(data, (0, -columns % block[1], 0, -rows % block[0]))
    quantizer = nvfp4.NVFP4QuantizerRef(
        dtype=None,
        columnwise=is_turned,
        quant_tile_shape=block,
        row_scaled_nvfp4=cast["tensor_scale"] == "row",
        nvfp4_use_4over6="candidates" in cast,
        nvfp4_e4m3_max=256 if "candidates" in cast else 448,
        nvfp4_4over6_err_mode=kind,
        with_rht=is_turned,
    )
    made = quantizer._quantize(data.T if is_turned else data)
    codes, scales, amax = (made[i] for i in ((2, 3, 5) if is_turned else (0, 1, 4)))
    codes = torch.stack((codes & 15, codes >> 4), -1).flatten(
        -2
    )  # two codes of each byte, the low half first
    codes = codes[:rows, : None if is_turned else columns]  # a transform writes to what fills its last groups
    second = amax / (quantizer.nvfp4_e4m3_max * 6.0)
    return codes.numpy(), scales.view(torch.uint8)[:: block[0]].numpy(), second.numpy()
