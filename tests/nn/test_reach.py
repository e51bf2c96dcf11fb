"""What a recipe leaves of a model as it is: named in one warning and in the audit, unless it is little."""

import functools
import re
import warnings

import pytest
import torch
import transformers

from narrowgauge.errors import UserError
from narrowgauge.nn import Linear, audit, convert
from narrowgauge.recipes import parse_recipe

X = torch.arange(64.0).sin().reshape(2, 4, 8)


def caught_warnings(make):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = make()
    return result, [str(w.message) for w in found]


def with_adapter(layer):
    """Put an adapter on a layer as kohya's LoRA does: its forward pass is another function from now on."""
    adapter = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
    torch.nn.init.zeros_(adapter.weight)  # at the start it changes nothing
    org_forward = layer.forward
    layer.forward = lambda x: org_forward(x) + adapter(x)
    return adapter


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4"])
def test_a_forward_pass_that_was_put_on_the_instance_is_kept(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    adapters = [with_adapter(model[i]) for i in (0, 2)]
    _, said = caught_warnings(lambda: convert(model, recipe))
    assert len(said) == 1
    assert "2 such as '0', because its forward pass was replaced (convert the model first" in said[0]
    assert isinstance(model[1], Linear)
    before = model(X)
    for adapter in adapters:
        torch.nn.init.ones_(adapter.weight)
    assert not torch.equal(model(X), before)


def test_converted_model_computes_under_an_adapter_and_refuses_a_second_conversion():
    model = convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), "fp8")
    before = model(X)
    torch.nn.init.ones_(with_adapter(model[0]).weight)
    assert not torch.equal(model(X), before)
    with pytest.raises(UserError, match=r"the forward pass of layer '0' was replaced after its conversion"):
        convert(model, "mxfp4")


class Casting(torch.nn.Linear):
    """A layer that casts its weight to the dtype of the input, as nanochat's."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(dtype=x.dtype))


class NanoBlock(torch.nn.Module):
    """A block with nanochat's layers, and zeros where nanochat starts with zeros."""

    def __init__(self):
        super().__init__()
        parts = {name: Casting(16, 16, bias=False) for name in ("c_q", "c_k", "c_v", "c_proj")}
        self.attn = torch.nn.ModuleDict(parts | {"ve_gate": Casting(4, 2, bias=False)})
        self.mlp = torch.nn.ModuleDict(
            {"c_fc": Casting(16, 64, bias=False), "c_proj": Casting(64, 16, bias=False)}
        )
        for part in (self.attn, self.mlp):
            torch.nn.init.zeros_(part["c_proj"].weight)


class Nano(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = torch.nn.ModuleList(NanoBlock() for _ in range(2))
        self.transformer = torch.nn.ModuleDict({"wte": torch.nn.Embedding(64, 16), "h": blocks})
        self.lm_head = Casting(16, 64, bias=False)
        self.smear_gate = Casting(8, 1, bias=False)


@pytest.mark.parametrize("also", [[Casting], (torch.nn.Module, Casting)])
def test_layers_that_cast_their_weight_are_converted_where_they_are_named(also):
    with pytest.raises(
        UserError, match=r"16 such as .*, because Casting overrides the forward pass\): .*also="
    ):
        convert(Nano(), "fp8")
    model, said = caught_warnings(lambda: convert(Nano(), "fp8", also=also))
    assert said == []
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert all(isinstance(m, Linear) for m in layers.values())
    assert {n for n, m in layers.items() if not m.recipe.is_narrow} == {"lm_head"}


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Noisy(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


class Gate(torch.nn.Linear):
    """A router with a separate bias for the choice, which returns the choice."""

    def __init__(self):
        super().__init__(8, 8, bias=False)
        self.e_score_correction_bias = torch.nn.Parameter(torch.zeros(8))

    def forward(self, x):
        scores = super().forward(x).sigmoid()
        return (scores + self.e_score_correction_bias).topk(2, dim=-1)


@pytest.mark.parametrize("kind", [functools.partial(Doubled, 8, 8), functools.partial(Noisy, 8, 8), Gate])
def test_a_layer_that_computes_something_else_stays_what_it_is(kind):
    model = torch.nn.ModuleDict({"plain": torch.nn.Linear(8, 8), "own": kind()})
    own, state = model["own"], torch.random.get_rng_state()
    _, said = caught_warnings(lambda: convert(model, "mxfp8"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model["own"] is own
    assert isinstance(model["plain"], Linear)
    assert len(said) == 1
    assert f"1 such as 'own', because {type(own).__name__} overrides the forward pass" in said[0]


def test_a_keep_may_name_what_stays_anyway_and_a_rule_may_not():
    def model():
        return torch.nn.ModuleDict({"plain": torch.nn.Linear(8, 8), "own": Doubled(8, 8)})

    with pytest.warns(UserWarning, match="overrides the forward pass"):
        convert(model(), "mxfp8", keep="own")
    rule = parse_recipe('[[rule]]\nmodules = ["own"]\nfprop = "mxfp4"', "mine.toml")
    with (
        pytest.raises(UserError, match=r"a \[\[rule\]\] with modules = \['own'\] matches no layer"),
    ):
        convert(model(), rule)


def test_a_model_of_which_every_layer_computes_something_else_is_refused():
    with pytest.raises(
        UserError, match=r"could replace \(1 such as '0', because Doubled overrides the forward"
    ):
        convert(torch.nn.Sequential(Doubled(8, 8)), "fp8")


def test_experts_whose_forward_pass_was_replaced_stay_what_they_are():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda x, *_: x
    with pytest.warns(UserWarning, match=r"such as 'model\.layers\.0\.mlp\.experts.*multiplies with it"):
        convert(model, "mxfp8")
    assert model.model.layers[0].mlp.experts is experts


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize("kind", ["Llama4", "Phimoe"])
def test_routers_that_return_tuples_stay_what_they_are(kind):
    if kind == "Llama4":
        config = transformers.Llama4TextConfig(
            **SIZES, num_local_experts=4, head_dim=16, intermediate_size_mlp=64, moe_layers=[0, 1]
        )
        model = transformers.Llama4ForCausalLM(config)
    else:
        config = transformers.PhimoeConfig(**SIZES, num_local_experts=4)
        model = transformers.PhimoeForCausalLM(config)
    model.eval()
    ids = torch.arange(8)[None]
    wide = model(ids).logits
    routers = {n: m for n, m in model.named_modules() if n.endswith(".router")}
    assert len(routers) == 2
    caught_warnings(lambda: convert(model, "mxfp8"))  # of Llama 4's experts, but not of few routers
    of = {record.layer: record.note for record in audit(model)}
    assert all("Router overrides the forward pass" in of[name] for name in routers)
    assert all(model.get_submodule(name) is router for name, router in routers.items())
    narrow = model(ids).logits
    assert torch.isfinite(narrow).all()
    assert not torch.equal(narrow, wide)
    model(ids, labels=ids).loss.backward()
    assert all(router.weight.grad is not None for router in routers.values())


class InLists(torch.nn.Module):
    """Layers in plain lists, a teacher that does not train, and a layer that torch sees."""

    def __init__(self, with_plain=True):
        super().__init__()
        self.blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)]
        self.by_name = {"up": [torch.nn.Linear(8, 8)]}
        self.teacher = [torch.nn.Linear(8, 8).requires_grad_(False)]
        if with_plain:
            self.seen = torch.nn.Linear(8, 8)
            self.again = [self.seen]


def test_layers_in_plain_lists_are_named_in_one_warning():
    model = InLists()
    _, said = caught_warnings(lambda: convert(model, "mxfp4"))
    assert len(said) == 1
    assert "4 such as 'blocks[0].0', because it lies in a plain Python list" in said[0]
    assert "torch.nn.ModuleList" in said[0]
    assert isinstance(model.seen, Linear)
    with pytest.raises(UserError, match=r"no torch\.nn\.Linear in InLists that .* \(4 such as"):
        convert(InLists(with_plain=False), "mxfp4")


class Own(torch.nn.Module):
    """A module that multiplies with a parameter itself, next to one layer."""

    def __init__(self, rows):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(rows, 64))
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.nn.functional.linear(self.layer(x), self.matrix)


def with_layer(**parts):
    return torch.nn.ModuleDict({"layer": torch.nn.Linear(64, 64), **parts})


def holding(**tensors):
    model = with_layer()
    for name, tensor in tensors.items():
        model.register_parameter(name, torch.nn.Parameter(tensor))
    return model


# By kind: a model, and what the warning says; "" for silence.
LEFT = {
    "F.linear": (lambda: Own(6400), r"converted 1 of 2 .* 99% .*'matrix', because Own multiplies with it"),
    "little": (lambda: Own(3), ""),
    "convolutions": (
        lambda: with_layer(a=torch.nn.Conv2d(64, 64, 3), b=torch.nn.Conv1d(8, 8, 3)),
        r"90% .* 1 such as 'a\.weight', because Conv2d .* 1 such as 'b\.weight', because Conv1d",
    ),
    "recurrent": (lambda: with_layer(a=torch.nn.LSTM(64, 64)), r"89% .* 2 such as 'a\.weight_ih_l0'"),
    "bilinear": (lambda: with_layer(a=torch.nn.Bilinear(8, 8, 8)), r"11% .* 'a\.weight', because Bilinear"),
    "lists of parameters": (
        lambda: with_layer(a=torch.nn.ParameterList([torch.zeros(64, 64)])),
        r"50% .* 'a\.0', because ParameterList",
    ),
    "a stack": (lambda: holding(w1=torch.ones(4, 64, 64)), r"80% .* 'w1', because ModuleDict"),
    "positions": (lambda: holding(position=torch.ones(1, 99, 64)), ""),
    "embeddings": (lambda: with_layer(a=torch.nn.Embedding(999, 64), b=torch.nn.EmbeddingBag(99, 64)), ""),
    "norms": (lambda: with_layer(a=torch.nn.LayerNorm((64, 64)), b=torch.nn.BatchNorm2d(64)), ""),
    "kept by the recipe": (lambda: with_layer(head=torch.nn.Linear(64, 999)), ""),
}


@pytest.mark.parametrize("kind", LEFT)
def test_weights_that_no_recipe_reaches_are_named_where_they_are_many(kind):
    make, words = LEFT[kind]
    model, said = caught_warnings(lambda: convert(make(), "mxfp8"))
    assert len(said) == bool(words)
    assert re.search(words, "".join(said))
    left = [record for record in audit(model) if record.cast is None]
    assert all(record.note.startswith("not converted: ") for record in left)
    assert f"left {len(left)} as they are" in str(audit(model)).splitlines()[-1]
    assert bool(left) == (bool(words) or kind == "little")


def test_what_a_recipe_would_do_is_listed_before_anything_changes():
    def model():
        return torch.nn.ModuleDict({"a": torch.nn.Linear(64, 64), "b": torch.nn.Linear(64, 64)})

    plain = model()
    before = audit(plain, "msamp-o2", keep="b")
    assert [type(m) for m in plain.values()] == [torch.nn.Linear] * 2
    after = audit(convert(plain, "msamp-o2", keep="b"))
    assert [(r.layer, r.cast) for r in before] == [(r.layer, r.cast) for r in after]
    assert [r.note for r in before] == ["", "kept in bf16"]
    assert before.summary == after.summary == "converted 2 of 2 (1 of them kept wide), left 0 as they are"
    assert [r.layer for r in audit(Own(9), {"fprop": "mxfp8"})] == ["layer", "matrix"]
