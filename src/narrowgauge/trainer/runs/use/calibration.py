"""Scales of activations for an export: from a text, or from what the recipe remembers.

The text passes through the model under its recipe, in sequences of the run's length; the amax of each
layer's input gives its scale. A fixed scale clips what is larger in another text, so it should be like the
text that will be served.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from narrowgauge.nn import Linear
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.activations import (
    InputScale,
    needs_scale,
    recorded_scale,
    scale_of_amax,
)
from narrowgauge.trainer.checkpoint.interop.quantized_export import narrow_layers
from narrowgauge.trainer.data import validation_batches
from narrowgauge.trainer.runs.choices import RECORDED
from narrowgauge.trainer.runs.use.trained_model import TrainedRun, run_data

#: The most sequences that are read, spread evenly over the text.
SEQUENCES = 128


def activation_scales(trained: TrainedRun, source: str) -> dict[str, InputScale]:
    """The scale of the input of each layer that can store one, by our names (`activations.scale_of_amax`).

    `source` is a source of text, as of a run, or `RECORDED`.
    """
    layers = layers_with_scales(trained.model)
    if not layers:
        raise UserError(
            "no layer of this run has activations whose scale is stored (NVFP4, or FP8 with one scale), so "
            "there is nothing to calibrate; leave --calibrate out"
        )
    scales = {name: recorded_scale(layer) for name, layer in layers.items()}
    if source != RECORDED:
        scales = _measured(trained, source, layers)
    missing = [name for name, scale in scales.items() if scale is None]
    if missing and source == RECORDED:
        raise UserError(
            f"the recipe remembers no amax of the input of {missing[0]!r}: it has neither delayed scales nor "
            "a held amax there; name a text with --calibrate"
        )
    if missing:
        raise UserError(
            f"no token of {source} reached {missing[0]!r}, so its input has no scale; calibrate with "
            "a longer text"
        )
    return {name: scale for name, scale in scales.items() if scale is not None}


def layers_with_scales(model: torch.nn.Module) -> dict[str, Linear]:
    """The layers whose input can have a stored scale."""
    layers = narrow_layers(model)
    return {n: layer for n, layer in layers.items() if needs_scale(layer.spec.casts["fprop.x"])}


def _measured(trained: TrainedRun, source: str, layers: dict[str, Linear]) -> dict[str, InputScale | None]:
    dataset, length = run_data(trained, source), trained.config.data.sequence_length
    with input_amaxes(layers) as amaxes, torch.no_grad():
        for number, window in enumerate(validation_batches(dataset.train, 1, length, sequences=SEQUENCES)):
            trained.go_to_sample(number)
            trained.model(window.x_BT)
    broken = [name for name, amax in amaxes.items() if not amax < float("inf")]
    if broken:
        raise UserError(
            f"the input of {broken[0]!r} is not finite on {source}, so it has no scale; calibrate with "
            "another text, or export an earlier checkpoint"
        )
    return {
        name: scale_of_amax(layer.spec.casts["fprop.x"], amaxes[name]) if amaxes.get(name) else None
        for name, layer in layers.items()
    }


@contextmanager
def input_amaxes(layers: dict[str, Linear]) -> Iterator[dict[str, float]]:
    """The largest magnitude of the inputs of layers, in what runs meanwhile."""
    found: dict[str, float] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].numel():
                amax = float(inputs[0].abs().max())
                found[name] = amax if amax != amax else max(found.get(name, 0.0), amax)

        return see

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
