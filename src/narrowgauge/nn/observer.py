"""Gauges: one optimizer step of a model, read place by place.

A `Gauges` is laid on a model for one step. Layers and tensors at rest find it there and show it what they
have, before and after; it changes nothing. Each place is read once:

    operands    of the first micro-batch: `fprop.x` ... `wgrad.x`, and `saved` where that is a cast of its
                own. Numbers that two products share stand under the place that made them (fp8: `fprop.w`, and
                no `dgrad.w`); a second forward pass (recompute) finds its places read, and a head that is
                computed with the loss (`training.chunked_loss`) shows none
    products    of the first micro-batch: `fprop.y`, `dgrad.dx`, `wgrad.dw`, each against the product in
                float32 of what came before any rounding, at 64 rows of y and dx and 64 columns of dw, evenly
                spaced
    state       of matrices: `grad` when the last micro-batch has been added, before it is clipped; `weight`,
                `master`, `m`, `v` as the update left them

Figures stay on the device as small vectors until `lines`, which waits for all of them once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from narrowgauge.quantization import Cast, QuantContext, QuantizedState, cast
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.gauges.figures import (
    cosine_similarity,
    figures,
    gauge,
    gauge_operand,
    gauge_product,
    gauge_state,
)

ROWS = 64  # of a product, that are computed again in float32
DIGITS = 6  # of what is written


class Key(NamedTuple):
    """What a gauge reads."""

    layer: str
    place: str


def evenly(t: torch.Tensor) -> torch.Tensor:
    """A view of `ROWS` rows of a matrix, or all if it has fewer, evenly spaced from the first on."""
    return t[:: max(1, t.shape[0] // ROWS)][:ROWS]


class Observer(Protocol):
    """What may be laid on a layer, to be shown each operand and each product of its three GEMMs."""

    def operand(
        self,
        place: str,
        x: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor | None,
        cast: Cast,
        axis: int,
        context: QuantContext,
    ) -> None:
        """See a matrix and what a GEMM sees of it, `values * scale`; the rest is as for `emulate`."""

    def product(self, place: str, c_MN: torch.Tensor, a_MK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """See a product, and what it is the product of in high precision; of `a` perhaps some rows only."""


class Gauges:
    """The gauges of a model during one optimizer step: the calls below, in their order."""

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Module],
        state: Mapping[tuple[str, str], QuantizedState | torch.Tensor],
    ) -> None:
        """Read nothing yet.

        Args:
            layers: the `nn.Linear`s of a converted model, by name.
            state: by (layer, place), the tensors at rest and the parameters that are plain; the gradient of a
                plain parameter is found on it.
        """
        self.layers = dict(layers)
        self.state = {Key(*key): tensor for key, tensor in state.items()}
        self.read: dict[Key, tuple[Cast, torch.Tensor]] = {}  # with a vector of `quantization.gauge`
        self.products: dict[Key, torch.Tensor] = {}

    def begin_micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Lay gauges on what this micro-batch is to show."""
        for name, layer in self.layers.items():
            layer.gauge = LayerGauge(name, self) if is_first else None  # type: ignore[assignment]
        self._attach(lambda place: is_last and place == "grad")

    def after_backward(self) -> None:
        """Take them off, read plain gradients, and lay gauges on what the update writes."""
        self.begin_micro_batch(is_first=False, is_last=False)
        for key, tensor in self.state.items():
            if key.place == "weight" and isinstance(tensor, torch.Tensor) and tensor.grad is not None:
                self._read_plain(Key(key.layer, "grad"), tensor.grad)
        self._attach(lambda place: place != "grad")

    def after_step(self) -> None:
        """Take them off, and read what was updated where it lies."""
        self._attach(lambda place: False)
        for key, tensor in self.state.items():
            if isinstance(tensor, torch.Tensor):
                self._read_plain(key, tensor.detach())
            elif tensor.cast.name == "fp32" and key.place != "grad":
                self._read_plain(key, tensor.read())

    def lines(self, step: int) -> list[dict[str, Any]]:
        """One object a layer and place, ready for JSON; waits for the device."""
        casts = {key: cast.name for key, (cast, _) in self.read.items()}
        vectors = _fetched({key: vector for key, (_, vector) in self.read.items()})
        found = {key: figures(vector, self.read[key][0].element) for key, vector in vectors.items()}
        of_products = {key: cosine_similarity(v) for key, v in _fetched(self.products).items()}
        return [
            {"step": step, **key._asdict(), "cast": casts.get(key), **_rounded(values)}
            for key, values in (found | of_products).items()
        ]

    def _attach(self, is_wanted: Callable[[str], bool]) -> None:
        for key, tensor in self.state.items():
            if isinstance(tensor, QuantizedState):
                tensor.gauge = partial(self._see, key) if is_wanted(key.place) else None

    def _see(self, key: Key, x: torch.Tensor, stored: QuantizedState) -> None:
        """Read a tensor that has been stored; the first time counts."""
        if key not in self.read:
            self.read[key] = stored.cast, gauge_state(x, stored)

    def _read_plain(self, key: Key, x: torch.Tensor) -> None:
        if key not in self.read:
            x = x.to_local() if isinstance(x, DTensor) else x  # of a weight that is cut, what is here
            plain = cast("fp32")
            self.read[key] = plain, gauge(x, x, blocks_of(x.shape, plain, -1))


@dataclass(frozen=True, slots=True)
class LayerGauge:
    """What a layer shows its operands and products to."""

    layer: str
    gauges: Gauges

    def operand(
        self,
        place: str,
        x: torch.Tensor,
        values: torch.Tensor,
        scale: torch.Tensor | None,
        cast: Cast,
        axis: int,
        context: QuantContext,
    ) -> None:
        """See a matrix and what a GEMM sees of it, `values * scale`; the rest is as for `emulate`."""
        key = Key(self.layer, place)
        if key not in self.gauges.read:
            seen = values if scale is None else values.float() * scale
            vector = gauge_operand(x, seen, cast, axis, context)
            self.gauges.read[key] = cast, vector

    def product(self, place: str, c_MN: torch.Tensor, a_MK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Read some rows of a product against the same rows in high precision."""
        key = Key(self.layer, place)
        if key not in self.gauges.products:
            wide_RN = evenly(a_MK).float() @ b_NK.float().T
            self.gauges.products[key] = gauge_product(evenly(c_MN), wide_RN)


def _fetched(vectors: Mapping[Key, torch.Tensor]) -> dict[Key, list[float]]:
    """Vectors of one length, brought from the device at once."""
    return dict(zip(vectors, torch.stack(list(vectors.values())).tolist(), strict=True)) if vectors else {}


def _rounded(value: Any) -> Any:
    """Numbers in few digits, without those that are not finite, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
