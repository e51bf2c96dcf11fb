"""A mixture of experts: those without tokens, and its balance; its results: interop/test_huggingface.py."""

import torch

from narrowgauge.trainer.models import Transformer, initialize, model_config
from narrowgauge.trainer.models.experts import Experts

SIZES = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 50, "experts": 5}


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
