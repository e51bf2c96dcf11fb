"""One destroyed part of an export is named; import refuses what no quantizer makes."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.interop.models import export, model_under
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.activations import needs_scale, scale_of_amax
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.quantized_export import narrow_layers
from narrowgauge.trainer.checkpoint.interop.read_back import different_tensors, wrong_input_scales

KINDS = [("compressed-tensors", recipe) for recipe in ("nvfp4", "fp8", "mxfp8")] + [("modelopt", "nvfp4")]
LAYER, AMAX = "model.layers.1.mlp.gate_proj", 3.0
CODES = ("weight_packed", "weight")
GLOBAL = ("weight_global_scale", "weight_scale_2")
INPUT = ("input_global_scale", "input_scale")


def scales_of(model):
    layers = {name: layer.spec.casts["fprop.x"] for name, layer in narrow_layers(model).items()}
    return {name: scale_of_amax(x, AMAX) for name, x in layers.items() if needs_scale(x)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder of a format, written once, and its model."""
    made = {}

    def of(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("sound"), model_under(kind[1], dim=64, layers=4)
            export(kind[0], *made[kind], scales=scales_of(made[kind][1]))
        return made[kind]

    return of


def destroyed(folder, out, parts, change):
    """(A copy of an export without a tensor of the layer, or with another in its place; its name or "")."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    name = next((name for part in parts if (name := f"{LAYER}.{part}") in tensors), "")
    if name:
        tensor = tensors.pop(name)
        tensors |= {} if change is None else {name: change(tensor).contiguous()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out, name


def wide(change):
    """A change of the numbers of scales, whatever their dtype."""
    return lambda t: change(t.float()).to(t.dtype)


def flipped(t):
    bytes_of_it = t.clone().view(-1).view(torch.uint8)
    bytes_of_it[5] ^= 0x21
    return bytes_of_it.view(t.dtype).view(t.shape)


def inverted(t):
    is_e8m0 = t.numel() > 1 and bool((t == t.round()).all())
    return 254 - t if is_e8m0 else 1 / t


def not_a_number(t):
    return torch.full_like(t.view(torch.uint8), 255).view(t.dtype)


LACKING = "no weight_scale|scale of the tensor is missing|only fp32|has no tensor"
#: What is done to a part of a layer, and how `import` refuses it; "" where any weights may be so.
PARTS = {
    "codes": (CODES, flipped, ""),
    "scales are zero": (("weight_scale",), wide(lambda t: 0 * t), "all scales are 0"),
    "a scale of the tensor is zero": (GLOBAL, wide(lambda t: 0 * t), "all scales are 0|an infinity"),
    "a scale of the tensor is negative": (GLOBAL, wide(lambda t: -t), "a scale is negative"),
    "scales are inverted": ((*GLOBAL, "weight_scale"), wide(inverted), "with the reciprocal"),
    "scales are missing": (("weight_scale",), None, LACKING),
    "scales are not numbers": (("weight_scale",), not_a_number, "holds a NaN"),
    "scales have another shape": (
        ("weight_scale",),
        lambda t: t.flatten()[:1].expand(3, 5),
        "scales of shape",
    ),
    "a shape is transposed": (
        *(CODES, lambda t: t.reshape(t.shape[::-1])),
        "scales of shape|its configuration requires",
    ),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_destroyed_tensor_is_named_and_refused_if_no_quantizer_makes_it(sound, tmp_path, kind, part):
    (folder, _), (parts, change, words) = sound(kind), PARTS[part]
    bad, name = destroyed(folder, tmp_path, parts, change)
    for found, expected in ((bad, folder), (folder, bad)):
        assert [difference.name for difference in different_tensors(found, expected)] == [name] * bool(name)
    if words and name:
        with pytest.raises(UserError, match=words) as error:
            read_external_model(bad)
        assert re.search(r"blocks\.1|layers\.1", str(error.value)), error.value
    else:
        assert read_external_model(bad).tensors


ACTIVATIONS = [lambda t: t * 0, lambda t: t * 64, lambda t: 1 / t, lambda t: t * torch.nan, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_scale_of_activations_is_named(sound, tmp_path, kind):
    folder, model = sound(kind)
    amaxes = dict.fromkeys(scales_of(model), AMAX / 2)  # another text than that of the calibration
    assert wrong_input_scales(folder, model, amaxes) == []
    for change in ACTIVATIONS if amaxes else ():
        bad, name = destroyed(folder, tmp_path, INPUT, change)
        found = wrong_input_scales(bad, model, amaxes) + different_tensors(bad, folder)
        assert name in [difference.name for difference in found]
