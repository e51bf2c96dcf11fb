"""A linear layer that computes under a recipe: three GEMMs in one autograd function.

Legend: M tokens, K inputs, N outputs.

    forward    y_MN  = fprop.x(x_MK)  @ fprop.w(w_NK).T          blocks along K
    backward   dx_MK = dgrad.dy(dy_MN) @ dgrad.w(w_NK)           blocks along N
               dw_NK = wgrad.dy(dy_MN).T @ wgrad.x(x_MK)         blocks along M

Each `place(tensor)` is what the GEMM sees of the tensor in that place's format (`quantization.emulate`).
An operand is quantized again for the backward pass, from high precision, because its blocks lie along
another axis there; where they do not (one scale per tensor, square blocks), the same numbers are used
twice. The layer returns the dtype it was given, so that conversion changes no other part of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from narrowgauge.formats import Stream, stream_key
from narrowgauge.nn.gemm import Operand, multiply
from narrowgauge.quantization import Cast, emulate
from narrowgauge.recipes import GEMM_PLACES, Recipe

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NEXT_KEY = 0x9E3779B9 - 2**32  # odd, so that 2^32 calls pass before a key comes again


@dataclass(frozen=True, slots=True)
class _Places:
    """The casts of one layer's GEMMs, and the random keys of one step (int32 [places, 2]) if any."""

    casts: Mapping[str, Cast]
    compute: torch.dtype
    keys: torch.Tensor | None = None
    first_sample: int | torch.Tensor = 0
    num_samples: int = 1

    def operand(self, tensor: torch.Tensor, place: str, axis: int) -> Operand:
        """What the GEMM of `place` sees of a tensor whose `axis` it contracts."""
        generator = None
        if self.keys is not None and self.casts[place].rounding == "stochastic":
            offset = self.first_sample * (tensor.numel() // self.num_samples)
            generator = Stream(self.keys[GEMM_PLACES.index(place)], offset)
        return emulate(tensor, self.casts[place], axis, self.compute, generator)

    def shared(self, a: str, b: str) -> bool:
        """Whether two places see the same numbers of the same tensor, whatever the axis."""
        cast = self.casts[a]
        return cast == self.casts[b] and cast.ignores_axis and cast.rounding != "stochastic"


class _ThreeGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, w_NK: torch.Tensor, bias_N: torch.Tensor | None, places: _Places
    ) -> torch.Tensor:
        x, w = places.operand(x_MK, "fprop.x", -1), places.operand(w_NK, "fprop.w", -1)
        y_MN = multiply(x, w[0].T, w[1])
        if bias_N is not None:
            y_MN = y_MN + bias_N.to(y_MN.dtype)
        reuse_x, reuse_w = places.shared("fprop.x", "wgrad.x"), places.shared("fprop.w", "dgrad.w")
        ctx.save_for_backward(*(x if reuse_x else (x_MK, None)), *(w if reuse_w else (w_NK, None)))
        ctx.places, ctx.reuse_x, ctx.reuse_w = places, reuse_x, reuse_w
        ctx.dtypes = x_MK.dtype, w_NK.dtype, None if bias_N is None else bias_N.dtype
        return y_MN.to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_saved, x_scale, w_saved, w_scale = ctx.saved_tensors
        places: _Places = ctx.places
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dx_MK = dw_NK = dbias_N = dy = None
        if ctx.needs_input_grad[0]:
            dy = places.operand(dy_MN, "dgrad.dy", -1)
            w = (w_saved, w_scale) if ctx.reuse_w else places.operand(w_saved, "dgrad.w", 0)
            dx_MK = multiply(dy, *w).to(x_dtype)
        if ctx.needs_input_grad[1]:
            if dy is None or not places.shared("dgrad.dy", "wgrad.dy"):
                dy = places.operand(dy_MN, "wgrad.dy", 0)
            x = (x_saved, x_scale) if ctx.reuse_x else places.operand(x_saved, "wgrad.x", 0)
            dw_NK = multiply((dy[0].T, dy[1]), *x).to(w_dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias_N = dy_MN.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx_MK, dw_NK, dbias_N, None


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` whose three GEMMs compute under a recipe.

    It shares the parameters of the layer it is made from. Random bits of stochastic places are a function of
    (seed, step, tensor, element): a training loop says where it is with `nn.set_step`; without that, each
    forward call that records gradients counts as a step. There is no second derivative: rounding has none.
    """

    keys: torch.Tensor | None
    first_sample: torch.Tensor | None

    def __init__(self, layer: torch.nn.Module, recipe: Recipe, index: int, transposed: bool = False) -> None:
        """Take over `layer`'s weight and bias; `transposed` if its weight is stored (K, N)."""
        torch.nn.Module.__init__(self)
        self.weight, self.bias = layer.weight, layer.bias  # type: ignore[assignment]
        n, k = reversed(self.weight.shape) if transposed else self.weight.shape
        self.in_features, self.out_features, self.transposed = k, n, transposed
        self.recipe, self.index = recipe, index
        self.driven = False  # whether `set_step` says where training is
        self.is_stochastic = any(c.rounding == "stochastic" for c in recipe.casts.values())
        self.register_buffer("keys", None, persistent=False)
        self.register_buffer("first_sample", None, persistent=False)
        if self.is_stochastic:
            self.set_position(0, 0, 0)

    def set_position(self, seed: int, step: int, first_sample: int) -> None:
        """Make the random bits those of (seed, step), with the batch's first sequence at `first_sample`."""
        ids = [self.index * len(GEMM_PLACES) + i for i in range(len(GEMM_PLACES))]
        words = [stream_key(seed, step, tensor) for tensor in ids]
        self.keys = torch.tensor(words, dtype=torch.int32, device=self.weight.device)
        self.first_sample = torch.tensor(first_sample, device=self.weight.device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., K) to (..., N), in the dtype of the input."""
        places = _Places(self.recipe.casts, _DTYPES[self.recipe.compute])
        if self.is_stochastic:
            assert self.keys is not None
            assert self.first_sample is not None
            num_samples = input.shape[0] if input.ndim > 2 else 1
            places = _Places(places.casts, places.compute, self.keys, self.first_sample, num_samples)
            if not self.driven and torch.is_grad_enabled():
                # A new tensor, since backward needs the old one; a tensor, so that compiled code stays valid.
                self.keys = self.keys + _NEXT_KEY
        weight = self.weight.T if self.transposed else self.weight
        y_MN = _ThreeGemms.apply(input.reshape(-1, self.in_features), weight, self.bias, places)
        return y_MN.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Torch's words and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
