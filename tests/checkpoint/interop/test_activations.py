"""Activations in an exported folder: the scales of a text, and the codes of the layout's own program."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file

from checkpoint.interop.models import export, model_under
from narrowgauge.quantization import quantize
from narrowgauge.trainer.checkpoint.interop.activations import (
    differences,
    needs_scale,
    recorded_scale,
    scale_of_amax,
)
from narrowgauge.trainer.checkpoint.interop.quantized_export import narrow_layers

DOWN = "blocks.0.down"
THEIRS = "model.layers.0.mlp.down_proj"


def in_training(recipe, steps=0):
    return model_under(recipe, steps, torch.bfloat16)


def by_the_package(folder, x_MK):
    """What compressed-tensors makes of an input of a layer."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    args, tensors = scheme.input_activations, load_file(folder / "model.safetensors")
    outer, scale = tensors.get(f"{THEIRS}.input_global_scale"), tensors.get(f"{THEIRS}.input_scale")
    if scale is None:
        layer = torch.nn.Linear(x_MK.shape[1], 1)
        scale, _ = compute_dynamic_scales_and_zp(value=x_MK, args=args, module=layer, global_scale=outer)
    return fake_quantize(x=x_MK, scale=scale, zero_point=None, args=args, global_scale=outer)


@pytest.mark.parametrize(("recipe", "share"), [("nvfp4", 0.99), ("mxfp8", 1), ("mxfp4-amd", 1), ("fp8", 1)])
def test_the_package_makes_the_codes_of_training(tmp_path, recipe, share):
    """With the scale of the same tensor; the package computes block scales of NVFP4 in bf16."""
    model, draw = in_training(recipe), torch.Generator().manual_seed(0)
    x = (torch.randn(64, 128, generator=draw) * torch.logspace(-1, 1, 64)[:, None]).bfloat16()
    of_x = narrow_layers(model)[DOWN].spec.casts["fprop.x"]
    scale = scale_of_amax(of_x, float(x.abs().max()))
    scales = dict.fromkeys(narrow_layers(model), scale) if needs_scale(of_x) else {}
    remarks = export("compressed-tensors", tmp_path, model, torch.bfloat16, scales)
    ours = quantize(x, of_x, -1).dequantize().bfloat16()
    assert bool(remarks) == bool(scales)
    theirs = by_the_package(tmp_path, x)
    assert (theirs.bfloat16() == ours).double().mean() >= share
    assert not torch.equal(ours, x)


def test_delayed_scales_are_those_of_training(tmp_path):
    model = in_training("fp8-delayed", steps=2)
    scales = {name: recorded_scale(layer) for name, layer in narrow_layers(model).items()}
    assert export("compressed-tensors", tmp_path, model, torch.bfloat16, scales) == []
    tensors, layer = load_file(tmp_path / "model.safetensors"), narrow_layers(model)[DOWN]
    assert tensors[f"{THEIRS}.input_scale"] == 1 / layer.histories["fprop.x"].scale
    assert tensors[f"{THEIRS}.input_scale"].shape == (1,)
    assert recorded_scale(narrow_layers(in_training("fp8-delayed"))[DOWN]) is None
    assert recorded_scale(narrow_layers(in_training("fp8"))[DOWN]) is None


def test_modelopt_multiplies_by_the_scale(tmp_path):
    model = in_training("nvfp4")
    scales = dict.fromkeys(narrow_layers(model), 4.0)
    assert len(export("modelopt", tmp_path, model, torch.bfloat16, scales)) == 1
    scale = load_file(tmp_path / "model.safetensors")[f"{THEIRS}.input_scale"]
    assert (scale, scale.shape) == (0.25, ())
    assert (
        json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"
    )


DIFFERENCES = {
    "bf16": None,
    "mxfp8": None,
    "mxfp4": 'scale_rule = "rceil" in training, and scale_rule = "even" in the server',
    "mxfp6-e2m3": 'element = "e2m3" in training, and element = "e4m3"',
    "fp8": 'block = "tensor" in training, and block = "row"',
    "nvfp4": "without a scale",
    "fp8-attention": "attention multiplied narrow operands",
}


@pytest.mark.parametrize("recipe", DIFFERENCES)
def test_a_difference_from_training_is_a_sentence(recipe):
    found, words = differences(in_training(recipe), None), DIFFERENCES[recipe]
    assert (words is None and not found) or any(words in sentence for sentence in found), found
