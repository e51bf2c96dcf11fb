"""Attention, the residual stream and experts of a model under a recipe: what is replaced and when."""

import copy

import pytest
import torch

import narrowgauge as ng
from narrowgauge.kernels.attention import Attention
from narrowgauge.nn import DTYPES, Gauges, NarrowAttention, Stepped, discard_step, set_step
from narrowgauge.quantization import gradient_of, make_cast
from narrowgauge.recipes import parse_recipe, recipe, recipe_names, require_attention_shapes
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import ModelConfig, Transformer, initialize, model_config
from nn.layers import same, transformer

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


EXPERTS = {"dim": 64, "heads": 2, "ffn_dim": 64, "vocab_size": 100, "experts": 4, "layers": 1}


def make_experts(under, dtype=torch.float32):
    model = transformer(under, dtype, **EXPERTS)
    return model, model.blocks[0].experts


def test_the_router_stays_wide_unless_a_rule_selects_it():
    model, experts = make_experts("nvfp4")
    assert {cast.name for cast in experts.router.spec.casts.values()} == {"bf16"}
    again = ng.convert(model, "mxfp8").blocks[0].experts
    assert {cast.name for cast in again.router.spec.casts.values()} == {"bf16"}
    assert again.get_submodule("3").down.spec.casts["fprop.w"].name == "mxfp8"
    text = ng.recipe("mxfp8").text + '\n[[rule]]\nmodules = ["router"]\nfprop.x = "e4m3"\nfprop.w = "e4m3"\n'
    assert make_experts(parse_recipe(text, "mine"))[1].router.spec.casts["fprop.x"].name == "e4m3"


@pytest.mark.tier("nightly", keep=("bf16", "fp8-delayed", "nvfp4", "msamp-o3", "coat"))
@pytest.mark.parametrize("name", recipe_names())
def test_an_expert_without_tokens_is_left_alone_and_a_copy_computes_the_same(name):
    model, experts = make_experts(name, DTYPES[ng.recipe(name).compute])
    model.blocks[0].mlp_norm.register_forward_hook(lambda _, __, out: (out[0], out[1].abs()))
    with torch.no_grad():
        experts.router.weight[3] = -10.0
    ids = torch.randint(100, (2, 21), generator=torch.Generator().manual_seed(0))
    unused = experts.get_submodule("3")
    before = {n: h.tensors() for n, h in unused.down.histories.items() if not n.endswith(".w")}
    before = {n: {k: t.clone() for k, t in of.items()} for n, of in before.items()}
    twin = copy.deepcopy(model)
    for step in (1, 2):
        for m in (model, twin):
            set_step(m, 0, step, 0, 100, 50)
        loss = model.loss(ids, ids)
        assert torch.equal(twin.loss(ids, ids), loss)
    loss.backward()
    assert experts.tokens_E.tolist()[3] == 0
    for parameter, p in model.named_parameters():
        gradient = gradient_of(p)
        assert gradient is not None, parameter
        assert gradient.isfinite().all(), parameter
        assert gradient.any() != (".3." in parameter), parameter
    set_step(model, 0, 3, 0, 100, 50)
    for place, state in before.items():
        now = unused.down.histories[place].tensors()
        assert all(torch.equal(now[key], t) for key, t in state.items()), place


SMALL = {"dim": 32, "layers": 1, "heads": 2, "ffn_dim": 32, "vocab_size": 64, "max_sequence_length": 16}
ON_DEVICES = ("fp8-attention", "bf16-sr", "msamp-o2", "quartet", "tetrajet2-outliers", "fp8-delayed", "eco")


def a_step(name, device):
    """The weights of a model after two steps under a recipe, and their state saved and loaded."""
    model = Transformer(model_config("debug", **SMALL, dropout=0.1), torch.bfloat16)
    initialize(model, 0)
    with torch.device(device):
        m = ng.convert(model, name)
        optimizer = ng.AdamW(m.parameters(), name, lr=1e-2)
        ids = torch.arange(64, device="cpu").reshape(2, 2, 16)
        for step in (1, 2):
            ng.set_step(m, 0, step, 0, steps=4, decay=3)
            m.loss(*ids).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        ng.load_state_dict(m, optimizer, ng.state_dict(m, optimizer))
        return [p.detach().float().clone() for p in m.parameters()]


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("name", ON_DEVICES)
def test_a_step_has_the_same_values_whatever_the_default_device(name, kernels, monkeypatch):
    monkeypatch.setenv("NARROWGAUGE_KERNELS", kernels)
    assert all(map(torch.equal, a_step(name, "meta"), a_step(name, "cpu")))
