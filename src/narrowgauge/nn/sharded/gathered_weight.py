"""Weights that are cut over processes (FSDP2) and travel in narrow numbers: the place `gather`.

FSDP asks a shard what to send (`fsdp_pre_all_gather`) and makes of what arrived the whole weight that a layer
computes with (`fsdp_post_all_gather`). Two tensors stand there that look like float32, so that gradients are
float32 whatever travels, and are none:

    Hollow      the shard of a weight at rest in narrow numbers, which lie beside it (`nn.weight_state`)
    Gathered    the whole weight: the codes or values that arrived, and their scale

A weight that is fp32 at rest stays an ordinary shard, which is given the two methods. Its codes are those
that the layer would make of the whole weight, as their one scale comes from the largest magnitude of all
shards: `sync_scales` finds those of many layers in one all-reduce; a layer whose weight has changed since
does so alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from narrowgauge.collectives import all_reduce_amax
from narrowgauge.formats import decode, torch_dtype
from narrowgauge.nn.gemm import Operand
from narrowgauge.nn.native import QuantizedOperand
from narrowgauge.quantization import Cast, QuantContext, QuantizedState, TensorShard, quantize_in_context
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
    """A whole weight as it travelled, (N, K): looks like float32, so that its gradient is.

    Attributes:
        numbers: uint8 codes, or values in bf16, fp16 or fp32; in memory that FSDP frees and fills again.
        scale: 0-dim float32 that they are multiplied by, or None for 1.
        cast: theirs.
        is_operand: whether they are what products see, or a weight at rest of which products make that.
    """

    numbers: torch.Tensor
    scale: torch.Tensor | None
    cast: Cast
    is_operand: bool

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(
        cls, numbers: torch.Tensor, scale: torch.Tensor | None, cast: Cast, is_operand: bool
    ) -> "GatheredWeight":
        """A tensor of the numbers' shape."""
        self = wrapper_subclass(cls, numbers.shape, numbers.stride(), torch.float32, numbers.device)
        self.numbers, self.scale, self.cast, self.is_operand = numbers, scale, cast, is_operand
        return self

    def __init__(self, *_: object) -> None:
        """Nothing more."""

    def wide(self) -> torch.Tensor:
        """The weight: values where it needs no scale, else float32."""
        if self.numbers.dtype == torch.uint8:
            assert self.scale is not None
            return decode(self.numbers, self.cast.element) * self.scale
        return self.numbers if self.scale is None else self.numbers.float() * self.scale

    def operand(self, dtype: torch.dtype, native: bool) -> Operand | QuantizedOperand:
        """What products see, contracting the last axis: as `emulate` or `quantize` would give it."""
        if self.scale is None:
            return Operand(self.numbers)
        if native:
            return QuantizedOperand(self.numbers, self.scale, torch.ones_like(self.scale), self.cast)
        return Operand(decode(self.numbers, self.cast.element, dtype), self.scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views are of the numbers; anything else sees the weight in float32."""
        first = args[0] if args else None
        if isinstance(first, GatheredWeight):
            if func is aten.as_strided.default:  # FSDP's, which asks for the shape that it has
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
        """Without looking at numbers, which may be freed."""
        return f"Gathered({tuple(self.shape)}, {self.cast.name})"


class PlaceholderShard(torch.Tensor):
    """Looks like a float32 tensor, and has no numbers: whatever is done with it gives such a one."""

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, shape: torch.Size, strides: Sequence[int], device: torch.device) -> "PlaceholderShard":
        """A placeholder of a shape."""
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
        found = func(*metas, **named)
        if is_in_place(func):
            return args[0]
        return tree_map_only(torch.Tensor, lambda x: PlaceholderShard(x.shape, x.stride(), device), found)

    def __repr__(self) -> str:  # type: ignore[override]
        """Its shape, which is all it has."""
        return f"Hollow({tuple(self.shape)})"

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Any]:
        """What FSDP is to send, and what the receiver has to know."""
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
        """The whole weight of what arrived."""
        gathering, scale, rows = metadata
        return gathering.post_all_gather(outputs[0][:rows], scale, out)


class WeightGather:
    """How the weight of one layer travels.

    Attributes:
        parameter: the sharded one.
        scale: 0-dim float32 (encode, decode), as last agreed on; `version` is that of the shard it is of.
    """

    def __init__(
        self, cast: Cast, parameter: DTensor, at_rest: QuantizedState | None, part: TensorShard
    ) -> None:
        """In the numbers of a cast; `part` tells whose the other shards are."""
        self.cast, self.parameter, self.at_rest, self.part = cast, parameter, at_rest, part
        self.scale: tuple[torch.Tensor, torch.Tensor] | None = None
        self.version = -1
        shard = local_tensor(parameter)
        if not isinstance(shard, PlaceholderShard):
            attach_fsdp_extension(shard, PlaceholderShard)

    @property
    def needs_scale(self) -> bool:
        """Whether its scale depends on all shards: not that of a weight at rest, which lies beside it."""
        return self.at_rest is None and self.cast.is_scaled

    def pre_all_gather(
        self, shard: torch.Tensor, mesh: DeviceMesh, size: torch.Size
    ) -> tuple[tuple[torch.Tensor], Any]:
        """What a shard of a weight of `size` sends, filled up to the rows that all shards have."""
        numbers, scale = self._numbers(shard)
        missing = -(-size[0] // mesh.size()) - len(numbers)
        return (pad(numbers, (0, 0, 0, missing)) if missing else numbers,), (self, scale, size[0])

    def _numbers(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(numbers, scale) in the shape of the shard."""
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
        return quantize_in_context(shard, self.cast, -1, QuantContext(scale=encode)).codes, decode

    def post_all_gather(
        self, numbers: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """A weight of what arrived, or what arrived into one."""
        if out is None:
            return GatheredWeight(numbers, scale, self.cast, self.at_rest is None), ()
        whole = local_tensor(out)
        assert isinstance(whole, GatheredWeight)
        whole.numbers, whole.scale = numbers, scale
        return None


@torch.no_grad()
def sync_scales(gatherings: Sequence[WeightGather]) -> None:
    """Take the scales of weights whose shards the same processes have, in one all-reduce."""
    shards = [local_tensor(g.parameter) for g in gatherings]
    amax = all_reduce_amax(shards, gatherings[0].part.groups)
    for gathering, shard, largest in zip(gatherings, shards, amax, strict=True):
        finite, cast = largest.isfinite(), gathering.cast
        encode, decode = fp32_scale(torch.where(finite, largest, 0.0), cast.element, cast.power_of_two)
        gathering.scale = encode, torch.where(finite, decode, torch.nan)
        gathering.version = version_of(shard)
