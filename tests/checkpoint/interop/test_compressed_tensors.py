"""The layouts of compressed-tensors and ModelOpt hold the narrow numbers of training, or refuse them."""

import json
import re

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from checkpoint.interop import models
from checkpoint.interop.models import export, model_under, weights_of
from narrowgauge.nn import Linear
from narrowgauge.quantization import quantize
from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.huggingface import read_folder
from narrowgauge.trainer.checkpoint.interop.name_map import name_map
from narrowgauge.trainer.checkpoint.interop.quantized_export import LAYOUTS, narrow_layers
from narrowgauge.trainer.checkpoint.interop.read_back import require_read_back
from narrowgauge.trainer.models import model_config
from narrowgauge.trainer.training.outline import placement

SIZES = {"dim": 256, "layers": 4, "ffn_dim": 384}
RECIPES = {
    "fp8": "float-quantized",
    "fp8-delayed": "float-quantized",
    "fp8-row": "float-quantized",
    "fp8-block": "float-quantized",
    "msamp-o2": "float-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp6-e2m3": "mxfp6-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}

#: Recipes with sizes of a model whose rows the layout cannot hold, and the words that say so.
UNFIT = [
    ("nvfp4", {"ffn_dim": 100}, r"'blocks.0.down' has rows of 100, which end inside a block of 16 \(3 "),
    ("mxfp8", {"ffn_dim": 80}, "'blocks.0.down' has rows of 80, which end inside a block of 32"),
    ("mxfp4", {"dim": 144, "head_dim": 36}, "'blocks.0.qkv' has rows of 144, which end inside a block of 32"),
    ("fp8-block", {"dim": 192, "heads": 3, "kv_heads": 1}, "of 192 and 64 rows .* its blocks of 128 rows"),
]


def trained(recipe, steps=None, **changes):
    return model_under(recipe, steps, **SIZES | changes)


def written(folder, model):
    export("compressed-tensors", folder, model)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def expected(model, name):
    """Their weight's numbers as training multiplies with them, and whether the layer is narrow."""
    (pair,) = (pair for pair in name_map(model.config) if name in pair.theirs)
    layer, weight = model.get_submodule(pair.ours.removesuffix(".weight")), weights_of(model)[pair.ours]
    is_narrow = isinstance(layer, Linear) and layer.spec.casts["fprop.w"].is_scaled
    values = quantize(weight, layer.spec.casts["fprop.w"]).dequantize() if is_narrow else weight
    return dict(pair.split(values))[name], is_narrow


@pytest.mark.tier("thorough", keep=("fp8-row", "nvfp4", "mxfp8"))
@pytest.mark.parametrize("name", RECIPES)
def test_the_package_and_import_read_the_numbers_of_training(tmp_path, name):
    model = trained(name, 1)
    tensors, config = written(tmp_path, model)
    described = QuantizationConfig.model_validate(config["quantization_config"])
    assert described.format == RECIPES[name]
    (scheme,) = described.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(described.format)
    read = read_external_model(tmp_path)
    assert read.precisions == {"fp32", described.format.split("-")[0].replace("float", "fp8")}
    narrow = 0
    for pair in name_map(model.config):
        for theirs, mine in pair.split(read.tensors[pair.ours]):
            values, is_narrow = expected(model, theirs)
            # The layout has the inverse of NVFP4's tensor scale: four roundings lie between.
            assert ((mine - values).abs() <= (2**-22 if name == "nvfp4" else 0) * values.abs()).all(), theirs
            layer = theirs.removesuffix(".weight")
            is_listed = layer in described.ignore or pair.ours.endswith(("norm.weight", "embedding.weight"))
            assert is_listed != is_narrow
            if is_narrow:
                narrow += 1
                own = {k.rsplit(".", 1)[1]: t for k, t in tensors.items() if k.startswith(f"{layer}.")}
                assert set(own) == set(compressor.compression_param_names(scheme))
                unpacked = compressor.decompress(own, scheme)["weight"].float()
                # The package multiplies in bfloat16 where elements are packed.
                within = 0.004 if "pack" in described.format else 1e-6
                assert (unpacked - values).norm() < within * values.norm()
            else:
                assert torch.equal(tensors[theirs], values)
    assert narrow == 7 * (3 if name == "nvfp4" else 4)
    assert "lm_head" in described.ignore


MODELOPT = {"nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8"}


@pytest.mark.tier("thorough", keep=("nvfp4", "mxfp8", "fp8"))
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_exact_in_modelopts_layout_or_refused(tmp_path, name):
    model = model_under(name)
    try:
        export("modelopt", tmp_path, model)
    except UserError:
        assert name not in MODELOPT
        assert not list(tmp_path.iterdir())
        return
    narrow = {f"{name}.weight": layer.forward_weight() for name, layer in narrow_layers(model).items()}
    require_read_back(read_folder(tmp_path).tensors, weights_of(model) | narrow)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_algo"]
    assert said == MODELOPT.get(name, said)
    assert any(said in layout.algorithms.values() for layout in LAYOUTS.values())


def test_several_casts_are_several_groups(tmp_path):
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(recipe("mxfp8").text + '\n[[rule]]\nmodules = ["*.down"]\nfprop = "mxfp4"\n')
    (tmp_path / "out").mkdir()
    _, config = written(tmp_path / "out", trained(str(mixed)))
    described = QuantizationConfig.model_validate(config["quantization_config"])
    assert described.format == "mixed-precision"
    by_format = {scheme.format: scheme.targets for scheme in described.config_groups.values()}
    assert by_format["mxfp4-pack-quantized"] == [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    assert len(by_format["mxfp8-quantized"]) == 24


REFUSED = [
    ("bf16", {}, "does not quantize weights"),
    ("quartet", {}, r"hadamard = 32, .*, which compressed-tensors cannot express"),
    ("mxint8", {}, 'element = "int8"'),
    ("fp4", {}, "'fp4-row'"),
    ("fp8", {"name": "gpt2-debug", "kv_heads": 4}, "Conv1D"),
    *UNFIT,
]


@pytest.mark.parametrize(("recipe", "changes", "words"), REFUSED)
def test_what_the_layout_cannot_hold_is_refused(tmp_path, recipe, changes, words):
    with pytest.raises(UserError, match=words) as error:
        written(tmp_path, trained(recipe, **changes))
    assert re.search(r"--to (gguf or )?hf", str(error.value))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "changes", "words"), UNFIT)
def test_rows_that_no_layout_holds_are_named_before_the_training(name, changes, words):
    """The placement of a run says it; the same recipe in a model that fits has no such sentence."""
    for sizes, expected_count in ((SIZES | changes, 1), (SIZES, 0)):
        lines = placement(model_config("debug", **models.SIZES | sizes), recipe(name), 128)
        exports = [line for line in lines if line.startswith("export: ")]
        assert len(exports) == expected_count
        for sentence in exports:
            assert re.search(words, sentence), sentence
            assert "--to gguf or hf" in sentence


# A weight's cast, and what an export does with it: the key that the layout cannot hold, or "" where it can.
WEIGHTS = [
    ({"cast": "nvfp4", "candidates": [6, 4], "choose": "mse"}, ""),
    ({"cast": "mxfp4", "scale_rule": "floor"}, ""),
    ({"cast": "e4m3", "history": 4, "margin": 1, "history_algorithm": "most_recent"}, ""),
    ({"cast": "nvfp4", "correct": "projection"}, ""),
    ({"cast": "fp8-row", "outliers": 0.9}, ""),
    ({"cast": "fp8-row", "outliers": 0.9, "compensate": True}, "compensate = true"),
    ({"cast": "mxfp4", "hadamard": 32}, "hadamard = 32"),
    ({"cast": "nvfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"}, "keep_channels = 0.1"),
    ({"cast": "nvfp4", "tensor_scale": "row"}, 'tensor_scale = "row"'),
    ({"element": "e2m1", "block": 16, "scale": "e5m3"}, 'scale = "e5m3"'),
]


def with_weights(tmp_path, table):
    """A recipe that multiplies in fp32, narrow in its weights alone."""
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
    path = tmp_path / "mine.toml"
    x = f"{{{keys}}}" if {"keep_channels", "hadamard"} & table.keys() else '"fp32"'  # they come in pairs
    path.write_text(
        f'name = "mine"\ncompute = "fp32"\nfprop.w = {{{keys}}}\nfprop.x = {x}\n'
        'dgrad = "fp32"\nwgrad = "fp32"\n[keep]\nmodules = ["head"]\n'
    )
    return str(path)


@pytest.mark.parametrize(("table", "refused"), WEIGHTS)
def test_compressed_tensors_refuse_a_cast_key_or_hold_what_the_layer_multiplies(tmp_path, table, refused):
    model = trained(with_weights(tmp_path, table), 3, layers=1)
    (tmp_path / "out").mkdir()
    if refused:
        with pytest.raises(UserError, match=rf"{re.escape(refused)}(.|\n)*--to hf"):
            written(tmp_path / "out", model)
        return
    written(tmp_path / "out", model)
    read = read_folder(tmp_path / "out").tensors
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and name != "head"}
    assert len(layers) == 4
    for name, layer in layers.items():
        multiplied = layer(torch.eye(layer.in_features)).T.detach()  # what it makes of the unit vectors
        torch.testing.assert_close(read[f"{name}.weight"], multiplied, rtol=1e-6, atol=0)


def test_a_narrow_head_that_is_tied_to_the_embedding_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ncompute = "bf16"\nfprop = "mxfp8"\ndgrad = "bf16"\nwgrad = "bf16"\n')
    with pytest.raises(UserError, match=r"tied to an embedding that is not.*--to hf"):
        written(tmp_path, trained(str(path), tied_head=True, layers=1))
