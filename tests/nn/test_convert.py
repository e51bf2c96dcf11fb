"""Putting any module under a recipe: which layers, which stay out, and what must not change."""

import copy

import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.nn import Linear, convert
from narrowgauge.recipes import parse_recipe


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8, bias=False)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.drop(x))))


class Model(torch.nn.Module):
    """An embedding tied to the head, around blocks."""

    def __init__(self, blocks=4):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.short = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.short[0](x))


def make(blocks=4):
    torch.manual_seed(0)
    return Model(blocks)


def narrow(model):
    """Names of the layers whose GEMMs are narrow."""
    return {n for n, m in model.named_modules() if isinstance(m, Linear) and m.recipe.is_narrow}


def linears(model):
    return {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


IDS = torch.tensor([[1, 5, 9], [0, 2, 10]])


def test_every_linear_is_converted_and_the_head_stays_wide():
    model = make()
    names = linears(model)
    assert convert(model, "mxfp8") is model
    assert all(isinstance(model.get_submodule(n), Linear) for n in names)
    assert narrow(model) == names - {"head"}
    assert model.head.recipe.compute == "bf16"
    assert not model.head.recipe.is_narrow


def test_parameters_and_state_dict_stay_as_they_were():
    model = make()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    convert(model, "nvfp4")(IDS).sum().backward()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(before) == list(model.state_dict())
    assert all(after[n] is p for n, p in parameters.items())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    make().load_state_dict(model.state_dict())


def test_tied_weights_stay_tied():
    model = convert(make(), "fp8")
    assert model.head.weight is model.embedding.weight
    model(IDS).sum().backward()
    assert model.embedding.weight.grad is model.head.weight.grad


def test_a_layer_that_stands_twice_in_a_model_is_converted_twice():
    shared = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), shared, torch.nn.Linear(8, 8))
    convert(model, "mxfp4")
    assert isinstance(model[0], Linear)
    assert model[0] is model[2]
    assert [m.index for m in model if isinstance(m, Linear)] == [0, 0, 1]
    assert narrow(model) == {"0", "3"}
    assert narrow(convert(model, "mxfp4", keep=["2"])) == {"3"}


def test_a_block_that_stands_twice_in_a_model_is_converted_once():
    block = Block()
    model = convert(torch.nn.Sequential(block, block), "mxfp4")
    assert model[0] is model[1] is block
    assert isinstance(block.up, Linear)


@pytest.mark.parametrize("recipe", ["mxfp4", "msamp-o2"])
def test_a_layer_alone_is_converted_in_place(recipe):
    layer, seen = torch.nn.Linear(32, 4).eval(), []
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    weight, bias = layer.weight, layer.bias
    convert(layer, "fp8")
    assert convert(layer, recipe) is layer
    assert type(layer) is Linear
    assert layer.weight is weight
    assert layer.bias is bias
    assert not layer.training
    assert layer.recipe.name == recipe
    layer(torch.ones(2, 32)).sum().backward()
    assert seen == ["forward"]


def test_training_flags_are_preserved_layer_by_layer():
    model = make().train()
    model.blocks[1].eval()
    before = {n: m.training for n, m in model.named_modules()}
    convert(model, "fp8")
    assert {n: m.training for n, m in model.named_modules()} == before
    assert not any(m.training for m in convert(make().eval(), "fp8").modules())


def test_frozen_weights_stay_frozen():
    model = make()
    model.blocks[0].up.weight.requires_grad_(False)
    convert(model, "mxfp4")(IDS).sum().backward()
    assert model.blocks[0].up.weight.grad is None
    assert model.blocks[0].down.weight.grad is not None


def test_a_converted_model_can_be_copied():
    model = convert(make().eval(), "nvfp4")
    twin = copy.deepcopy(model)
    assert torch.equal(model(IDS), twin(IDS))
    assert twin.head.weight is twin.embedding.weight


KEEPS = {
    "blocks.0.up": {"blocks.0.up"},
    "down": {f"blocks.{i}.down" for i in range(4)},
    "blocks.2.*": {"blocks.2.up", "blocks.2.down"},
    "blocks.[01].up": {"blocks.0.up", "blocks.1.up"},
    "*": linears(make()),
    "d?wn": {f"blocks.{i}.down" for i in range(4)},
}


@pytest.mark.parametrize("pattern", KEEPS)
def test_keep_is_a_name_a_last_component_or_a_pattern(pattern):
    everything = linears(make())
    kept = KEEPS[pattern] | {"head"}
    assert narrow(convert(make(), "mxfp4", keep=[pattern])) == everything - kept
    assert narrow(convert(make(), "mxfp4", keep=pattern)) == everything - kept


def test_patterns_add_up():
    model = convert(make(), "mxfp4", keep=["up", "short.0"])
    assert narrow(model) == {f"blocks.{i}.down" for i in range(4)}


def test_a_keep_that_matches_nothing_is_refused_before_anything_changes():
    model = make()
    with pytest.raises(UserError) as caught:
        convert(model, "mxfp4", keep=["up", "Down"])
    assert str(caught.value) == (
        "keep='Down' matches no linear layer; the nearest name is 'down'; use a whole name such as 'head', "
        "its last component 'head', or a pattern such as '*'"
    )
    assert not any(isinstance(m, Linear) for m in model.modules())
    with pytest.raises(UserError, match=r"such as 'blocks\.3\.down', its last component 'down'"):
        convert(torch.nn.ModuleDict({"blocks": model.blocks}), "mxfp4", keep=["blocks.7.*"])


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(UserError, match=r"no torch\.nn\.Linear in Embedding that a recipe could replace: "):
        convert(torch.nn.Embedding(3, 3), "fp8")


def test_attention_that_reads_its_weights_itself_is_left_alone_and_named():
    attention = torch.nn.MultiheadAttention(8, 2)
    with pytest.raises(UserError, match=r"no torch\.nn\.Linear in MultiheadAttention that a recipe could"):
        convert(attention, "fp8")
    model = torch.nn.ModuleDict({"attention": attention, "out": torch.nn.Linear(8, 8)})
    with pytest.warns(UserWarning, match=r"80% of their elements .* 'attention\.in_proj_weight', because"):
        convert(model, "fp8")
    assert narrow(model) == {"out"}


def test_a_weight_that_is_computed_is_refused():
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    with pytest.raises(
        UserError, match=r"the weight of 1 is not a parameter .* take the parametrization off"
    ):
        convert(model, "fp8")
    assert type(model[0]) is torch.nn.Linear


def test_an_unknown_recipe_is_refused():
    with pytest.raises(UserError, match="unknown recipe 'fp88'; the nearest is 'fp8'"):
        convert(make(), "fp88")


def test_ones_own_recipe_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[keep]\nmodules = ["down", "short.*"]\n[fprop]\nx = "mxfp4"')
    assert narrow(convert(make(), str(path))) == {"head", *(f"blocks.{i}.up" for i in range(4))}


def blocks_kept(model, share):
    r = parse_recipe(f'fprop = "mxfp4"\n[keep]\nlast_blocks = {share}', "mine.toml")
    return linears(model) - narrow(convert(model, r))


def numbers_kept(n, share):
    return {int(name.split(".")[1]) for name in blocks_kept(make(n), share)}


@pytest.mark.parametrize(
    ("n", "share", "count"),
    [(4, 0.15, 1), (12, 0.15, 2), (20, 0.15, 3), (21, 0.15, 4), (3, 0.0, 0), (3, 1.0, 3), (25, 0.28, 7)],
)
def test_the_share_of_last_blocks_is_rounded_up(n, share, count):
    assert numbers_kept(n, share) == set(range(n - count, n))


def test_nvfp4_keeps_its_last_blocks_and_the_head():
    model = convert(make(), "nvfp4")
    assert linears(model) - narrow(model) == {"head", "blocks.3.up", "blocks.3.down"}


def test_last_blocks_of_a_bare_module_list_and_of_plain_layers():
    blocks = torch.nn.ModuleList(Block() for _ in range(4))
    assert blocks_kept(blocks, 0.5) == {"2.up", "2.down", "3.up", "3.down"}
    layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(11))})
    assert blocks_kept(layers, 0.01) == {"layers.10"}
    assert blocks_kept(torch.nn.Sequential(torch.nn.Linear(2, 2)), 0.5) == set()


@pytest.mark.parametrize("second", ["fp32", "mxfp4", "nvfp4"])
def test_converting_again_takes_the_new_recipe(second):
    model = convert(convert(make().eval(), "fp8"), second)
    fresh = convert(make().eval(), second)
    assert narrow(model) == narrow(fresh)
    assert all(
        m.recipe == fresh.get_submodule(n).recipe for n, m in model.named_modules() if isinstance(m, Linear)
    )
    for m in (model, fresh):
        m(IDS).square().sum().backward()
    assert torch.equal(model(IDS), fresh(IDS))
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_hooks_of_a_layer_are_called_after_conversion_and_can_be_removed():
    m, seen = torch.nn.Sequential(torch.nn.Linear(8, 8)), []
    handle = m[0].register_forward_hook(lambda *_: seen.append("forward"))
    m[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    convert(convert(m, "fp8"), "bf16")(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert seen == ["forward", "backward"]
    handle.remove()
    m(torch.ones(2, 8))
    assert seen == ["forward", "backward"]


class WithAdapter(torch.nn.Linear):
    """A layer that computes more than its weight shows."""

    def __init__(self):
        super().__init__(8, 8)
        self.adapter = torch.nn.Parameter(torch.zeros(8, 8))


def test_a_layer_that_is_more_than_its_weight_is_refused():
    for layer, words in (
        (WithAdapter(), "also has 'adapter'"),
        (torch.nn.LazyLinear(8), "has no values yet"),
    ):
        m = torch.nn.Sequential(torch.nn.Linear(8, 8), layer)
        with pytest.raises(UserError, match=f"layer '1' is a .* that {words}"):
            convert(m, "fp8")
        assert type(m[0]) is torch.nn.Linear
