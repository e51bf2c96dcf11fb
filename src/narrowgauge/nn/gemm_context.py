"""The context of the three GEMMs of one layer, and the operands that they see.

A `GemmContext` is made for every forward pass and goes with it to the backward pass. It joins three records:

    LayerSpec    fixed by `convert`: the cast of each place, the dtype of products, the hardware
    StepState    fixed by a step: random keys, histories of delayed scales
    shards       the positions of this pass's tensors in the global ones
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.kernels import emulate, quantize
from narrowgauge.kernels.amax import DelayedScale, amax_of_gradient
from narrowgauge.kernels.cast import emulate_rows
from narrowgauge.kernels.gradient_sum import add_gradient
from narrowgauge.nn.gemm import AnyOperand, Operand, RowOperand, multiply
from narrowgauge.nn.histories import AmaxHistory, ChannelChoice, HeldAmax
from narrowgauge.nn.native import QuantizedOperand, quantized_operand
from narrowgauge.nn.observer import Observation, Observer
from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.nn.step_state import StepState
from narrowgauge.nn.weight_state import Accumulation
from narrowgauge.quantization import Cast, ParamState, QuantContext, TensorShard, kept_count, local_channels
from narrowgauge.quantization import cast as named_cast
from narrowgauge.recipes.kept_channels import CHOOSES, MEETS
from narrowgauge.recipes.places import have_same_numbers, reuses

#: Elements; to copy the codes of such a weight to the other axis takes little more than the launch itself.
_SMALL_WEIGHT = 10**7


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """How a layer computes."""

    casts: Mapping[str, Cast]  #: by GEMM place; rules that wait for a step change it
    compute: torch.dtype  #: of products, and of everything that is not narrow
    saved: str | Cast = "input"  #: what is kept of the input for the backward pass (`saved.py`)
    native: bool = False  #: whether narrow operands stay codes, for the hardware to multiply
    transposed: bool = False  #: whether the weight is stored (K, N)


@dataclass(frozen=True, slots=True, eq=False)
class GemmContext:
    """All that the GEMMs of one forward and backward pass need in addition to x, w and dy."""

    layer: LayerSpec
    step: StepState = field(default_factory=StepState)
    num_samples: int | Fraction = 1  #: sequences in x and dy
    shards: Mapping[str, TensorShard] = field(default_factory=dict)  #: by "x", "w", "dy"; only real shards
    weight: ParamState | None = None  #: if the weight or its gradient is narrow, and not sharded
    observer: Observer | None = None  #: sees every operand and product
    accumulation: Accumulation | None = None  #: between the micro-batches of a step
    input_amax: torch.Tensor | None = None  #: max |x|, where the kernel that wrote the input has found it

    def shard(self, place: str) -> TensorShard | None:
        """The shard that the tensor of a place is; None if this process holds all of it."""
        return self.shards.get(place.partition(".")[2])

    def shared(self, a: str, b: str) -> bool:
        """Whether two places see the same numbers of the same tensor, whatever the axis."""
        return have_same_numbers(self.layer.casts, a, b)

    @property
    def reuses_x(self) -> bool:
        """Whether wgrad sees the operand of the forward pass, or something made from it."""
        return reuses("wgrad.x", self.layer.casts, self.layer.saved)

    @property
    def reuses_w(self) -> bool:
        """Whether dgrad sees the weight's operand of the forward pass, or something made from it."""
        return reuses("dgrad.w", self.layer.casts, self.layer.saved)

    def again(self, operand: AnyOperand, place: str) -> AnyOperand:
        """The operand of a place that takes the numbers of another one, contracted along the other axis.

        Args:
            operand: The operand of that other place.
            place: The place. Where its cast has scales, the numbers are rounded once more.
        """
        if not self.layer.casts[place].is_scaled or not self.layer.casts[place].of:
            return operand.transposed()
        assert not isinstance(operand, QuantizedOperand)  # such a product has no native scheme
        return self.operand(operand.numbers(), place, 0)

    def operand(
        self,
        tensor: torch.Tensor,
        place: str,
        axis: int,
        both: bool = False,
        amax: torch.Tensor | None = None,
    ) -> AnyOperand:
        """The operand that the GEMM of `place` sees of a matrix whose `axis` (-1 or 0) it contracts.

        With `both` the same values are also contracted along the other axis. `amax`: max |tensor|, if known.
        """
        if isinstance(tensor, GatheredWeight):  # it travelled in these numbers: there is no loss to gauge
            gathered = tensor.operand(self.layer.compute, self.layer.native)
            return gathered if axis == -1 else gathered.transposed()
        cast, context = self.layer.casts[place], self.quant_context(tensor, place, amax)
        if self.layer.native and cast.is_scaled:
            q, other_codes = quantize(tensor, cast, axis, context, both)
            if self.observer is not None:
                observed = Observation(place, tensor, q.dequantize(), None, cast, axis, context)
                self.observer.operand(observed)
            return quantized_operand(q, axis, other_codes)
        has_rows = place in ("fprop.x", "fprop.w") and self.layer.compute == torch.bfloat16  # both operands
        parts = emulate_rows(tensor, cast, context) if has_rows else None
        if parts is not None:
            rows = RowOperand(*parts)
            if self.observer is not None:
                self.observer.operand(Observation(place, tensor, rows.numbers(), None, cast, axis, context))
            return rows
        operand = Operand(*emulate(tensor, cast, axis, self.layer.compute, context))
        if self.observer is not None:
            self.observer.operand(Observation(place, tensor, *operand, cast, axis, context))
        return operand if axis == -1 else operand.transposed()

    def weight_operand(self, w_NK: torch.Tensor, place: str, axis: int, both: bool = False) -> AnyOperand:
        """`operand` of the weight whose parameter is `w_NK`; its codes are made once a step where that is
        allowed, and where they are the same in each micro-batch. They are then kept along one axis only,
        except those of a small one where memory is not short."""
        cast, kept = self.layer.casts[place], self.accumulation
        is_same = not (cast.is_random or cast.signs == "random" or cast.refresh)
        is_codes = self.layer.native and cast.is_scaled and not isinstance(w_NK, GatheredWeight)
        if kept is None or not kept.keeps_codes or not is_same or not is_codes or self.observer is not None:
            return self.operand(self.numbers_of(w_NK), place, axis, both)
        both = both and kept.keeps_both and w_NK.numel() <= _SMALL_WEIGHT
        key = place, axis, self.step.is_training  # a history sees the weight in the first training pass
        return kept.once(key, lambda: self.operand(self.numbers_of(w_NK), place, axis, both))

    def numbers_of(self, w_NK: torch.Tensor) -> torch.Tensor:
        """The numbers of a weight whose parameter is `w_NK`, in whatever dtype holds them."""
        if isinstance(w_NK, GatheredWeight):
            return w_NK if w_NK.is_operand else w_NK.wide()
        narrow = None if self.weight is None else self.weight.weight
        if narrow is None or not narrow.cast.is_scaled:  # the parameter holds the numbers
            return w_NK
        w = narrow.read()
        return w.T if self.layer.transposed else w

    def add_gradient(self, dw_NK: torch.Tensor) -> bool:
        """Add to a narrow gradient, or to one that waits; False if autograd has to add."""
        if self.weight is None or self.weight.gradient is None:
            return self.accumulation is not None and self.accumulation.add(dw_NK, self.layer.transposed)
        stream = self.step.gradient_stream(self._elements("fprop.w", dw_NK))
        add_gradient(self.weight.gradient, dw_NK.T if self.layer.transposed else dw_NK, stream)
        return True

    def stream(self, tensor: torch.Tensor, place: str) -> RandomStream | None:
        """The random bits of a place's cast, if it is random."""
        if not self.layer.casts[place].is_random:
            return None
        return self.step.operand_stream(place, self._elements(place, tensor) // self.num_samples)

    def quant_context(
        self, tensor: torch.Tensor, place: str, amax: torch.Tensor | None = None
    ) -> QuantContext:
        """The context of a place's cast; the cast updates a history with the tensor (again does no harm)."""
        cast, step, held = self.layer.casts[place], self.step, None
        scale, seen = self.delayed_scale(place)
        if cast.refresh:
            history = step.histories[place]
            assert isinstance(history, HeldAmax)
            held = history.current()
        signs = step.signs(place, cast.hadamard) if cast.signs == "random" else None
        channels = self.kept_channels(place) if cast.keep_channels else None
        stream, shard = self.stream(tensor, place), self.shard(place)
        return QuantContext(stream, signs, scale, shard, held, seen, channels, amax=amax)

    def delayed_scale(self, place: str) -> DelayedScale:
        """The scale that a place's history gives, and its largest magnitude, which a training pass raises.

        A held magnitude gives no scale.
        """
        cast = self.layer.casts[place]
        if not (cast.history or cast.refresh):
            return DelayedScale(None, None)
        history = self.step.histories[place]
        assert isinstance(history, AmaxHistory)
        scale = history.scale if cast.history else None
        return DelayedScale(scale, history.amax if self.step.is_training else None)

    def see_input(self, x_MK: torch.Tensor) -> None:
        """Let the layer's choice of kept channels see its input, once a pass that a backward pass follows."""
        choice = self.step.histories.get(CHOOSES)
        is_wanted = self.step.is_training and self.layer.casts[CHOOSES].keep_channels
        if is_wanted and isinstance(choice, ChannelChoice):
            choice.update(x_MK, self.shard(CHOOSES))

    def kept_channels(self, place: str) -> torch.Tensor:
        """The channels that the layer keeps in another cast, of those that a place's tensor has."""
        choice = self.step.histories[CHOOSES]
        assert isinstance(choice, ChannelChoice)
        return local_channels(choice.chosen, self.shard(place))

    def with_kept(
        self, dw_NK: torch.Tensor, dy_MN: torch.Tensor, x: AnyOperand, dtype: torch.dtype
    ) -> torch.Tensor:
        """The weight's gradient, its kept channels from operands in their cast.

        There x is in that cast, too, and not transformed, so that it meets dy neither narrow nor transformed.

        Args:
            dw_NK: The product of wgrad's operands, changed in place.
            dy_MN: The output gradient.
            x: The operand of wgrad.x, as (K, M); a transform of the other channels may have lengthened M.
            dtype: The dtype of products.
        """
        channels, cast = self.kept_channels("wgrad.x"), named_cast(self.layer.casts[MEETS].keep_cast)
        context = QuantContext(shard=self.shard(MEETS), amax=amax_of_gradient(dy_MN))
        dy = Operand(*emulate(dy_MN, cast, 0, self.layer.compute, context))
        assert isinstance(x, Operand)  # such a product has no native scheme
        shard = self.shard("wgrad.x")
        everywhere = len(channels) if shard is None else shard.axes[-1].size
        most = min(kept_count(self.layer.casts["wgrad.x"].keep_channels, everywhere), len(channels))
        columns = channels.to(torch.int8).topk(most).indices  # with some that are not kept, where few are
        kept = Operand(x.values[columns, : dy_MN.shape[0]], x.scale)
        there = multiply(dy.transposed(), kept, dtype).to(dw_NK.dtype)
        return dw_NK.index_copy_(1, columns, torch.where(channels[columns], there, dw_NK[:, columns]))

    def _elements(self, place: str, tensor: torch.Tensor) -> int:
        """The number of elements of the global tensor."""
        shard = self.shard(place)
        return tensor.numel() if shard is None else shard.shape.numel()
