"""Folders with narrow weights are read as exactly the numbers that their owners multiply with."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from checkpoint.interop.test_compressed_tensors import RECIPES, after_steps, expected, trained, written
from narrowgauge.checkpoint.interop.external_model import read_external_model
from narrowgauge.checkpoint.interop.name_map import name_map
from narrowgauge.checkpoint.interop.quantized_weights import dequantize
from narrowgauge.errors import UserError

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


# Of the others test_compressed_tensors.py compares the files with what the layers multiply.
@pytest.mark.tier("thorough", keep=("nvfp4", "mxfp8", "fp8-row"))
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_exported_comes_in_with_the_numbers_of_training(tmp_path, name):
    model = after_steps(trained(name), 1)
    written(tmp_path, model)
    read = read_external_model(tmp_path)
    # The layout has the inverse of NVFP4's tensor scale: four roundings lie between.
    within = 2**-22 if name == "nvfp4" else 0.0
    for pair in name_map(model.config):
        for theirs, part in pair.split(read.tensors[pair.ours]):
            values, _ = expected(model, theirs)
            assert ((part - values).abs() <= within * values.abs()).all(), theirs
    narrow = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "mxfp6-e2m3": "mxfp6"}.get(name, "fp8")
    assert read.precision == f"fp32 and {narrow}"


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, shape[-1] + 1)


@pytest.mark.parametrize(
    ("format", "strategy", "more"),
    [
        ("float-quantized", "channel", {"num_bits": 8}),
        ("nvfp4-pack-quantized", "tensor_group", {"num_bits": 4, "group_size": 16}),
    ],
)
def test_what_the_package_stores_is_what_it_reads(format, strategy, more):
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights={"type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more},
        format=format,
    )
    w_NK = randn(32, 64)
    if strategy == "channel":
        given = {"weight": w_NK, "weight_scale": w_NK.abs().amax(1, keepdim=True) / 448}
    else:
        whole = 448 * 6 / w_NK.abs().amax().reshape(1)
        blocks = (w_NK.view(32, 4, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        given = {"weight": w_NK, "weight_scale": blocks.float(), "weight_global_scale": whole}
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(given, scheme)
    theirs = compressor.decompress({k: v for k, v in stored.items() if v is not None}, scheme)["weight"]
    ours, _ = dequantize(stored, (128, 128))
    assert torch.equal(ours.to(theirs.dtype), theirs)


def test_deepseeks_blocks():
    w_NK, (rows, columns) = randn(200, 300), (128, 128)
    codes, scales = torch.empty(200, 300, dtype=torch.float8_e4m3fn), torch.empty(2, 3)
    wide = torch.empty(200, 300)
    for i in range(2):
        for j in range(3):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = w_NK[at].abs().max() / 448
            codes[at] = (w_NK[at] / scales[i, j]).to(torch.float8_e4m3fn)
            wide[at] = codes[at].float() * scales[i, j]
    read, precision = dequantize({"weight": codes, "weight_scale_inv": scales}, (rows, columns))
    assert precision == "fp8"
    assert torch.equal(read, wide)


def test_modelopts_nvfp4():
    codes = torch.randint(0, 16, (8, 32), generator=torch.Generator().manual_seed(1))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale, whole = randn(8, 2).abs().to(torch.float8_e4m3fn), torch.tensor(0.003)
    wide = torch.empty(8, 32)
    for n in range(8):
        for k in range(32):
            wide[n, k] = E2M1[codes[n, k]] * (scale[n, k // 16].float() * whole)
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}
    read, precision = dequantize(stored, (128, 128))
    assert precision == "nvfp4"
    assert torch.equal(read, wide)


def test_modelopts_own_file_says_it_and_activations_scales_are_no_weights(tmp_path):
    model = trained("fp8")
    tensors, config = written(tmp_path, model)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    layer = "model.layers.0.mlp.down_proj"
    save_file(tensors | {f"{layer}.input_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    read = read_external_model(tmp_path)
    assert torch.equal(read.tensors["blocks.0.down.weight"], expected(model, f"{layer}.weight")[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "gptq"}, ["quantized by 'gptq'", "compressed-tensors", "the unquantized model"]),
        ({"without": "weight_scale"}, ["down_proj", "is torch.float8_e4m3fn"]),
        ({"scale": torch.ones(3, 5)}, ["down_proj", "scales of shape (3, 5)", "the unquantized model"]),
        ({"scale": torch.tensor([float("nan")])}, ["down_proj.weight", "holds a NaN"]),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path, change, words):
    tensors, config = written(tmp_path, trained("fp8"))
    scale = "model.layers.0.mlp.down_proj.weight_scale"
    if "method" in change:
        config["quantization_config"]["quant_method"] = change["method"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    elif "scale" in change:
        save_file(tensors | {scale: change["scale"]}, tmp_path / "model.safetensors")
    else:
        save_file({k: t for k, t in tensors.items() if k != scale}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as refusal:
        read_external_model(tmp_path)
    for word in words:
        assert word in str(refusal.value)


def test_a_block_size_that_is_none_is_not_used(tmp_path):
    tensors, config = written(tmp_path, trained("fp8-block"))
    for wrong in ([0, 0], "128", [128], [128.5, 1], None):
        config["quantization_config"]["weight_block_size"] = wrong
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_external_model(tmp_path).precision == "fp32 and fp8"
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_weights_of_a_rotated_model_are_refused_unless_the_rotation_is_in_them(tmp_path):
    """They were read as they lie there, without the rotation of their inputs."""
    _, config = written(tmp_path, trained("fp8"))
    for location in ("weight_input", "input"):
        applied = [{"targets": ["Linear"], "location": location}]
        transform = {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}
        config["quantization_config"]["transform_config"] = transform
        (tmp_path / "config.json").write_text(json.dumps(config))
        if location == "weight_input":
            read_external_model(tmp_path)
    with pytest.raises(UserError, match="transform_config rotates what is computed at 'input'"):
        read_external_model(tmp_path)
