"""The places of one layer at one moment: which numbers each GEMM sees of each tensor.

A `GemmContext` is made for every forward pass and goes with it to the backward pass. It holds the casts of
this step, the random keys of this step, and the histories of delayed scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from narrowgauge.formats import RandomStream
from narrowgauge.kernels import emulate, quantize
from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.nn.gemm import Operand
from narrowgauge.nn.native import QuantizedOperand, quantized_operand
from narrowgauge.nn.observer import Observation, Observer
from narrowgauge.nn.saved import Restore, Tensors, keep_as_it_is, keep_operand, keep_quantized
from narrowgauge.nn.sharded.gathered_weight import GatheredWeight
from narrowgauge.nn.weight_state import WeightState
from narrowgauge.quantization import DEFAULT_CONTEXT, Cast, QuantContext, TensorShard
from narrowgauge.recipes import GEMM_PLACES, GEMMS


def stream_ids(layer: int) -> list[int]:
    """The tensor ids of a layer's streams: bits of each operand, signs of each GEMM, bits of its gradient."""
    operands = [layer * len(GEMM_PLACES) + i for i in range(len(GEMM_PLACES))]
    signs = [2**32 + layer * len(GEMMS) + i for i in range(len(GEMMS))]
    return [*operands, *signs, 2**33 + layer]


@dataclass(frozen=True, slots=True)
class GemmContext:
    """The casts of one layer's GEMMs, and what they need beside the tensors.

    Attributes:
        keys: int32 [10, 2], the keys of this step's streams (`stream_ids`), if any cast is random.
        first_sample, num_samples: which sequences of the global batch the tensors hold.
        histories: of the places with delayed scaling.
        sees: whether histories take note of the forward pass (it will be followed by a backward pass).
        weight: the weight at rest, if it or its gradient is narrow and all of it is here.
        transposed: whether that is stored (K, N).
        native: whether narrow operands stay codes, for the hardware to multiply.
        observer: is shown the operand of every place, where one is attached to the layer.
        parts: of x, w and dy, those that several processes hold together.
    """

    casts: Mapping[str, Cast]
    compute: torch.dtype
    saved: str | Cast = "input"
    keys: torch.Tensor | None = None
    first_sample: int | torch.Tensor = 0
    num_samples: int = 1
    histories: Mapping[str, AmaxHistory] | None = None
    sees: bool = False
    native: bool = False
    weight: WeightState | None = None
    transposed: bool = False
    observer: Observer | None = None
    parts: Mapping[str, TensorShard] = field(default_factory=dict)

    def part(self, place: str) -> TensorShard | None:
        """Where the tensor of a place lies in the global one, if not all of it is here."""
        return self.parts.get(place.partition(".")[2])

    def operand(
        self, tensor: torch.Tensor, place: str, axis: int, both: bool = False
    ) -> Operand | QuantizedOperand:
        """What the GEMM of `place` sees of a matrix whose `axis` (-1 or 0) it contracts.

        `both` says that the same numbers will be contracted along the other axis, too.
        """
        if isinstance(tensor, GatheredWeight):  # it travelled as that, so there is no loss left to gauge
            seen = tensor.operand(self.compute, self.native)
            return seen if axis == -1 else seen.transposed()
        cast, context = self.casts[place], self._context(tensor, place)
        if self.native and cast.is_scaled:
            q, other = quantize(tensor, cast, axis, context, both)
            if self.observer is not None:
                self.observer.operand(Observation(place, tensor, q.dequantize(), None, cast, axis, context))
            return quantized_operand(q, axis, other)
        operand = Operand(*emulate(tensor, cast, axis, self.compute, context))
        if self.observer is not None:
            self.observer.operand(Observation(place, tensor, *operand, cast, axis, context))
        return operand if axis == -1 else operand.transposed()

    def wide(self, w_NK: torch.Tensor) -> torch.Tensor:
        """The numbers of a weight whose parameter is `w_NK`, in whatever dtype holds them."""
        if isinstance(w_NK, GatheredWeight):
            return w_NK if w_NK.is_operand else w_NK.wide()
        if self.weight is None:
            return w_NK
        w = self.weight.operand()
        return w.T if self.transposed else w

    def take_gradient(self, dw_NK: torch.Tensor) -> bool:
        """Add to a gradient at rest; False where autograd does that."""
        if self.weight is None or self.weight.gradient is None:
            return False
        stream = None
        if self.keys is not None:
            stream = RandomStream(self.keys[-1], self.first_sample * self._elements("fprop.w", dw_NK))
        self.weight.gradient.add((dw_NK.T if self.transposed else dw_NK).float(), stream)
        return True

    def _context(self, tensor: torch.Tensor, place: str) -> QuantContext:
        """What the cast of a place needs beside the tensor; a history takes note of the tensor."""
        cast, scale = self.casts[place], None
        if cast.history:
            assert self.histories is not None
            history = self.histories[place]
            scale = history.scale
            if self.sees:
                history.see(tensor)
        signs = self._signs(place) if cast.signs == "random" else None
        return QuantContext(self._stream(tensor, place), signs, scale, self.part(place))

    def _stream(self, tensor: torch.Tensor, place: str) -> RandomStream | None:
        """The random bits of a place: a function of (seed, step, tensor, element of the global batch)."""
        if self.casts[place].rounding != "stochastic":
            return None
        assert self.keys is not None
        is_weight = place.endswith(".w")
        offset = 0 if is_weight else self.first_sample * (self._elements(place, tensor) // self.num_samples)
        return RandomStream(self.keys[GEMM_PLACES.index(place)], offset)

    def _elements(self, place: str, tensor: torch.Tensor) -> int:
        """Of the global tensor."""
        part = self.part(place)
        return tensor.numel() if part is None else part.shape.numel()

    def _signs(self, place: str) -> torch.Tensor:
        """The signs of a GEMM's transform, the same for both operands."""
        assert self.keys is not None
        gemm = GEMMS.index(place.partition(".")[0])
        bits = RandomStream(self.keys[len(GEMM_PLACES) + gemm]).bits((self.casts[place].hadamard,))
        return 1 - 2 * (bits & 1)

    def shared(self, a: str, b: str) -> bool:
        """Whether two places see the same numbers of the same tensor, whatever the axis."""
        cast = self.casts[a]
        return cast == self.casts[b] and cast.ignores_axis and cast.rounding != "stochastic"

    @property
    def reuses_x(self) -> bool:
        """Whether the operand of the forward pass is wgrad's, too."""
        return isinstance(self.saved, str) and self.shared("fprop.x", "wgrad.x")

    def keep(self, x_MK: torch.Tensor, operand: Operand | QuantizedOperand) -> tuple[Tensors, Restore]:
        """What is kept of the input; `operand` is what fprop saw of it."""
        own = self.casts["fprop.x"]
        if self.reuses_x:
            if (
                isinstance(operand, QuantizedOperand)
                or self.saved == "input"
                or own.block
                or not own.is_scaled
            ):
                return keep_as_it_is(operand)
            return keep_operand(operand, own)
        if self.saved == "input":
            return keep_as_it_is(Operand(x_MK))
        cast = own if isinstance(self.saved, str) else self.saved
        if not cast.is_scaled:
            return keep_as_it_is(Operand(emulate(x_MK, cast, -1, self.compute)[0]))  # no scale to share
        stream = self._stream(x_MK, "fprop.x") if self.saved == "operand" else None
        q, _ = quantize(x_MK, cast, -1, QuantContext(stream, shard=self.part("fprop.x")))
        if self.observer is not None and self.saved != "operand":
            seen = q.dequantize()
            self.observer.operand(Observation("saved", x_MK, seen, None, cast, -1, DEFAULT_CONTEXT))
        return keep_quantized(q, x_MK.dtype)
