"""What code does with a weight: one function for each idiom, run on a narrow model and on its fp32 twin.

Each takes a model and returns tensors that are compared. `READS` are exact; `GRADIENTS` are rounded to the
format that stores gradients; `WRITES` change a model, and return its weights, which are rounded to the format
that stores them.
"""

import copy

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nn.own_loop import through_a_file


def batch(seed=1, rows=32):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def named(m):
    return {n: p for n, p in m.named_parameters() if n.endswith("weight")}


def grads(m):
    return [p.grad for p in named(m).values()]


def weights(m):
    return [p.detach().clone() for p in named(m).values()]


def loss_of(m, seed=1):
    return m(batch(seed)).square().mean()


def through_safetensors(tensors):
    loaded = safetensors.torch.load(safetensors.torch.save(tensors))
    return [loaded[key] for key in sorted(loaded)]


#: Of the weight of a layer.
READS_OF_WEIGHT = {
    "arithmetic": lambda w: [2 * w + 1, w - w.T.T / 3, w.abs().max(), w.mean(1), w @ w.T],
    "views": lambda w: [w.t(), w.view(-1), w[0], w[2:5, ::2], w[w > 0], *w.chunk(2), *w.unbind(0)[:2]],
    "casts": lambda w: [w.float(), w.double(), w.to(torch.bfloat16).float(), w.type_as(w)],
    "shown": lambda w: torch.tensor("NarrowTensor" in repr(w) or "Parameter" in repr(w)),
    "other_containers": lambda w: [
        *[torch.from_numpy(w.detach().numpy()), torch.tensor(w.tolist())],
        *[torch.cat([w, w]), torch.stack([w, w])],
    ],
    "gradients_of_penalties": lambda w: [
        torch.autograd.grad(penalty, w)[0]
        for penalty in (w.square().sum(), (w @ w.T - torch.eye(64)).square().sum(), w.norm())
    ],
    "vmap_over_rows": lambda w: torch.func.vmap(lambda row: row.square().sum())(w.detach()),
}
READS = {name: lambda m, read=read: read(m[0].weight) for name, read in READS_OF_WEIGHT.items()}
READS |= {
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "copies_in_a_plain_weight": lambda m: torch.empty(64, 32).copy_(m[0].weight.detach()),
    "foreach_norms": lambda m: torch._foreach_norm([p.detach() for p in m.parameters()]),
    "saved_parameters": lambda m: list(through_a_file(dict(m.named_parameters())).values()),
    "safetensors_of_a_state_dict": lambda m: through_safetensors(m.state_dict()),
    "safetensors_of_parameters": lambda m: through_safetensors(dict(m.named_parameters())),
}


def a_parent_that_reads_the_weight(m):
    with torch.autocast("cpu", torch.bfloat16):
        x = functional.gelu(functional.linear(batch(), m[0].weight, m[0].bias))
        y = functional.linear(x, m[2].weight)
    return y.float().square().mean()


#: Of a model, whose weights then have the gradients of these.
LOSSES = {
    "a_penalty_and_the_loss": lambda m: loss_of(m) + 0.01 * sum(p.abs().sum() for p in m.parameters()),
    "a_layer_called_twice": lambda m: (m(batch(1)) + m(batch(2))).square().mean(),
    "a_parent_that_reads_the_weight": a_parent_that_reads_the_weight,
    "a_checkpointed_penalty": lambda m: sum(
        checkpoint(lambda t: t.square().sum(), w, use_reentrant=False) for w in named(m).values()
    ),
    "frozen_and_trained_again": lambda m: loss_of(m.requires_grad_(False).requires_grad_(True)),
}


def gradients_of(loss):
    def run(m):
        loss(m).backward()
        return grads(m)

    return run


GRADIENTS = {name: gradients_of(loss) for name, loss in LOSSES.items()}


def idiom(function):
    GRADIENTS[function.__name__] = function
    return function


@idiom
def gradients_by_autograd_grad(m):
    """Computes gradients of the input and of the weights that accumulate nowhere."""
    x = batch().requires_grad_()
    torch.autograd.grad(m(x).square().mean(), x)
    m(x).square().mean().backward(inputs=[x])
    found = torch.autograd.grad(loss_of(m), list(named(m).values()))
    assert all(g is None for g in grads(m))
    return list(found)


@idiom
def hooks(m):
    """One that scales, and one after accumulation."""
    seen = []
    handle = m[0].weight.register_hook(lambda g: 2 * g)
    m[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss_of(m).backward()
    handle.remove()
    return [*seen, *grads(m)]


@idiom
def gradients_changed_in_place(m):
    loss_of(m).backward()
    nn.utils.clip_grad_value_(m.parameters(), 1e-3)
    for p in m.parameters():
        p.grad.mul_(0.5)
    return grads(m)


@idiom
def an_embedding_tied_after_conversion(m):
    embedding = nn.Embedding(64, 32)
    embedding.weight = m[0].weight
    (m(embedding(torch.arange(32))).square().mean()).backward()
    assert embedding.weight.grad is not None
    return [embedding(torch.arange(64)).detach(), *grads(m)]


@idiom
def other_weights_by_functional_call(m):
    other = {n: (2 * p.detach()).requires_grad_() for n, p in m.named_parameters()}
    torch.func.functional_call(m, other, (batch(),)).square().mean().backward()
    assert all(g is None for g in grads(m))
    return [p.grad for n, p in other.items() if n.endswith("weight")]


@idiom
def a_parameter_put_in_its_place(m):
    m[0].weight = nn.Parameter(m[0].weight.detach().clone() * 2)
    loss_of(m).backward()
    return [*grads(m), copy.deepcopy(m).state_dict()["0.weight"]]


def halved(state):
    return {k: 0.5 * v for k, v in state.items()}


#: To the weight of a layer.
WRITES_TO_WEIGHT = {
    "set_to_zero": lambda w: w.mul_(0),
    "initialize_normal": lambda w: torch.manual_seed(5) and w.data.normal_(std=0.02),
    "initialize_orthogonal": lambda w: torch.manual_seed(5) and nn.init.orthogonal_(w),
    "copy_into_data": lambda w: w.data.copy_(w.flip(0).clone()),
    "output_argument": lambda w: torch.mul(w.clone(), 0.5, out=w),
}
WRITES_TO_MODEL = {
    "foreach_scale": lambda m: torch._foreach_mul_(list(m.parameters()), 0.5),
    "load_by_assignment": lambda m: m.load_state_dict(halved(m.state_dict()), assign=True),
    "load_by_copy": lambda m: m.load_state_dict(halved(m.state_dict())),
}


def write(function):
    WRITES_TO_MODEL[function.__name__] = function
    return function


@write
def write_a_slice(m):
    m[0].weight[:, :4] = 0
    m[0].weight.data[0].zero_()
    m[2].weight.view(-1)[::3] = 0.01


@write
def write_through_a_state_dict(m):
    for name, t in m.state_dict().items():
        t.copy_(0.5 * m.get_parameter(name))


@write
def averaged_model(m):
    averaged = torch.optim.swa_utils.AveragedModel(m)
    for p in m.parameters():
        p.copy_(0.5 * p)
    for _ in range(2):
        averaged.update_parameters(m)
    m.load_state_dict(averaged.module.state_dict())


def returning_weights(function):
    def run(m):
        with torch.no_grad():
            function(m)
        return weights(m)

    return run


WRITES = {
    name: returning_weights(lambda m, write=write: write(m[0].weight))
    for name, write in WRITES_TO_WEIGHT.items()
} | {name: returning_weights(write) for name, write in WRITES_TO_MODEL.items()}
