"""What code does with a weight: one function for each idiom, run on a narrow model and on its fp32 twin.

Each takes a model and returns tensors that are compared. `READS` are exact; `GRADIENTS` are rounded to the
format that stores gradients. Those that write are in `idioms_of_writing.py`.
"""

import copy
import io

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

READS, GRADIENTS = {}, {}


def idiom(kind):
    def add(function):
        kind[function.__name__] = function
        return function

    return add


def batch(seed=1, rows=32):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def grads(m):
    return [p.grad for n, p in m.named_parameters() if n.endswith("weight")]


def weights(m):
    return [p.detach().clone() for n, p in m.named_parameters() if n.endswith("weight")]


def loss_of(m, seed=1):
    return m(batch(seed)).square().mean()


# Reads


@idiom(READS)
def norm(m):
    return m[0].weight.norm()


@idiom(READS)
def linear_by_hand(m):
    return functional.linear(batch(), m[0].weight, m[0].bias)


@idiom(READS)
def reductions(m):
    w = m[0].weight
    return [w.sum(), w.mean(1), w.std(), w.abs().max(), w.argmax(1).float(), w.isfinite().all().float()]


@idiom(READS)
def indexing(m):
    w = m[0].weight
    return [w[0], w[:, 3], w[2:5, ::2], w[torch.tensor([1, 4])], w[w > 0], w[0, 0]]


@idiom(READS)
def arithmetic(m):
    w = m[0].weight
    return [2 * w + 1, w - w.T.T / 3, w**2, -w, w.clamp(-0.1, 0.1), torch.where(w > 0, w, 0)]


@idiom(READS)
def shapes(m):
    w = m[0].weight
    return [w.t(), w.view(-1), w.reshape(32, -1), w.unsqueeze(0), *w.chunk(2), *w.unbind(0)[:2], w.flatten()]


@idiom(READS)
def products(m):
    w = m[0].weight
    return [w @ w.T, torch.einsum("nk,mk->nm", w, w), w.T.mm(w), torch.linalg.svdvals(w)]


@idiom(READS)
def casts(m):
    w = m[0].weight
    return [w.float(), w.double(), w.to(torch.bfloat16).float(), w.type(torch.float32), w.type_as(w)]


@idiom(READS)
def other_containers(m):
    w = m[0].weight.detach()
    return [torch.from_numpy(w.numpy()), torch.tensor(w.tolist()), torch.cat([w, w]), torch.stack([w, w])]


@idiom(READS)
def parameters_to_vector(m):
    return nn.utils.parameters_to_vector(m.parameters())


@idiom(READS)
def foreach_norms(m):
    return torch._foreach_norm([p.detach() for p in m.parameters()])


@idiom(READS)
def saved_parameters(m):
    file = io.BytesIO()
    torch.save(dict(m.named_parameters()), file)
    file.seek(0)
    return list(torch.load(file, weights_only=True).values())


@idiom(READS)
def safetensors_of_a_state_dict(m):
    loaded = safetensors.torch.load(safetensors.torch.save(m.state_dict()))
    return [loaded[key] for key in sorted(loaded)]


@idiom(READS)
def safetensors_of_clones(m):
    named = {n: p.detach().clone() for n, p in m.named_parameters()}
    loaded = safetensors.torch.load(safetensors.torch.save(named))
    return [loaded[key] for key in sorted(loaded)]


@idiom(READS)
def safetensors_of_parameters(m):
    loaded = safetensors.torch.load(safetensors.torch.save(dict(m.named_parameters())))
    return [loaded[key] for key in sorted(loaded)]


@idiom(READS)
def shadow_average(m):
    shadow = [p.detach().clone() for p in m.parameters()]
    for s, p in zip(shadow, m.parameters(), strict=True):
        s.mul_(0.9).add_(p.detach(), alpha=0.1).lerp_(p, 0.5)
    return shadow


@idiom(READS)
def teacher_from_parameters(m):
    teacher = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    with torch.no_grad():
        for t, p in zip(teacher.parameters(), m.parameters(), strict=True):
            t.copy_(p)
    return teacher(batch())


@idiom(READS)
def a_clone_is_independent(m):
    before = m[0].weight.detach().clone()
    m[0].weight.detach().clone().zero_()
    return [before, m[0].weight.detach().clone()]


@idiom(READS)
def gradients_of_penalties(m):
    w = m[0].weight
    penalties = [w.square().sum(), w.abs().sum(), (w @ w.T - torch.eye(64)).square().sum(), w.norm()]
    return [torch.autograd.grad(penalty, w)[0] for penalty in penalties]


@idiom(READS)
def functional_gradient(m):
    return torch.func.grad(lambda w: w.square().sum())(m[0].weight.detach())


@idiom(READS)
def vmap_over_rows(m):
    return torch.func.vmap(lambda row: row.square().sum())(m[0].weight.detach())


# Gradients


@idiom(GRADIENTS)
def an_l2_penalty_alone(m):
    sum(p.square().sum() for p in m.parameters()).backward()
    return grads(m)


@idiom(GRADIENTS)
def an_l1_penalty_and_the_loss(m):
    (loss_of(m) + 0.01 * sum(p.abs().sum() for p in m.parameters())).backward()
    return grads(m)


@idiom(GRADIENTS)
def elastic_weight_consolidation(m):
    anchors = [p.detach().clone() + 0.1 for p in m.parameters()]
    penalty = sum((p - a).square().sum() for p, a in zip(m.parameters(), anchors, strict=True))
    (loss_of(m) + penalty).backward()
    return grads(m)


@idiom(GRADIENTS)
def orthogonality(m):
    w = m[0].weight
    (w @ w.T - torch.eye(64)).square().sum().backward()
    return w.grad


@idiom(GRADIENTS)
def two_backward_passes(m):
    loss_of(m, 1).backward()
    loss_of(m, 2).backward()
    return grads(m)


@idiom(GRADIENTS)
def a_layer_called_twice(m):
    (m(batch(1)) + m(batch(2))).square().mean().backward()
    return grads(m)


@idiom(GRADIENTS)
def a_parent_that_reads_the_weight(m):
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.linear(
            functional.gelu(functional.linear(batch(), m[0].weight, m[0].bias)), m[2].weight
        )
    y.float().square().mean().backward()
    return grads(m)


@idiom(GRADIENTS)
def gradient_of_the_input_alone(m):
    x = batch().requires_grad_()
    torch.autograd.grad(m(x).square().mean(), x)
    assert all(g is None for g in grads(m))
    m(x).square().mean().backward(inputs=[x])
    assert all(g is None for g in grads(m))
    loss_of(m).backward()
    return grads(m)


@idiom(GRADIENTS)
def gradients_by_autograd_grad(m):
    ours = [p for n, p in m.named_parameters() if n.endswith("weight")]
    found = torch.autograd.grad(loss_of(m), ours)
    assert all(g is None for g in grads(m))
    return list(found)


@idiom(GRADIENTS)
def gradient_surgery(m):
    """PCGrad: the conflicting part of one task's gradient is removed."""
    ours = [p for n, p in m.named_parameters() if n.endswith("weight")]
    a, b = (torch.autograd.grad(loss_of(m, seed), ours) for seed in (1, 2))
    for p, g, h in zip(ours, a, b, strict=True):
        dot = (g * h).sum().clamp(max=0)
        p.grad = g - dot / h.square().sum() * h
    return grads(m)


@idiom(GRADIENTS)
def a_hook_that_scales(m):
    handle = m[0].weight.register_hook(lambda g: 2 * g)
    loss_of(m).backward()
    handle.remove()
    return grads(m)


@idiom(GRADIENTS)
def a_hook_after_accumulation(m):
    seen = []
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss_of(m).backward()
    return seen


@idiom(GRADIENTS)
def clipping_by_value(m):
    loss_of(m).backward()
    nn.utils.clip_grad_value_(m.parameters(), 1e-3)
    return grads(m)


@idiom(GRADIENTS)
def gradients_scaled_in_place(m):
    loss_of(m).backward()
    for p in m.parameters():
        p.grad.mul_(0.5)
    return grads(m)


@idiom(GRADIENTS)
def a_checkpointed_penalty(m):
    w = m[0].weight
    checkpoint(lambda t: t.square().sum(), w, use_reentrant=False).backward()
    return w.grad


@idiom(GRADIENTS)
def an_embedding_tied_after_conversion(m):
    embedding = nn.Embedding(64, 32)
    embedding.weight = m[0].weight
    (m(embedding(torch.arange(32))).square().mean()).backward()
    assert embedding.weight.grad is not None
    return [embedding(torch.arange(64)).detach(), *grads(m)]


@idiom(GRADIENTS)
def frozen_and_trained_again(m):
    m.requires_grad_(False)
    m.requires_grad_(True)
    loss_of(m).backward()
    return grads(m)


@idiom(GRADIENTS)
def other_weights_by_functional_call(m):
    other = {n: (2 * p.detach()).requires_grad_() for n, p in m.named_parameters()}
    torch.func.functional_call(m, other, (batch(),)).square().mean().backward()
    assert all(g is None for g in grads(m))
    return [p.grad for n, p in other.items() if n.endswith("weight")]


@idiom(GRADIENTS)
def a_copy_has_gradients_of_its_own(m):
    twin = copy.deepcopy(m)
    loss_of(twin).backward()
    assert all(g is None for g in grads(m))
    return grads(twin)


@idiom(GRADIENTS)
def a_parameter_put_in_its_place(m):
    m[0].weight = nn.Parameter(m[0].weight.detach().clone() * 2)
    loss_of(m).backward()
    loaded = copy.deepcopy(m)
    return [*grads(m), loaded.state_dict()["0.weight"]]


@idiom(GRADIENTS)
def weight_norm(m):
    nn.utils.parametrizations.weight_norm(m[0])
    loss_of(m).backward()
    return [p.grad for _, p in sorted(m[0].named_parameters()) if p.ndim == 2]


@idiom(GRADIENTS)
def pruning(m):
    prune.l1_unstructured(m[0], "weight", amount=0.5)
    loss_of(m).backward()
    return [m[0].weight.detach(), m[0].weight_orig.grad]
