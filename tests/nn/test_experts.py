"""Experts under recipes: a router that stays wide, copies, and experts without tokens."""

import copy

import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn import DTYPES, set_step
from narrowgauge.quantization import gradient_of
from narrowgauge.recipes import parse_recipe
from nn.layers import transformer

SIZES = {"dim": 64, "heads": 2, "ffn_dim": 64, "vocab_size": 100, "experts": 4, "layers": 1}


def make(under, dtype=torch.float32):
    model = transformer(under, dtype, **SIZES)
    return model, model.blocks[0].experts


def test_the_router_stays_wide_unless_a_rule_selects_it():
    model, experts = make("nvfp4")
    assert {cast.name for cast in experts.router.spec.casts.values()} == {"bf16"}
    again = ng.convert(model, "mxfp8").blocks[0].experts
    assert {cast.name for cast in again.router.spec.casts.values()} == {"bf16"}
    assert again.get_submodule("3").down.spec.casts["fprop.w"].name == "mxfp8"
    text = ng.recipe("mxfp8").text + '\n[[rule]]\nmodules = ["router"]\nfprop.x = "e4m3"\nfprop.w = "e4m3"\n'
    assert make(parse_recipe(text, "mine"))[1].router.spec.casts["fprop.x"].name == "e4m3"


@pytest.mark.tier("nightly", keep=("bf16", "fp8-delayed", "nvfp4", "msamp-o3", "coat"))
@pytest.mark.parametrize("name", ng.recipe_names())
def test_an_expert_without_tokens_is_left_alone_and_a_copy_computes_the_same(name):
    model, experts = make(name, DTYPES[ng.recipe(name).compute])
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
