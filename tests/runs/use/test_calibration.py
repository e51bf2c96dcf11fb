"""Scales of activations from a text: each is that of the largest input that its layer saw."""

import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.nn import Linear
from narrowgauge.runs.use.calibration import activation_scales
from narrowgauge.runs.use.export import export_run
from narrowgauge.runs.use.trained_model import open_run


@pytest.mark.tier("thorough")
def test_a_text_gives_each_layer_the_scale_of_its_largest_input(train, text):
    run = train(changes={"recipe.name": "fp8", "training.steps": 1})
    opened = open_run(run, "cpu")
    scales = activation_scales(opened, text)
    layers = {name: m for name, m in opened.model.named_modules() if isinstance(m, Linear)}
    assert scales.keys() == {name for name, m in layers.items() if m.spec.casts["fprop.w"].is_scaled}
    seen = []
    opened.model.blocks[0].qkv.register_forward_pre_hook(lambda _, x: seen.append(x[0].abs().max()))
    assert activation_scales(opened, text) == scales
    assert scales["blocks.0.qkv"].decode == float(torch.stack(seen).max().float() / 448)


@pytest.mark.tier("thorough")
def test_scales_that_do_not_exist_are_refused(train, tmp_path, text):
    for recipe, source, to, words in [
        ("mxfp8", text, "compressed-tensors", "nothing to calibrate"),
        ("nvfp4", "recorded", "modelopt", "remembers no amax"),
        ("fp8", text, "gguf", "holds no scales of activations"),
        ("fp8", None, "modelopt", "--calibrate TEXT for FP8"),
    ]:
        run = train(recipe + to, {"recipe.name": recipe, "training.steps": 1})
        with pytest.raises(UserError, match=words):
            export_run(run, to, tmp_path / "out", calibrate=source)
        assert not (tmp_path / "out").exists()
