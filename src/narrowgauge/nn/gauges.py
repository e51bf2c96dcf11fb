"""The gauges of a model: an observer that reads operands, matmuls and state for one optimizer step.

`Gauges` are attached to a model for one optimizer step. Layers and state tensors then show them their values,
before and after; nothing is changed. Each place is read once:

    operands    of the first micro-batch: `fprop.x` ... `wgrad.x`, and `saved` if it has a separate cast.
                Values that two matmuls share are listed under the place that made them (fp8: `fprop.w`, and
                no `dgrad.w`). A second forward pass (recompute) finds its places already read. A head that is
                computed together with the loss (`kernels.head_loss`) shows none
    results     of the first micro-batch: `fprop.y`, `dgrad.dx`, `wgrad.dw`, each against the float32 matmul
                of the unrounded operands, at 64 rows of y and dx and 64 columns of dw, evenly spaced
    state       of matrices: `grad` after the last micro-batch has been added, before clipping; `weight`,
                `master`, `m`, `v` after the update

Readings stay on the device as small vectors until `lines`, which syncs once for all of them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowgauge.nn.operands import Observation, evenly
from narrowgauge.nn.step_state import stepped_modules
from narrowgauge.quantization import Cast, QuantizedState, cast, local_tensor, plain_gradient, state_of
from narrowgauge.quantization.blocks import blocks_of
from narrowgauge.quantization.gauges.figures import (
    cosine_similarity,
    figures,
    gauge,
    gauge_operand,
    gauge_product,
    gauge_state,
)
from narrowgauge.recipes.places import STATE_PLACES

DIGITS = 6  # significant digits written
Key = tuple[str, str]  # the layer and the place that a gauge reads


class Gauges:
    """The gauges of a model during one optimizer step; call the methods below in order."""

    def __init__(
        self,
        layers: Mapping[str, Any],
        state: Mapping[Key, QuantizedState | torch.Tensor],
    ) -> None:
        """Prepare to read layers by name, and state and plain parameters by (layer, place).

        The gradient of a plain parameter is read from it.
        """
        self.layers = dict(layers)
        self.state = dict(state)
        self.vectors: dict[Key, tuple[Cast, torch.Tensor]] = {}  # made by `quantization.gauges.gauge`
        self.products: dict[Key, torch.Tensor] = {}

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> "Gauges":
        """The gauges of all layers under a recipe, and of the weights, gradients and moments of matrices.

        Args:
            model: A model that `convert` has changed.
            optimizer: Its optimizer; moments in torch's own form have no gauge.
            names: Other names of the parameters than the model's, or names of some of them.
        """
        state: dict[Key, QuantizedState | torch.Tensor] = {}
        for p, name in (names or {p: name for name, p in model.named_parameters()}).items():
            if p.ndim < 2:
                continue
            moments = {} if optimizer is None else optimizer.state.get(p, {})
            places: dict[str, Any] = {"weight": p, **state_of(p).by_place()}
            places |= {place: m for place, m in moments.items() if isinstance(m, QuantizedState)}
            state |= {(name.removesuffix(".weight"), place): tensor for place, tensor in places.items()}
        return cls(stepped_modules(model), state)

    def begin_micro_batch(self, is_first: bool, is_last: bool) -> None:
        """Attach the gauges to what this micro-batch should show."""
        for name, layer in self.layers.items():
            layer.observer = LayerGauge(name, self) if is_first else None
        self._attach(("grad",) if is_last else ())

    def after_backward(self) -> None:
        """Detach the gauges from layers, read plain gradients, and observe the update's writes."""
        self.begin_micro_batch(is_first=False, is_last=False)
        for (layer, _), tensor in self.state.items():
            if isinstance(tensor, torch.Tensor) and (gradient := plain_gradient(tensor)) is not None:
                self._observe((layer, "grad"), gradient)
        self._attach({*STATE_PLACES} - {"grad"})

    def after_step(self) -> None:
        """Detach all gauges, and read the state that was updated in place."""
        self._attach(())
        for key, tensor in self.state.items():
            if isinstance(tensor, torch.Tensor):
                self._observe(key, tensor.detach())
            elif tensor.cast.name == "fp32" and key[1] != "grad":
                self._observe(key, tensor.read())

    def lines(self, step: int) -> list[dict[str, Any]]:
        """One object per layer and place, ready for JSON; waits for the device."""
        casts = {key: cast.name for key, (cast, _) in self.vectors.items()}
        vectors = _fetched({key: vector for key, (_, vector) in self.vectors.items()})
        readings = {key: figures(vector, self.vectors[key][0].element) for key, vector in vectors.items()}
        products = {key: cosine_similarity(v) for key, v in _fetched(self.products).items()}
        return [
            {"step": step, "layer": key[0], "place": key[1], "cast": casts.get(key), **_rounded(values)}
            for key, values in (readings | products).items()
        ]

    def _attach(self, places: Collection[str]) -> None:
        """Let writes to the state of some places be seen, and to no other."""
        for key, tensor in self.state.items():
            if isinstance(tensor, QuantizedState):
                tensor.gauge = partial(self._observe, key) if key[1] in places else None

    def _observe(self, key: Key, x: torch.Tensor, stored: QuantizedState | None = None) -> None:
        """Read a tensor, and what has been stored of it in a cast; only the first time counts."""
        if key not in self.vectors:
            x, plain = local_tensor(x), cast("fp32")
            if stored is None:
                self.vectors[key] = plain, gauge(x, x, blocks_of(x.shape, plain, -1))
            else:
                self.vectors[key] = stored.cast, gauge_state(x, stored)


@dataclass(frozen=True, slots=True)
class LayerGauge:
    """The observer of one layer, which reads for the gauges of the model."""

    layer: str
    gauges: Gauges

    def operand(self, observation: Observation) -> None:
        """Read an operand against the matrix that it was made from."""
        key, o = (self.layer, observation.place), observation
        if key not in self.gauges.vectors:
            self.gauges.vectors[key] = o.cast, gauge_operand(o.x, o.values, o.cast, o.axis, o.context)

    def product(self, place: str, c_MN: torch.Tensor, a_RK: torch.Tensor, b_NK: torch.Tensor) -> None:
        """Read some rows of a matmul against the same rows in high precision."""
        key = self.layer, place
        if key not in self.gauges.products:
            wide_RN = evenly(a_RK).float() @ b_NK.float().T
            self.gauges.products[key] = gauge_product(evenly(c_MN), wide_RN)


def means(lines: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """The mean of each place's figures over layers, by the name of an entry: PREFIX, PLACE/FIGURE."""
    values: dict[str, list[float]] = {}
    for line in lines:
        for figure in ("underflow", "clipped", "sqnr_db", "cosine"):
            if line.get(figure) is not None:
                values.setdefault(f"{prefix}{line['place']}/{figure}", []).append(line[figure])
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _fetched(vectors: Mapping[Key, torch.Tensor]) -> dict[Key, list[float]]:
    """Copy vectors of one length from the device together."""
    return dict(zip(vectors, torch.stack(list(vectors.values())).tolist(), strict=True)) if vectors else {}


def _rounded(value: Any) -> Any:
    """Round values to a few digits; None for non-finite ones, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
