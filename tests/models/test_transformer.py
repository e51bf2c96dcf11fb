import copy

import pytest
import torch
from torch import nn

from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, initialize, model_config

# Published initial weights, under which every token is about as likely at first.
TINY = {
    "dim": 64,
    "layers": 2,
    "ffn_dim": 96,
    "vocab_size": 61,
    "max_sequence_length": 32,
    "initial_std": 0.02,
}
NAMES = ["debug", "gpt2-debug"]


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


@pytest.mark.parametrize("name", NAMES)
def test_a_later_token_never_changes_earlier_logits(name):
    model, x_BT = tiny(name), tokens(2, 24)
    before = model(x_BT)
    for t in (5, 17, 23):
        changed = x_BT.clone()
        changed[:, t] = (changed[:, t] + 1) % 61
        after = model(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.allclose(before[:, t], after[:, t])


@pytest.mark.parametrize("name", NAMES)
def test_order_matters(name):
    """Without positions the last logits would be the same for any order of the tokens before."""
    model, x_BT = tiny(name), tokens(1, 24)
    swapped = x_BT.clone()
    swapped[:, [2, 9]] = x_BT[:, [9, 2]]
    assert (model(x_BT)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_gradients_are_the_same_bit_for_bit(name):
    model, x_BT, y_BT = tiny(name), tokens(2, 24), tokens(2, 24, seed=1)
    kept = gradients(model, x_BT, y_BT)
    model.recompute = True
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    recomputed = gradients(model, x_BT, y_BT)
    assert len(calls) == 2, "the block runs once forward and once more in the backward pass"
    assert all(torch.equal(kept[key], recomputed[key]) for key in kept)
    with torch.no_grad():
        model.loss(x_BT, y_BT)
    assert len(calls) == 3, "without gradients there is nothing to run again"
    model.selective, of_mlp, of_attention = True, [], []
    model.blocks[0].down.register_forward_pre_hook(lambda *_: of_mlp.append(1))
    model.blocks[0].qkv.register_forward_pre_hook(lambda *_: of_attention.append(1))
    in_part = gradients(model, x_BT, y_BT)
    assert (len(calls), len(of_mlp), len(of_attention)) == (4, 2, 1), "the MLP alone runs again"
    assert all(torch.equal(kept[key], in_part[key]) for key in kept)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_step_twice_is_the_same_bit_for_bit(name):
    model, x_BT, y_BT = tiny(name), tokens(4, 32), tokens(4, 32, seed=1)
    first, second = gradients(model, x_BT, y_BT), gradients(model, x_BT, y_BT)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name):
    model, x_BT, y_BT = tiny(name), tokens(4, 16), tokens(4, 16, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model.loss(x_BT, y_BT).item()
    assert first == pytest.approx(torch.tensor(61.0).log().item(), abs=0.1), (
        "at first every token is as likely"
    )
    for _ in range(40):
        optimizer.zero_grad()
        model.loss(x_BT, y_BT).backward()
        optimizer.step()
    assert model.loss(x_BT, y_BT).item() < 0.5


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


@pytest.mark.parametrize("name", NAMES)
def test_bf16_by_casting_linears_or_by_bf16_weights(name):
    """Both ways are near fp32, and so near each other as the rounding of the norms' weights allows."""
    x_BT, y_BT = tokens(2, 24), tokens(2, 24, seed=1)
    reference = tiny(name)
    casting = with_casting_linears(tiny(name, torch.bfloat16))
    narrow = tiny(name, torch.bfloat16).to(torch.bfloat16)
    assert casting(x_BT).dtype == narrow(x_BT).dtype == torch.bfloat16
    assert casting.loss(x_BT, y_BT).dtype == narrow.loss(x_BT, y_BT).dtype == torch.float32
    for model in (casting, narrow):
        assert (model(x_BT).float() - reference(x_BT)).abs().max() < 0.02
        expected, got = gradients(reference, x_BT, y_BT), gradients(model, x_BT, y_BT)
        for key, grad in expected.items():
            assert (got[key].float() - grad).norm() < 0.05 * grad.norm(), key


def test_the_residual_stream_stays_fp32():
    model = tiny("debug", torch.bfloat16).to(torch.bfloat16)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, x, output: seen.extend([x[0].dtype, output[0].dtype]))
    model(tokens(1, 8))
    assert seen == [torch.float32] * 4


def test_rotary_angles_are_not_cast_down_with_the_model():
    """In bf16 position 300 would equal position 301; the model has no buffer that `.to` could narrow."""
    model = Transformer(model_config("debug", **TINY), torch.bfloat16).to(torch.bfloat16)
    assert list(model.buffers()) == []


@pytest.mark.parametrize("name", NAMES)
def test_initial_values(name):
    model = tiny(name, dim=256, vocab_size=512, layers=8)
    for key, p in model.named_parameters():
        if key.endswith("bias"):
            assert p.count_nonzero() == 0
        elif "norm" in key:
            assert (p == 1).all()
        else:
            std = 0.02 / 4 if "attention_out" in key or "down" in key else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), key
            assert abs(p.mean().item()) < 0.05 * std, key


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_weights(name):
    a, b, other = (tiny(name, seed=seed).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["blocks.1.down.weight"], other["blocks.1.down.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_meta_device_and_narrow_weights_start_from_the_same_model(name):
    plain = tiny(name)
    with torch.device("meta"):
        empty = Transformer(plain.config)
    model = empty.to_empty(device="cpu")
    initialize(model, 0)
    narrow = Transformer(plain.config).to(torch.bfloat16)
    initialize(narrow, 0)
    for key, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(key), p)
        assert torch.equal(narrow.get_parameter(key), p.bfloat16())
    assert (model.head.weight is model.embedding.weight) == plain.config.tied_head


def test_drawing_leaves_the_global_generator_alone():
    model = Transformer(model_config("debug", **TINY))
    before = torch.get_rng_state()
    initialize(model, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_tied_head_is_one_parameter_and_stays_one():
    model = tiny("gpt2-debug")
    assert "head.weight" not in dict(model.named_parameters())
    for same in (model.to(torch.float64), copy.deepcopy(model)):
        assert same.head.weight is same.embedding.weight
    untied = tiny("gpt2-debug", tied_head=False)
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
    with pytest.raises(UserError) as error:
        tiny("debug")(tokens(1, 33))
    assert str(error.value) == (
        "a sequence of 33 tokens is longer than model.max_sequence_length = 32; "
        "shorten it or raise model.max_sequence_length"
    )
