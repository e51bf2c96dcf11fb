"""AdamW on quantized state: read as float32, updated in registers, rounded and written in place.

    largest      the amax of each new tensor that needs a scale; writes nothing else
    update       the same values from the same operations, each rounded once, and the new scales

Both are needed because a scale is known only after the last element; if no written tensor has a scale, the
second runs alone. Each program of `update` computes the scales from the amaxes, and program 0 stores them.
The old scales are therefore read from a copy that `largest` made.

The layout of a tensor is a tuple of constants, its CAST (`cast_constants`). A thread has 8 elements: 16 bytes
of fp16 in one load, and according to the assembler for an H100 40 to 80 registers. A program of `largest`
processes four tiles in turn, so that there is one atomic operation per tensor for 8192 elements.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.kernels.triton import quantized_state as stored
from narrowgauge.kernels.triton.arithmetic import fma, magnitude
from narrowgauge.kernels.triton.launch import cdiv, launch, tl, triton
from narrowgauge.quantization import Cast, QuantizedState, make_cast

BLOCK, TILES = 2048, 4


@triton.jit
def _updated(
    w, g, m, v, decay, weight_1, beta_2, weight_2, step_size, root, eps, FROM_M: tl.constexpr
):  # fmt: skip
    """(w', m', v'), operation for operation as in `kernels.adamw.reference`."""
    m = fma(g - m, weight_1, m) if FROM_M else fma(g - m, weight_1 - 1.0, g)
    v = fma(weight_2 * g, g, v * beta_2)
    w = w * decay - tl.math.div_rn(step_size * m, tl.math.div_rn(tl.math.sqrt_rn(v), root) + eps)
    return w, m, v


@triton.jit
def largest(
    w, w_extra, g, g_extra, m, m_extra, v, v_extra, amax, n,
    decay, weight_1, beta_2, weight_2, step_size, root, eps,
    W: tl.constexpr, G: tl.constexpr, M_: tl.constexpr, V: tl.constexpr, SCALES: tl.constexpr,
    FROM_M: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The bits of the amax of each of w', m', v' that SCALES selects, into int32 zeros `amax`.

    The old scales are copied behind them, to `amax + 4`.
    """
    largest_w = tl.zeros([BLOCK], tl.int32)
    largest_m = tl.zeros([BLOCK], tl.int32)
    largest_v = tl.zeros([BLOCK], tl.int32)
    for i in range(TILES):
        at = (tl.program_id(0).to(tl.int64) * TILES + i) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        new_w, new_m, new_v = _updated(
            stored.read(w, w_extra, at, inside, W), stored.read(g, g_extra, at, inside, G),
            stored.read(m, m_extra, at, inside, M_), stored.read(v, v_extra, at, inside, V),
            decay, weight_1, beta_2, weight_2, step_size, root, eps, FROM_M,
        )  # fmt: skip
        largest_w = tl.maximum(largest_w, tl.where(inside, magnitude(new_w), 0))
        largest_m = tl.maximum(largest_m, tl.where(inside, magnitude(new_m), 0))
        largest_v = tl.maximum(largest_v, tl.where(inside, magnitude(new_v), 0))
    if SCALES[0]:
        tl.atomic_max(amax, tl.max(largest_w, 0), sem="relaxed")
    if SCALES[1]:
        tl.atomic_max(amax + 1, tl.max(largest_m, 0), sem="relaxed")
    if SCALES[2]:
        tl.atomic_max(amax + 2, tl.max(largest_v, 0), sem="relaxed")
    if tl.program_id(0) == 0:
        stored.copy_scale(amax + 4, w_extra, W)
        stored.copy_scale(amax + 5, m_extra, M_)
        stored.copy_scale(amax + 6, v_extra, V)


@triton.jit(do_not_specialize=["w_0", "w_1", "m_0", "m_1", "v_0", "v_1", "o_0", "o_1"])
def update(
    w, w_from, w_to, g, g_from, m, m_from, m_to, v, v_from, v_to, o, o_to, amax, n,
    decay, weight_1, beta_2, weight_2, step_size, root, eps, w_0, w_1, m_0, m_1, v_0, v_1, o_0, o_1,
    W: tl.constexpr, G: tl.constexpr, M_: tl.constexpr, V: tl.constexpr, OTHER: tl.constexpr,
    FROM_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of w, m, v, in place, and of `o`, the weight of a master; `X_0`, `X_1` are key words."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    new_w, new_m, new_v = _updated(
        stored.read(w, w_from, at, inside, W), stored.read(g, g_from, at, inside, G),
        stored.read(m, m_from, at, inside, M_), stored.read(v, v_from, at, inside, V),
        decay, weight_1, beta_2, weight_2, step_size, root, eps, FROM_M,
    )  # fmt: skip
    largest_w = tl.load(amax)
    new_w = stored.write(new_w, w, w_to, largest_w, w_0, w_1, at, inside, W)
    if OTHER[stored.HOW] != "nothing":
        if OTHER[stored.HOW] != "plain":  # the amax of what the master holds is the amax as it holds it
            x = largest_w.to(tl.float32, bitcast=True)
            held, scale = stored.rounded(x, largest_w, w_0, w_1, 0, w.dtype.element_ty, W)
            largest_w = magnitude(stored.value(held, scale, W))
        stored.write(new_w, o, o_to, largest_w, o_0, o_1, at, inside, OTHER)
    stored.write(new_m, m, m_to, tl.load(amax + 1), m_0, m_1, at, inside, M_)
    stored.write(new_v, v, v_to, tl.load(amax + 2), v_0, v_1, at, inside, V)


_PLAIN = {
    torch.float32: make_cast("fp32"),
    torch.bfloat16: make_cast("bf16"),
    torch.float16: make_cast("fp16"),
}


def _stored(state: QuantizedState | Tensor) -> tuple[Tensor, Tensor | None, Cast]:
    """(values, scale, cast) of a state."""
    if isinstance(state, Tensor):
        return state, None, _PLAIN[state.dtype]
    values, *extra = state.on_device().values()
    return values, extra[0] if extra else None, state.cast


def launch_update(
    states: Sequence[QuantizedState | Tensor],
    weight: QuantizedState | None,
    numbers: Sequence[float],
    from_m: bool,
    keys: Sequence[tuple[int, int]],
) -> None:
    """Update w, m and v of `states`, (w, g, m, v), in place, and write w to `weight`, if w is its master.

    `numbers` and `from_m` are the factors of `_updated`, `keys` the key words of the random bits of w, m, v
    and the weight.
    """
    w_g_m_v = w, g, m, v = [_stored(s) for s in states]
    o = None if weight is None else _stored(weight)
    n = w[0].numel()
    W, G, M, V = (stored.cast_constants(cast) for *_, cast in w_g_m_v)
    OTHER = stored.NOTHING if o is None else stored.cast_constants(o[2])
    extras = [t if extra is None else extra for t, extra, _ in w_g_m_v]
    scaled = [cast.is_scaled for cast in (w[2], m[2], v[2])]
    needed = (scaled[0] or (o is not None and o[2].is_scaled), scaled[1], scaled[2])
    casts: dict[str, Any] = {"W": W, "G": G, "M_": M, "V": V, "FROM_M": from_m, "num_warps": 8}
    sources, amax = list(extras), w[0]
    if any(needed):
        amax = torch.zeros(8, dtype=torch.int32, device=w[0].device)
        launch(
            largest, (cdiv(n, BLOCK * TILES),),
            *(t for (values, *_), extra in zip(w_g_m_v, extras, strict=True) for t in (values, extra)),
            amax, n, *numbers, writes="amax", **casts, SCALES=needed, BLOCK=BLOCK, TILES=TILES,
        )  # fmt: skip
        before = amax.view(torch.float32)[4:]
        for i, (index, is_scaled) in enumerate(zip((0, 2, 3), scaled, strict=True)):
            sources[index] = before[i : i + 1] if is_scaled else extras[index]
    other, other_extra = (w[0], w[0]) if o is None else (o[0], o[0] if o[1] is None else o[1])
    launch(
        update, (cdiv(n, BLOCK),),
        w[0], sources[0], extras[0], g[0], sources[1], m[0], sources[2], extras[2],
        v[0], sources[3], extras[3], other, other_extra, amax, n, *numbers,
        *(word for key in keys for word in key),
        writes="o o_to", updates="w w_to m m_to v v_to", **casts, OTHER=OTHER, BLOCK=BLOCK,
    )  # fmt: skip
    for state, found in zip((states[0], *states[2:], weight), (w, m, v, o), strict=True):
        if state is not None and found is not None:  # autograd does not see a kernel's writes
            written = [t for t in found[:2] if t is not None]
            torch.autograd.graph.increment_version(written)
            if not isinstance(state, Tensor):
                state.keep(written)
