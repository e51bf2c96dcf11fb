"""Which layers a rule selects, and the refusal of one that selects none."""

import pytest
import torch

from narrowgauge import convert
from narrowgauge.errors import UserError
from narrowgauge.recipes import (
    Outline,
    kept_text,
    parse_recipe,
    recipe,
    recipe_names,
    require_matches,
    resolve,
)

LAYERS = [f"blocks.{i}.{name}" for i in range(4) for name in ("qkv", "down")]
SMALL = dict.fromkeys(LAYERS, (64, 32))


def outline(head="head", blocks=4, **more):
    """An outline of four blocks, and a head."""
    layers = {n: [(n, int(n.split(".")[1]) if blocks else None)] for n in LAYERS}
    shapes = dict(SMALL)
    if head:
        layers[head] = [(head, None), ("head", None)]
        shapes[head] = (128, 32)
    return Outline(layers, shapes, [f"blocks.{i}" for i in range(blocks)], **more)


def mine(text):
    return parse_recipe(f'fprop = "mxfp4"\n{text}', "mine.toml")


REFUSED = {
    '[keep]\nmodules = ["haed"]': (
        r"recipe 'mine': \[keep\] modules = \['haed'\] matches no layer .*; the nearest name is 'head'"
    ),
    '[[rule]]\nmodules = ["blocks.77.*"]\nfprop = "mxfp8"': r"a \[\[rule\]\] with modules = \['blocks.77",
    '[[rule]]\nmodules = ["dwon"]\nfrom_step = 9\nfprop = "mxfp8"': "nearest name is 'down'",
    '[[rule]]\nmodules = ["dwon"]\nlast_blocks = 1\nfprop = "mxfp8"': "nearest name is 'down'",
    '[[rule]]\nmodules = ["down"]\nfprop = "mxfp8"\n[[rule]]\nmodules = ["up"]\nv = "fp32"': r"\['up'\]",
    '[keep]\nmodules = ["lm_head"]': "nearest name is 'head'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_rule_that_matches_no_layer_is_refused_with_the_nearest_name(text):
    with pytest.raises(UserError, match=REFUSED[text]):
        require_matches(mine(text), outline())


ACCEPTED = [
    '[keep]\nmodules = ["head", "lm_head"]\nlast_blocks = 0.15',
    '[keep]\nmodules = ["down", "w2"]',
    '[[rule]]\nmodules = ["blocks.[01].*"]\nfrom_share = 0.5\nfprop = "mxfp8"',
    '[[rule]]\nlast_blocks = 2\nfprop = "mxfp8"',
    '[[rule]]\nmodules = ["embedding"]\nv = "fp32"',
    '[keep]\nmodules = ["blocks.0.attention"]',
    '[[rule]]\nfrom = "decay"\nfprop = "bf16"',
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_rule_that_matches_anything_is_accepted(text):
    owners = {"embedding": [("embedding", None)]}
    attention = {f"blocks.{i}.attention": [(f"blocks.{i}.attention", i)] for i in range(4)}
    require_matches(mine(text), outline(owners=owners, attention=attention))


def test_the_name_of_a_place_that_a_rule_does_not_set_is_no_match():
    owners = {"embedding": [("embedding", None)]}
    with pytest.raises(UserError, match=r"modules = \['embedding'\] matches no layer"):
        require_matches(mine('[[rule]]\nmodules = ["embedding"]\nfprop = "mxfp8"'), outline(owners=owners))


def test_a_head_is_its_role_and_a_model_may_lack_it():
    require_matches(mine('[keep]\nmodules = ["head"]'), outline(head="output"))
    require_matches(mine('[keep]\nmodules = ["lm_head"]'), outline(head=""))
    for text in ('[keep]\nmodules = ["haed"]', '[[rule]]\nmodules = ["head"]\nfprop = "mxfp8"'):
        with pytest.raises(UserError, match=r"modules = \['h..d'\] matches no layer"):
            require_matches(mine(text), outline(head=""))


def test_rule_about_blocks_is_refused_for_a_model_without_blocks():
    with pytest.raises(UserError, match="has no repeated blocks; name its layers with modules"):
        require_matches(mine('[[rule]]\nlast_blocks = 2\nfprop = "mxfp8"'), outline(blocks=0))
    kept = mine("[keep]\nlast_blocks = 2")
    require_matches(kept, outline(blocks=0))
    assert (
        kept_text(resolve(kept, outline(blocks=0)))
        == "kept in bf16: no layer; the model has no repeated blocks"
    )


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_converts_plain_layers(name):
    r = recipe(name)
    if not (r.narrows_attention or r.stream.name != "fp32"):
        convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)), r)


def test_a_file_with_a_misspelt_layer_is_refused_by_convert(tmp_path):
    path = tmp_path / "typo.toml"
    path.write_text('fprop = "mxfp4"\n[keep]\nmodules = ["haed"]')
    model = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(8, 4), "output": torch.nn.Linear(4, 8)})
    with pytest.raises(UserError, match="nearest name is 'head'"):
        convert(model, str(path))
    assert type(model["output"]) is torch.nn.Linear


def test_what_is_kept_is_one_line():
    routers = {f"blocks.{i}.router": [(f"blocks.{i}.router", i)] for i in range(5)}
    many = Outline({**outline().layers, **routers}, {}, [f"blocks.{i}" for i in range(5)])
    assert kept_text(resolve(recipe("nvfp4"), outline())) == "kept in bf16: blocks.3, head"
    kept = mine('[keep]\nmodules = ["blocks.2.down", "router", "w9"]')
    assert kept_text(resolve(kept, many)) == (
        "kept in bf16: blocks.4, blocks.2.down, blocks.0.router, blocks.1.router, blocks.2.router, "
        "blocks.3.router; 'w9' matches no layer"
    )
    more = {f"blocks.{i}.router": [(f"blocks.{i}.router", i)] for i in range(4, 10)}
    longer = Outline({**many.layers, **more}, {}, [f"blocks.{i}" for i in range(10)])
    assert kept_text(resolve(kept, longer)) == (
        "kept in bf16: blocks.4 to blocks.9, blocks.2.down, "
        "blocks.0.router, blocks.1.router, blocks.2.router, blocks.3.router; 'w9' matches no layer"
    )
    assert kept_text(resolve(recipe("bf16"), outline())) == ""
    assert kept_text(resolve(mine(""), outline())) == "kept in bf16: no layer"
    assert (
        kept_text(resolve(recipe("nvfp4"), outline(untouched=["gate"])))
        == "kept in bf16: blocks.3, head, gate"
    )
