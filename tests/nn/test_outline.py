"""Blocks and heads of any model, by its structure: what `last_blocks` and `head` mean in it."""

import functools

import pytest
import torch
import transformers
from torch.nn import Embedding, LayerNorm, ModuleDict, ModuleList, ReLU, Sequential

from narrowgauge import audit, convert, kept_layers
from narrowgauge.nn import Linear
from narrowgauge.recipes import parse_recipe

NVFP4 = "nvfp4"
LAST = parse_recipe('fprop = "mxfp4"\n[keep]\nlast_blocks = 1', "last.toml")
FIRST = parse_recipe('fprop = "mxfp4"\n[keep]\nfirst_blocks = 1', "first.toml")


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

    def __init__(self, name="experts"):
        super().__init__()
        self.qkv, self.gate = plain(16, 48), plain(16, 8)
        self.add_module(name, ModuleList(Mlp() for _ in range(8)))


def model_of(**parts):
    """A module with these children, which computes nothing."""
    made = torch.nn.Module()
    for name, part in parts.items():
        made.add_module(name, part)
    return made


def kept(model, recipe):
    """The layers that stay wide."""
    return set(kept_layers(convert(model, recipe)))


@pytest.mark.parametrize("name", ["experts", "mlps"])
def test_experts_in_a_list_are_no_blocks(name):
    model = model_of(layers=ModuleList(Mixture(name) for _ in range(4)))
    wide = kept(model, NVFP4)
    assert {n.split(".")[1] for n in wide} == {"3"}
    assert len(wide) == 2 + 8 * 2


def test_experts_of_layers_without_a_list_are_no_blocks():
    model = model_of(layer1=Mixture(), layer2=Mixture(), layer3=Mixture())
    assert {n.split(".")[0] for n in kept(model, LAST)} == {"layer3"}
    assert kept(model_of(experts=ModuleList(Mlp() for _ in range(8))), LAST) == set()


def test_blocks_of_several_stacks_are_counted_through_the_model():
    parts = {"encoder": ModuleList(Mlp() for _ in range(3)), "decoder": ModuleList(Mlp() for _ in range(2))}
    assert kept(model_of(**parts), LAST) == {"decoder.1.up", "decoder.1.down"}
    parts = {"encoder": ModuleList(Mlp() for _ in range(3)), "decoder": ModuleList(Mlp() for _ in range(2))}
    assert kept(model_of(**parts), FIRST) == {"encoder.0.up", "encoder.0.down"}


class UNet(torch.nn.Module):
    """As diffusers registers its blocks: the middle after the way up, which it computes before."""

    def __init__(self):
        super().__init__()
        self.down_blocks = ModuleList(Mlp() for _ in range(3))
        self.up_blocks = ModuleList(Mlp() for _ in range(3))
        self.mid_block = model_of(attentions=ModuleList([Mlp()]), resnets=ModuleList([Mlp(), Mlp()]))

    def forward(self, x):
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = block(x)
        return x


class Wrapped(UNet):
    @functools.wraps(UNet.forward)
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class InParts(UNet):
    """A forward method that names only some of the blocks: the order of the model holds."""

    def forward(self, x):
        return self.mid_block(self.run(x))


@pytest.mark.parametrize(
    ("kind", "last"), [(UNet, "up_blocks.2"), (Wrapped, "up_blocks.2"), (InParts, "mid_block.resnets.1")]
)
def test_last_blocks_are_those_that_the_forward_pass_names_last(kind, last):
    assert kept(kind(), LAST) == {f"{last}.up", f"{last}.down"}
    kept_before = {r.layer for r in audit(kind(), LAST) if r.note.startswith("kept")}
    assert kept_before == {f"{last}.up", f"{last}.down"}
    assert kept(kind(), FIRST) == {"down_blocks.0.up", "down_blocks.0.down"}


def test_blocks_in_a_sequence_are_its_members_of_one_class():
    model = Sequential(plain(8), LayerNorm(16), Mlp(), Mlp(), Mlp(), LayerNorm(16))
    assert kept(model, LAST) == {"4.up", "4.down"}
    sequences = Sequential(*(Sequential(plain(), ReLU(), plain()) for _ in range(3)), plain())
    assert kept(sequences, LAST) == {"2.0", "2.2"}


def test_halves_of_a_layer_in_a_list_are_no_blocks():
    layers = ModuleList(ModuleList([Mixture(), Mlp()]) for _ in range(3))
    assert {n.split(".")[1] for n in kept(model_of(layers=layers), LAST)} == {"2"}


def test_a_list_with_numbers_for_keys_and_blocks_with_numbers_in_their_names():
    torchtitans = model_of(layers=ModuleDict({str(i): Mlp() for i in range(12)}))
    assert kept(torchtitans, LAST) == {"layers.11.up", "layers.11.down"}
    assert kept(model_of(block1=Mlp(), block2=Mlp(), other=Mlp()), LAST) == {"block2.up", "block2.down"}


def test_a_block_whose_layers_are_elsewhere_is_counted():
    blocks = ModuleList(Mlp() for _ in range(4))
    blocks[0] = torch.nn.Identity()  # as a stage of a pipeline has it
    assert kept(
        model_of(blocks=blocks), parse_recipe('fprop = "mxfp4"\n[keep]\nlast_blocks = 0.75', "x")
    ) == {f"blocks.{i}.{name}" for i in (1, 2, 3) for name in ("up", "down")}


def test_a_head_is_found_by_what_it_computes():
    def with_blocks(**parts):
        return model_of(tokens=Embedding(48, 16), layers=ModuleList(Mlp() for _ in range(2)), **parts)

    assert kept(with_blocks(output=plain(16, 48)), "mxfp4") == {"output"}
    assert kept(with_blocks(output=plain(16, 48), gate=plain(4, 1)), "mxfp4") == {"output"}
    assert kept(with_blocks(norm=LayerNorm(16), classifier=plain(16, 3)), "mxfp4") == {"classifier"}
    tied = with_blocks(project=plain(16, 16), unembed=plain(16, 48))
    tied.unembed.weight = tied.tokens.weight
    assert kept(tied, "mxfp4") == {"unembed"}
    assert kept(model_of(first=plain(), layers=ModuleList([Mlp(), Mlp()])), "mxfp4") == set()
    assert kept(Sequential(plain(), ReLU(), plain()), "mxfp4") == set()


def test_rules_and_keep_select_the_head_by_its_role():
    text = 'fprop = "mxfp4"\n[[rule]]\nmodules = ["head"]\nfprop = "mxfp8"'
    model = model_of(layers=ModuleList(Mlp() for _ in range(2)), output=plain())
    convert(model, parse_recipe(text, "rule.toml"))
    assert model.output.recipe.casts["fprop.x"].name == "mxfp8"
    model = model_of(layers=ModuleList(Mlp() for _ in range(2)), output=plain())
    assert set(kept_layers(convert(model, parse_recipe('fprop = "mxfp4"', "x"), keep="head"))) == {"output"}


def small(kind, **more):
    """A tiny model of transformers'."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return getattr(transformers, f"{kind}Config")(**(sizes | more))


def test_t5_keeps_the_end_of_its_decoder():
    """The share is one of all blocks, so that it is two of the decoder's four (15 % of eight)."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 4, "num_heads": 2, "vocab_size": 64}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    wide = kept(model, NVFP4)
    assert "lm_head" in wide
    assert {n.rsplit(".layer.")[0] for n in wide - {"lm_head"}} == {"decoder.block.2", "decoder.block.3"}


def test_a_vision_transformer_keeps_its_last_block_and_its_classifier():
    config = small("ViT", image_size=32, patch_size=16, num_labels=5)
    model = transformers.ViTForImageClassification(config)
    layers = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert kept(model, NVFP4) == {"classifier", *(n for n in layers if ".3." in n)}


def test_mixtral_keeps_whole_blocks_and_its_experts_are_narrow():
    config = small("Mixtral", num_local_experts=8, num_key_value_heads=2, vocab_size=64)
    model = convert(transformers.MixtralForCausalLM(config), NVFP4)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear)}
    wide = {n for n, m in layers.items() if not m.recipe.is_narrow}
    assert wide == {"lm_head", *(n for n in layers if n.startswith("model.layers.3."))}
    assert {n for n in layers if ".experts." in n} - wide
