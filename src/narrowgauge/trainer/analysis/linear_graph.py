"""A forward pass of an unquantized model with its graph kept, and the effect of errors in its linear layers.

The mathematics is in `sensitivity`. Legend: M tokens, N outputs, K inputs of a layer.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowgauge.kernels.residual import total
from narrowgauge.nn import Linear
from narrowgauge.quantization import Cast, emulate
from narrowgauge.trainer.analysis.update import StepMetric, lost, progress, turned
from narrowgauge.trainer.data import Batch
from narrowgauge.trainer.models import IGNORED, Transformer

Tensors = Mapping[str, torch.Tensor]


@dataclass(eq=False)
class LayerTensors:
    """The tensors of one layer in one pass: input, output, and the output's gradient."""

    layer: Linear
    before: int  #: the index of the point of the residual stream before its block
    x: torch.Tensor
    y: torch.Tensor
    g_MN: torch.Tensor = field(init=False)


class LinearGraph:
    """A forward pass of a model whose layers are all in high precision, and its gradient."""

    def __init__(self, model: Transformer, batch: Batch) -> None:
        """Compute both passes."""
        self.model = model
        self.layers: dict[str, LayerTensors] = {}
        self.stream: list[torch.Tensor] = []  # before each block, and after the last one
        batch = batch.to(model.embedding.weight.device)
        with self._recorded():
            logits = model(batch.x_BT, batch.position_BT).float().flatten(0, 1)
        target_M = batch.y_BT.flatten()
        loss = nn.functional.cross_entropy(logits, target_M, ignore_index=IGNORED)
        self.parameters = dict(model.named_parameters())
        outputs = [layer.y for layer in self.layers.values()]
        wanted = [*outputs, *self.stream, *self.parameters.values()]
        found = torch.autograd.grad(loss, wanted, retain_graph=True)
        for layer, g in zip(self.layers.values(), found, strict=False):
            layer.g_MN = g.flatten(0, -2)
        self.stream_gradient = found[len(outputs) : len(outputs) + len(self.stream)]
        self.gradient = dict(zip(self.parameters, found[len(outputs) + len(self.stream) :], strict=True))

    def shares(self, cast: Cast, metric: StepMetric) -> dict[tuple[str, str], float]:
        """The share of a step's progress lost to each layer's places of the backward pass, one at a time."""
        factors = metric.factors(self.gradient)
        gained = progress(factors, self.gradient)
        size = math.fsum(gained.values())
        shares = {}
        for name, tensors in self.layers.items():
            x_MK, g_MN = tensors.x.detach().flatten(0, -2), tensors.g_MN
            w_NK = tensors.layer.weight.detach()
            for place, d_MK in (
                ("dgrad.dy", _error(g_MN, cast, -1) @ w_NK),
                ("dgrad.w", g_MN @ _error(w_NK, cast, 0)),
            ):
                shares[name, place] = self._upstream(tensors, d_MK, factors, gained) / size
            for place, d_NK in (
                ("wgrad.dy", _error(g_MN, cast, 0).T @ x_MK),
                ("wgrad.x", g_MN.T @ _error(x_MK, cast, 0)),
            ):
                weight = f"{name}.weight" if f"{name}.weight" in self.gradient else self._tied(tensors)
                shares[name, place] = lost(factors, self.gradient, {weight: d_NK}) / size
        return shares

    def relative_errors(self, cast: Cast) -> dict[tuple[str, str], float]:
        """|e|^2 / |x|^2 over both operands of each GEMM, by layer and GEMM."""
        errors = {}
        for name, tensors in self.layers.items():
            x_MK, g_MN = tensors.x.detach().flatten(0, -2), tensors.g_MN
            w_NK = tensors.layer.weight.detach()
            operands = {
                "fprop": ((x_MK, -1), (w_NK, -1)),
                "dgrad": ((g_MN, -1), (w_NK, 0)),
                "wgrad": ((g_MN, 0), (x_MK, 0)),
            }
            for gemm, pair in operands.items():
                errors[name, gemm] = sum(
                    (_error(t, cast, axis).square().sum() / t.square().sum()).item() for t, axis in pair
                )
        return errors

    def _upstream(
        self, tensors: LayerTensors, d_MK: torch.Tensor, factors: Tensors, gained: Mapping[str, float]
    ) -> float:
        """The progress that all parameters lose to an error in the gradient of a layer's input."""
        point = tensors.before
        local = list(self._local_parameters(tensors))
        inputs = [self.stream[point], *(self.parameters[n] for n in local)]
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            tensors.x, inputs, d_MK.view_as(tensors.x), retain_graph=True, allow_unused=True
        )
        error, *errors = found
        of_local = {n: e for n, e in zip(local, errors, strict=True) if e is not None}
        total = lost(factors, self.gradient, of_local)
        if error is None:
            return total
        g, e = self.stream_gradient[point].double(), error.double()
        gg = g.square().sum().item()
        share = turned(gg, (g * e).sum().item(), e.square().sum().item()) / gg if gg else 0.0
        return total + share * math.fsum(gained[name] for name in self._parameters_before(point))

    def _local_parameters(self, tensors: LayerTensors) -> Iterator[str]:
        """The parameters of the layer's block, or of what follows the last block."""
        prefix = f"blocks.{tensors.before}."
        is_last = tensors.before == len(self.stream) - 1
        for name in self.parameters:
            if name.startswith("norm.") if is_last else name.startswith(prefix):
                yield name

    def _parameters_before(self, point: int) -> Iterator[str]:
        """The parameters whose gradient passes through a point of the residual stream."""
        for name in self.parameters:
            _, _, rest = name.partition("blocks.")
            is_block = name.startswith("blocks.")
            if int(rest.partition(".")[0]) < point if is_block else "embedding" in name:
                yield name

    def _tied(self, tensors: LayerTensors) -> str:
        """The name of a weight that the layer shares with another module."""
        return next(n for n, p in self.parameters.items() if p is tensors.layer.weight)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the stream and the tensors of each layer during a forward pass.

        The stream is summed at each point, so that a single tensor holds it there.
        """
        handles = []

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            self.stream.append(total(*inputs[:2]))
            return self.stream[-1], None, *inputs[2:]

        def after(_: nn.Module, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
            self.stream.append(total(*output))
            return self.stream[-1], None

        def layer(name: str, module: nn.Module, inputs: tuple[Any, ...], y: torch.Tensor) -> None:
            assert isinstance(module, Linear)
            self.layers[name] = LayerTensors(module, len(self.stream) - 1, inputs[0], y)

        blocks = list(self.model.blocks)
        handles += [block.register_forward_pre_hook(before) for block in blocks]
        handles.append(blocks[-1].register_forward_hook(after))
        for name, module in self.model.named_modules():
            if isinstance(module, Linear):
                handles.append(module.register_forward_hook(partial(layer, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _error(x: torch.Tensor, cast: Cast, axis: int) -> torch.Tensor:
    """Q(x) - x for a matrix, where a GEMM contracts `axis`."""
    numbers, scale = emulate(x, cast, axis, torch.float32)
    return (numbers if scale is None else numbers * scale) - x
