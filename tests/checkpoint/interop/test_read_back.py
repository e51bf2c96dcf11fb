"""One destroyed part of an export is named; import refuses what no quantizer makes."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.interop.models import export, model_under
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.activations import needs_scale, scale_of_amax
from narrowgauge.trainer.checkpoint.interop.compressed_tensors import narrow_layers
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.read_back import different_tensors, wrong_input_scales

NARROW = {"compressed-tensors": ("nvfp4", "fp8", "mxfp8"), "modelopt": ("nvfp4", "fp8")}
NARROW |= {"hf": ("nvfp4",)}
FORMATS = [f"{to}, {recipe}" for to, recipes in NARROW.items() for recipe in recipes]
#: The layer that is destroyed, and the one that it is swapped with, by the format's names.
LAYER, OTHER = "model.layers.1.self_attn.k_proj", "model.layers.0.self_attn.k_proj"
CODES = ("weight_packed", "weight")
GLOBAL = ("weight_global_scale", "weight_scale_2")
INPUT = ("input_global_scale", "input_scale")
AMAX = 3.0


def scales_of(model):
    layers = {name: layer.spec.casts["fprop.x"] for name, layer in narrow_layers(model).items()}
    return {name: scale_of_amax(x, AMAX) for name, x in layers.items() if needs_scale(x)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder of a format, written once, and its model."""
    made = {}

    def of(kind):
        if kind not in made:
            to, recipe = kind.split(", ")
            made[kind] = tmp_path_factory.mktemp("sound"), model_under(recipe, dim=64, layers=4)
            export(to, *made[kind], scales=scales_of(made[kind][1]))
        return made[kind]

    return of


def destroyed(folder, how):
    """A copy of an export in which `how` changed the tensors."""
    out = folder.with_name(folder.name + "-destroyed")
    out.mkdir(exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    how(tensors)
    contiguous = {name: t.contiguous() for name, t in tensors.items()}
    save_file(contiguous, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def part_of(tensors, layer, parts):
    return next((f"{layer}.{part}" for part in parts if f"{layer}.{part}" in tensors), None)


def codes(tensors):
    name = part_of(tensors, LAYER, CODES)
    tensors[name].view(-1).view(torch.uint8)[5] ^= 0x21
    return name


def changed(parts, change):
    """Changes the scales of the layer that are called so."""

    def how(tensors):
        name = part_of(tensors, LAYER, parts)
        if name is not None:
            tensors[name] = change(tensors[name].float()).to(tensors[name].dtype)
        return name

    return how


def missing(tensors):
    name = part_of(tensors, LAYER, ("weight_scale", "weight"))
    del tensors[name]
    return name


def extra(tensors):
    tensors[f"{LAYER}.k_scale"] = torch.ones(1)
    return f"{LAYER}.k_scale"


def transposed(tensors):
    name = part_of(tensors, LAYER.replace("self_attn.k_proj", "mlp.gate_proj"), CODES)
    tensors[name] = tensors[name].reshape(tensors[name].shape[::-1])
    return name


def swapped(tensors):
    first, second = (part_of(tensors, layer, CODES) for layer in (LAYER, OTHER))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    return first


def inverted(t):
    is_e8m0 = t.numel() > 1 and bool((t == t.round()).all())
    return 254 - t if is_e8m0 else 1 / t


LACKING = "no weight_scale|scale of the tensor is missing|only fp32|has no tensor"
#: What is done to a part of a file, and how `import` refuses it; "" where any weights may be so.
PARTS = {
    "codes": (codes, ""),
    "scales are zero": (changed(("weight_scale",), lambda t: 0 * t), "all scales are 0"),
    "a scale of the tensor is zero": (changed(GLOBAL, lambda t: 0 * t), "all scales are 0|an infinity"),
    "a scale of the tensor is 64 times too large": (changed(GLOBAL, lambda t: 64 * t), ""),
    "a scale of the tensor is negative": (changed(GLOBAL, lambda t: -t), "a scale is negative"),
    "scales are inverted": (changed((*GLOBAL, "weight_scale"), inverted), "with the reciprocal"),
    "a tensor is missing": (missing, LACKING),
    "a tensor too many": (extra, ""),
    "a shape is transposed": (transposed, "scales of shape|its configuration requires"),
    "layers are swapped": (swapped, ""),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_one_destroyed_tensor_is_named_and_refused_if_no_quantizer_makes_it(sound, kind, part):
    folder, _ = sound(kind)
    how, words = PARTS[part]
    named = []
    bad = destroyed(folder, lambda tensors: named.append(how(tensors)))
    found = [difference.name for difference in different_tensors(bad, folder)]
    if named == [None]:  # the format has no such part
        assert found == []
        assert read_external_model(bad).tensors
        return
    assert named[0] in found
    assert len(found) == (2 if part == "layers are swapped" else 1)
    assert different_tensors(folder, folder) == []
    if words and not kind.startswith("hf"):
        with pytest.raises(UserError, match=words) as error:
            read_external_model(bad)
        assert re.search(r"blocks\.1|layers\.1", str(error.value)), error.value


ACTIVATIONS = {
    "zero": lambda t: t * 0,
    "64 times": lambda t: t * 64,
    "inverted": lambda t: 1 / t,
    "not a number": lambda t: t * torch.nan,
    "missing": None,
}


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith(("comp", "model"))])
def test_a_wrong_scale_of_activations_is_named(sound, kind):
    folder, model = sound(kind)
    amaxes = dict.fromkeys(scales_of(model), AMAX / 2)  # another text than that of the calibration
    assert wrong_input_scales(folder, model, amaxes) == []
    for change in ACTIVATIONS.values() if amaxes else ():
        named = []

        def spoil(tensors, change=change, named=named):
            named.append(part_of(tensors, LAYER, INPUT))
            scale = tensors.pop(named[0])
            tensors |= {} if change is None else {named[0]: change(scale)}

        bad = destroyed(folder, spoil)
        found = wrong_input_scales(bad, model, amaxes) + different_tensors(bad, folder)
        assert named[0] in [difference.name for difference in found]
