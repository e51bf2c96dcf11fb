"""The narrow weights in ModelOpt's layout: every shipped recipe is exact there, or refused."""

import json

import pytest

from checkpoint.interop.models import export, model_under, weights_of
from narrowgauge.nn import Linear
from narrowgauge.recipes import recipe_names
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.checkpoint.interop.huggingface import read_folder
from narrowgauge.trainer.checkpoint.interop.modelopt import ALGORITHMS
from narrowgauge.trainer.checkpoint.interop.read_back import require_read_back

EXACT = {"nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8"}


@pytest.mark.tier("thorough", keep=("nvfp4", "mxfp8", "fp8"))
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_exact_or_refused(tmp_path, name):
    model = model_under(name)
    try:
        export("modelopt", tmp_path, model)
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
