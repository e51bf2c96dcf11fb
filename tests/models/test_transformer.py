"""The transformer: causal, repeatable, the same with recomputation; its tied head."""

import copy

import pytest
import torch

from models.built import built
from narrowgauge.system.errors import UserError

of_both = pytest.mark.parametrize("name", ["debug", "gpt2-debug"])


def tokens(*shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, x_BT, y_BT):
    model.zero_grad()
    model.loss(x_BT, y_BT).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@of_both
def test_a_later_token_never_changes_earlier_logits_and_order_matters(name):
    model, x_BT = built(name), tokens(2, 24)
    before = model(x_BT)
    for t in (5, 17, 23):
        changed = x_BT.clone()
        changed[:, t] = (changed[:, t] + 1) % 61
        after = model(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.allclose(before[:, t], after[:, t])
    # Without positions the last logits would be the same for any order of the tokens before.
    swapped = x_BT.clone()
    swapped[:, [2, 9]] = x_BT[:, [9, 2]]
    assert (before[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


@of_both
def test_gradients_are_the_same_bit_for_bit_twice_and_recomputed(name):
    model, x_BT, y_BT = built(name), tokens(2, 24), tokens(2, 24, seed=1)
    kept, again = gradients(model, x_BT, y_BT), gradients(model, x_BT, y_BT)
    model.recompute = True
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = gradients(model, x_BT, y_BT)
    assert len(calls) == 2, "the block runs once forward and once more in the backward pass"
    with torch.no_grad():
        model.loss(x_BT, y_BT)
    assert len(calls) == 3, "without gradients there is nothing to run again"
    model.selective, of_mlp, of_attention = True, [], []
    model.blocks[0].down.register_forward_pre_hook(lambda *_: of_mlp.append(1))
    model.blocks[0].qkv.register_forward_pre_hook(lambda *_: of_attention.append(1))
    in_part = gradients(model, x_BT, y_BT)
    assert (len(calls), len(of_mlp), len(of_attention)) == (4, 2, 1), "the MLP alone runs again"
    for other in (again, recomputed, in_part):
        assert all(torch.equal(kept[key], other[key]) for key in kept)


@of_both
def test_a_tied_head_is_one_parameter_and_stays_one(name):
    model = built(name)
    is_tied = name == "gpt2-debug"
    assert ("head.weight" in dict(model.named_parameters())) is not is_tied
    for same in (model.to(torch.float64), copy.deepcopy(model)):
        assert (same.head.weight is same.embedding.weight) is is_tied
    untied = built(name, tied_head=False)
    assert untied.head.weight is not untied.embedding.weight


def test_too_long_a_sequence_is_refused():
    with pytest.raises(
        UserError, match=r"^a sequence of 33 tokens is longer than model.max_sequence_length = 32;"
    ):
        built("debug")(tokens(1, 33))
