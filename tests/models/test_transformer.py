"""The transformer: causal, repeatable, the same with recomputation; its dtypes and its layers."""

import copy

import pytest
import torch
from torch import nn

from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import Transformer, initialize, model_config

# Published initial weights, under which every token is about as likely at first.
TINY = {
    **{"dim": 64, "layers": 2, "ffn_dim": 96, "vocab_size": 61},
    **{"max_sequence_length": 32, "initial_std": 0.02},
}
of_both = pytest.mark.parametrize("name", ["debug", "gpt2-debug"])


def tiny(name, compute_dtype=torch.float32, seed=0, **overrides):
    model = Transformer(model_config(name, **(TINY | overrides)), compute_dtype)
    initialize(model, seed)
    return model


def tokens(*shape, seed=0, vocab=61):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model, x_BT, y_BT):
    model.zero_grad()
    model.loss(x_BT, y_BT).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@of_both
def test_a_later_token_never_changes_earlier_logits_and_order_matters(name):
    model, x_BT = tiny(name), tokens(2, 24)
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
    model, x_BT, y_BT = tiny(name), tokens(2, 24), tokens(2, 24, seed=1)
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


class Casting(nn.Linear):
    """A linear layer with an fp32 weight that computes in the dtype of its input."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


def with_casting_linears(model):
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Casting
    return model


@of_both
def test_bf16_by_casting_linears_or_by_bf16_weights(name):
    """Both ways are near fp32, and so near each other as the rounding of the norms' weights allows."""
    x_BT, y_BT = tokens(2, 24), tokens(2, 24, seed=1)
    reference, streams = tiny(name), []
    casting = with_casting_linears(tiny(name, torch.bfloat16))
    narrow = tiny(name, torch.bfloat16).to(torch.bfloat16)
    for block in narrow.blocks:
        block.register_forward_hook(lambda _, x, output: streams.extend([x[0].dtype, output[0].dtype]))
    for model in (casting, narrow):
        logits = model(x_BT)
        assert (logits.dtype, model.loss(x_BT, y_BT).dtype) == (torch.bfloat16, torch.float32)
        assert (logits.float() - reference(x_BT)).abs().max() < 0.02
        expected, got = gradients(reference, x_BT, y_BT), gradients(model, x_BT, y_BT)
        for key, grad in expected.items():
            assert (got[key].float() - grad).norm() < 0.05 * grad.norm(), key
    assert set(streams) == {torch.float32}, "the residual stream stays fp32"
    # In bf16 position 300 would equal position 301: there is no buffer of angles that `.to` could narrow.
    assert list(narrow.buffers()) == []


@of_both
def test_a_tied_head_is_one_parameter_and_stays_one(name):
    model = tiny(name)
    is_tied = name == "gpt2-debug"
    assert ("head.weight" in dict(model.named_parameters())) is not is_tied
    for same in (model.to(torch.float64), copy.deepcopy(model)):
        assert (same.head.weight is same.embedding.weight) is is_tied
    untied = tiny(name, tied_head=False)
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize(("name", "up"), [("debug", "gate_up"), ("gpt2-debug", "up")], ids=["swiglu", "gelu"])
def test_every_product_with_a_weight_is_a_replaceable_linear(name, up):
    model = tiny(name)
    linears = [key for key, module in model.named_modules() if type(module) is nn.Linear]
    per_block = ["qkv", "attention_out", up, "down"]
    assert linears == [f"blocks.{i}.{key}" for i in range(2) for key in per_block] + ["head"]
    expected = model(tokens(2, 8))
    assert torch.equal(with_casting_linears(model)(tokens(2, 8)), expected)


def test_too_long_a_sequence_is_refused():
    with pytest.raises(
        UserError, match=r"^a sequence of 33 tokens is longer than model.max_sequence_length = 32;"
    ):
        tiny("debug")(tokens(1, 33))
