"""Weights that FSDP2 shards over processes and that travel in narrow numbers: the place `gather`.

FSDP calls two methods of a shard: `fsdp_pre_all_gather` returns what to send, `fsdp_post_all_gather` turns
what arrived into the full weight that a layer computes with. Two tensor classes look like float32, so that
gradients are float32 whatever travels, and hold no float32 numbers:

    PlaceholderShard    the shard of a weight that is stored in narrow numbers (`nn.weight_state`)
    GatheredWeight      the full weight: the codes or values that arrived, and their scale

A weight that is stored in fp32 stays an ordinary shard with these two methods. Its codes are those that the
layer would make of the full weight, because their one scale comes from the largest magnitude of all shards:
`sync_scales` finds those of many layers in one all-reduce; a layer whose weight has changed since then finds
its scale alone.
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
    """A full weight (N, K) in the numbers that travelled; it looks like float32, so that its gradient is.

    Attributes:
        numbers: uint8 codes, or values in bf16, fp16 or fp32; in memory that FSDP frees and fills again.
        scale: 0-dim float32 that they are multiplied by, or None for 1.
        cast: Their cast.
        is_operand: Whether products see these numbers; else products narrow them further.
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
        """The weight as values: float32 if it has a scale, else in their dtype."""
        if self.numbers.dtype == torch.uint8:
            assert self.scale is not None
            return decode(self.numbers, self.cast.element) * self.scale
        return self.numbers if self.scale is None else self.numbers.float() * self.scale

    def operand(self, dtype: torch.dtype, native: bool) -> Operand | QuantizedOperand:
        """The operand of a product that contracts the last axis, as from `emulate` or `quantize`."""
        if self.scale is None:
            return Operand(self.numbers)
        if native:
            return QuantizedOperand(self.numbers, self.scale, torch.ones_like(self.scale), self.cast)
        return Operand(decode(self.numbers, self.cast.element, dtype), self.scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply views to the numbers, and anything else to the weight in float32."""
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
        """Shape and cast; the numbers may be freed."""
        return f"GatheredWeight({tuple(self.shape)}, {self.cast.name})"


class PlaceholderShard(torch.Tensor):
    """A tensor that looks like float32 and has no numbers; any operation on it returns another one."""

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
        results = func(*metas, **named)
        if is_in_place(func):
            return args[0]
        return tree_map_only(torch.Tensor, lambda x: PlaceholderShard(x.shape, x.stride(), device), results)

    def __repr__(self) -> str:  # type: ignore[override]
        """The shape, as there are no numbers."""
        return f"PlaceholderShard({tuple(self.shape)})"

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Any]:
        """The tensors that FSDP sends, and the metadata for the receiver."""
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
        """The full weight from what arrived."""
        gathering, scale, rows = metadata
        return gathering.post_all_gather(outputs[0][:rows], scale, out)


class WeightGather:
    """The way in which the weight of one layer travels.

    Attributes:
        cast: The cast on the wire.
        parameter: The sharded parameter.
        stored: Its weight in narrow numbers, if it is stored in such.
        shard: The position of the local shard in the full weight.
        scale: 0-dim float32 (encode, decode), as last agreed on.
        version: The version of the local shard for which `scale` was found.
    """

    def __init__(
        self, cast: Cast, parameter: DTensor, stored: QuantizedState | None, shard: TensorShard
    ) -> None:
        self.cast, self.parameter, self.stored, self.shard = cast, parameter, stored, shard
        self.scale: tuple[torch.Tensor, torch.Tensor] | None = None
        self.version = -1
        local = local_tensor(parameter)
        if not isinstance(local, PlaceholderShard):
            attach_fsdp_extension(local, PlaceholderShard)

    @property
    def needs_scale(self) -> bool:
        """Whether the scale has to be found from all shards; a stored weight has its scale already."""
        return self.stored is None and self.cast.is_scaled

    def pre_all_gather(
        self, local: torch.Tensor, mesh: DeviceMesh, size: torch.Size
    ) -> tuple[tuple[torch.Tensor], Any]:
        """The message of a local shard of a weight of `size`, padded to the rows that all shards have."""
        numbers, scale = self._numbers(local)
        missing = -(-size[0] // mesh.size()) - len(numbers)
        return (pad(numbers, (0, 0, 0, missing)) if missing else numbers,), (self, scale, size[0])

    def _numbers(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(numbers, scale) of the local shard, in its shape."""
        if self.stored is not None:
            if not self.cast.is_scaled and self.stored.cast.is_scaled:
                return self.stored.read(), None
            numbers, *scales = self.stored.tensors.values()
            return numbers, scales[0] if scales else None
        if not self.cast.is_scaled:
            return local.to(torch_dtype(self.cast.element)), None
        if self.version != version_of(local):
            sync_scales([self])
        assert self.scale is not None
        encode, decode = self.scale
        if not local.numel():
            return local.to(torch.uint8), decode
        return quantize_in_context(local, self.cast, -1, QuantContext(scale=encode)).codes, decode

    def post_all_gather(
        self, numbers: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """A new weight from what arrived; or, given `out`, None after putting it there."""
        if out is None:
            return GatheredWeight(numbers, scale, self.cast, self.stored is None), ()
        weight = local_tensor(out)
        assert isinstance(weight, GatheredWeight)
        weight.numbers, weight.scale = numbers, scale
        return None


@torch.no_grad()
def sync_scales(gatherings: Sequence[WeightGather]) -> None:
    """Find the scales of weights that the same processes shard, in one all-reduce."""
    shards = [local_tensor(g.parameter) for g in gatherings]
    amaxes = all_reduce_amax(shards, gatherings[0].shard.groups)
    for gathering, local, amax in zip(gatherings, shards, amaxes, strict=True):
        finite, cast = amax.isfinite(), gathering.cast
        encode, decode = fp32_scale(torch.where(finite, amax, 0.0), cast.element, cast.power_of_two)
        gathering.scale = encode, torch.where(finite, decode, torch.nan)
        gathering.version = version_of(local)
