"""Recipes for other tools: what is written is what they read, and what they cannot say is refused by name."""

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import narrowgauge as ng
from narrowgauge.exchange import TARGETS, Refused, refusals, write_recipe
from narrowgauge.nn import Linear
from narrowgauge.quantization import make_cast
from narrowgauge.recipes import GEMM_PLACES, parse_recipe, recipe
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.cli.main import main
from narrowgauge.trainer.models import Transformer, model_config
from support.unchecked import tomorrow, unchecked

#: A recipe that the target can express.
BASE = dict.fromkeys(TARGETS, "fp8") | {"modelopt": "modelopt-fp8-default"}


def parsed(text):
    return parse_recipe(text, "mine")


def written(of, target, tmp_path):
    """The names of a written file, run as Python."""
    file = tmp_path / f"{target}.py"
    file.write_text(write_recipe(of, target))
    return runpy.run_path(str(file))


@pytest.fixture
def te(monkeypatch):
    """TransformerEngine, whose names note what they are called with."""
    module = MagicMock()
    tensors = ("float8", "float8_blockwise", "mxfp8", "nvfp4", "hybrid", "identity")
    names = ["", ".common", ".common.recipe", ".pytorch", ".pytorch.constants", ".pytorch.tensor"]
    for name in (*names, *(f".pytorch.tensor.{t}_tensor" for t in tensors)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    return module


def role(tensor_type):
    return SimpleNamespace(module_type="linear", tensor_type=tensor_type, name="")


USED_AGAIN = """
fprop = "mxfp8"
dgrad = {dy = "nvfp4", w = {cast = "nvfp4", of = "fprop.w"}}
wgrad = "nvfp4"
[keep]
modules = ["head"]
"""


def test_transformer_engine_gets_a_quantizer_of_each_direction_otherwise(te, tmp_path):
    """The source of the other direction is the original, or the numbers that are used again."""
    make = written(recipe("bf16-fwd-mxfp8-bwd"), "te", tmp_path)["qfactory"]
    mxfp8, wide = te.MXFP8Quantizer.return_value, te.IdentityQuantizer.return_value
    assert make(role("weight")) is te.HybridQuantizer.return_value
    te.HybridQuantizer.assert_called_with(
        rowwise_quantizer=wide, columnwise_quantizer=mxfp8, columnwise_source="original"
    )
    te.MXFP8Quantizer.assert_called_with(te.DType.kFloat8E4M3)
    assert make(role("grad_output")) is mxfp8
    assert make(None) is wide
    written(parsed(USED_AGAIN), "te", tmp_path)["qfactory"](role("weight"))
    nvfp4 = te.NVFP4Quantizer.return_value
    te.HybridQuantizer.assert_called_with(
        rowwise_quantizer=mxfp8, columnwise_quantizer=nvfp4, columnwise_source="rowwise_dequantized"
    )


@pytest.mark.parametrize("name", ["fp8", "fp8-row", "fp8-row-hp"])
def test_torchao_computes_what_the_recipe_computes(name, tmp_path):
    """Outputs and gradients of torchao's layer and of ours, from the same operands: equal to the last bit."""
    pytest.importorskip("torchao")
    file = written(recipe(name), "torchao", tmp_path)
    torch.manual_seed(0)
    x, dy = torch.randn(64, 48), torch.randn(64, 32) / 64
    results = []
    for convert in (
        lambda m: file["convert"](m, replace(file["CONFIG"], emulate=True)),
        lambda m: ng.convert(m, parsed(recipe(name).text), backend="emulated"),
    ):
        torch.manual_seed(1)
        model = torch.nn.ModuleDict(
            {"body": torch.nn.Linear(48, 32, bias=False), "head": torch.nn.Linear(4, 4)}
        )
        convert(model.bfloat16())
        a = x.bfloat16().requires_grad_()
        y = model["body"](a)
        y.backward(dy.bfloat16())
        assert type(model["head"]) is torch.nn.Linear or "Float8" not in type(model["head"]).__name__
        results.append((y, a.grad, model["body"].weight.grad))
    for theirs, ours in zip(*results, strict=True):
        scale = ours.float().abs().max()
        assert (theirs.float() - ours.float()).abs().max() <= scale * 2**-8  # one rounding to bf16


def test_the_same_layers_stay_wide(tmp_path, te):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(model_config("gpt2"))
    file = written(recipe("nvfp4"), "te", tmp_path)
    wide = file["wide_layers"](model)
    ng.convert(model, "nvfp4")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear)}
    kept = {n for n, m in layers.items() if set(m.recipe.casts.values()) == {make_cast("bf16")}}
    assert wide & set(layers) == kept
    assert any(n.startswith("blocks.11.") for n in kept)


def test_megatron_reads_globs_of_which_the_first_wins():
    yaml = pytest.importorskip("yaml")
    file = yaml.safe_load(write_recipe(recipe("nvfp4"), "megatron", blocks=8))
    patterns = [(m["pattern"], m["config"]) for m in file["matchers"].values()]
    assert patterns == [("*layers.6.*", "wide"), ("*layers.7.*", "wide"), ("*layers.*", "narrow")]
    assert file["configs"]["narrow"]["training_recipe"]["fp4_quantization_recipe"] == "nvfp4"
    assert file["configs"]["wide"]["training_recipe"] == {}
    with pytest.raises(UserError, match=r"keep.last_blocks .* --blocks N"):
        write_recipe(recipe("nvfp4"), "megatron")


@pytest.mark.parametrize(
    ("name", "target", "key"),
    [
        ("quartet", "te", r"hadamard = 32, where te has none"),
        ("fp4-ue5m3", "megatron", "refresh = 50, where megatron has none"),
        ("msamp-o2", "torchao", "m = e4m3"),
        ("mxfp8", "qwix", 'scale = "e8m0"'),
        ("bf16", "te", "compute = 'bf16' in all three GEMMs"),
    ],
)
def test_what_a_target_cannot_say_is_refused_by_key_and_target(name, target, key):
    with pytest.raises(Refused, match=key) as caught:
        write_recipe(recipe(name), target)
    assert f"recipe {name!r} cannot be written for {target}: " in str(caught.value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", GEMM_PLACES)
def test_every_key_of_a_cast_is_refused_unless_it_is_said(target, place):
    """Each field of a cast, moved away from what the recipe has: nothing is dropped silently."""
    base = recipe(BASE[target])
    assert not refusals(base, target)
    assert refusals(unchecked(base, places={**base.places, place: tomorrow(base[place])}), target)
    moved = {int: 3, float: 0.5, bool: True, str: "another", tuple: (1, 2)}
    for key, value in base.casts[place].values().items():
        if key in ("power_of_two", "element", "scale", "block", "scale_rule"):
            continue  # of these, targets say some values
        if key == "of" and target in ("te", "megatron") and place in ("dgrad.w", "wgrad.x"):
            continue  # a HybridQuantizer's columnwise_source
        changed = unchecked(base.casts[place], **{key: moved[type(value)]})
        found = refusals(unchecked(base, places={**base.places, place: changed}), target)
        assert (place, key) in {(r.place, r.key) for r in found}, key


E4M3 = 'fprop="e4m3"\ndgrad="e4m3"\nwgrad="e4m3"\n'
NO_OPERANDS = {
    '[[rule]]\nfrom="decay"\nfprop="bf16"': "from",
    '[[rule]]\nmodules=["*.down"]\nfprop="bf16"': "rule",
    '[[rule]]\nmodules=["*.down"]\nm="bf16"': "rule",
    '[[rule]]\nmodules=["*.0"]\nattention="e4m3"': "rule",
    **{'m="bf16"': "m", 'saved="e5m2"': "saved", 'stream="bf16"': "stream"},
    'attention="e4m3"': "attention.q",
}


@pytest.mark.parametrize("text", NO_OPERANDS)
def test_what_is_no_operand_is_refused_too(text):
    for target in TARGETS:
        assert NO_OPERANDS[text] in [r.key for r in refusals(parsed(E4M3 + text), target)]


@pytest.mark.parametrize("line", ["mine.toml --to te", "theirs.py --from te --to torchao", "fp8 --to te"])
def test_the_line_in_the_header_writes_the_same_file(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(recipe("fp8").text)
    Path("theirs.py").write_text(write_recipe(recipe("fp8"), "te"))
    main(["recipes", *line.split()])
    first = capsys.readouterr().out
    (said,) = re.findall(r"^# Written by: narrowgauge (.*)$", first, re.MULTILINE)
    main(said.split())
    assert capsys.readouterr().out == first
