"""Measured ceilings of this machine, at the shapes of a step.

No data-sheet figure is used. A matmul is measured with torch, in the format in which it runs, with operands
prepared beforehand. Attention is measured with torch's kernel, which chooses its back end, and on a CPU also
in order. Memory bandwidth is measured with a copy and counts bytes read plus bytes written.
"""

from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from narrowgauge.kernels import quantize
from narrowgauge.kernels.attention_in_order import attend_in_order, has_c, supports
from narrowgauge.nn import DTYPES
from narrowgauge.nn.gemm import arguments, quantized_operand
from narrowgauge.nn.self_test import verified_backend
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import Backend
from narrowgauge.system.errors import UserError
from narrowgauge.system.processes import depend_on_parent
from narrowgauge.system.torch_compat import fp8_product, scaled_mm
from narrowgauge.trainer.bench.work import Attention, Gemm, Work, work_of
from narrowgauge.trainer.runs.monitor.machine import fastest, use_device
from narrowgauge.trainer.training import Config

#: The casts of the operands of block-scaled matmuls.
IN_BLOCKS = {"mxfp8": make_cast("mxfp8"), "fp4": make_cast("nvfp4")}
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}  # far larger than any cache


@dataclass(frozen=True)
class Ceilings:
    """The best that this machine reaches for each part of a step."""

    gemm_s: dict[Gemm, float]  # seconds of each matmul
    attention_forward_s: float
    attention_backward_s: float
    copy_bytes_per_s: float

    def floor_ms(self, work: Work) -> dict[str, float]:
        """The minimum time of each class of work, in ms."""
        gemms = sum(self.gemm_s[gemm] * times for gemm, times in work.gemms.items())
        forward = work.attention_forward * self.attention_forward_s
        backward = work.attention_backward * self.attention_backward_s
        moved = {name: 1e3 * size / self.copy_bytes_per_s for name, size in work.moved.items()}
        return {"GEMMs": 1e3 * gemms, "attention": 1e3 * (forward + backward), **moved}

    def as_json(self) -> dict[str, object]:
        """Ceilings as JSON values."""
        return {
            "gemms": [vars(g) | {"tflops": g.flops / s / 1e12} for g, s in self.gemm_s.items()],
            "attention_forward_ms": 1e3 * self.attention_forward_s,
            "attention_backward_ms": 1e3 * self.attention_backward_s,
            "copy_gb_per_s": self.copy_bytes_per_s / 1e9,
        }


def measure_apart(config: Config, device: torch.device) -> tuple[Backend, Work, Ceilings]:
    """Measure the backend, the work of a step and its ceilings: seconds on a GPU, about a minute on a CPU.

    A separate process does it. When it ends, its memory is freed: workers that train later have the whole
    device.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), depend_on_parent) as pool:
        try:
            return pool.submit(_measured, config, device, torch.get_num_threads()).result()
        except BrokenProcessPool:
            raise UserError(
                "the process that measures the machine's ceilings ended early, with the message above; if it "
                "ran out of memory, set a smaller --training.micro_batch_size"
            ) from None


def _measured(config: Config, device: torch.device, threads: int) -> tuple[Backend, Work, Ceilings]:
    torch.set_num_threads(threads)
    use_device(device)
    backend = verified_backend(config.spec.recipe, device, config.spec.backend)
    work = work_of(config, backend.name == "native")
    gemms = {gemm: gemm_seconds(gemm, device) for gemm in sorted(work.gemms)}
    forward, backward = attention_seconds(work.attention, device)
    return backend, work, Ceilings(gemms, forward, backward, copy_bandwidth(device))


def gemm_seconds(gemm: Gemm, device: torch.device) -> float:
    """The best time of a matmul, in seconds; FP8 with tensor scales, which hardware runs fastest."""
    if gemm.kind in IN_BLOCKS:
        return fastest(partial(scaled_mm, **block_arguments(gemm, device)), device)[0]
    dtype = torch.float8_e4m3fn if gemm.kind == "fp8" else DTYPES[gemm.kind]
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.float32  # as nn.gemm computes fp16 matmuls on a CPU
    a = torch.randn(gemm.m, gemm.k, device=device).to(dtype)
    b = torch.randn(gemm.n, gemm.k, device=device).to(dtype)
    if gemm.kind == "fp8":
        return fastest(partial(fp8_product, a, b.T, torch.ones((), device=device)), device)[0]
    out = torch.empty(gemm.m, gemm.n, device=device, dtype=dtype)
    return fastest(partial(torch.mm, a, b.T, out=out), device)[0]


def block_arguments(gemm: Gemm, device: torch.device) -> dict[str, Any]:
    """The arguments of `scaled_mm` for a block-scaled matmul, made before it is timed."""
    operands = []
    for rows in (gemm.m, gemm.n):
        x_RK = torch.randn(rows, gemm.k, device=device, dtype=torch.bfloat16)
        operands.append(quantized_operand(quantize(x_RK, IN_BLOCKS[gemm.kind])[0], -1))
    return arguments(*operands) | {"output_dtype": torch.bfloat16}


def attention_seconds(shape: Attention, device: torch.device) -> tuple[float, float]:
    """The best times of the forward and backward pass of causal attention, in seconds.

    A CPU that can compute it in order has two ways; the times are the faster way's.
    """
    dtype = DTYPES[shape.kind]
    q, k, v = (
        torch.randn(shape.batch, heads, shape.tokens, shape.head_dim, device=device)
        .to(dtype)
        .requires_grad_()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    grouped = shape.heads != shape.kv_heads

    def fused() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    ways = [fused]
    if supports(q, k, v) and has_c():
        ways.append(lambda: attend_in_order(q, k, v))
    found = []
    for forward in ways:
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        backward_s = fastest(backward, device)[0]
        with torch.no_grad():
            found.append((fastest(forward, device)[0], backward_s))
    return min(found, key=sum)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    size = _COPY_BYTES[device.type]
    x = torch.zeros(size // 4, device=device)
    y = torch.empty_like(x)
    return 2 * size / fastest(partial(y.copy_, x), device)[0]
