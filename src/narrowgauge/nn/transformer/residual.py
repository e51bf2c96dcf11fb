"""The residual stream under a recipe: the module that `convert` puts at each point where a model adds to it.

    x_i+1 = Q(x_i + f_i)

The sum is float32 (float64 for float64 tensors), and rounded once. In a format without scales the stream is a
tensor of that format, and so is its gradient. If addends have that format too, torch's sum is rounded once as
well, and the next norm computes it (`is_plain`). Under a cast with scales the stream stays float32 and holds
the values of the cast; gradients pass through unchanged. Blocks lie along the width of the model.

Legend: B sequences, T tokens, D the model's width.
"""

from typing import Any

import torch

from narrowgauge.formats import RandomStream, torch_dtype
from narrowgauge.kernels import emulate
from narrowgauge.kernels.residual import Residual
from narrowgauge.nn.linear_function import autocast_disabled
from narrowgauge.nn.operands import Observation
from narrowgauge.nn.shards import EqualShare
from narrowgauge.nn.step_state import Stepped
from narrowgauge.quantization import Cast, QuantContext, TensorShard, full_axis
from narrowgauge.recipes import Recipe
from narrowgauge.system.second_derivative import FirstOrderFunction
from narrowgauge.system.torch_compat import has_hooks, reshaped

_FIRST_STREAM = 2**37  # above the tensor ids of attention


class _Narrowed(FirstOrderFunction):
    """The values of a cast, with the gradient of the sum itself."""

    @staticmethod
    def forward(ctx: Any, x_MD: torch.Tensor, cast: Cast, context: QuantContext) -> torch.Tensor:
        values, scale = emulate(x_MD, cast, -1, x_MD.dtype, context)
        return values if scale is None else values * scale

    @staticmethod
    def backward(ctx: Any, dy_MD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
        self._set_keys(0, 0, 0)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether the stream and an addend of `dtype` have the same format, and nothing sees their sum."""
        return dtype == self.dtype and self.observer is None and not has_hooks(self, before=True)

    def forward(self, x_BTD: torch.Tensor, delta_BTD: torch.Tensor | None = None) -> torch.Tensor:
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

    def _context(self, x_MD: torch.Tensor, samples: int) -> QuantContext:
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
        return [_FIRST_STREAM + self.index]
