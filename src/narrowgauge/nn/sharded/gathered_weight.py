"""Weights that FSDP2 shards and gathers in narrow numbers: the place `gather` of a recipe.

FSDP calls two methods of a shard: `fsdp_pre_all_gather` returns what to send, and `fsdp_post_all_gather`
makes the full weight from what arrived. Two tensor subclasses claim the dtype float32, so that gradients are
float32 whatever travels, but hold no float32 numbers:

    PlaceholderShard    the shard of a weight whose narrow numbers are in its record (`nn.weight_state`)
    GatheredWeight      the full weight: the codes or values that arrived, and their scale

A weight that is fp32 at rest stays an ordinary shard, with these two methods attached. Its codes are those of
the full weight, because their one scale comes from the largest magnitude of all shards. `sync_scales`
computes the scales of many layers in one all-reduce; a layer whose weight has changed since does so alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from narrowgauge.collectives import all_reduce_max
from narrowgauge.formats import decode, torch_dtype
from narrowgauge.kernels.cast import amaxes_of, codes_under
from narrowgauge.nn.gemm import Operand
from narrowgauge.nn.native import QuantizedOperand
from narrowgauge.quantization import Cast, QuantizedState, TensorShard
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.torch_compat import (
    attach_fsdp_extension,
    disabled_torch_function,
    is_in_place,
    local_tensor,
    tree_leaves,
    tree_map_only,
    version_of,
    wrapper_subclass,
)

aten = torch.ops.aten
_VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
}


class GatheredWeight(torch.Tensor):
    """A full weight (N, K) as it travelled; its dtype is float32, so that its gradient is float32.

    Attributes:
        numbers: uint8 codes, or values in bf16, fp16 or fp32; in memory that FSDP frees and fills again.
        scale: 0-dim float32 factor of the numbers, or None for 1.
        cast: the cast of the numbers.
        is_operand: whether products take the numbers as they are; else they quantize the weight first.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None
    cast: Cast
    is_operand: bool
    one: torch.Tensor | None = None  # made once

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls, numbers: torch.Tensor, scale: torch.Tensor | None, cast: Cast, is_operand: bool
    ) -> "GatheredWeight":
        """Make a tensor of the numbers' shape."""
        self = wrapper_subclass(cls, numbers.shape, numbers.stride(), torch.float32, numbers.device)
        self.numbers, self.scale, self.cast, self.is_operand = numbers, scale, cast, is_operand
        return self

    def __init__(self, *_: object) -> None:
        """Nothing more."""

    def wide(self) -> torch.Tensor:
        """The weight's values: float32 where it has a scale, else the numbers themselves."""
        if self.numbers.dtype == torch.uint8:
            assert self.scale is not None
            return decode(self.numbers, self.cast.element) * self.scale
        return self.numbers if self.scale is None else self.numbers.float() * self.scale

    def operand(self, dtype: torch.dtype, native: bool) -> Operand | QuantizedOperand:
        """The operand of a product over the last axis, as `emulate` or (native) `quantize` would make it."""
        if self.scale is None:
            return Operand(self.numbers)
        if native:
            self.one = torch.ones_like(self.scale) if self.one is None else self.one
            return QuantizedOperand(self.numbers, self.scale, self.one, self.cast)
        return Operand(decode(self.numbers, self.cast.element, dtype), self.scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply a view to the numbers, and any other operation to the weight in float32."""
        first = args[0] if args else None
        if isinstance(first, GatheredWeight):
            if func is aten.as_strided.default:  # FSDP calls it with the weight's own shape
                assert (tuple(args[1]), tuple(args[2])) == (first.shape, first.stride())
                return GatheredWeight(first.numbers, first.scale, first.cast, first.is_operand)
            if func in _VIEWS:
                return GatheredWeight(
                    func(first.numbers, *args[1:]), first.scale, first.cast, first.is_operand
                )
            if func is aten._to_copy.default and first.scale is None and kwargs:
                return func(first.numbers, *args[1:], **kwargs)
        args, kwargs = tree_map_only(GatheredWeight, lambda x: x.wide().float(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and cast; the numbers may be freed."""
        return f"GatheredWeight({tuple(self.shape)}, {self.cast.name})"


class PlaceholderShard(torch.Tensor):
    """A float32 tensor without numbers: any operation on it returns another one."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, shape: torch.Size, strides: Sequence[int], device: torch.device) -> "PlaceholderShard":
        """Make a placeholder of this shape."""
        return wrapper_subclass(cls, shape, strides, torch.float32, device)

    def __init__(self, *_: object) -> None:
        """Nothing more."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Ask a tensor on the meta device for the shape of the result."""
        placeholder = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, PlaceholderShard))

        def to_meta(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

        metas, named = tree_map_only(torch.Tensor, to_meta, (args, dict(kwargs or {})))
        device = named.get("device") or placeholder.device
        if "device" in named:
            named["device"] = torch.device("meta")
        result = func(*metas, **named)
        if is_in_place(func):
            return args[0]
        return tree_map_only(torch.Tensor, lambda x: PlaceholderShard(x.shape, x.stride(), device), result)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape, as there are no numbers."""
        return f"PlaceholderShard({tuple(self.shape)})"

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Any]:
        """The tensor that FSDP sends, and the metadata for `fsdp_post_all_gather`."""
        gathering: WeightGather = module.gathering
        return gathering.pre_all_gather(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The full weight, made from the gathered numbers."""
        gathering, scale, rows = metadata
        return gathering.post_all_gather(outputs[0][:rows], scale, out)


class WeightGather:
    """The all-gather of one layer's weight, in the numbers of a cast.

    Attributes:
        parameter: the sharded parameter.
        at_rest: the numbers of the shard, where the weight is narrow at rest.
        shard: the position of the shard in the full weight, and the groups that hold the other shards.
        scale: 0-dim float32 (encode, decode) of the last `sync_scales`.
        version: version counter of the shard's tensor when `scale` was computed; -1 before.
        codes: the codes of the shard under that scale; None before the first gather after it. They are made
            once a step, though the weight is gathered twice for each micro-batch.
    """

    def __init__(
        self, cast: Cast, parameter: DTensor, at_rest: QuantizedState | None, shard: TensorShard
    ) -> None:
        self.cast, self.parameter, self.at_rest, self.shard = cast, parameter, at_rest, shard
        self.scale: tuple[torch.Tensor, torch.Tensor] | None = None
        self.version = -1
        self.codes: torch.Tensor | None = None
        tensor = local_tensor(parameter)
        if not isinstance(tensor, PlaceholderShard):
            attach_fsdp_extension(tensor, PlaceholderShard)

    @property
    def needs_scale(self) -> bool:
        """Whether the scale depends on all shards; a weight at rest has its scale stored."""
        return self.at_rest is None and self.cast.is_scaled

    def pre_all_gather(
        self, shard: torch.Tensor, mesh: DeviceMesh, size: torch.Size
    ) -> tuple[tuple[torch.Tensor], Any]:
        """The numbers that a shard of a weight of `size` sends, padded to the rows of the longest shard."""
        numbers, scale = self._numbers(shard)
        missing = -(-size[0] // mesh.size()) - len(numbers)
        return (pad(numbers, (0, 0, 0, missing)) if missing else numbers,), (self, scale, size[0])

    def _numbers(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The shard's numbers, in its shape, and their scale."""
        if self.at_rest is not None:
            if not self.cast.is_scaled and self.at_rest.cast.is_scaled:
                return self.at_rest.read(), None
            numbers, *scales = self.at_rest.tensors.values()
            return numbers, scales[0] if scales else None
        if not self.cast.is_scaled:
            return shard.to(torch_dtype(self.cast.element)), None
        if self.version != version_of(shard):
            sync_scales([self])
        assert self.scale is not None
        encode, decode = self.scale
        if not shard.numel():
            return shard.to(torch.uint8), decode
        if self.codes is None:
            self.codes = codes_under(shard, self.cast, encode, decode)
        return self.codes, decode

    def post_all_gather(
        self, numbers: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The gathered weight; if `out` is given, its numbers and scale are replaced instead."""
        if out is None:
            return GatheredWeight(numbers, scale, self.cast, self.at_rest is None), ()
        weight = local_tensor(out)
        assert isinstance(weight, GatheredWeight)
        weight.numbers, weight.scale = numbers, scale
        return None


@torch.no_grad()
def sync_scales(gatherings: Sequence[WeightGather]) -> None:
    """Compute the scales of weights that the same processes shard, in one all-reduce.

    Those of all weights that travel in one cast are computed together: a launch for each of a dozen
    operations would cost more than what it computes.
    """
    tensors = [local_tensor(g.parameter) for g in gatherings]
    amaxes = all_reduce_max(amaxes_of(tensors), gatherings[0].shard.groups)
    finite = amaxes.isfinite()
    amaxes = torch.where(finite, amaxes, 0.0)
    for cast in dict.fromkeys(g.cast for g in gatherings):
        encode, decode = fp32_scale(amaxes, cast.element, cast.power_of_two)
        decode = torch.where(finite, decode, torch.nan)
        for gathering, tensor, *scale in zip(gatherings, tensors, encode, decode, strict=True):
            if gathering.cast == cast:
                gathering.scale = scale[0], scale[1]
                gathering.version, gathering.codes = version_of(tensor), None
