"""The weight of a linear layer: its state in a recipe's casts, and how FSDP2 sends it between processes.

**State.** The parameter stays a parameter under its own name, in the dtype of its elements (bf16, fp16, FP8),
and its memory is the first tensor of the narrow weight. Weight, master and gradient are in the parameter's
record (`quantization.ParamState`), where the optimizer finds them, and the layer holds the same record: torch
copies a parameter without its attributes, and FSDP2 puts other parameters in its place. Master and gradient
may be in the host's memory (`offload`).

While the micro-batches of one step follow each other, weights do not change and gradients are only summed.
`Accumulation` is what a layer makes of that; the values are the same as without it.

**Gather.** FSDP calls two methods of a shard: `fsdp_pre_all_gather` returns what to send, and
`fsdp_post_all_gather` makes the full weight from what arrived. Two tensor subclasses claim the dtype float32,
so that gradients are float32 whatever travels, but hold no float32 values:

    PlaceholderShard    the shard of a weight whose narrow values are in its record
    GatheredWeight      the full weight: the codes or values that arrived, and their scale

A weight that is fp32 at rest stays an ordinary shard, with these two methods attached. Its codes are those of
the full weight, because their one scale comes from the largest magnitude of all shards. `sync_scales`
computes the scales of many layers in one all-reduce; a layer whose weight has changed since does so alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from narrowgauge.collectives import all_reduce_max
from narrowgauge.formats import RandomStream, decode, torch_dtype
from narrowgauge.kernels.cast import amaxes_of, codes_under
from narrowgauge.kernels.gradient_sum import add_gradient
from narrowgauge.nn.gemm import Operand, QuantizedOperand
from narrowgauge.nn.loop_checks import refuse_other_optimizers
from narrowgauge.quantization import (
    Cast,
    GradientState,
    ParamState,
    QuantizedState,
    TensorShard,
    ensure_state,
    master_or_weight,
    state_of,
)
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.quantization.state.parameter_state import NarrowGradParameter, attach_state
from narrowgauge.torch_compat import (
    attach_fsdp_extension,
    disabled_torch_function,
    has_hooks,
    is_in_place,
    local_tensor,
    tree_leaves,
    tree_map_only,
    version_of,
    wrapper_subclass,
)

T = TypeVar("T")
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
        is_operand: whether matmuls take the values as they are; else they quantize the weight first.
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


@dataclass(slots=True, eq=False)
class Accumulation:
    """What a layer may do between the first and the last micro-batch of a step.

    Attributes:
        parameter: The weight to whose waiting gradient a backward pass adds; None leaves it to autograd.
        keeps_codes: Whether the codes of the weight are kept from one micro-batch to the next.
        keeps_both: Whether those of a small weight are kept along both axes.
        kept: The operands that were kept.
    """

    parameter: torch.nn.Parameter | None
    keeps_codes: bool
    keeps_both: bool = False
    kept: dict[Any, Any] = field(default_factory=dict)

    def add(self, dw: torch.Tensor, transposed: bool, factor: torch.Tensor | None = None) -> bool:
        """Add to the gradient that waits, in one pass; False leaves it to autograd. `factor` is 0-dim.

        It reads `dw` as the product wrote it and widens each element, exactly, before the sum. Autograd adds
        where no gradient waits yet, where a hook sees it, and where the sum is in a narrower dtype.
        """
        waiting = None if self.parameter is None else self.parameter.grad
        if self.parameter is None or waiting is None or has_hooks(self.parameter):
            return False
        if torch.promote_types(waiting.dtype, dw.dtype) != waiting.dtype:
            return False
        dw = dw.T if transposed else dw
        if factor is None:
            waiting.add_(dw)
        else:
            waiting.addcmul_(dw, factor)
        return True

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returns, from the first call with this key on."""
        if key not in self.kept:
            self.kept[key] = make()
        made: T = self.kept[key]
        return made


@dataclass(frozen=True, slots=True, eq=False)
class WeightUse:
    """The weight in one pass of a layer: where its values come from, and where its gradient goes.

    Attributes:
        transposed: Whether the weight is stored (K, N).
        state: The weight's record, if the weight or its gradient is narrow, and not sharded.
        accumulation: What is the same in all micro-batches of a step; None outside of `accumulating`.
    """

    transposed: bool = False
    state: ParamState | None = None
    accumulation: Accumulation | None = None

    @property
    def has_narrow_gradient(self) -> bool:
        """Whether the gradient is kept in a cast, and added by this layer."""
        return self.state is not None and self.state.gradient is not None

    def values(self, w_NK: torch.Tensor) -> torch.Tensor:
        """The values of a weight whose parameter is `w_NK`, in whatever dtype holds them."""
        if isinstance(w_NK, GatheredWeight):
            return w_NK if w_NK.is_operand else w_NK.wide()
        narrow = None if self.state is None else self.state.weight
        if narrow is None or not narrow.cast.is_scaled:  # the parameter holds the values
            return w_NK
        w = narrow.read()
        return w.T if self.transposed else w

    def add_gradient(self, dw_NK: torch.Tensor, stream: RandomStream | None) -> bool:
        """Add to a narrow gradient (with random bits) or to one that waits; False leaves it to autograd."""
        if self.state is None or self.state.gradient is None:
            return self.accumulation is not None and self.accumulation.add(dw_NK, self.transposed)
        add_gradient(self.state.gradient, dw_NK.T if self.transposed else dw_NK, stream)
        return True


def make_weight_state(
    parameter: torch.nn.Parameter,
    casts: Mapping[str, Cast | None],
    offload: Collection[str] = (),
    local: torch.Tensor | None = None,
) -> ParamState | None:
    """Keep a weight, its master and its gradient in casts, in place of those of another recipe.

    Args:
        parameter: The weight. Its numbers are rounded once, from the widest that exist. It then holds the
            narrow numbers, unless `local` is given.
        casts: The casts of "weight", "master" (None: no master) and "grad".
        offload: Those of "master" and "grad" that are kept in the host's memory.
        local: float32, the local numbers of a parameter that FSDP2 has sharded, which holds none itself.

    Returns:
        The parameter's record; None if weight and gradient are plain fp32 and nothing is kept in casts.
    """
    weight, master, grad = (casts[place] for place in ("weight", "master", "grad"))
    assert weight is not None
    assert grad is not None
    numbers = master_or_weight(parameter) if local is None else local
    if local is None and state_of(parameter).weight is not None:  # it was under another recipe
        parameter.data = numbers
    is_plain = weight.name == grad.name == "fp32"
    if is_plain and not state_of(parameter).by_place():
        return None
    state, shape, device = ensure_state(parameter), numbers.shape, parameter.device
    state.weight = state.master = state.gradient = None
    if weight.name != "fp32":
        state.weight = QuantizedState(shape, weight, device, shard=state.shard)
    if master is not None:
        state.master = QuantizedState(shape, master, device, "master" in offload, state.shard)
    if not numbers.is_meta:
        state.write(numbers)
    if not is_plain:
        state.gradient = GradientState(shape, grad, device, "grad" in offload, state.shard)
    bind(parameter, state, is_sharded=local is not None)
    return None if is_plain else state


def bind(parameter: torch.nn.Parameter, state: ParamState, is_sharded: bool) -> None:
    """Attach a record to a parameter, move it to the parameter's device, and share the weight's memory.

    This is needed again after anything that gave the parameter new memory, or the layer another parameter. A
    parameter that FSDP2 has sharded shares no memory with the narrow weight.
    """
    attach_state(parameter, state)
    if state.gradient is not None and type(parameter) is torch.nn.Parameter:  # none that FSDP2 has sharded
        parameter.__class__ = NarrowGradParameter
    if state.weight is not None:
        refuse_other_optimizers()
    for tensor in state.by_place().values():
        tensor.move(parameter.device)
    if state.weight is not None and not is_sharded:
        stored = next(iter(state.weight.tensors.values()))
        parameter.data = stored.view(torch_dtype(state.weight.cast.element) or stored.dtype)
        state.version = version_of(parameter)


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
        encode, decode = fp32_scale(amaxes, cast.element, cast.scales.power_of_two)
        decode = torch.where(finite, decode, torch.nan)
        for gathering, tensor, *scale in zip(gatherings, tensors, encode, decode, strict=True):
            if gathering.cast == cast:
                gathering.scale = scale[0], scale[1]
                gathering.version, gathering.codes = version_of(tensor), None
