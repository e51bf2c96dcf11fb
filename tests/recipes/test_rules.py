"""Rules: other casts in some layers or from some time on, and what happens to one that selects no layer."""

import pytest
import torch

from narrowgauge import convert
from narrowgauge.nn import outline_of
from narrowgauge.recipes import (
    GEMM_PLACES,
    Outline,
    cut_blocks,
    kept_text,
    parse_recipe,
    recipe,
    recipe_names,
    require_matches,
    resolve,
)
from narrowgauge.system.errors import UserError

LAYERS = [(f"blocks.{i}.{n}", i) for i in range(8) for n in ("qkv", "down")] + [("head", None)]


def casts(text, name, place="fprop.x", step=1, steps=10, decay=8):
    """The name of a layer's cast in a step: the last rule that selects and holds wins."""
    r = parse_recipe(text, "mine.toml").for_layer([(name, dict(LAYERS)[name])], 8)
    return r.at(step, steps, decay).casts[place].name


def of_blocks(*numbers):
    return {name for name, block in LAYERS if block in numbers}


WHERE = {
    "": {name for name, _ in LAYERS},
    'modules = ["qkv", "head"]': {"head", *(f"blocks.{i}.qkv" for i in range(8))},
    "first_blocks = 2": of_blocks(0, 1),
    "last_blocks = 0.15": of_blocks(6, 7),
    'first_blocks = 1\nmodules = ["head"]': {*of_blocks(0), "head"},
}


@pytest.mark.parametrize("where", WHERE)
def test_which_layers(where):
    text = f'[[rule]]\n{where}\nfprop = "e4m3"'
    assert {name for name, _ in LAYERS if casts(text, name) == "e4m3"} == WHERE[where]


def test_a_share_of_blocks_is_rounded_up_but_for_the_rounding_of_its_product():
    """0.28 x 25 is 7.000000000000001 in float64."""
    for share, blocks, kept in ((0.28, 25, 7), (0.29, 25, 8), (0.15, 8, 2)):
        r = parse_recipe(f"[keep]\nlast_blocks = {share}", "mine.toml").rules[0]
        assert sum(r.selects("up", i, blocks) for i in range(blocks)) == kept


WHEN = {
    "from_step = 4": range(4, 11),
    "from_share = 0.7": (8, 9, 10),
    'from = "decay"': (8, 9, 10),
    "until_share = 0.75": range(1, 8),
    'until = "decay"': range(1, 8),
    'from_step = 3\nuntil = "decay"': range(3, 8),
    "from_share = 0.2\nuntil_share = 0.5": (3, 4, 5),
}


@pytest.mark.parametrize("when", WHEN)
def test_from_when(when):
    text = f'fprop = "mxfp4"\n[[rule]]\n{when}\nfprop = "bf16"'
    assert [s for s in range(1, 11) if casts(text, "head", step=s) == "bf16"] == list(WHEN[when])


def test_later_rules_win_and_what_is_kept_is_kept():
    text = 'fprop = "mxfp4"\n[keep]\nmodules = ["head"]\n'
    text += '[[rule]]\nmodules = ["down"]\nfprop = "mxfp8"\nwgrad.dy = "e5m2"\n'
    text += '[[rule]]\nfirst_blocks = 1\nfprop = "mxfp6-e2m3"\n'
    names = ("blocks.3.qkv", "blocks.3.down", "blocks.0.down", "head")
    assert [casts(text, name) for name in names] == ["mxfp4", "mxfp8", "mxfp6-e2m3", "bf16"]
    others = [p for p in GEMM_PLACES if not p.startswith("fprop")]
    assert {p for p in others if casts(text, "blocks.3.down", p) != "bf16"} == {"wgrad.dy"}
    waits = 'fprop = "mxfp4"\n[[rule]]\nfrom_step = 5\nfprop = "bf16"\n'
    waits += '[[rule]]\nmodules = ["head"]\nfprop = "mxfp8"'
    assert [casts(waits, "head", step=s) for s in (1, 9)] == ["mxfp8", "mxfp8"]
    assert [casts(waits, "blocks.0.qkv", step=s) for s in (1, 9)] == ["mxfp4", "bf16"]
    r = recipe("fp8").with_places({"fprop.x": "mxfp4"})  # an override does not narrow what is kept
    assert [r.for_layer([of], 8).casts["fprop.x"].name for of in (("head", None), ("up", 0))] == [
        "bf16",
        "mxfp4",
    ]


def outline(head="head", blocks=4, **more):
    """An outline of four blocks, and a head."""
    names = [f"blocks.{i}.{name}" for i in range(4) for name in ("qkv", "down")]
    layers = {n: [(n, int(n.split(".")[1]) if blocks else None)] for n in names}
    shapes = dict.fromkeys(names, (64, 32))
    if head:
        layers[head] = [(head, None), ("head", None)]
        shapes[head] = (128, 32)
    return Outline(layers, shapes, [f"blocks.{i}" for i in range(blocks)], **more)


def mine(text):
    return parse_recipe(f'fprop = "mxfp4"\n{text}', "mine.toml")


OWNERS = {"embedding": [("embedding", None)]}
#: What no layer matches, with the sentence, or "" for what one does.
MATCHES = {
    '[keep]\nmodules = ["haed"]': (
        r"recipe 'mine': \[keep\] modules = \['haed'\] matches no layer .*; the nearest name is 'head'"
    ),
    '[[rule]]\nmodules = ["down"]\nfprop = "mxfp8"\n[[rule]]\nmodules = ["up"]\nv = "fp32"': r"\['up'\]",
    '[[rule]]\nmodules = ["embedding"]\nfprop = "mxfp8"': r"modules = \['embedding'\] matches no layer",
    '[keep]\nmodules = ["head", "lm_head"]\nlast_blocks = 0.15': "",
    '[[rule]]\nmodules = ["blocks.[01].*"]\nfrom_share = 0.5\nfprop = "mxfp8"': "",
    '[[rule]]\nmodules = ["embedding"]\nv = "fp32"': "",
    '[keep]\nmodules = ["blocks.0.attention"]': "",
    '[[rule]]\nfrom = "decay"\nfprop = "bf16"': "",
}


@pytest.mark.parametrize("text", MATCHES)
def test_a_rule_that_matches_no_layer_is_refused_with_the_nearest_name(text):
    attention = {f"blocks.{i}.attention": [(f"blocks.{i}.attention", i)] for i in range(4)}
    model = outline(owners=OWNERS, attention=attention)
    if not MATCHES[text]:
        require_matches(mine(text), model)
        return
    with pytest.raises(UserError, match=MATCHES[text]):
        require_matches(mine(text), model)


def test_a_model_may_lack_a_head_or_blocks():
    require_matches(mine('[keep]\nmodules = ["head"]'), outline(head="output"))
    require_matches(mine('[keep]\nmodules = ["lm_head"]'), outline(head=""))
    for text in ('[keep]\nmodules = ["haed"]', '[[rule]]\nmodules = ["head"]\nfprop = "mxfp8"'):
        with pytest.raises(UserError, match=r"modules = \['h..d'\] matches no layer"):
            require_matches(mine(text), outline(head=""))
    with pytest.raises(UserError, match="has no repeated blocks; name its layers with modules"):
        require_matches(mine('[[rule]]\nlast_blocks = 2\nfprop = "mxfp8"'), outline(blocks=0))
    kept = mine("[keep]\nlast_blocks = 2")
    require_matches(kept, outline(blocks=0))
    assert kept_text(resolve(kept, outline(blocks=0))).endswith("no layer; the model has no repeated blocks")


def test_what_is_kept_is_one_line():
    some = mine('[keep]\nmodules = ["blocks.3.down", "w9"]\nfirst_blocks = 3')
    assert kept_text(resolve(some, outline(untouched=["gate"]))) == (
        "kept in bf16: blocks.0 to blocks.2, blocks.3.down, gate; 'w9' matches no layer"
    )
    assert kept_text(resolve(recipe("bf16"), outline())) == ""
    assert kept_text(resolve(mine(""), outline())) == "kept in bf16: no layer"


# blocks that do not divide a model's tensors, with what the last one holds


def one_layer(outputs, inputs=64, name="up"):
    return Outline({name: [(name, None)]}, {name: (outputs, inputs)})


HUGE = '[fprop]\nw = {element = "e2m1", block = [4096, 32], scale = "e8m0"}\n'
IN_ROWS = '{element = "e2m1", block = "row", scale = "fp32", hadamard = 16}'
#: (recipe, the layer's shape, tokens): what is said, or nothing.
CUT = [
    (HUGE, (192,), 0, "do not divide the outputs of 1 of 1 layers: up has 192, so its only block holds 192"),
    (HUGE, (4097,), 0, "up has 4097, so its last block holds 1, padded"),
    (f'{HUGE}[keep]\nmodules = ["up"]', (100,), 0, ""),
    ("mxfp8", (64, 40), 0, "blocks of 32 in fprop.x, fprop.w do not divide the inputs"),
    ("mxfp8", (64,), 64, ""),
    ("mxfp8", (64,), 80, "blocks of 32 in wgrad.dy, wgrad.x do not divide the tokens of 1 of 1 layers"),
    ("mxfp8", (64, 64, "blocks.0.experts.1.up"), 80, ""),
    (f"wgrad = {IN_ROWS}", (64,), 24, "its last transform holds 8"),
    (
        '[[rule]]\nfrom_share = 0.5\nfprop.w = {cast = "mxfp8", block = [48, 32]}',
        *((64,), 0, "blocks of 48 in fprop.w"),
    ),
    ('m = {cast = "fp8-1x128", block = 48}', (64,), 0, "blocks of 48 in m do not divide the inputs"),
]


@pytest.mark.parametrize(("text", "shape", "tokens", "sentence"), CUT)
def test_blocks_that_are_cut_are_named(text, shape, tokens, sentence):
    r = parse_recipe(text, "mine.toml") if "=" in text else recipe(text).in_high_precision(["nothing"])
    found = cut_blocks(resolve(r, one_layer(*shape)), tokens=tokens)
    assert bool(found) == bool(sentence)
    assert not sentence or sentence in found[0]


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_converts_plain_layers_and_cuts_no_blocks_of_round_sizes(name):
    r, model = recipe(name), torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    assert cut_blocks(resolve(r, outline_of(model)), tokens=512) == []
    if not (r.narrows_attention or r["stream"].name != "fp32"):
        convert(model, r)
