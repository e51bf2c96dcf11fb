"""Blocks and heads of any model, by its structure: what `last_blocks` and `head` mean in it."""

import pytest
import torch
from torch.nn import Embedding, LayerNorm, ModuleList, ReLU, Sequential

from narrowgauge import audit, convert, kept_layers
from narrowgauge.nn import Linear
from narrowgauge.recipes import parse_recipe


def keeping(**keys):
    text = "\n".join(f"{key} = {value}" for key, value in keys.items())
    return parse_recipe(f'fprop = "mxfp4"\n[keep]\n{text}', "mine.toml")


LAST = keeping(last_blocks=1)


def plain(inputs=16, outputs=16):
    return torch.nn.Linear(inputs, outputs, bias=False)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = plain(16, 32), plain(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Mixture(torch.nn.Module):
    """A layer of eight experts in a ModuleList, as older releases of transformers have them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate = plain(16, 48), plain(16, 8)
        self.experts = blocks(8)


def blocks(count, kind=Mlp):
    return ModuleList(kind() for _ in range(count))


def model_of(**parts):
    """A module with these children, which computes nothing."""
    made = torch.nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


class UNet(torch.nn.Module):
    """As diffusers registers its blocks: the middle after the way up, which it computes before."""

    def __init__(self):
        super().__init__()
        self.down_blocks, self.up_blocks = blocks(3), blocks(3)
        self.mid_block = model_of(attentions=blocks(1), resnets=blocks(2))

    def forward(self, x):
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = block(x)
        return x


def with_head(**parts):
    return model_of(tokens=Embedding(48, 16), layers=blocks(2), **parts)


def with_tied_head():
    tied = with_head(project=plain(16, 16), unembed=plain(16, 48))
    tied.unembed.weight = tied.tokens.weight
    return tied


def sequence():
    return Sequential(*(Sequential(plain(), ReLU(), plain()) for _ in range(3)), plain())


def sides():
    return Sequential(plain(8), LayerNorm(16), Mlp(), Mlp(), LayerNorm(16))


#: A model, a recipe, and the layers that stay wide, or the blocks of which all stay so.
KEPT = {
    "experts form no stack of blocks": (lambda: model_of(layers=blocks(4, Mixture)), "nvfp4", {"layers.3"}),
    "nor are they without a list": (lambda: model_of(l1=Mixture(), l2=Mixture(), l3=Mixture()), LAST, {"l3"}),
    "several stacks are counted through": (
        lambda: model_of(encoder=blocks(3), decoder=blocks(2)),
        *(LAST, {"decoder.1"}),
    ),
    "last in the forward pass": (UNet, LAST, {"up_blocks.2"}),
    "a sequence's members of one class": (sides, LAST, {"3"}),
    "sequences in a sequence": (sequence, LAST, {"2"}),
    "numbers in names": (lambda: model_of(block1=Mlp(), block2=Mlp(), other=Mlp()), LAST, {"block2"}),
    "a block of another stage is counted": (
        lambda: ModuleList([torch.nn.Identity(), *blocks(3)]),
        keeping(last_blocks=0.75),
        {"1", "2", "3"},
    ),
    "one layer": (lambda: Sequential(plain(2, 2)), keeping(last_blocks=0.5), set()),
    "a head": (lambda: with_head(output=plain(16, 48)), "mxfp4", {"output"}),
    "a tied head": (with_tied_head, "mxfp4", {"unembed"}),
    "no head": (lambda: model_of(first=plain(), layers=blocks(2)), "mxfp4", set()),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_stays_wide(case):
    make, recipe, expected = KEPT[case]
    model = make()
    before = {record.layer for record in audit(model, recipe) if record.note.startswith("kept")}
    wide = set(kept_layers(convert(model, recipe)))
    layers = {n for n, m in model.named_modules() if isinstance(m, Linear)}
    assert wide == before == {n for n in layers if any(f"{n}.".startswith(f"{e}.") for e in expected)}
    assert len(wide) >= len(expected)


def test_rules_and_keep_select_the_head_by_its_role():
    text = 'fprop = "mxfp4"\n[[rule]]\nmodules = ["head"]\nfprop = "mxfp8"'
    model = model_of(layers=blocks(2), output=plain())
    convert(model, parse_recipe(text, "rule.toml"))
    assert model.output.recipe.casts["fprop.x"].name == "mxfp8"
    model = model_of(layers=blocks(2), output=plain())
    assert set(kept_layers(convert(model, parse_recipe('fprop = "mxfp4"', "x"), keep="head"))) == {"output"}
