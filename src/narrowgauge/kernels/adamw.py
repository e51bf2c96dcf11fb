"""AdamW on quantized state: reads one parameter's weight, gradient and moments, updates and rounds them.

    m' = fma(g - m, 1 - beta1, m)                      1 - beta1 < 1/2; else fma(g - m, -beta1, g)
    v' = fma((1 - beta2) g, g, v beta2)
    w' = w (1 - lr weight_decay) - (lr / c1) m' / (sqrt(v') / sqrt(c2) + eps)        c = 1 - beta^t

Every operation is rounded to fp32, as is every factor that the host computes in fp64; fma(a, b, c) = a b + c
is rounded once. These are the operations of torch's fused AdamW on a CPU with vector units (AVX2, AVX-512),
so the kernel gives the same digits on every GPU; torch's GPU kernels contract other sums.

Quantized results are then rounded as in `QuantizedState.write`. If that needs one scale per tensor, a first
launch computes the same update for its amax and stores nothing else. Reading 6 bytes twice (msamp-o2) is less
than writing 12 bytes of new fp32 values in between and reading them back.

Bytes per element, over the two launches and over separate torch operations, each of which reads its operands
and writes its result (an fp8 tensor is read in 87 bytes and written in 159, fp16-scaled in 14 and 102, bf16
with random bits in 6 and 708; the fused update itself is 28):

                  stored                                  separate  fused
    bf16-sr       w 2, g 2, m 4, v 4                        748       22    one launch: no scales
    msamp-o1      w 2, g 1, m 4, v 4                        231       32
    msamp-o2      w 2, g 1, m 1, v 2                        593       17
    msamp-o3      w 1, master 2, g 1, m 1, v 2              752       18

Nothing runs between the launches, and the host does not wait for the device: the second launch computes the
scales itself.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.kernels.dispatch import has_kernels, use_kernels
from narrowgauge.quantization import Cast, QuantizedState
from narrowgauge.quantization.keys import Consumer

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Factors:
    """The factors of the formulas above that the host computes for a step, in order, as fp32 values."""

    decay: float
    weight_1: float
    beta_2: float
    weight_2: float
    step_size: float
    root: float
    eps: float

    @classmethod
    def of(cls, options: Mapping[str, Any], step: int) -> "Factors":
        """The factors of step `step`, from 1, for AdamW's options: lr, betas, eps, weight_decay."""
        (beta_1, beta_2), lr = options["betas"], options["lr"]
        step_size, root = lr / (1 - beta_1**step), (1 - beta_2**step) ** 0.5
        decay = 1 - lr * options["weight_decay"]
        factors = decay, 1 - beta_1, beta_2, 1 - beta_2, step_size, root, options["eps"]
        return cls(*(float(np.float32(x)) for x in factors))

    @property
    def from_m(self) -> bool:
        """Whether m is moved toward g, rather than g back toward m: the sum starts from the nearer one."""
        return self.weight_1 < 0.5


def supports(*states: QuantizedState | Tensor | None) -> bool:
    """Whether the kernel can update state that is stored this way (None: absent).

    It supports plain fp32, fp16 and bf16 (also rounded with random bits), fp16 and FP8 codes under one scale,
    and copies of state in host memory, but not shards. A gauge needs float32 values in memory, so gauged
    state is not supported either.
    """
    return all(state is None or _supports(state) for state in states)


def adamw(
    w: QuantizedState | Tensor,
    g: QuantizedState | Tensor,
    m: QuantizedState,
    v: QuantizedState,
    weight: QuantizedState | None,
    factors: Factors,
    keys: Mapping[str, tuple[int, int]],
) -> None:
    """Update a parameter and its state in place by the kernel, which must support all of it (`supports`).

    Args:
        w: The master if there is one, else the weight.
        g: The gradient.
        m: The first moment.
        v: The second moment.
        weight: The weight if `w` is its master, else None.
        factors: The factors of this step.
        keys: The key words (`formats.stream_key`) of the random bits of "w", "m", "v" and "weight", for those
            that are rounded with random bits.
    """
    from narrowgauge.kernels.triton.adamw import launch_update

    key_words = [keys.get(place, (0, 0)) for place in ("w", "m", "v", "weight")]
    launch_update((w, g, m, v), weight, astuple(factors), factors.from_m, key_words)


def reference(w: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """The new (w', m', v') in plain torch, from fp32 tensors of one shape."""
    f = factors
    weight_1, weight_2 = torch.tensor([f.weight_1, f.weight_2], dtype=torch.float32, device="cpu")
    m = fma(g - m, weight_1, m) if f.from_m else fma(g - m, weight_1 - 1, g)
    v = fma(g * weight_2, g, v * f.beta_2)
    root = v.double().sqrt().float()  # torch may use a library's fp32 root, which can be off by an ulp
    w = w * f.decay - (m * f.step_size) / (root / torch.full_like(v, f.root) + f.eps)
    return w, m, v


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 tensors, rounded once.

    The product is exact in fp64. If the fp64 sum is inexact, its last bit is made odd, so that rounding it to
    fp32 sees neither a false tie nor the wrong side (Boldo & Melquiond 2008).
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    rest = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    cut = ((rest > 0) | (rest < 0)) & (bits & 1 == 0)
    return (bits + cut * torch.where((rest > 0) == (total > 0), 1, -1)).view(torch.float64).float()


def _supports(state: QuantizedState | Tensor) -> bool:
    if isinstance(state, Tensor):
        return use_kernels(state) and state.dtype in _PLAIN and state.is_contiguous()
    values = next(iter(state.tensors.values()))
    is_whole = state.shard is None or state.shard.is_full
    is_there = has_kernels(state.device) and values.numel() > 0 if state.is_offloaded else use_kernels(values)
    return is_whole and is_there and state.gauge is None and _supports_cast(state.cast)


def _supports_cast(cast: Cast) -> bool:
    name = cast.element.name
    if cast.unsupported[Consumer.ADAMW]:  # also `feedback`: the first moment waits for the weight
        return False
    if not cast.is_scaled:
        return name in ("fp32", "bf16", "fp16") and (cast.rounding != "stochastic" or name == "bf16")
    return cast.scale == "fp32" and name in ("fp16", "e4m3", "e5m2")
