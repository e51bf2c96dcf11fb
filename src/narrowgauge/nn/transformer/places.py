"""Attention and the residual stream under a recipe: the modules that `convert` puts in a model for its own.

**Attention** is two products, and a softmax between them, with operands in the casts of the recipe.

    z_ts = (q_t . k_s) / sqrt(H)
    p_ts = softmax over s of z_ts                      rows sum to 1 before p is quantized
    y_t  = sum over s of p_ts v_s

A product and its two gradients are three matmuls, as in a linear layer, so attention has six:

    matmul     operands     contracts
    q kᵀ       q, k         H
    ds k       ds, k        S
    dsᵀ q      ds, q        T
    p v        p, v         S
    do vᵀ      do, v        H
    pᵀ do      p, do        T

In the backward pass an operand is quantized only if the gradient that it is multiplied with is: with `do` in
a format without scales, its two matmuls use p and v unquantized, and the same holds for `ds` with k and q.
Rounding passes gradients through unchanged, so these are the gradients of the matmuls that were computed.
Sums and the softmax are float32 (float64 for float64 tensors); the scale of a full tensor is applied to a
sum, not to its terms. p is quantized after it is normalized; under a scale per row this is the same as
quantizing exp(z - max z), as kernels with a running maximum do.

Blocks lie within a matrix. Random bits follow from an element's index in the global tensor [B, all heads,
rows, columns] of the step, and a scale of the full tensor is that of the heads of all processes.

Only q, k and v are kept for the backward pass, which computes the rest again. Some heads are computed at a
time (`SCORES` elements of p, or one head of keys with its queries), except under scales of the full tensor,
which need all of p first.

`NarrowAttention` has no parameters, and computes as the attention that it replaces while the recipe leaves
all of its places in `compute`.

**The residual stream** is rounded once at each point where the model adds to it: x_i+1 = Q(x_i + f_i).

The sum is float32 (float64 for float64 tensors). In a format without scales the stream is a tensor of that
format, and so is its gradient. If addends have that format too, torch's sum is rounded once as well, and the
next norm computes it (`is_plain`). Under a cast with scales the stream stays float32 and holds the values of
the cast; gradients pass through unchanged. Blocks lie along the width of the model.

Legend: B sequences, N query heads, K key-value heads, Z = B N matrices, Y = B K matrices, T queries, S keys,
H head_dim; D the model's width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from narrowgauge.formats import RandomStream, torch_dtype
from narrowgauge.kernels import emulate
from narrowgauge.kernels.attention import Attention
from narrowgauge.kernels.dispatch import contexts, is_unread, last_product
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn.gemm import Operand
from narrowgauge.nn.linear_function import autocast_disabled
from narrowgauge.nn.operands import EqualShare, Observation, Observer
from narrowgauge.nn.step_state import Stepped
from narrowgauge.quantization import Cast, QuantContext, TensorShard, full_axis
from narrowgauge.quantization.quantize import emulate_in_context
from narrowgauge.recipes import ATTENTION_PRODUCTS, GRADIENT_PLACES, Recipe, is_wide
from narrowgauge.system.errors import UserError
from narrowgauge.system.second_derivative import FirstOrderFunction
from narrowgauge.system.torch_compat import has_hooks, reshaped

SCORES = {"cpu": 2**20, "cuda": 2**25}  # elements of p that are held at a time
_PRODUCTS = list(ATTENTION_PRODUCTS)
_STREAMS = 2 * len(_PRODUCTS)  # of an attention
_FIRST_STREAM = 2**36  # above the tensor ids of linear layers and of the optimizer, below those of dropout
_FIRST_OF_RESIDUALS = 2**37
#: The matmuls of the gradients of both operands, in their order.
_GRADIENTS = {"q kᵀ": ("ds k", "dsᵀ q"), "p v": ("do vᵀ", "pᵀ do")}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionContext:
    """Everything that a forward and a backward pass of attention need besides the tensors."""

    casts: Mapping[str, Cast | None]  # the cast of each place; None, or a place that is missing, for `dtype`
    share: EqualShare = field(default_factory=EqualShare)  # the heads of this process
    #: int32 [12, 2], keys of the step's random streams, two per matmul; None if no cast is random
    keys: Tensor | None = None
    first_sample: int | Tensor = 0  # the index in the global batch of the first sequence
    observer: Observer | None = None  # sees every operand
    dtype: torch.dtype = torch.float32  # the dtype of q
    samples: int = 1  # B
    #: (index, count): the matrices at hand are the index-th of `count` equal pieces
    piece: tuple[int, int] = (0, 1)

    def cast(self, place: str, product: str) -> Cast | None:
        """The cast of an operand of a matmul."""
        gradients = set(ATTENTION_PRODUCTS[product]) & set(GRADIENT_PLACES) - {place}
        casts = map(self.casts.get, gradients)
        has_wide_gradient = any(cast is None or not cast.is_scaled for cast in casts)
        return None if has_wide_gradient else self.casts.get(place)

    def operand(self, x: Tensor, place: str, product: str, axis: int) -> Operand:
        """What a matmul sees of a tensor [matrices, rows, columns] whose `axis` (-1 or -2) it contracts."""
        cast, context = self.cast(place, product), QuantContext()
        if cast is None or not cast.is_scaled:
            seen = Operand(x.to(self.dtype if cast is None else torch_dtype(cast.element)))
        else:
            context = self._quant_context(x, cast, place, product)
            wide = torch.promote_types(x.dtype, torch.float32)
            has_rows = cast.block is None or cast.block[0] == 1
            if axis == -1 and has_rows and context.shard is None and context.random is None:
                values, scale = emulate(x.flatten(0, 1), cast, -1, wide)  # one matrix of all rows
                seen = Operand(values.view(*x.shape[:2], -1), scale)
            else:
                seen = Operand(*emulate_in_context(x, cast, axis, wide, context))
        if self.observer is not None and cast is not None:
            self.observer.operand(Observation(place, x, seen.values(), cast, axis, context))
        return seen

    def _quant_context(self, x: Tensor, cast: Cast, place: str, product: str) -> QuantContext:
        """The random bits of the matrices of a tensor, and where they lie in the global one."""
        is_random = cast.is_random and self.keys is not None
        if not (is_random or self.share.groups):
            return QuantContext()
        index, count = self.piece
        matrices = self.share.axis(self.samples, len(x) * count // self.samples)
        shard = TensorShard((matrices.chunk(index, count), full_axis(x.shape[1]), full_axis(x.shape[2])))
        stream = None
        if is_random and self.keys is not None:
            key = self.keys[2 * _PRODUCTS.index(product) + ATTENTION_PRODUCTS[product].index(place)]
            stream = RandomStream(key, self.first_sample * (shard.shape.numel() // self.samples))
        return QuantContext(stream, shard=shard)


class _Product(FirstOrderFunction):
    """factor * a @ b of matrices in float32 or float64: [Z, M, C] of a product "q kᵀ" or "p v"."""

    @staticmethod
    def forward(
        ctx: Any, a_ZMC: Tensor, b: Tensor, name: str, factor: float, context: AttentionContext
    ) -> Tensor:
        ctx.save_for_backward(a_ZMC, b)
        ctx.given = name, factor, context
        if is_unread():
            width = b.shape[1] if "ᵀ" in name else b.shape[2]
            return a_ZMC.new_empty(*a_ZMC.shape[:2], width, dtype=_wide(context.dtype))
        (a_place, b_place), axis = ATTENTION_PRODUCTS[name], -1 if "ᵀ" in name else -2
        a, b_of = context.operand(a_ZMC, a_place, name, -1), context.operand(b, b_place, name, axis)
        return _multiply(a, b_of, factor, context, b_turned="ᵀ" in name)

    @staticmethod
    def backward(ctx: Any, dc_ZMN: Tensor) -> tuple[Tensor | None, ...]:
        (a_ZMC, b), (name, factor, context) = ctx.saved_tensors, ctx.given
        (a_place, b_place), (to_a, to_b) = ATTENTION_PRODUCTS[name], _GRADIENTS[name]
        c_place, b_turned = ATTENTION_PRODUCTS[to_a][0], "ᵀ" in name
        dc = context.operand(dc_ZMN, c_place, to_a, -1)
        b_of = context.operand(b, b_place, to_a, -2 if b_turned else -1)
        da_ZMC = _multiply(dc, b_of, factor, context, b_turned=not b_turned).to(a_ZMC.dtype)
        cast = context.casts.get(c_place)
        depends_on_axis = cast is not None and cast.is_scaled and (cast.is_random or not cast.ignores_axis)
        if context.observer is not None or depends_on_axis:
            dc = context.operand(dc_ZMN, c_place, to_b, -2)
        a = context.operand(a_ZMC, a_place, to_b, -2)
        first, second = (dc, a) if b_turned else (a, dc)
        db = _multiply(Operand(first.elements.mT, first.scale), second, factor, context)
        return da_ZMC, db.unflatten(0, (len(b), -1)).sum(1).to(b.dtype), None, None, None


class _Softmax(FirstOrderFunction):
    """The softmax over keys; its gradient is p (dp - sum of p dp)."""

    @staticmethod
    def forward(ctx: Any, z_ZTS: Tensor) -> Tensor:
        p_ZTS = z_ZTS.softmax(dim=-1)
        ctx.save_for_backward(p_ZTS)
        return p_ZTS

    @staticmethod
    def backward(ctx: Any, dp_ZTS: Tensor) -> Tensor:
        (p_ZTS,) = ctx.saved_tensors
        ds_ZTS = p_ZTS * dp_ZTS
        torch.sub(dp_ZTS, ds_ZTS.sum(-1, keepdim=True), out=ds_ZTS)
        return ds_ZTS.mul_(p_ZTS)


def _multiply(
    a: Operand, b: Operand, factor: float, context: AttentionContext, b_turned: bool = False
) -> Tensor:
    """factor * a @ b, or a @ bᵀ if `b_turned`; several matrices of a may share one of b."""
    wide = _wide(context.dtype)
    b_values = b.elements.repeat_interleave(len(a.elements) // len(b.elements), dim=0)
    c = a.elements.to(wide) @ (b_values.mT if b_turned else b_values).to(wide)
    scales = [s for s in (a.scale, b.scale) if s is not None]
    if scales:
        c *= math.prod(scales[1:], start=scales[0])
    return c if factor == 1 else c.mul_(factor)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def narrow_attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, context: AttentionContext
) -> Tensor:
    """Attention -> [B, N, T, H] in the dtype of q, causal or under `mask` [B, 1, T, S]."""
    (B, N, T, _), (K, S) = q_BNTH.shape, k_BKSH.shape[1:3]
    casts = [cast for cast in context.casts.values() if cast is not None and cast.is_scaled]
    if any(cast.block is None or cast.tensor_scale == "tensor" for cast in casts):
        count = 1
    else:
        limit = max(1, SCORES.get(q_BNTH.device.type, SCORES["cuda"]) // max(1, T * S * N // K))
        count = next(n for n in range(1, B * K + 1) if B * K % n == 0 and B * K // n <= limit)
    context = replace(context, dtype=q_BNTH.dtype, samples=B)
    pieces = zip(*(x.flatten(0, 1).chunk(count) for x in (q_BNTH, k_BKSH, v_BKSH)), strict=True)
    device = q_BNTH.device
    visible = torch.ones(1, T, S, dtype=torch.bool, device=device).tril(S - T) if mask is None else mask
    found = []
    for i, piece in enumerate(pieces):
        if mask is not None:
            visible = mask[torch.arange(B * N, device=device).chunk(count)[i] // N, 0]  # [Z, T, S]
        given = (*piece, visible, replace(context, piece=(i, count)))
        options: dict[str, Any] = {"context_fn": contexts, "use_reentrant": False}
        found.append(checkpoint(_attend, *given, preserve_rng_state=False, **options))
    return torch.cat(found).unflatten(0, (B, N))


def _attend(
    q_ZTH: Tensor, k_YSH: Tensor, v_YSH: Tensor, visible: Tensor, context: AttentionContext
) -> Tensor:
    z_ZTS: Tensor = _Product.apply(q_ZTH, k_YSH, "q kᵀ", q_ZTH.shape[2] ** -0.5, context)
    z_ZTS.detach().masked_fill_(~visible, -math.inf)  # p is 0 there, and so is the gradient
    p_ZTS: Tensor = _Softmax.apply(z_ZTS)
    with last_product():  # in the backward pass only p is read again
        y_ZTH: Tensor = _Product.apply(p_ZTS, v_YSH, "p v", 1.0, context)
    return y_ZTH.to(q_ZTH.dtype)


class NarrowAttention(Stepped, Attention):
    """The attention of one layer, with its operands in the casts of a recipe.

    Attributes:
        casts: The cast of each place in this step; one that is missing, or None, is in `compute`.
        shard: The heads of this process.
    """

    def __init__(self, recipe: Recipe, index: int) -> None:
        """Compute under the recipe of this layer; `index` counts the attentions of the model."""
        torch.nn.Module.__init__(self)
        self.recipe, self.index = recipe, index
        self.casts: Mapping[str, Cast | None] = dict(recipe.attention)
        self.shard = EqualShare()
        everything = [*recipe.attention.values(), *(c for r in recipe.rules for c in r.attention.values())]
        self.is_random = any(cast is not None and cast.is_random for cast in everything)
        # Plain CPU tensors that do not move with the module: each pass copies them.
        self.keys = self.first_sample = None
        self.start()

    @property
    def is_wide(self) -> bool:
        """Whether every place is in `compute` in this step."""
        return all(is_wide(cast, self.recipe.compute) for cast in self.casts.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        q_BNTH: torch.Tensor,
        k_BKSH: torch.Tensor,
        v_BKSH: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout: Dropout | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> torch.Tensor:
        """Attention -> [B, N, T, H], as in `Attention`."""
        self.begin_pass()
        if self.is_wide:
            return super().forward(q_BNTH, k_BKSH, v_BKSH, mask, dropout, share)
        if dropout is not None:
            raise UserError(
                f"recipe {self.recipe.name!r} narrows attention, and probabilities with dropout have no "
                "place in a recipe; set model.attention_dropout = 0"
            )
        context = AttentionContext(self.casts, self.shard, observer=self.observer)
        if self.keys is not None and self.first_sample is not None:
            keys, first_sample = (t.to(q_BNTH.device) for t in (self.keys, self.first_sample))
            context = replace(context, keys=keys, first_sample=first_sample)
        with autocast_disabled(q_BNTH.device.type):
            return narrow_attention(q_BNTH, k_BKSH, v_BKSH, mask, context)

    def extra_repr(self) -> str:
        """The name of the recipe."""
        return f"recipe={self.recipe.name}"

    def _stream_ids(self) -> list[int]:
        return [_FIRST_STREAM + _STREAMS * self.index + i for i in range(_STREAMS)]

    def _use_rules(self, step: int, steps: int | None, decay: int | None) -> None:
        if self.recipe.rules:
            self.casts = self.recipe.at(step, steps, decay).attention


class _Narrowed(FirstOrderFunction):
    """The values of a cast, with the gradient of the sum itself."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, cast: Cast, context: QuantContext) -> Tensor:
        values, scale = emulate(x_MD, cast, -1, x_MD.dtype, context)
        return values if scale is None else values * scale

    @staticmethod
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor | None, ...]:
        return dy_MD, None, None


class NarrowResidual(Stepped, Residual):
    """One point of the residual stream, in the format of a recipe's `stream`.

    Attributes:
        dtype: The dtype of the stream after this point.
        tokens: The tokens of this process, if several hold parts of each sequence.
    """

    def __init__(self, recipe: Recipe, index: int) -> None:
        """Keep the stream in the cast of a model's recipe; `index` counts the points of the model."""
        torch.nn.Module.__init__(self)
        self.recipe, self.index, self.cast = recipe, index, recipe["stream"]
        self.dtype = None if self.cast.is_scaled else torch_dtype(self.cast.element)
        self.tokens: EqualShare | None = None
        self.is_random = self.cast.is_random
        self.keys = self.first_sample = None
        self.start()

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether the stream and an addend of `dtype` have the same format, and nothing sees their sum."""
        return dtype == self.dtype and self.observer is None and not has_hooks(self, before=True)

    def forward(self, x_BTD: Tensor, delta_BTD: Tensor | None = None) -> Tensor:
        """The stream after this point: `x_BTD`, or the sum of both, rounded once."""
        self.begin_pass()
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        with autocast_disabled(x_BTD.device.type):
            total = x_BTD.to(wide) if delta_BTD is None else x_BTD.to(wide) + delta_BTD
            x_MD = total.flatten(0, -2)
            context = self._context(x_MD, x_BTD.shape[0])
            has_scales = self.dtype is None
            seen = _Narrowed.apply(x_MD, self.cast, context) if has_scales else x_MD.to(self.dtype)
            if self.observer is not None:
                with torch.no_grad():
                    self.observer.operand(Observation("stream", x_MD, seen, self.cast, -1, context))
            return reshaped(seen, x_BTD.shape)

    def _context(self, x_MD: Tensor, samples: int) -> QuantContext:
        """The position of the local tokens in the global tensor, and the random bits."""
        shard = None
        M, D = x_MD.shape
        if self.tokens is not None:
            shard = TensorShard((self.tokens.axis(samples, M // samples), full_axis(D)))
        if self.keys is None or self.first_sample is None:
            return QuantContext(shard=shard)
        per_sample = (M if shard is None else shard.shape[0]) // samples * D
        offset = self.first_sample.to(x_MD.device) * per_sample
        return QuantContext(RandomStream(self.keys[0].to(x_MD.device), offset), shard=shard)

    def extra_repr(self) -> str:
        """The cast of the stream."""
        return f"stream={self.cast.name}"

    def _stream_ids(self) -> list[int]:
        return [_FIRST_OF_RESIDUALS + self.index]
