"""Files of other tools as recipes: what is read, what is lost, and what is refused by name."""

import re
from dataclasses import replace

import pytest

from narrowgauge.exchange import SOURCES, read_recipe, refusals, write_recipe
from narrowgauge.recipes import recipe, recipe_names
from narrowgauge.recipes.places import Moment
from narrowgauge.system.errors import UserError

BLOCKS = 8
NAMES = (*recipe_names(), *recipe_names("modelopt"), *recipe_names("nemo-rl"))
PAIRS = [(r, t) for r in NAMES for t in SOURCES if not refusals(recipe(r), t)]
ENDS = {"te": ".py", "torchao": ".py", "megatron": ".yaml", "modelopt": ".yaml"}
GATHER = "gather, the format of weights between devices: the file leaves it to its user"


def written(name, target, folder):
    """The file of a recipe, with the factory that it may name."""
    file = folder / f"{name}{ENDS[target]}"
    file.write_text(write_recipe(recipe(name), target, BLOCKS))
    if target == "megatron" and "custom_recipe_factory" in file.read_text():
        factory = folder / f"te_{name.replace('-', '_')}.py"
        factory.write_text(write_recipe(recipe(name), "te"))
    return file


def lost(read):
    return re.findall(r"^# Lost: (.*)\.$", read.text, re.MULTILINE)


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_a_file_comes_back_or_the_recipe_names_what_was_lost(name, target, tmp_path):
    pytest.importorskip("yaml")
    file = written(name, target, tmp_path)
    read = read_recipe(file, target, BLOCKS)
    assert read.name == name
    assert read.casts == recipe(name).casts
    is_share = (name, target) == ("nvfp4", "megatron")  # of blocks, which a file of Megatron names one by one
    assert is_share or read.rules == recipe(name).rules
    again, before = write_recipe(read, target, BLOCKS), file.read_text()
    assert again.partition("\n\n")[2] == before.partition("\n\n")[2]
    assert again == before or GATHER in lost(read)  # only in the comment above the file
    assert len(set(lost(read)) - {GATHER}) == (target == "modelopt")


def read(text, source, folder, blocks=None):
    file = folder / f"theirs{ENDS[source]}"
    file.write_text(text)
    return read_recipe(file, source, blocks)


#: A call of a tool with its defaults: the recipe, and what its values lose.
CALLS = [
    ("te", "Float8CurrentScaling()", "fp8", "fp8_gemm_fprop"),
    ("te", "recipe.NVFP4BlockScaling()", "nvfp4", ""),
    ("te", "MXFP8BlockScaling(fp8_format=Format.E4M3)", "mxfp8", ""),
    ("te", "te.recipe.MXFP8BlockScaling(0, Format.E4M3, enable_2d_quantization=True)", "mxfp8-2d", ""),
    ("torchao", 'Float8LinearConfig.from_recipe_name("rowwise")', "fp8-row", "use_fast_accum"),
]


@pytest.mark.parametrize(("tool", "call", "name", "loses"), CALLS)
def test_a_call_with_its_defaults(tool, call, name, loses, tmp_path):
    """The file is parsed and never executed."""
    made = tmp_path / "made"
    found = read(f'import anything\nopen({str(made)!r}, "w").close()\nmine = {call}\n', tool, tmp_path)
    assert found.casts == recipe(name).casts
    assert any("which layers are narrow" in sentence for sentence in lost(found))
    assert any(loses in sentence for sentence in lost(found))
    assert not made.exists()


MATCHERS = """
configs:
  narrow:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8}
    evaluation_recipe: {}
  wide:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {}
matchers:
  off: {config: narrow, type: glob, pattern: "*linear_fc1*"}
  first: {config: wide, type: glob, pattern: "*layers.0.*", enabled: true}
  last: {config: wide, type: glob, pattern: "*layers.7.*", enabled: true}
  rest: {config: narrow, type: glob, pattern: "*", enabled: true}
"""


def test_a_file_of_megatron_that_was_written_by_hand(imported):
    found = read(MATCHERS, "megatron", imported, blocks=8)
    assert found.casts == recipe("mxfp8").casts
    (rule,) = found.rules
    assert (rule.first_blocks, rule.last_blocks) == (1, 1)
    assert any("evaluation_recipe" in sentence for sentence in lost(found))
    with pytest.raises(UserError, match=r"blocks 7 stay wide.* --blocks N"):
        read(MATCHERS, "megatron", imported)


# As NeMo-RL's examples/te_precision have them.
EXPERTS = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  nvfp4:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp4_quantization_recipe: nvfp4, override_quantized_autocast: true}
  wide:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {override_quantized_autocast: true}
matchers:
  qkv: {config: bf16, type: glob, pattern: "*.linear_qkv", enabled: true}
  fc1: {config: nvfp4, type: glob, pattern: "*.experts.linear_fc1", enabled: true}
  fc2: {config: nvfp4, type: glob, pattern: "*.experts.linear_fc2", enabled: true}
  shared: {config: bf16, type: glob, pattern: "*.shared_experts.*", enabled: true}
  rest: {config: wide, type: glob, pattern: "*", enabled: true}
"""


def test_a_file_of_megatron_with_narrow_experts(tmp_path):
    """The first matcher wins: wide modules above the narrow ones are kept, those below are the rest."""
    pytest.importorskip("yaml")
    found = read(EXPERTS, "megatron", tmp_path)
    narrow, keep = found.rules
    assert narrow.modules == ("*.experts.linear_fc1", "*.experts.linear_fc2")
    assert narrow.casts == recipe("nvfp4").casts
    assert keep.modules == ("*.linear_qkv",)
    assert found.casts == recipe("bf16").casts
    assert not lost(found)
    open_end = EXPERTS.replace("  rest:", "  rest: {enabled: false}\n  other:").replace('"*"', '"*.proj"')
    (sentence,) = lost(read(open_end, "megatron", tmp_path))
    assert "modules that no matcher names" in sentence


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: replace(r, modules=("fc1",)), r"\[\[rule\]\] with other casts"),
        (lambda r: replace(r, until=Moment(9)), r"\[\[rule\]\] until_step"),
        (lambda r: replace(r, places=recipe("mxfp4").casts), "where megatron has"),
        (lambda r: replace(r, places=recipe("mxfp8-2d").casts), "that Megatron has no name for"),
    ],
)
def test_what_no_matcher_of_megatron_says_is_refused(change, why):
    """A pattern that begins with no * also fits the last part of a name; a factory serves all layers."""
    ours = recipe("nemo-rl-mxfp8-routed-experts")
    with pytest.raises(UserError, match=f"cannot be written for megatron.*{why}"):
        write_recipe(replace(ours, rules=(change(ours.rules[0]),)), "megatron")


def test_the_recipes_of_nemo_rl_narrow_the_routed_experts_alone():
    nvfp4, mxfp8 = (recipe(name) for name in recipe_names("nemo-rl"))
    for found, same in ((nvfp4, "nvfp4"), (mxfp8, "mxfp8")):
        assert "NeMo-RL" in found.source
        experts = ["model.layers.1.mlp.experts.3.up_proj", "decoder.layers.1.mlp.experts.linear_fc1"]
        others = ["model.layers.1.mlp.shared_experts.up_proj", "decoder.layers.1.self_attention.linear_qkv"]
        for name in experts:
            assert found.for_layer([(name, 1)], 4).casts == recipe(same).casts
        for name in others:
            assert found.for_layer([(name, 1)], 4).casts == recipe("bf16").casts


# Of other words than ModelOpt's.
FOUR = """
num_bits: [2, 1]
effective_bits: 4.5
block_sizes: {-1: 16, type: dynamic, scale_bits: [4, 3]}
"""
BOTH = """
imports: {four: configs/four}
---
- {quantizer_name: '*weight_quantizer', cfg: {$import: four}}
- {quantizer_name: '*input_quantizer', cfg: {$import: four}}
"""
MODELOPT = """
imports: {both: configs/units/both}
quantize:
  algorithm: max
  quant_cfg:
  - {quantizer_name: '*', enable: false}
  - $import: both
  - {quantizer_name: '*[kv]_bmm_quantizer', cfg: {num_bits: e5m2}}
  - {quantizer_name: '*lm_head*', enable: false}
"""


@pytest.fixture
def imported(tmp_path):
    """A folder with the files that a recipe of ModelOpt's imports."""
    pytest.importorskip("yaml")
    (tmp_path / "configs" / "units").mkdir(parents=True)
    (tmp_path / "configs" / "four.yaml").write_text(FOUR)
    (tmp_path / "configs" / "units" / "both.yaml").write_text(BOTH)
    return tmp_path


def test_a_recipe_of_modelopt_with_imports(imported):
    found = read(MODELOPT, "modelopt", imported)
    assert found.casts == recipe("modelopt-nvfp4-default").casts
    assert [rule.modules for rule in found.rules] == [("head", "lm_head")]
    assert len(lost(found)) == 2


NARROW_EXPERTS = """
quantize:
  algorithm: max
  quant_cfg:
  - {quantizer_name: '*', enable: false}
  - {quantizer_name: '*moe*weight_quantizer', cfg: {num_bits: e4m3}}
  - {quantizer_name: '*mlp*weight_quantizer', cfg: {num_bits: e4m3}}
  - {quantizer_name: '*share_expert*', enable: false}
"""


def test_a_recipe_of_modelopt_for_some_layers_comes_back_without_its_wide_ones(tmp_path):
    """`*share_expert*` was dropped, and the shared expert of a mixture was narrow."""
    pytest.importorskip("yaml")
    found = read(NARROW_EXPERTS, "modelopt", tmp_path)
    for name, element in (("moe.experts.0", "e4m3"), ("moe.share_expert.up", "bf16"), ("proj", "bf16")):
        assert found.for_layer([(f"blocks.1.{name}", 1)], 4).casts["fprop.w"].element.name == element
    text = write_recipe(found, "modelopt")
    again = read(text, "modelopt", tmp_path)
    assert (again.casts, again.rules) == (found.casts, found.rules)
    assert [text.count(f"'{p}") for p in ("*moe*w", "*mlp*w", "*.up", "*share_expert*'")] == [1, 1, 0, 1]


REFUSED = [
    ("te", "A = NVFP4BlockScaling(row_scaled_activation=True)", "activation = True is not supported"),
    ("te", "A = MXFP8BlockScaling(weather=1)", "argument of MXFP8BlockScaling 'weather'"),
    ("te", "A = MXFP8BlockScaling(margin=compute())", "line 1: unknown class or function 'compute'"),
    ("te", "A = MXFP8BlockScaling(margin=1 + x)", "1 [+] x is not a literal"),
    ("te", "A = 1", "makes 0 recipes of TransformerEngine's"),
    ("te", "def f(:", "is not Python"),
    ("te", "MODULES = [{1}]\nA = MXFP8BlockScaling()", "MODULES is a list of names"),
    ("te", "def qfactory(role):\n    if role.name == 'a':\n        return None", "a branch of qfactory"),
    ("torchao", 'A = Float8LinearConfig.from_recipe_name("columns")', "'columns'"),
    ("megatron", EXPERTS.replace("shared: {config: bf16", "shared: {config: other"), "'shared' is not a"),
    ("megatron", EXPERTS.replace("config: nvfp4", "config: bf16"), "no enabled matcher has a narrow"),
    ("megatron", EXPERTS.replace("rest: {config: wide", "rest: {config: nvfp4"), "'rest' gives '[*]'"),
    ("megatron", MATCHERS.replace("mxfp8", "delayed"), "has fp8_quantization_recipe: delayed"),
    ("megatron", "a: 1", "has no configs and matchers"),
    ("megatron", "a: !!python/object/apply:os.system ['true']", "is not YAML"),
    ("modelopt", "a: 1", "has no list quant_cfg"),
    ("megatron", "configs: 3\nmatchers: 4", "not of the form that the tool reads"),
    ("modelopt", "&a [*a]", "not of the form that the tool reads"),
    # of ModelOpt's, next to the files that it imports
    ("modelopt", MODELOPT.replace("algorithm: max", "algorithm: mse"), "algorithm 'mse' changes weights"),
    ("modelopt", MODELOPT.replace("[kv]_bmm", "softmax"), r"quantizer '\*softmax_quantizer' is none of"),
    ("modelopt", MODELOPT.replace("[kv]_bmm_q", "weight_q"), "'e5m2'.* no cast stands in the table"),
    ("modelopt", MODELOPT.replace("units/both", "../../both"), "'both' is not among its imports below"),
]


@pytest.mark.parametrize(("source", "text", "sentence"), REFUSED)
def test_what_no_recipe_holds_is_refused_by_name(source, text, sentence, imported):
    with pytest.raises(UserError, match=sentence) as caught:
        read(text, source, imported, blocks=8)
    assert "theirs" in str(caught.value).partition(":")[0]
    assert "\n" not in str(caught.value)
