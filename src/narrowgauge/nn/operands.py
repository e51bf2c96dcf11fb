"""The operands of each GEMM of a linear layer, for one forward pass and its backward pass.

`Operands` turns a matrix into the operand of a place: it finds the cast of the place, the context of the cast
(random bits, delayed scale, kept channels, shard), and applies it. What decides is fixed

    by `convert`     the cast of each place, the dtype of the matmuls, the hardware (`LayerSpec`)
    by a step        random keys, histories of delayed scales
    by a pass        the positions of its tensors in the global ones

It also holds what the layer keeps of its input for the backward pass, the place `saved`:

    input      the tensor as it came, or the operand if wgrad sees the same values as fprop
    operand    the values of fprop.x in the bytes of their format: one byte per element in FP8, half in FP4.
               If wgrad sees the same values (one scale per tensor), nothing else changes; otherwise its
               operand is quantized from these values, a second time
    a cast     the same, in another format than fprop.x's

Where several processes compute a layer together, `LinearShards` says which part this one computes, so that
blocks, scales and random bits are laid out on the global tensors:

    tokens     some tokens of every sequence (sequence and context parallel)
    inputs     some columns of the weight: matmuls give partial sums (row-wise tensor parallel)
    outputs    some rows of the weight (column-wise tensor parallel)

Two functions exchange tokens and sums with the other processes; they are in the room `distributed`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import torch
import torch.distributed as dist

from narrowgauge.formats import RandomStream, unpack
from narrowgauge.kernels import emulate, quantize
from narrowgauge.kernels.cast import emulate_rows, random_signs
from narrowgauge.kernels.gradient_sum import through_rounding
from narrowgauge.nn.gemm import (
    CODES,
    NATIVE,
    ROWS,
    VALUES,
    Operand,
    Restore,
    Tensors,
    quantized_operand,
    tiled_operand,
)
from narrowgauge.nn.histories import AmaxHistory, ChannelChoice, HeldAmax, History
from narrowgauge.nn.weight import Accumulation, GatheredWeight
from narrowgauge.quantization import (
    DEFAULT_CONTEXT,
    Cast,
    NarrowTensor,
    ParamState,
    QTensor,
    QuantContext,
    ShardAxis,
    TensorShard,
    full_axis,
    local_channels,
)
from narrowgauge.quantization import cast as named_cast
from narrowgauge.quantization.passes.implementations import ROW_PLACES, rows_gap
from narrowgauge.recipes.places import CHOOSES, GEMM_PLACES, GEMMS
from narrowgauge.recipes.recipe_rules import have_equal_values, reuses
from narrowgauge.system.torch_compat import is_accumulated

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Elements; copying the codes of such a weight to the other axis takes little longer than the launch itself.
_SMALL_WEIGHT = 10**7
_WIDE = {dtype: named_cast(name) for name, dtype in DTYPES.items()}
WIDE = "wide"  # the form of an operand that is the tensor itself, in the dtype of the matmul
OBSERVED = 64  # rows of a matmul that an observer recomputes in float32
Exchange = Callable[[torch.Tensor], torch.Tensor]


def evenly(t: torch.Tensor) -> torch.Tensor:
    """A view of `OBSERVED` evenly spaced rows of a matrix, from the first; of all if it has fewer."""
    return t[:: max(1, t.shape[0] // OBSERVED)][:OBSERVED]


@dataclass(frozen=True, slots=True)
class Observation:
    """A matrix, and the operand that a GEMM sees."""

    place: str  # the place in the recipe, such as "fprop.x"
    x: torch.Tensor  # the matrix as it came, in high precision
    values: torch.Tensor  # the values that the GEMM sees, scale applied
    cast: Cast  # of the place
    axis: int  # the axis that the GEMM contracts
    context: QuantContext  # the context under which the cast was applied


class Observer(Protocol):
    """The interface of a layer observer: it sees each operand and result of the three GEMMs."""

    def operand(self, observation: Observation) -> None:
        """Observe an operand."""

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Observe a result and its operands in high precision; R is M, or the rows that `evenly` picks."""


@dataclass(frozen=True)
class EqualShare:
    """One of `count` equal shares of what processes hold: of each sequence's tokens, or of all heads."""

    index: int = 0
    count: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()  # the process groups that hold the other shares

    def axis(self, samples: int, local: int) -> ShardAxis:
        """The axis of the tokens of `samples` concatenated sequences; `local` of each are on this rank."""
        length = local * self.count
        segments = tuple((b * length + self.index * local, local) for b in range(samples))
        return ShardAxis(samples * length, segments, self.groups)


@dataclass(frozen=True)
class LinearShards:
    """The sharding of one layer; None for a dimension that is not sharded.

    An expert computes tokens of the sequences of `pool` processes. Their n-th micro-batches are concatenated
    into one, so that its random bits are those of one process with `pool` times as many sequences in each.
    """

    tokens: EqualShare | None = None  # the shard of the tokens
    inputs: ShardAxis | None = None  # the shard of the weight's columns
    outputs: ShardAxis | None = None  # the shard of the weight's rows
    before: Exchange | None = None  # computes the input of the matmuls from the layer's input
    after: Exchange | None = None  # computes the layer's output, still without bias, from the matmul's result
    pool: int = 1  # the processes of whose sequences the layer computes tokens
    #: The first of their sequences in a pass, less `pool` times the first of this process's
    pool_offset: int = 0
    is_whole: bool = field(init=False, compare=False)  # whether this process computes the layer alone

    def __post_init__(self) -> None:
        parts = (self.tokens, self.inputs, self.outputs, self.before, self.after)
        # Not computed at first use, which compiled code would take for a change of the layer.
        object.__setattr__(self, "is_whole", self.pool == 1 and all(part is None for part in parts))

    def tensor_shards(self, samples: int, m: int, n: int, k: int) -> dict[str, TensorShard]:
        """The shards of x (M, K), w (N, K) and dy (M, N), M tokens of `samples` sequences; full ones are left
        out."""
        if self.tokens is None and self.inputs is None and self.outputs is None:
            return {}
        M = full_axis(m) if self.tokens is None else self.tokens.axis(samples, m // samples)
        N, K = self.outputs or full_axis(n), self.inputs or full_axis(k)
        shards = {"x": TensorShard((M, K)), "w": TensorShard((N, K)), "dy": TensorShard((M, N))}
        return {name: shard for name, shard in shards.items() if not shard.is_full}


@dataclass(slots=True, eq=False)
class LayerSpec:
    """How a layer computes; it is never changed, but replaced."""

    casts: Mapping[str, Cast]  #: by GEMM place; rules that wait for a step change it
    compute: torch.dtype  #: of matmuls, and of everything that is not narrow
    saved: str | Cast = "input"  #: what is kept of the input for the backward pass
    native: bool = False  #: whether narrow operands stay codes, for the hardware to multiply
    transposed: bool = False  #: whether the weight is stored (K, N)
    #: The form of each place's operand: `CODES`, in tiles where a kernel lays them out; `ROWS`, where the row
    #: kernel supports the tensor; `VALUES`; or `WIDE`.
    forms: Mapping[str, str] = field(init=False)
    #: Whether wgrad reuses the operand of x of the forward pass, or something made from it.
    reuses_x: bool = field(init=False)
    #: The same for dgrad and the weight.
    reuses_w: bool = field(init=False)
    #: Whether dgrad and wgrad see the same values of dy.
    shares_dy: bool = field(init=False)
    #: Whether no place rounds to anything but `compute`, so that torch's matmuls have the same values.
    is_wide: bool = field(init=False)

    def __post_init__(self) -> None:
        casts, wide = self.casts, _WIDE.get(self.compute)
        self.forms = {place: self._form(place, cast) for place, cast in casts.items()}
        self.reuses_x, self.reuses_w = (reuses(place, casts, self.saved) for place in ("wgrad.x", "dgrad.w"))
        self.shares_dy = have_equal_values(casts, "dgrad.dy", "wgrad.dy")
        self.is_wide = isinstance(self.saved, str) and all(cast == wide for cast in casts.values())

    def _form(self, place: str, cast: Cast) -> str:
        if self.native and cast.is_scaled:
            return CODES
        if cast == _WIDE.get(self.compute):
            return WIDE
        has_rows = self.compute == torch.bfloat16 and place in ROW_PLACES and not rows_gap(cast)
        return ROWS if has_rows else VALUES


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """The operands of the three GEMMs of one forward and backward pass."""

    layer: LayerSpec
    is_training: bool = False  #: whether a backward pass will follow, so that histories are updated
    #: int32 [10, 2], the keys of the step's streams (`Linear._stream_ids`); None if no cast is random
    keys: torch.Tensor | None = None
    first_sample: int | torch.Tensor = 0  #: the index in the global batch of the first sequence of this pass
    histories: Mapping[str, History] = field(default_factory=dict)  #: what places remember of earlier steps
    num_samples: int | Fraction = 1  #: sequences in x and dy
    shards: Mapping[str, TensorShard] = field(default_factory=dict)  #: by "x", "w", "dy"; only real shards
    record: ParamState | None = None  #: of a weight that is not sharded; None for a plain weight
    accumulation: Accumulation | None = None  #: what micro-batches share; None outside `accumulating`
    observer: Observer | None = None  #: sees every operand and result
    input_amax: torch.Tensor | None = None  #: max |x|, if the kernel that wrote the input has computed it

    def of(
        self,
        tensor: torch.Tensor,
        place: str,
        axis: int,
        both: bool = False,
        amax: torch.Tensor | None = None,
    ) -> Operand:
        """The operand that the GEMM of `place` sees of a matrix whose `axis` (-1 or 0) it contracts.

        `both`: whether the same values are also contracted along the other axis. `amax`: max |tensor|, 0-dim
        fp32, if it is known.
        """
        form, compute = self.layer.forms[place], self.layer.compute
        if isinstance(tensor, GatheredWeight):  # it arrived in these values, so this cast adds no noise
            operand = tensor.operand(compute, self.layer.native)
            return operand if axis == -1 else operand.transposed()
        if form == WIDE and self.observer is None:
            operand = Operand(tensor.to(compute))
            return operand if axis == -1 else operand.transposed()
        cast, context = self.layer.casts[place], self.quant_context(tensor, place, amax)
        values: Callable[[], torch.Tensor]
        if form == CODES:
            in_tiles = tiled_operand(tensor, cast, axis, context) if self.observer is None else None
            if in_tiles is not None:
                return in_tiles
            q, other_codes = quantize(tensor, cast, axis, context, both)
            operand, values = quantized_operand(q, axis, other_codes), q.dequantize
        else:
            parts = emulate_rows(tensor, cast, context) if form == ROWS else None
            if parts is None:
                found = Operand(*emulate(tensor, cast, axis, compute, context))
            else:
                found = Operand(*parts, form=ROWS)
            operand, values = found if axis == -1 else found.transposed(), found.values
        if self.observer is not None:
            self.observer.operand(Observation(place, tensor, values(), cast, axis, context))
        return operand

    def of_weight(self, w_NK: torch.Tensor, place: str, axis: int, both: bool = False) -> Operand:
        """`of` for the weight whose parameter is `w_NK`.

        Its codes are computed once per step if that is allowed, and if they are the same in each micro-batch.
        They are then kept along one axis only, except the operands of a small weight if memory is not short.
        """
        cast, kept = self.layer.casts[place], self.accumulation
        is_same = not (cast.is_random or cast.signs == "random" or cast.refresh)
        is_codes = self.layer.forms[place] == CODES and not isinstance(w_NK, GatheredWeight)
        if kept is None or not kept.keeps_codes or not is_same or not is_codes or self.observer is not None:
            return self.of(weight_values(w_NK), place, axis, both)
        both = both and kept.keeps_both and w_NK.numel() <= _SMALL_WEIGHT
        key = place, axis, self.is_training  # a history sees the weight in the first training pass
        if key not in kept.kept:
            kept.kept[key] = self.of(weight_values(w_NK), place, axis, both)
        return kept.kept[key]

    def requantized(self, operand: Operand, place: str) -> Operand:
        """The operand of a place that reuses another place's `operand`, contracted along the other axis.

        If the cast of the place has scales, the values are rounded once more.
        """
        if not self.layer.casts[place].is_scaled or not self.layer.casts[place].of:
            return operand.transposed()
        assert operand.form not in NATIVE  # such a matmul has no native scheme
        return self.of(operand.values(), place, 0)

    def shard(self, place: str) -> TensorShard | None:
        """The shard of a place's tensor; None if this process holds all of it."""
        return self.shards.get(place.partition(".")[2])

    def quant_context(
        self, tensor: torch.Tensor, place: str, amax: torch.Tensor | None = None
    ) -> QuantContext:
        """The context of a place's cast; the cast updates a history with the tensor (repeats do no harm)."""
        cast, shard, held, scale, seen = self.layer.casts[place], self.shard(place), None, None, None
        if cast.history or cast.refresh:
            history = self.histories[place]
            assert isinstance(history, AmaxHistory)
            seen = history.amax if self.is_training else None
            if isinstance(history, HeldAmax):
                held = history.current()
            else:
                scale = history.scale
        channels = self.kept_channels(place) if cast.keep_channels else None
        stream = signs = None
        if cast.signs == "random":  # the same for both operands of a GEMM
            assert self.keys is not None
            gemm = GEMMS.index(place.partition(".")[0])
            signs = random_signs(self.keys[len(GEMM_PLACES) + gemm], cast.hadamard)
        if cast.is_random:
            assert self.keys is not None
            elements = tensor.numel() if shard is None else shard.shape.numel()
            # A weight's bits are the same in every part of the batch.
            offset = 0 if place.endswith(".w") else self.first_sample * (elements // self.num_samples)
            stream = RandomStream(self.keys[GEMM_PLACES.index(place)], offset)
        return QuantContext(stream, signs, scale, shard, held, seen, channels, amax=amax)

    def kept_channels(self, place: str) -> torch.Tensor:
        """The channels that the layer keeps in another cast, of those that a place's tensor has."""
        choice = self.histories[CHOOSES]
        assert isinstance(choice, ChannelChoice)
        return local_channels(choice.chosen, self.shard(place))

    def choose_channels(self, x_MK: torch.Tensor) -> None:
        """Let the layer's choice of kept channels see its input, once per pass that has a backward pass."""
        choice = self.histories.get(CHOOSES)
        is_wanted = self.is_training and self.layer.casts[CHOOSES].keep_channels
        if is_wanted and isinstance(choice, ChannelChoice):
            choice.update(x_MK, self.shard(CHOOSES))

    def reuses_weight(self, w_NK: torch.Tensor) -> bool:
        """Whether the backward pass uses the weight's operand; a gathered one is gathered again instead."""
        return self.layer.reuses_w and not isinstance(w_NK, GatheredWeight)

    def weight_gradient(
        self, dw_NK: torch.Tensor, w_NK: torch.Tensor, dtype: torch.dtype, node: Any
    ) -> torch.Tensor | None:
        """What autograd carries to the weight's `node` (None in compiled code) of a matmul's result.

        None if it was added to a gradient that waits for more. Otherwise it has the weight's dtype, or stays
        as it is if only the layer reads the weight, so that it is summed with nothing of another dtype.
        """
        cast, record = self.layer.casts["fprop.w"], self.record
        if cast.estimator_k:
            context = QuantContext(shard=self.shard("fprop.w"))
            dw_NK = through_rounding(dw_NK, weight_values(w_NK), cast, context)
        if record is None or record.gradient is None:
            is_added = self.accumulation is not None and self.accumulation.add(dw_NK, self.layer.transposed)
            return None if is_added else dw_NK.to(dtype)
        shard, stream = self.shard("fprop.w"), None
        if self.keys is not None:
            elements = dw_NK.numel() if shard is None else shard.shape.numel()
            stream = RandomStream(self.keys[-1], self.first_sample * elements)
        record.gradient.stream = stream
        is_alone = record.weight is not None and not record.reads and not self.layer.transposed
        is_wide = is_alone and torch.finfo(dw_NK.dtype).bits > record.gradient.cast.element.bits
        return dw_NK if is_wide and node and is_accumulated(node) else dw_NK.to(dtype)


def weight_values(w_NK: torch.Tensor) -> torch.Tensor:
    """The values of a weight, in the dtype that stores them."""
    if isinstance(w_NK, GatheredWeight):
        return w_NK if w_NK.is_operand else w_NK.wide()
    return w_NK.stored_values() if isinstance(w_NK, NarrowTensor) else w_NK


def keep_input(x_MK: torch.Tensor, operand: Operand, operands: Operands) -> tuple[Tensors, Restore]:
    """Keep a layer's input; `operand` is what fprop used."""
    layer, amax = operands.layer, operands.input_amax
    saved, fprop, is_operand = layer.saved, layer.casts["fprop.x"], layer.saved == "operand"
    if layer.reuses_x:
        is_wider = bool(layer.casts["wgrad.x"].of) or (fprop.block is None and operand.form == VALUES)
        if not (is_operand and fprop.is_scaled and is_wider):
            return operand.kept()
    elif saved == "input":
        return Operand(x_MK).kept()
    cast, dtype = fprop if isinstance(saved, str) else saved, layer.compute if layer.reuses_x else x_MK.dtype
    if not cast.is_scaled:
        return Operand(emulate(x_MK, cast, -1, layer.compute)[0]).kept()
    if is_operand:
        context = operands.quant_context(x_MK, "fprop.x", amax)
    else:
        context = QuantContext(shard=operands.shard("fprop.x"), amax=amax)
    q, _ = quantize(x_MK, cast, -1, context)
    if operands.observer is not None and not is_operand:
        operands.observer.operand(Observation("saved", x_MK, q.dequantize(), cast, -1, DEFAULT_CONTEXT))
    blocks, width, reuses_x = q.blocks, q.codes.shape[-1], layer.reuses_x

    def restore(packed: torch.Tensor, scales: torch.Tensor, _: None, outer: Any) -> Operand:
        found = QTensor(unpack(packed, cast.element, width), scales, None, outer, cast, blocks)
        return Operand(*found.operand(dtype)) if reuses_x else Operand(found.dequantize(dtype))

    outer = None if reuses_x and cast.block is None else q.tensor_scale  # an operand of one block has one
    return (q.packed(), q.scales, None, outer), restore
