"""The narrow weights in ModelOpt's layout: every shipped recipe is exact there, or refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.interop.models import export, model_under, weights_of
from narrowgauge.checkpoint.interop.huggingface import read_folder
from narrowgauge.checkpoint.interop.modelopt import ALGORITHMS
from narrowgauge.checkpoint.interop.read_back import require_read_back
from narrowgauge.errors import UserError
from narrowgauge.nn import Linear
from narrowgauge.recipes import recipe_names

EXACT = {"nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8"}


def written(folder, name):
    """A model under a recipe, written."""
    model = model_under(name)
    export("modelopt", folder, model)
    return model


@pytest.mark.tier("thorough", keep=("nvfp4", "mxfp8", "fp8"))
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_exact_or_refused(tmp_path, name):
    try:
        model = written(tmp_path, name)
    except UserError:
        assert name not in EXACT
        assert not list(tmp_path.iterdir())
        return
    expected = weights_of(model)
    for layer, module in model.named_modules():
        if isinstance(module, Linear) and module.spec.casts["fprop.w"].is_scaled:
            expected[f"{layer}.weight"] = module.forward_weight()
    require_read_back(read_folder(tmp_path).tensors, expected)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_algo"]
    assert said == EXACT.get(name, said)
    assert said in {algorithm for algorithm, _ in ALGORITHMS.values()}


@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.tier("thorough")  # the reader of `import` shows the same above
def test_the_package_decodes_the_same_numbers(tmp_path):
    reason = "nvidia-modelopt decodes this layout, and is not installed"
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor", reason=reason)
    written(tmp_path, "nvfp4")
    tensors, checked = load_file(tmp_path / "model.safetensors"), 0
    ours = read_folder(tmp_path).tensors
    for name in [n for n in tensors if n.endswith("o_proj.weight") and n[:-7] + ".weight_scale_2" in tensors]:
        layer, q = name.removesuffix(".weight"), tensors[name]
        scale, second = tensors[f"{layer}.weight_scale"], tensors[f"{layer}.weight_scale_2"]
        packed = qtensor.NVFP4QTensor(torch.Size((q.shape[0], 2 * q.shape[1])), torch.float32, q)
        theirs = packed.dequantize(scale=scale, double_scale=second, block_sizes={-1: 16})
        mine = ours[f"blocks.{layer.split('.')[2]}.attention_out.weight"]
        assert (theirs - mine).abs().max() <= 2.0**-21 * mine.abs().max()
        checked += 1
    assert checked
