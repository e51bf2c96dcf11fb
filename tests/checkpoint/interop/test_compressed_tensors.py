"""The narrow weights in compressed-tensors' layout, against that package and against our own numbers."""

import dataclasses
import json
import re

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from narrowgauge.checkpoint.interop.compressed_tensors import write_compressed
from narrowgauge.checkpoint.interop.huggingface import read_folder
from narrowgauge.checkpoint.interop.name_map import name_map
from narrowgauge.checkpoint.interop.safetensors_reader import SHARD_BYTES
from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import Linear, convert, set_step
from narrowgauge.quantization import Cast, quantize
from narrowgauge.recipes import recipe
from narrowgauge.training.outline import placement

SIZES = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 384, "vocab_size": 160}
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
    (
        "nvfp4",
        {"ffn_dim": 100},
        r"'blocks.0.down' has rows of 100, which end inside a block of 16 \(3 ",
    ),
    ("mxfp8", {"ffn_dim": 80}, "'blocks.0.down' has rows of 80, which end inside a block of 32"),
    ("mxfp4", {"dim": 144, "head_dim": 36}, "'blocks.0.qkv' has rows of 144, which end inside a block of 32"),
    ("fp8-block", {"dim": 192, "heads": 3, "kv_heads": 1}, "of 192 and 64 rows .* its blocks of 128 rows"),
]


def trained(name, **changes):
    model = Transformer(model_config("debug", **(SIZES | changes)))
    initialize(model, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return convert(model, name)


def after_steps(model, steps):
    """The model in the step after some, whose passes the histories of delayed scales have seen."""
    for step in range(1, steps + 1):
        set_step(model, 0, step, 0)
        model(torch.arange(40)[None] % 160).sum().backward()
    set_step(model, 0, steps + 1, 0)
    return model


def plain(model):
    names = dict(model.named_parameters(remove_duplicate=False))
    return {name: t.float() for name, t in model.state_dict().items() if name in names}


def written(tmp_path, model, dtype=torch.float32):
    write_compressed(tmp_path, model, plain(model), None, dtype, SHARD_BYTES)
    return load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())


def expected(model, name):
    """Their weight's numbers as training multiplies with them, and whether the layer is narrow."""
    for counterpart in name_map(model.config):
        if name in counterpart.theirs:
            weight = plain(model)[counterpart.ours]
            layer = model.get_submodule(counterpart.ours.removesuffix(".weight"))
            cast = layer.spec.casts["fprop.w"] if isinstance(layer, Linear) else None
            if cast is not None and cast.is_scaled:
                q = quantize(weight, cast)
                return dict(counterpart.split(q.dequantize()))[name], True
            return dict(counterpart.split(weight))[name], False
    raise AssertionError(name)


@pytest.mark.tier("thorough", keep=3)
@pytest.mark.parametrize("name", RECIPES)
def test_the_package_reads_the_numbers_of_training(tmp_path, name):
    model = after_steps(trained(name), 1)
    tensors, config = written(tmp_path, model)
    described = QuantizationConfig.model_validate(config["quantization_config"])
    assert described.format == RECIPES[name]
    (scheme,) = described.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(described.format)
    narrow = 0
    for counterpart in name_map(model.config):
        for theirs in counterpart.theirs:
            values, is_narrow = expected(model, theirs)
            layer = theirs.removesuffix(".weight")
            if not is_narrow:
                assert torch.equal(tensors[theirs], values)
                assert (
                    counterpart.ours.endswith(("norm.weight", "embedding.weight"))
                    or layer in described.ignore
                )
                continue
            narrow += 1
            assert layer not in described.ignore
            own = {k.rsplit(".", 1)[1]: t for k, t in tensors.items() if k.startswith(f"{layer}.")}
            assert set(own) == set(compressor.compression_param_names(scheme))
            read = compressor.decompress(own, scheme)["weight"].float()
            # The package multiplies in bfloat16 where elements are packed.
            assert (read - values).norm() < (0.004 if "pack" in described.format else 1e-6) * values.norm()
    assert narrow == 7 * (3 if name == "nvfp4" else 4)
    assert "lm_head" in described.ignore


@pytest.mark.tier("thorough", keep=("fp8", "nvfp4"))  # test_quantized_weights.py reads all of them
@pytest.mark.parametrize(
    ("name", "within"),
    [("fp8", 1e-4), ("fp8-block", 1e-4), ("mxfp8", 1e-4), ("mxfp4", 1e-2), ("nvfp4", 1e-2)],
)
@torch.no_grad()
def test_transformers_opens_it(tmp_path, name, within):
    model = trained(name)
    written(tmp_path, model)
    wide = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="from the model will be used"):
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, quantization_config=wide
        ).eval()
    ours = Transformer(model.config)
    weights = plain(model)
    for counterpart in name_map(model.config):
        weights[counterpart.ours] = counterpart.join(lambda n: expected(model, n)[0], tmp_path)
    ours.load_state_dict(weights)
    ids = torch.arange(40)[None] % 160
    expected_logits = ours(ids)
    assert (theirs(ids).logits - expected_logits).norm() < within * expected_logits.norm()


def test_several_casts_are_several_groups(tmp_path):
    mixed = "mixed.toml"
    text = recipe("mxfp8").text + '\n[[rule]]\nmodules = ["*.down"]\nfprop = "mxfp4"\n'
    (tmp_path / mixed).write_text(text)
    (tmp_path / "out").mkdir()
    _, config = written(tmp_path / "out", trained(str(tmp_path / mixed)))
    described = QuantizationConfig.model_validate(config["quantization_config"])
    assert described.format == "mixed-precision"
    by_format = {scheme.format: scheme.targets for scheme in described.config_groups.values()}
    assert by_format["mxfp4-pack-quantized"] == [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    assert len(by_format["mxfp8-quantized"]) == 24


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bf16", {}, "does not quantize weights"),
        ("quartet", {}, r"hadamard = 32, .*, which compressed-tensors cannot express"),
        ("mxint8", {}, 'element = "int8"'),
        ("fp4", {}, "'fp4-row'"),
        *UNFIT,
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path, name, changes, words):
    with pytest.raises(UserError, match=words) as error:
        written(tmp_path, trained(name, **changes))
    assert re.search(r"--to (gguf or )?hf", str(error.value))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "changes", "words"), UNFIT)
def test_rows_that_no_layout_holds_are_named_before_the_training(name, changes, words):
    config = model_config("debug", **(SIZES | changes))
    (sentence,) = [s for s in placement(config, recipe(name), 128) if s.startswith("export: ")]
    assert re.search(words, sentence), sentence
    assert "--to gguf or hf" in sentence
    fits = placement(model_config("debug", **SIZES), recipe(name), 128)
    assert not any(s.startswith("export: ") for s in fits)


def test_gpt2_is_refused(tmp_path):
    model = Transformer(model_config("gpt2-debug", dim=128, layers=1, ffn_dim=128, vocab_size=160))
    initialize(model, 0)
    with pytest.raises(UserError, match="Conv1D"):
        written(tmp_path, convert(model, "fp8"))


# A weight's cast, and what an export does with it: the key that the layout cannot hold, or "" where it can.
WEIGHTS = {
    "headroom": ({"cast": "nvfp4", "headroom": 16 / 17}, ""),
    "power_of_two": ({"cast": "e4m3", "power_of_two": True}, ""),
    "candidates": ({"cast": "nvfp4", "candidates": [6, 4], "choose": "mse"}, ""),
    "zero_scale": ({"cast": "nvfp4", "zero_scale": "smallest"}, ""),
    "scale_target": ({"cast": "nvfp4", "scale_target": 256}, ""),
    "scale_rounding": ({"cast": "nvfp4", "scale_rounding": "toward-zero"}, ""),
    "scale_rule": ({"cast": "mxfp4", "scale_rule": "floor"}, ""),
    "rounding": ({"cast": "mxfp8", "rounding": "stochastic", "random_bits": 8}, ""),
    "history": ({"cast": "e4m3", "history": 4, "margin": 1, "history_algorithm": "most_recent"}, ""),
    "refresh": ({"cast": "nvfp4", "refresh": 3}, ""),
    "correct": ({"cast": "nvfp4", "correct": "projection"}, ""),
    "estimator_k": ({"cast": "fp8-row", "estimator_k": 5.0}, ""),
    "outliers": ({"cast": "fp8-row", "outliers": 0.9}, ""),
    "compensate": ({"cast": "fp8-row", "outliers": 0.9, "compensate": True}, "compensate = true"),
    "hadamard": ({"cast": "mxfp4", "hadamard": 32}, "hadamard = 32"),
    "keep_channels": ({"cast": "nvfp4", "keep_channels": 0.1, "keep_cast": "mxfp8"}, "keep_channels = 0.1"),
    "tensor_scale": ({"cast": "nvfp4", "tensor_scale": "row"}, 'tensor_scale = "row"'),
    "scale": ({"element": "e2m1", "block": 16, "scale": "e5m3"}, 'scale = "e5m3"'),
}


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


@torch.no_grad()
def multiplied(layer):
    """The weight that a layer multiplies with: what it makes of the unit vectors."""
    return layer(torch.eye(layer.in_features)).T


@pytest.mark.parametrize("key", WEIGHTS)
def test_compressed_tensors_refuse_a_cast_key_or_hold_what_the_layer_multiplies(tmp_path, key):
    table, refused = WEIGHTS[key]
    model = after_steps(trained(with_weights(tmp_path, table), layers=1), 3)
    (tmp_path / "out").mkdir()
    if refused:
        with pytest.raises(UserError, match=re.escape(refused)) as error:
            written(tmp_path / "out", model)
        assert "--to hf" in str(error.value)
        return
    written(tmp_path / "out", model)
    read = read_folder(tmp_path / "out").tensors
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and name != "head"}
    assert len(layers) == 4
    for name, layer in layers.items():
        torch.testing.assert_close(read[f"{name}.weight"], multiplied(layer), rtol=1e-6, atol=0)


def test_a_key_that_does_not_exist_yet_is_refused(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NewCast(Cast):
        twist: int = 0

    model = trained("mxfp8", layers=1)
    for layer in model.modules():
        if isinstance(layer, Linear):
            w = layer.spec.casts["fprop.w"]
            known = {f.name: getattr(w, f.name) for f in dataclasses.fields(Cast)}
            casts = {**layer.spec.casts, "fprop.w": NewCast(**known, twist=2)}
            layer.spec = dataclasses.replace(layer.spec, casts=casts)
    with pytest.raises(UserError, match=r"twist = 2"):
        written(tmp_path, model)


def test_inputs_that_training_left_wide_are_described_as_wide(tmp_path):
    model = trained(with_weights(tmp_path, {"cast": "mxfp4"}), layers=1)
    (tmp_path / "out").mkdir()
    _, config = written(tmp_path / "out", model)
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["weights"]["num_bits"] == 4
    assert group["input_activations"] is None


def test_a_narrow_head_that_is_tied_to_the_embedding_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ncompute = "bf16"\nfprop = "mxfp8"\ndgrad = "bf16"\nwgrad = "bf16"\n')
    with pytest.raises(UserError, match=r"tied to an embedding that is not.*--to hf"):
        written(tmp_path, trained(str(path), tied_head=True, layers=1))
