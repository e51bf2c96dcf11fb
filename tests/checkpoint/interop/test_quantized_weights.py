"""Folders with narrow weights are read as exactly the numbers that their owners multiply with."""

import json
from itertools import product

import torch
from safetensors.torch import save_file

from checkpoint.interop.models import refused
from checkpoint.interop.test_compressed_tensors import expected, trained, written
from narrowgauge.trainer.checkpoint.interop.external_model import read_external_model
from narrowgauge.trainer.checkpoint.interop.quantized_weights import dequantize

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, shape[-1] + 1)


def test_deepseeks_blocks():
    w_NK = randn(200, 300)
    row, column = torch.arange(200)[:, None] // 128, torch.arange(300) // 128
    scales = torch.empty(2, 3)
    for i, j in product(range(2), range(3)):
        scales[i, j] = w_NK[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].abs().max() / 448
    codes = (w_NK / scales[row, column]).to(torch.float8_e4m3fn)
    read, precision = dequantize({"weight": codes, "weight_scale_inv": scales}, (128, 128))
    assert precision == "fp8"
    assert torch.equal(read, codes.float() * scales[row, column])


def test_modelopts_nvfp4():
    codes = torch.randint(0, 16, (8, 32), generator=torch.Generator().manual_seed(1))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    scale, whole = randn(8, 2).abs().to(torch.float8_e4m3fn), torch.tensor(0.003)
    wide = E2M1[codes] * (scale.float() * whole)[:, torch.arange(32) // 16]
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole}
    read, precision = dequantize(stored, (128, 128))
    assert precision == "nvfp4"
    assert torch.equal(read, wide)


def test_modelopts_own_file_says_it_and_activations_scales_are_no_weights(tmp_path):
    model = trained("fp8", layers=1)
    tensors, config = written(tmp_path, model)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    layer = "model.layers.0.mlp.down_proj"
    save_file(tensors | {f"{layer}.input_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    read = read_external_model(tmp_path)
    assert torch.equal(read.tensors["blocks.0.down.weight"], expected(model, f"{layer}.weight")[0])


def test_weights_of_a_rotated_model_are_refused_unless_the_rotation_is_in_them(tmp_path):
    """They were read as they lie there, without the rotation of their inputs."""
    _, config = written(tmp_path, trained("fp8", layers=1))
    for location in ("weight_input", "input"):
        applied = [{"targets": ["Linear"], "location": location}]
        transform = {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}
        config["quantization_config"]["transform_config"] = transform
        (tmp_path / "config.json").write_text(json.dumps(config))
        if location == "weight_input":
            read_external_model(tmp_path)
    refused(tmp_path, "transform_config rotates what is computed at 'input'")
