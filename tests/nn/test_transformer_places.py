"""Attention and the residual stream of a model under a recipe: what is replaced, when, with which digits."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.kernels.attention import Attention
from narrowgauge.nn import Gauges, NarrowAttention, Stepped, discard_step, set_step
from narrowgauge.quantization import gradient_of, make_cast
from narrowgauge.recipes import parse_recipe, recipe, recipe_names, require_attention_shapes
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import ModelConfig, Transformer, initialize
from nn.layers import same

MODEL = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 67}
STOCHASTIC = {"cast": "mxfp4", "block": 8, "rounding": "stochastic"}
NARROW = {"attention": STOCHASTIC, "stream": {"cast": "mxfp8", "rounding": "stochastic"}}


def make(under, **changes):
    model = Transformer(ModelConfig(**MODEL | {"max_sequence_length": 32} | changes), torch.bfloat16)
    initialize(model, 0)
    return ng.convert(model, under)


def tokens(seed=0):
    return torch.randint(0, 67, (2, 32), generator=torch.Generator().manual_seed(seed))


def digits(model, step=1, micro_batches=1):
    """Losses and gradients of a step."""
    model.zero_grad()
    losses = []
    for i in range(micro_batches):
        set_step(model, 0, step, 2 * i, 10, 5)
        loss = model.loss(tokens(i), tokens(i).roll(-1, 1))
        loss.backward()
        losses.append(loss.detach())
    return losses + [g.clone() for p in model.parameters() if (g := gradient_of(p)) is not None]


QUICK = ("bf16", "fp8-delayed", "nvfp4", "msamp-o3", "coat", "fp8-attention")
#: A recipe and other sizes of the model.
RECOMPUTED = {name: (name, {}) for name in recipe_names()} | {
    "experts": ("nvfp4", {"experts": 4}),
    "gelu": ("nvfp4", {"mlp": "gelu", "bias": True}),
    "narrow places": (NARROW, {}),
}


@pytest.mark.tier("nightly", keep=(*QUICK, "experts", "gelu", "narrow places"))
@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputed_blocks_and_mlps_give_the_same_digits(case):
    under, changes = RECOMPUTED[case]
    found = []
    for recompute, selective in ((0, False), (1, False), (1, True)):
        model = make(recipe("fp8").with_places(under) if under is NARROW else recipe(under), **changes)
        model.recompute, model.selective = recompute, selective
        found.append(digits(model, micro_batches=2))
    assert same(found[1], found[0])
    assert same(found[2], found[0])


def test_rules_narrow_attention_in_some_blocks_or_from_some_step_on():
    text = '[[rule]]\nmodules = ["blocks.1.attention"]\nfrom_step = 3\nattention = "e4m3"'
    late = make(parse_recipe(text, "late"))
    assert [type(block.attention) for block in late.blocks] == [Attention, NarrowAttention]
    bf16 = make("bf16")
    assert same(digits(late, 2), digits(bf16, 2))
    assert not same(digits(late, 3), digits(bf16, 3))
    kept = make(parse_recipe('attention = "e4m3"\n[keep]\nlast_blocks = 1', "kept"))
    assert [type(block.attention) for block in kept.blocks] == [NarrowAttention, Attention]


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_the_stream_is_the_sum_rounded_once(name):
    model = make(recipe("bf16").with_places({"stream": name}))
    point, seen = model.blocks[0].attention_residual, []
    point.register_forward_hook(lambda _, inputs, out: seen.append((*inputs, out)))
    digits(model)
    ((x, delta, out),) = seen
    total = x.detach().float() + delta.detach().float()
    cast = make_cast(name)
    expected = ng.quantize(total, cast).dequantize() if cast.is_scaled else total.to(torch.bfloat16)
    assert out.dtype == expected.dtype == (torch.float32 if cast.is_scaled else torch.bfloat16)
    assert torch.equal(out, expected)
    x = total.requires_grad_()
    point(x).float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize(
    ("places", "changes", "words"),
    [
        ({"attention.q": "mxfp8"}, {}, "attention.q.*blocks of 32.*model.head_dim = 8 is not a multiple"),
        ({"attention.v": "nvfp4"}, {"length": 24}, "attention.v.*blocks of 16.*data.sequence_length = 24"),
        ({"attention.p": {"cast": "mxfp8", "block": [16, 8]}}, {"length": 24}, "blocks of 16.*= 24"),
        ({"stream": "fp8-1x128"}, {}, "stream = 'fp8-1x128'.*model.dim = 32 is not a multiple of 128"),
        ({"attention.q": "e4m3"}, {"dropout": 0.1}, "attention_dropout = 0.1.*set model.attention_dropout"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(places, changes, words):
    length, dropout = changes.get("length", 32), changes.get("dropout", 0.0)
    with pytest.raises(UserError, match=words):
        require_attention_shapes(recipe("bf16").with_places(places), 8, length, 32, dropout)


def test_gauges_read_the_places():
    model = make(recipe("fp8").with_places(NARROW))
    gauges = Gauges({n: m for n, m in model.named_modules() if isinstance(m, Stepped)}, {})
    gauges.begin_micro_batch(is_first=True, is_last=True)
    digits(model)
    gauges.after_backward()
    lines = {(line["layer"], line["place"]): line for line in gauges.lines(1)}
    for tensor in ("q", "k", "v", "p", "do", "ds"):
        line = lines["blocks.1.attention", f"attention.{tensor}"]
        assert line["cast"] == make_cast(STOCHASTIC).name
        assert 10 < line["sqnr_db"] < 30
    assert lines["blocks.0.mlp_residual", "stream"]["sqnr_db"] > 25
    assert lines["embedding_residual", "stream"]["cast"] == "mxfp8"
    discard_step(model)
