"""IST-DASLab/Quartet-II against the vectors: its emulation, Triton kernels, in Triton's interpreter.

    QUARTET2=CHECKOUT python -m narrowgauge.conformance conformance/adapters/quartet2_adapter.py

Written for commit 8776a90 and Triton 3.8. The kernels return numbers; their own functions say which codes and
scales these are. Random numbers come from the vector. The interpreter rounds float32 to E4M3 wrongly, so
that torch rounds it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from importlib import import_module

import numpy as np
import torch
import triton
import triton.language as tl
from checkouts import folder, package
from shared import checked_out, is_nvfp4
from triton.runtime import interpreter

version = checked_out("QUARTET2")
ROOT = folder("QUARTET2", "src/models")
package("models", ROOT)
package("models.quantization", ROOT / "quantization")
package("models.quantization.quantizers", ROOT / "quantization" / "quantizers")
kernels = import_module("models.quantization.quantizers.nvfp4_triton")
get_scales, get_alt_scales, rtn_fp4 = kernels.get_scales, kernels.get_alt_scales, kernels.rtn_fp4

READ = {"name", "element", "scale", "block", "tensor_scale", "input", "zero_scale", "candidates", "choose"}
EDEN = {"correct", "scale_rounding", "scale_target", "headroom", "scale_random", "random"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIZE = 2048  # numbers that a program of a kernel computes
converted = interpreter._convert_float


def to_e4m3(numbers, source, target, rounding):
    """The interpreter's conversion of floats, but for float32 to E4M3."""
    if (source, target) != (tl.float32, tl.float8e4nv):
        return converted(numbers, source, target, rounding)
    wide = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = to_e4m3


@triton.jit
def given_random(numbers, offsets):
    """In place of `tl.rand`: the numbers take the place of its seed."""
    return tl.load(numbers + offsets)


tl.rand = given_random


def quantize(x, cast):
    """Codes and scales of the kernel for a cast."""
    is_eden, has_four = cast.get("correct") == "projection", "candidates" in cast
    read = READ | (EDEN if is_eden else set())
    expected = {"element": "e2m1", "scale": "e4m3", "block": [1, 16], "tensor_scale": "tensor"}
    may_be = {"candidates": [6, 4], "choose": "mse", "scale_target": 255.99}
    if set(cast) - read or any(cast.get(k) != v for k, v in expected.items()):
        raise NotImplementedError
    if any(cast.get(k, v) != v for k, v in may_be.items()) or (is_eden and "scale_random" not in cast):
        raise NotImplementedError
    rows, columns = x.shape
    blocks = torch.nn.functional.pad(torch.from_numpy(x), (0, -columns % 16))
    data = torch.nn.functional.pad(blocks.flatten(), (0, -blocks.numel() % SIZE))
    kernel, given = kernels.rtn_1x16s_fp4_kernel, {"four_over_six": has_four}
    largest = 255.99 if is_eden else 256.0 if has_four else 448.0
    if is_eden:
        drawn = torch.from_numpy(np.append(cast["scale_random"], np.zeros(SIZE)) / 2**24)
        kernel = kernels.eden_1x16s_fp4_kernel
        given |= {"hadamard_dim": 16, "seed": drawn.float()}
    override, made, amax = 1 / cast.get("headroom", 1.0), torch.empty_like(data), data.abs().max()
    given |= {"n_elements": data.numel(), "scale_override": override, "group_size": 16, "BLOCK_SIZE": SIZE}
    programs = (data.numel() // SIZE,)
    kernel.fn[programs](x_ptr=data, amax_ptr=amax, output_ptr=made, **given)
    scales, codes, second = torch.empty(2, data.numel() // 16), torch.empty(2, data.numel()), torch.empty(())
    top = {"scales_max": largest, "val_max": 6.0 / override, "SIZE": SIZE}
    candidates[programs](data, amax, second, *scales, *codes, **top)
    code, scale = stored(made.view(-1, 16), scales.unsqueeze(-1), codes.view(2, -1, 16), second, is_eden)
    code, scale = code.flatten()[: blocks.numel()], scale.flatten()[: blocks.numel() // 16]
    return code.view(rows, -1)[:, :columns].numpy(), scale.view(rows, -1).numpy(), second.numpy()


def stored(numbers, scales, codes, second, is_drawn):
    """The codes and scales whose product the numbers are: of the first candidate or the second, or drawn."""
    if is_drawn:  # numbers that were rounded before, under another scale
        code = codes[0]
        scale = torch.where(code == 0, 0.0, numbers / (code * second)).amax(-1, keepdim=True)
        scale = torch.where(scale == 0, scales[0], scale)
    else:
        is_first = (codes[0] * (scales[0] * second) == numbers).all(-1, keepdim=True)
        scale, code = (torch.where(is_first, *both) for both in (scales, codes))
    code = (code.abs().unsqueeze(-1) == E2M1).int().argmax(-1) + 8 * code.signbit()
    return code, scale.to(torch.float8_e4m3fn).view(torch.uint8)


@triton.jit
def candidates(
    x_ptr,
    amax_ptr,
    second_ptr,
    six_ptr,
    four_ptr,
    of_six_ptr,
    of_four_ptr,
    scales_max: tl.constexpr,
    val_max: tl.constexpr,
    SIZE: tl.constexpr,
):
    """What the kernels' own functions make of a block that reaches to 6, and to 4."""
    blocks = tl.program_id(0) * (SIZE // 16) + tl.arange(0, SIZE // 16)
    numbers = tl.reshape(tl.program_id(0) * SIZE + tl.arange(0, SIZE), (SIZE // 16, 16))
    x = tl.load(x_ptr + numbers)
    six, second = get_scales(x, tl.load(amax_ptr), val_max, scales_max)
    four = get_alt_scales(x, val_max, second)
    tl.store(second_ptr, second)
    tl.store(six_ptr + blocks, tl.reshape(six, (SIZE // 16,)))
    tl.store(four_ptr + blocks, tl.reshape(four, (SIZE // 16,)))
    tl.store(of_six_ptr + numbers, rtn_fp4(x / (six * second)))
    tl.store(of_four_ptr + numbers, rtn_fp4(x / (four * second)))


def stochastic(x, cast, seed):
    """Values of its kernel for stochastic rounding, with uniform numbers."""
    if set(cast) - READ or "candidates" in cast or not is_nvfp4(cast):
        raise NotImplementedError
    data = torch.nn.functional.pad(torch.from_numpy(x).flatten(), (0, -x.size % SIZE))
    made, drawn = torch.empty_like(data), torch.rand(len(data), generator=torch.Generator().manual_seed(seed))
    given = {"n_elements": len(data), "scale_override": 1.0, "group_size": 16, "BLOCK_SIZE": SIZE}
    given |= {"four_over_six": False, "seed": drawn}
    kernels.sr_1x16s_fp4_kernel.fn[(len(data) // SIZE,)](
        x_ptr=data, amax_ptr=data.abs().max(), output_ptr=made, **given
    )
    return made[: x.size].reshape(x.shape).numpy()
