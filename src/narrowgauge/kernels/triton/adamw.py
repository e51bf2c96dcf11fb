"""AdamW on state at rest: read as float32, updated in registers, rounded and written in place.

    largest      the largest magnitude of each new tensor that is to have one scale; writes nothing else
    update       the same numbers again from the same operations, each rounded once, and the new scales

Both are needed because a scale is known only after the last element; where no written tensor has a scale, the
second runs alone. A program of the second makes the scales from the largest magnitudes by itself, and the
first of them stores these; what was the scale until now is therefore read from a copy, which `largest` made.

How a tensor lies is a tuple, its CAST: see `kind`. A thread has 8 elements: 16 bytes of fp16 in one load, and
by the assembler for an H100 40 to 80 registers. A program of `largest` takes four tiles, one after the other,
so that there is one atomic operation a tensor for 8192 elements.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.kernels.triton.arithmetic import fma, magnitude
from narrowgauge.kernels.triton.quantized_state import NOTHING, keep_scale, kind, read, write
from narrowgauge.quantization import Cast

BLOCK, TILES = 2048, 4
LAUNCH: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _updated(
    w, g, m, v, decay, weight_1, beta_2, weight_2, step_size, root, eps, FROM_M: tl.constexpr
):  # fmt: skip
    """(w', m', v'), operation for operation `kernels.adamw.reference`."""
    m = fma(g - m, weight_1, m) if FROM_M else fma(g - m, weight_1 - 1.0, g)
    v = fma(weight_2 * g, g, v * beta_2)
    w = w * decay - tl.math.div_rn(step_size * m, tl.math.div_rn(tl.math.sqrt_rn(v), root) + eps)
    return w, m, v


@triton.jit
def largest(
    w, w_beside, g, g_beside, m, m_beside, v, v_beside, found, n,
    decay, weight_1, beta_2, weight_2, step_size, root, eps,
    W: tl.constexpr, G: tl.constexpr, M_: tl.constexpr, V: tl.constexpr, SCALES: tl.constexpr,
    FROM_M: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of each of w', m', v' that SCALES asks for, into int32 zeros `found`.

    What their scales were is copied behind them, to `found + 4`.
    """
    largest_w = tl.zeros([BLOCK], tl.int32)
    largest_m = tl.zeros([BLOCK], tl.int32)
    largest_v = tl.zeros([BLOCK], tl.int32)
    for i in range(TILES):
        at = (tl.program_id(0).to(tl.int64) * TILES + i) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        new_w, new_m, new_v = _updated(
            read(w, w_beside, at, inside, W), read(g, g_beside, at, inside, G),
            read(m, m_beside, at, inside, M_), read(v, v_beside, at, inside, V),
            decay, weight_1, beta_2, weight_2, step_size, root, eps, FROM_M,
        )  # fmt: skip
        largest_w = tl.maximum(largest_w, tl.where(inside, magnitude(new_w), 0))
        largest_m = tl.maximum(largest_m, tl.where(inside, magnitude(new_m), 0))
        largest_v = tl.maximum(largest_v, tl.where(inside, magnitude(new_v), 0))
    if SCALES[0]:
        tl.atomic_max(found, tl.max(largest_w, 0))
    if SCALES[1]:
        tl.atomic_max(found + 1, tl.max(largest_m, 0))
    if SCALES[2]:
        tl.atomic_max(found + 2, tl.max(largest_v, 0))
    if tl.program_id(0) == 0:
        keep_scale(found + 4, w_beside, W)
        keep_scale(found + 5, m_beside, M_)
        keep_scale(found + 6, v_beside, V)


@triton.jit(do_not_specialize=["w_0", "w_1", "m_0", "m_1", "v_0", "v_1", "o_0", "o_1"])
def update(
    w, w_from, w_to, g, g_from, m, m_from, m_to, v, v_from, v_to, o, o_to, found, n,
    decay, weight_1, beta_2, weight_2, step_size, root, eps, w_0, w_1, m_0, m_1, v_0, v_1, o_0, o_1,
    W: tl.constexpr, G: tl.constexpr, M_: tl.constexpr, V: tl.constexpr, OTHER: tl.constexpr,
    FROM_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of w, m, v, in place, and of `o`, a weight beside its master; `X_0`, `X_1` are keys' words."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    new_w, new_m, new_v = _updated(
        read(w, w_from, at, inside, W), read(g, g_from, at, inside, G),
        read(m, m_from, at, inside, M_), read(v, v_from, at, inside, V),
        decay, weight_1, beta_2, weight_2, step_size, root, eps, FROM_M,
    )  # fmt: skip
    write(new_w, w, w_to, found, w_0, w_1, at, inside, W)
    write(new_w, o, o_to, found, o_0, o_1, at, inside, OTHER)
    write(new_m, m, m_to, found + 1, m_0, m_1, at, inside, M_)
    write(new_v, v, v_to, found + 2, v_0, v_1, at, inside, V)


#: A tensor as it lies: its numbers; its scale or the 16 further bits of each, if any; the cast.
State = tuple[Tensor, Tensor | None, Cast]


def launch(
    w_g_m_v: Sequence[State],
    o: State | None,
    numbers: Sequence[float],
    from_m: bool,
    keys: Sequence[tuple[int, int]],
) -> None:
    """Update w, m and v in place, and write w to `o` too; `numbers` and `from_m` are those of `_updated`.

    `keys` has the key words of the random bits of w, m, v and o.
    """
    w, g, m, v = w_g_m_v
    n = w[0].numel()
    W, G, M, V = (kind(cast) for *_, cast in w_g_m_v)
    OTHER = NOTHING if o is None else kind(o[2])
    beside = [t if extra is None else extra for t, extra, _ in w_g_m_v]
    scaled = [cast.is_scaled for cast in (w[2], m[2], v[2])]
    needed = (scaled[0] or (o is not None and o[2].is_scaled), scaled[1], scaled[2])
    kinds = {"W": W, "G": G, "M_": M, "V": V}
    sources, found = list(beside), w[0]
    if any(needed):
        found = torch.zeros(8, dtype=torch.int32, device=w[0].device)
        largest[(triton.cdiv(n, BLOCK * TILES),)](
            *(t for (values, *_), extra in zip(w_g_m_v, beside, strict=True) for t in (values, extra)),
            found, n, *numbers, **kinds, SCALES=needed, FROM_M=from_m, BLOCK=BLOCK, TILES=TILES, **LAUNCH,
        )  # fmt: skip
        before = found.view(torch.float32)[4:]
        for i, (of, is_scaled) in enumerate(zip((0, 2, 3), scaled, strict=True)):
            sources[of] = before[i : i + 1] if is_scaled else beside[of]
    other, other_beside = (w[0], w[0]) if o is None else (o[0], o[0] if o[1] is None else o[1])
    update[(triton.cdiv(n, BLOCK),)](
        w[0], sources[0], beside[0], g[0], sources[1], m[0], sources[2], beside[2],
        v[0], sources[3], beside[3], other, other_beside, found, n, *numbers,
        *(word for key in keys for word in key), **kinds, OTHER=OTHER, FROM_M=from_m, BLOCK=BLOCK, **LAUNCH,
    )  # fmt: skip
