"""A script that was written for torchao, with its own import and with ours."""

import copy
import inspect
from operator import attrgetter

import pytest
import torch
from torch import nn

from narrowgauge.integrations import torchao as ours
from narrowgauge.system.errors import UserError


@pytest.fixture(scope="module")
def torchao():
    return pytest.importorskip("torchao.float8", reason="torchao is not installed")


def script(float8, recipe, steps=4):
    """What scripts written for torchao do; returns model and losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 20))
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if float8 is not ours:
        config = copy.copy(config)
        object.__setattr__(config, "emulate", True)  # it multiplies on GPUs alone otherwise

    def module_filter_fn(module: nn.Module, fqn: str) -> bool:
        return isinstance(module, nn.Linear) and module.out_features % 16 == 0 and fqn != "head"

    model = float8.convert_to_float8_training(model, config=config, module_filter_fn=module_filter_fn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loss = (model(x) - x[:, :20]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_signatures_and_names_of_recipes_are_torchaos(torchao):
    for function in ("convert_to_float8_training", "Float8LinearConfig.from_recipe_name"):
        get = attrgetter(function)
        mine, theirs = (inspect.signature(get(module)).parameters for module in (ours, torchao))
        found, expected = ({n: (p.kind, p.default) for n, p in each.items()} for each in (mine, theirs))
        assert found == expected
    assert [n.value for n in ours.Float8LinearRecipeName] == [n.value for n in torchao.Float8LinearRecipeName]
    for name in torchao.Float8LinearRecipeName:
        assert ours.Float8LinearConfig.from_recipe_name(name).recipe == name.value


@pytest.mark.parametrize("recipe", list(ours.OURS))
def test_a_script_for_torchao_trains_alike_by_one_changed_import(torchao, recipe):
    (mine, losses), (theirs, expected) = script(ours, recipe), script(torchao, recipe)
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)
    narrow = [n for n, m in mine.named_modules() if "Float8" in type(m).__name__]
    assert narrow == [n for n, m in theirs.named_modules() if "Float8" in type(m).__name__] == ["0", "2"]
    assert type(mine[4]) is nn.Linear
    assert mine.state_dict().keys() == theirs.state_dict().keys()


def test_a_layer_that_is_left_out_still_shares_its_weight():
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[0].weight = model[1].weight
    config = ours.Float8LinearConfig.from_recipe_name("msamp-o3")
    ours.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name == "1")
    assert type(model[0]) is nn.Linear
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype == torch.float32


def test_refusals_name_the_way_out(torchao):
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UserError, match=r"narrowgauge\.fully_shard"):
        ours.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    with pytest.raises(UserError, match="nvfp4"):
        ours.Float8LinearConfig.from_recipe_name("nvfp44")
    with pytest.raises(UserError, match=r"import Float8LinearConfig from narrowgauge\.integrations\.torchao"):
        ours.convert_to_float8_training(model, config=torchao.Float8LinearConfig())
    with pytest.raises(UserError, match="module_filter_fn leaves none of 1"):
        ours.convert_to_float8_training(model, module_filter_fn=lambda *_: False)
    assert type(model[0]) is nn.Linear
