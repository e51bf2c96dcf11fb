"""What a recipe leaves of a model as it is, named in one warning and in the audit unless it is little; and
what the audit says of layers."""

import re
import warnings

import pytest
import torch
from torch import nn

from narrowgauge.nn import Linear, audit, convert
from narrowgauge.recipes import parse_recipe
from narrowgauge.system.errors import UserError

X = torch.arange(64.0).sin().reshape(2, 4, 8)


def warned(make):
    """What a function returns and warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = make()
    return result, [str(w.message) for w in found]


def with_adapter(layer):
    """Put an adapter on a layer as kohya's LoRA does: its forward pass is another function from now on."""
    adapter = nn.Linear(layer.in_features, layer.out_features, bias=False)
    nn.init.zeros_(adapter.weight)  # at the start it changes nothing
    org_forward = layer.forward
    layer.forward = lambda x: org_forward(x) + adapter(x)
    return adapter


def test_a_forward_pass_that_was_put_on_the_instance_is_kept():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    adapters = [with_adapter(model[i]) for i in (0, 2)]
    _, (said,) = warned(lambda: convert(model, "mxfp4"))
    assert "2 such as '0', because its forward pass was replaced (convert the model first" in said
    adapters.append(with_adapter(model[1]))
    for adapter in adapters:
        before = model(X)
        nn.init.ones_(adapter.weight)
        assert not torch.equal(model(X), before)
    with pytest.raises(UserError, match=r"the forward pass of layer '1' was replaced after its conversion"):
        convert(model, "fp8")


class Casting(nn.Linear):
    """A layer that casts its weight to the dtype of the input, as nanochat's."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(dtype=x.dtype))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_that_cast_their_weight_are_converted_where_they_are_named():
    def model():
        return nn.ModuleDict({"wte": nn.Embedding(64, 16), "fc": Casting(16, 16), "lm_head": Casting(16, 64)})

    with pytest.raises(
        UserError, match=r"2 such as .*, because Casting overrides the forward pass\): .*also="
    ):
        convert(model(), "fp8")
    m, said = warned(lambda: convert(model(), "fp8", also=[Casting]))
    assert said == []
    assert [m[name].recipe.is_narrow for name in ("fc", "lm_head")] == [True, False]


@pytest.mark.parametrize("keep", [(), "own"])
def test_a_layer_that_computes_something_else_stays_what_it_is(keep):
    model = nn.ModuleDict({"plain": nn.Linear(8, 8), "own": Doubled(8, 8)})
    own, state = model["own"], torch.random.get_rng_state()
    _, (said,) = warned(lambda: convert(model, "mxfp8", keep=keep))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model["own"] is own
    assert isinstance(model["plain"], Linear)
    assert "1 such as 'own', because Doubled overrides the forward pass" in said


def test_where_nothing_is_left_or_a_rule_selects_it_it_is_refused():
    rule = parse_recipe('[[rule]]\nmodules = ["1"]\nfprop = "mxfp4"', "mine.toml")
    with pytest.raises(UserError, match=r"a \[\[rule\]\] with modules = \['1'\] matches no layer"):
        convert(nn.Sequential(nn.Linear(8, 8), Doubled(8, 8)), rule)
    with pytest.raises(UserError, match=r"replace \(1 such as '0', because Doubled overrides the forward"):
        convert(nn.Sequential(Doubled(8, 8)), "fp8")


class InLists(nn.Module):
    """Layers in plain lists, and a teacher that does not train."""

    def __init__(self):
        super().__init__()
        self.blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]
        self.by_name = {"up": [nn.Linear(8, 8)]}
        self.teacher = [nn.Linear(8, 8).requires_grad_(False)]
        self.seen = nn.Linear(8, 8)
        self.again = [self.seen]


class Own(nn.Module):
    """A module that multiplies with a parameter itself, next to one layer."""

    def __init__(self, rows):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(rows, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return nn.functional.linear(self.layer(x), self.matrix)


def with_layer(**parts):
    return nn.ModuleDict({"layer": nn.Linear(64, 64)} | parts)


IN_LISTS = r"4 such as 'blocks\[0\]\.0', because it lies in a plain Python list.*torch\.nn\.ModuleList"
#: By kind: a model, and what the warning says; "" for silence.
LEFT = {
    "F.linear": (lambda: Own(6400), r"converted 1 of 2 .* 99% .*'matrix', because Own multiplies with it"),
    "little": (lambda: Own(3), ""),
    "a convolution": (
        lambda: with_layer(a=nn.Conv2d(64, 64, 3)),
        r"90% .* 1 such as 'a\.weight', because Conv2d",
    ),
    "kept by the recipe": (lambda: with_layer(head=nn.Linear(64, 999)), ""),
    "plain lists": (InLists, IN_LISTS),
}


@pytest.mark.parametrize("kind", LEFT)
def test_weights_that_no_recipe_reaches_are_named_where_they_are_many(kind):
    make, words = LEFT[kind]
    model, said = warned(lambda: convert(make(), "mxfp8"))
    assert len(said) == bool(words)
    assert re.search(words, "".join(said), re.DOTALL)
    left = [record for record in audit(model) if record.cast is None]
    assert all(record.note.startswith("not converted: ") for record in left)
    assert f"left {len(left)} as they are" in str(audit(model)).splitlines()[-1]
    assert bool(left) == (bool(words) or kind == "little")


class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(8, 8)
        self.read, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = self.down(nn.functional.gelu(self.up(x)))
        return self.head(nn.functional.linear(x, self.read.weight))


@pytest.mark.parametrize("name", ["fp8", "msamp-o2", "bf16-sr"])
def test_each_layer_is_listed_with_what_happened_to_it(name):
    torch.manual_seed(0)
    m = convert(Read(), name)
    m.down.weight.requires_grad_(False)
    m.added = nn.Linear(4, 4)
    for _ in range(2):
        m(torch.randn(8, 32)).square().mean().backward()
    of = {record.layer: record for record in audit(m)}
    assert list(of) == ["up", "down", "unused", "read", "head", "added"]
    assert [of[layer].calls for layer in of] == [2, 2, 0, 0, 2, None]
    assert [of[layer].gradient for layer in of] == [True, None, False, True, True, False]
    assert of["up"].note == ""
    assert of["unused"].note == "never called; no gradient waits"
    assert "never called" in of["read"].note
    assert (name == "fp8") or "other code read the weight" in of["read"].note
    assert of["added"].note == "not converted: it was added after the conversion"
    assert (of["added"].cast, of["head"].note) == (None, "kept in bf16" if name != "bf16-sr" else "")
