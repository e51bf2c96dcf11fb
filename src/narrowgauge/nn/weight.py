"""The weight of a linear layer: its state in a recipe's casts, and its all-gather under FSDP2.

**State.** A parameter whose weight is stored in a cast is a `quantization.NarrowTensor`: other code sees
values, and its record (`quantization.ParamState`), which the layer and the optimizer share, holds codes,
scales, master and gradient. Master and gradient may be in host memory (`offload`).

**Gradient.** Autograd sends the gradient of a weight to the parameter, whichever operation it comes from, and
sums the contributions of one backward pass. The first sum of a step is rounded into the gradient in the
record, with the random bits of the layer's last pass (`collect_gradient`); autograd adds the others to it.

Between the micro-batches of a step, weights do not change and gradients are only summed. `Accumulation` uses
this to save work, without changing values.

**Gather.** Under FSDP2 a parameter is a DTensor, and its local tensor is the shard: a `NarrowTensor` if the
weight is stored in a cast, else an ordinary tensor. FSDP calls two methods of the shard:
`fsdp_pre_all_gather` returns what to send, and `fsdp_post_all_gather` makes the full weight, a
`GatheredWeight`, from what arrived. Both belong to a `WeightGather`. The codes of a weight that is fp32 at
rest equal the full weight's, because their scale comes from the amax over all shards. `sync_scales`
computes the scales of many layers in one all-reduce; a layer whose weight has changed since computes its own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from narrowgauge.formats import decode, torch_dtype
from narrowgauge.kernels.cast import amaxes_of, codes_under
from narrowgauge.kernels.gradient_sum import add_gradient
from narrowgauge.nn.gemm import CODES, Operand
from narrowgauge.quantization import (
    Cast,
    GradientState,
    NarrowTensor,
    ParamState,
    QuantizedState,
    TensorShard,
    ensure_state,
    has_gradient,
    master_or_weight,
    plain_gradient,
    state_of,
)
from narrowgauge.quantization.scales import fp32_scale
from narrowgauge.quantization.state.gradient_state import NarrowGradient
from narrowgauge.quantization.state.narrow_tensor import make_narrow, make_plain
from narrowgauge.quantization.state.parameter_state import (
    NarrowGradParameter,
    attach_state,
    set_plain_gradient,
)
from narrowgauge.quantization.state.proxy import Opened, Proxy
from narrowgauge.system.collectives import all_reduce_max, broadcast_bytes
from narrowgauge.system.errors import UserError
from narrowgauge.system.torch_compat import (
    accept_any_gradient,
    active_ddp,
    attach_fsdp_extension,
    has_hooks,
    is_called_after_accumulation,
    is_view_operation,
    local_tensor,
    version_of,
    wrapper_subclass,
)

_SENT: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()  # wrappers whose masters are sent
aten = torch.ops.aten


class GatheredWeight(Proxy):
    """A full weight (N, K) in its transfer format; its dtype is float32, so that its gradient is float32.

    Attributes:
        elements: uint8 codes, or values in bf16, fp16 or fp32; in memory that FSDP frees and fills again.
        scale: 0-dim float32 factor of the elements, or None for 1.
        cast: the cast of the elements.
        is_operand: whether matmuls use the values unchanged; otherwise they quantize the weight first.
    """

    elements: torch.Tensor
    scale: torch.Tensor | None
    cast: Cast
    is_operand: bool

    @staticmethod
    def __new__(
        cls, elements: torch.Tensor, scale: torch.Tensor | None, cast: Cast, is_operand: bool
    ) -> "GatheredWeight":
        """Make a tensor with the shape of the codes or values."""
        self = wrapper_subclass(cls, elements.shape, elements.stride(), torch.float32, elements.device)
        self.elements, self.scale, self.cast, self.is_operand = elements, scale, cast, is_operand
        return self

    def wide(self) -> torch.Tensor:
        """The weight's values: float32 where it has a scale, else the elements themselves."""
        if self.elements.dtype == torch.uint8:
            assert self.scale is not None
            return decode(self.elements, self.cast.element) * self.scale
        return self.elements if self.scale is None else self.elements.float() * self.scale

    def values(self) -> torch.Tensor:
        """The weight's values, float32."""
        return self.wide().float()

    def _open(self, operation: str, opened: Opened) -> torch.Tensor:
        raise UserError(
            f"{operation} on a weight that FSDP2 has gathered for a pass would be lost: write "
            "to its shards, after reshard() of the FSDP2 module that holds it"
        )

    def operand(self, dtype: torch.dtype, native: bool) -> Operand:
        """The operand of a matmul over the last axis, as `emulate` or (native) `quantize` would make it."""
        if self.scale is None:
            return Operand(self.elements)
        if native:
            return Operand(self.elements, self.scale, form=CODES, cast=self.cast)
        return Operand(decode(self.elements, self.cast.element, dtype), self.scale)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply views to the codes or values, and other operations to the weight in float32."""
        first = args[0] if args else None
        if isinstance(first, GatheredWeight):
            if func is aten.as_strided.default:  # FSDP calls it with the weight's own shape
                assert (tuple(args[1]), tuple(args[2])) == (first.shape, first.stride())
                return GatheredWeight(first.elements, first.scale, first.cast, first.is_operand)
            if is_view_operation(func) and "dtype" not in str(func):
                view = func(first.elements, *args[1:], **(kwargs or {}))
                if isinstance(view, torch.Tensor):  # `split` and the like take the values
                    return GatheredWeight(view, first.scale, first.cast, first.is_operand)
            if func is aten._to_copy.default and first.scale is None and kwargs:
                return func(first.elements, *args[1:], **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and cast only: the memory may have been freed."""
        return f"GatheredWeight({tuple(self.shape)}, {self.cast.name})"


@dataclass(slots=True, eq=False)
class Accumulation:
    """The work that a layer may save between the first and last micro-batch of a step."""

    #: The weight whose existing gradient a backward pass adds to; None leaves it to autograd
    parameter: torch.Tensor | None
    keeps_codes: bool  # whether the codes of the weight are kept from one micro-batch to the next
    keeps_both: bool = False  # whether the operands of a small weight are kept along both axes
    kept: dict[Any, Operand] = field(default_factory=dict)  # the operands that were kept

    def add(self, dw: torch.Tensor, transposed: bool, factor: torch.Tensor | None = None) -> bool:
        """Add to the existing gradient in one pass; False leaves it to autograd. `factor` is 0-dim.

        This reads `dw` in the dtype of the matmul and widens each element exactly before the sum. Autograd
        adds if there is no gradient yet, if a hook needs to see it, or if the sum has a narrower dtype.
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

    def takes_rows(self, ids: torch.Tensor) -> bool:
        """Whether `add_rows` pays: a gradient waits, and there are fewer ids than rows."""
        if self.parameter is None or has_hooks(self.parameter):
            return False
        waiting = self.parameter.grad
        is_plain = type(waiting) is torch.Tensor and waiting.dtype == self.parameter.dtype
        return is_plain and ids.numel() < len(self.parameter)

    def add_rows(self, ids: torch.Tensor, grads: tuple[torch.Tensor]) -> tuple[None]:
        """Add the gradient of an embedding to the existing one, in the rows of its ids alone.

        It is a hook before autograd's node of the rows [..., D] that were looked up, to which it leaves no
        gradient. The rows of equal ids are first summed as `embedding` sums them, into the row of the first.
        Adding the whole gradient, whose other rows are zero, gives the same digits.
        """
        assert self.parameter is not None
        assert self.parameter.grad is not None
        ids_T, dy_TD = ids.flatten(), grads[0].flatten(0, -2)
        count = len(ids_T)
        first_V = torch.full((len(self.parameter),), count, device=ids.device)
        first_V.scatter_reduce_(0, ids_T, torch.arange(count, device=ids.device), "amin")
        sum_TD = aten.embedding_dense_backward(dy_TD, first_V[ids_T], count, -1, False)
        self.parameter.grad.index_add_(0, ids_T, sum_TD)
        return (None,)


@torch.no_grad()
def collect_gradient(parameter: torch.Tensor) -> None:
    """Round the gradient that autograd has accumulated into the record, and leave a `NarrowGradient`."""
    gradient, total = state_of(parameter).gradient, plain_gradient(parameter)
    if gradient is not None and total is not None:
        if gradient.is_held:  # other code has put another gradient in its place, to which autograd has added
            gradient.replace(None)
        add_gradient(gradient, total, gradient.stream)
        _hold(parameter, gradient)


def _hold(parameter: torch.Tensor, gradient: GradientState) -> None:
    """Let autograd add to a gradient in the record of a parameter."""
    set_plain_gradient(parameter, NarrowGradient(parameter, gradient, add_gradient))
    gradient.is_held = True


def make_weight_state(
    parameter: torch.nn.Parameter,
    casts: Mapping[str, Cast | None],
    offload: Collection[str] = (),
    local: torch.Tensor | None = None,
) -> ParamState | None:
    """Store a weight, its master and its gradient in casts, replacing the casts of another recipe.

    Its values are rounded once, from the widest available; it becomes a `NarrowTensor`, or a DTensor of such
    shards. The result is its record; None if weight and gradient are plain fp32.

    Args:
        parameter: The weight.
        casts: The casts of "weight", "master" (None: no master) and "grad".
        offload: The places, of "master" and "grad", that are stored in host memory.
        local: float32, the local values of a parameter that FSDP2 has sharded.
    """
    weight, master, grad = (casts[place] for place in ("weight", "master", "grad"))
    assert weight is not None
    assert grad is not None
    values = master_or_weight(parameter) if local is None else local
    is_plain = weight.name == grad.name == "fp32"
    if is_plain and not state_of(parameter).by_place():
        return None
    state, shape, device = ensure_state(parameter), values.shape, values.device
    state.weight = state.master = state.gradient = None
    if weight.name != "fp32":
        state.weight = QuantizedState(shape, weight, device, shard=state.shard)
    elif isinstance(parameter, NarrowTensor):  # under another recipe
        make_plain(parameter, values)
    if master is not None:
        state.master = QuantizedState(shape, master, device, "master" in offload, state.shard)
    if not values.is_meta:
        state.write(values)
    if not is_plain:
        state.gradient = GradientState(shape, grad, device, "grad" in offload, state.shard)
    bind(parameter, state, is_sharded=local is not None)
    return None if is_plain else state


def bind(parameter: torch.nn.Parameter, state: ParamState, is_sharded: bool) -> None:
    """Attach a record to a parameter, and move it to the parameter's device.

    Call it again after anything that replaces the layer's parameter. The gradient of a parameter that FSDP2
    has sharded is collected elsewhere (`distributed.fsdp`).
    """
    is_blank = is_sharded and parameter.is_meta  # its values are in the record
    for tensor in () if is_blank else state.by_place().values():
        tensor.move(parameter.device)
    attach_state(parameter, state)
    if state.weight is not None and is_sharded == isinstance(parameter, DTensor):
        make_narrow(parameter, state)
    if state.gradient is not None and not is_sharded:
        if type(parameter) is torch.nn.Parameter:
            parameter.__class__ = NarrowGradParameter
        accept_any_gradient(parameter)
        if not is_called_after_accumulation(parameter, collect_gradient):
            requires_grad = parameter.requires_grad  # it may be trained only later
            parameter.requires_grad_().register_post_accumulate_grad_hook(collect_gradient)
            parameter.requires_grad_(requires_grad)
        if has_gradient(parameter) and state.gradient.is_held:
            _hold(parameter, state.gradient)


def send_masters(record: ParamState) -> None:
    """In the first training pass of a DistributedDataParallel, send process 0's masters to all.

    When it wraps a model it sends values alone, of the weights that it does not ignore. Process 0 then keeps
    its masters, because its values stay the same; the other processes have masters of rounded values until
    now. A pass for evaluation sends nothing, because perhaps only one process takes it. In the first training
    pass every process must reach a layer whose weight has a master.
    """
    ddp = None if record.master is None else active_ddp()
    if ddp is None or ddp in _SENT or not (ddp.training or torch.is_grad_enabled()):
        return
    _SENT[ddp] = None
    for name, p in ddp.module.named_parameters():
        master = state_of(p).master
        if master is not None and name not in ddp.parameters_to_ignore:
            master.wait()
            for tensor in master.tensors.values():
                broadcast_bytes(tensor.detach(), ddp.process_group, p.device)


class WeightGather:
    """The all-gather of one layer's weight in a cast.

    Attributes:
        parameter: the sharded parameter.
        at_rest: the state of the shard, if the weight is stored in a cast.
        shard: the position of the shard in the full weight, and the groups that hold the other shards.
        scale: 0-dim float32 (encode, decode) of the last `sync_scales`.
        version: version counter of the shard's tensor when `scale` was computed; -1 before.
        codes: the codes of the shard with that scale, from the first gather after it on; else None. They are
            computed once per step, although the weight is gathered twice per micro-batch.
    """

    def __init__(
        self, cast: Cast, parameter: DTensor, at_rest: QuantizedState | None, shard: TensorShard
    ) -> None:
        self.cast, self.parameter, self.at_rest, self.shard = cast, parameter, at_rest, shard
        self.scale: tuple[torch.Tensor, torch.Tensor] | None = None
        self.version = -1
        self.codes: torch.Tensor | None = None
        if at_rest is None:
            attach_fsdp_extension(local_tensor(parameter), self)
        else:
            state_of(parameter).gathering = self

    @property
    def needs_scale(self) -> bool:
        """Whether the scale depends on all shards; a weight stored in a cast has its scale already."""
        return self.at_rest is None and self.cast.is_scaled

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient of the parameter waits for an optimizer."""
        return self.parameter.grad is not None

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Any]:
        """The codes or values that the shard sends, padded to the longest shard; their scale; the rows."""
        elements, scale = self._elements(local_tensor(self.parameter))
        missing = -(-outer_size[0] // mesh.size()) - len(elements)
        return (pad(elements, (0, 0, 0, missing)) if missing else elements,), (scale, outer_size[0])

    def _elements(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The shard's codes or values, in its shape, and their scale."""
        if self.at_rest is not None:
            if not self.cast.is_scaled and self.at_rest.cast.is_scaled:
                return self.at_rest.read(), None
            elements, *scales = self.at_rest.tensors.values()
            return elements, scales[0] if scales else None
        if not self.cast.is_scaled:
            return shard.to(torch_dtype(self.cast.element)), None
        if self.version != version_of(shard):
            sync_scales([self])
        assert self.scale is not None
        encode, decode = self.scale
        if not shard.numel():
            return shard.to(torch.uint8), decode
        if self.codes is None:
            self.codes = codes_under(shard, self.cast, encode)
        return self.codes, decode

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The gathered weight; if `out` is given, it is updated in place instead."""
        scale, rows = metadata
        elements = outputs[0][:rows]
        if out is None:
            return GatheredWeight(elements, scale, self.cast, self.at_rest is None), ()
        weight = local_tensor(out)
        assert isinstance(weight, GatheredWeight)
        weight.elements, weight.scale = elements, scale
        return None


@torch.no_grad()
def sync_scales(gatherings: Sequence[WeightGather]) -> None:
    """Compute the scales of weights that the same processes shard, in one all-reduce.

    The scales of all weights with one cast are computed together: launching a dozen operations for each
    weight would take longer than the operations.
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
