"""AdamW: what decays, the update by hand, and state that comes back bit for bit."""

import pytest
import torch

from narrowgauge.errors import UserError
from narrowgauge.models import Transformer, model_config
from narrowgauge.optim import make_adamw, optimizer_tensors, restore_optimizer, set_learning_rate


def small_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(11, 6), torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    )


def optimizer_of(model, weight_decay=0.1, betas=(0.9, 0.95)):
    return make_adamw(model, betas, 1e-8, weight_decay)


def step(model, optimizer, n, lr=1e-2):
    x = torch.randint(11, (5, 4), generator=torch.Generator().manual_seed(n))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    set_learning_rate(optimizer, lr)
    optimizer.step()


def test_matrices_decay_and_vectors_do_not():
    model = Transformer(model_config("gpt2-debug"))
    groups = optimizer_of(model).param_groups
    names = {p: n for n, p in model.named_parameters()}
    decays = {names[p]: g["weight_decay"] for g in groups for p in g["params"]}
    assert set(decays) == {n for n, _ in model.named_parameters()}
    assert all(decays[n] == (0.1 if p.ndim == 2 else 0.0) for n, p in model.named_parameters())
    assert decays["norm.weight"] == decays["blocks.0.qkv.bias"] == 0.0
    assert decays["embedding.weight"] == decays["blocks.0.qkv.weight"] == 0.1


def test_a_model_without_vectors_has_one_group():
    assert len(optimizer_of(torch.nn.Linear(3, 3, bias=False)).param_groups) == 1


def test_frozen_parameters_stay_out():
    model = small_model()
    model[0].weight.requires_grad_(False)
    held = {p for g in optimizer_of(model).param_groups for p in g["params"]}
    assert held == {p for p in model.parameters() if p.requires_grad}


def test_the_learning_rate_reaches_every_group():
    optimizer = optimizer_of(small_model())
    assert [g["lr"] for g in optimizer.param_groups] == [0.0, 0.0]
    set_learning_rate(optimizer, 0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.25]


def test_updates_are_the_papers():
    model, lr, eps, decay, betas = small_model(), 1e-2, 1e-8, 0.1, (0.8, 0.9)
    optimizer = optimizer_of(model, decay, betas)
    w = {n: p.detach().double() for n, p in model.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in w.items()}
    v = {n: torch.zeros_like(p) for n, p in w.items()}
    for t in range(1, 4):
        step(model, optimizer, t, lr)
        for n, p in model.named_parameters():
            g = p.grad.double()
            m[n] = betas[0] * m[n] + (1 - betas[0]) * g
            v[n] = betas[1] * v[n] + (1 - betas[1]) * g * g
            update = m[n] / (1 - betas[0] ** t) / ((v[n] / (1 - betas[1] ** t)).sqrt() + eps)
            w[n] = w[n] * (1 - lr * (decay if p.ndim == 2 else 0)) - lr * update
            torch.testing.assert_close(p.detach().double(), w[n], rtol=1e-5, atol=1e-6)


def test_state_comes_back_bit_for_bit():
    a, b = small_model(0), small_model(1)
    optimizer_a, optimizer_b = optimizer_of(a), optimizer_of(b)
    assert optimizer_tensors(a, optimizer_a) == {}
    for n in range(3):
        step(a, optimizer_a, n)
    state = optimizer_tensors(a, optimizer_a)
    fields = ("step", "exp_avg", "exp_avg_sq")
    assert set(state) == {f"{n}.{f}" for n, _ in a.named_parameters() for f in fields}
    b.load_state_dict(a.state_dict())
    restore_optimizer(b, optimizer_b, state)
    for n in range(3, 6):
        step(a, optimizer_a, n)
        step(b, optimizer_b, n)
    after_a, after_b = optimizer_tensors(a, optimizer_a), optimizer_tensors(b, optimizer_b)
    assert all(torch.equal(after_a[k], after_b[k]) for k in after_a)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert after_a["1.weight.step"] == 6


def test_restored_state_is_a_copy():
    model = small_model()
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    saved = {k: t.clone() for k, t in optimizer_tensors(model, optimizer).items()}
    kept = {k: t.clone() for k, t in saved.items()}
    restore_optimizer(model, optimizer, saved)
    step(model, optimizer, 1)
    assert all(torch.equal(saved[k], kept[k]) for k in kept)


def test_state_keeps_its_own_dtype():
    model = torch.nn.Linear(3, 2).bfloat16()
    optimizer = optimizer_of(model)
    moment = torch.randn(2, 3)
    restore_optimizer(model, optimizer, {"weight.exp_avg": moment})
    restored = optimizer_tensors(model, optimizer)["weight.exp_avg"]
    assert restored.dtype == torch.float32
    assert torch.equal(restored, moment)


def test_tied_parameters_have_one_state():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = optimizer_of(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert {k.rpartition(".")[0] for k in optimizer_tensors(model, optimizer)} == {"0.weight"}


def test_another_models_state_is_refused():
    model = small_model()
    optimizer = optimizer_of(model)
    with pytest.raises(
        UserError, match=r"has state for '9\.weight', which this model has not; use the run's"
    ):
        restore_optimizer(model, optimizer, {"9.weight.exp_avg": torch.zeros(2)})
    sentence = r"state '1\.weight\.exp_avg' has shape \(8, 5\), but this model's parameter has \(8, 6\)"
    with pytest.raises(UserError, match=sentence):
        restore_optimizer(model, optimizer, {"1.weight.exp_avg": torch.zeros(8, 5)})
