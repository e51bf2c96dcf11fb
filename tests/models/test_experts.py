"""A mixture of experts against a loop over tokens, and its balance against the definition."""

import pytest
import torch

from narrowgauge.trainer.models import Transformer, initialize, model_config
from narrowgauge.trainer.models.experts import Experts

SIZES = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 50, "experts": 5}

GELU = {"mlp": "gelu", "bias": True, "experts_per_token": 1}


def one_token(experts, config, x_D):
    """The definition, for one token."""
    p_E = (experts.router.weight @ x_D).softmax(0)
    chosen = sorted(range(config.experts), key=lambda e: -p_E.detach()[e].item())[: config.experts_per_token]
    total = sum(p_E[e] for e in chosen) if config.norm_topk_prob else 1
    y_D = torch.zeros_like(x_D)
    for e in chosen:
        expert = experts.get_submodule(str(e))
        if config.mlp == "gelu":
            hidden = torch.nn.functional.gelu(expert.up(x_D), approximate="tanh")
        else:
            gate, up = expert.gate_up(x_D).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
        y_D = y_D + p_E[e] / total * expert.down(hidden)
    return y_D


@pytest.mark.parametrize("changes", [{}, {"experts_per_token": 3, "norm_topk_prob": False}, GELU], ids=str)
def test_results_and_gradients_are_those_of_the_definition(changes):
    torch.manual_seed(0)
    config = model_config("debug", **(SIZES | changes))
    experts = Experts(config)
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_()
    x = torch.randn(2, 7, 16, requires_grad=True)
    weights = torch.randn(2, 7, 16)
    found = torch.autograd.grad((experts(x) * weights).sum(), [x, *experts.parameters()])
    y = torch.stack([one_token(experts, config, x_D) for x_D in x.flatten(0, 1)]).view_as(x)
    assert torch.allclose(experts(x), y, rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad((y * weights).sum(), [x, *experts.parameters()], allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=1e-3, atol=1e-3)


def test_expert_without_tokens_has_zero_gradients_and_is_skipped_without_gradients():
    experts = Experts(model_config("debug", **SIZES))
    with torch.no_grad():
        experts.router.weight[4] = -100.0
    x = torch.rand(1, 9, 16)
    calls = []
    experts.get_submodule("4").register_forward_hook(lambda *_: calls.append(1))
    experts(x).sum().backward()
    assert experts.tokens_E.tolist()[4] == 0
    assert int(experts.tokens_E.sum()) == 18
    assert all(p.grad is not None for p in experts.parameters())
    assert not any(p.grad.any() for p in experts.get_submodule("4").parameters())
    with torch.no_grad():
        experts(x)
    assert len(calls) == 1


def test_balance_loss_is_of_all_layers_and_the_same_with_recomputation():
    config = model_config("debug", **SIZES)
    model = Transformer(config)
    initialize(model, 0)
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    plain = model.loss(ids, ids)
    shares = [layer.experts.tokens_E / 24 for layer in model.blocks]
    balances = [layer.experts.balance.detach() for layer in model.blocks]
    model.balance_loss, gradients = 0.5, []
    for model.recompute in (0, 1):
        model.zero_grad()
        loss = model.loss(ids, ids)
        loss[0].backward()
        gradients.append([p.grad for p in model.parameters()])
        assert torch.equal(loss[1], plain)
        assert torch.allclose(loss[3], 0.5 * sum(balances) / 2)
        assert torch.equal(loss[0], loss[1] + loss[3])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert [int(layer.experts.tokens_E.sum()) for layer in model.blocks] == [3 * 48, 3 * 48]
    hidden = []
    handle = model.blocks[0].experts.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    with torch.no_grad():
        model.loss(ids, ids)
    handle.remove()
    p_ME = model.blocks[0].experts.router(hidden[0].flatten(0, 1)).softmax(-1)
    assert torch.allclose(balances[0], 5 * (shares[0] * p_ME.mean(0)).sum())
    assert shares[0].sum() == pytest.approx(2)  # each token is counted at each of its experts
