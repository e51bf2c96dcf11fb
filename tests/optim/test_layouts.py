"""Parameters, gradients and states of any layout move as their contiguous twins do; others are refused."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import stored_tensor
from narrowgauge.system.errors import UserError

SHAPE = (64, 64)  # large enough for narrow moments

#: A tensor of these values in another layout.
LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other element": lambda x: torch.stack([x, x], -1)[..., 0],
    "part of another tensor": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}
#: A gradient that depends on the values, in a layout that autograd or other code gives it.
GRADIENTS = {
    "contiguous": lambda x: x.square(),
    "one row, expanded": lambda x: x.square().sum(0, keepdim=True).expand_as(x),
    "one element, expanded": lambda x: x.square().sum().expand_as(x),
}


def trained(cls, recipe, p, gradient, steps=3, clip=None):
    """A parameter and its optimizer after a few steps."""
    optimizer = cls([p], recipe, lr=1e-2)
    for _ in range(steps):
        p.grad = gradient(p.detach().float().contiguous()).to(p.dtype)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
    return p, optimizer


def values(dtype=torch.float32):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def assert_same_state(found, expected):
    (p, optimizer), (twin, its_optimizer) = found, expected
    assert torch.equal(p, twin)
    for own, other in zip(optimizer.state[p].values(), its_optimizer.state[twin].values(), strict=True):
        assert torch.equal(*(x if isinstance(x, torch.Tensor) else x.read() for x in (own, other)))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("cls", "recipe", "dtype"),
    [
        (ng.AdamW, "fp32", torch.float32),
        (ng.AdamW, "coat", torch.float32),
        (ng.AdamW, "fp32", torch.bfloat16),  # with a master
        (ng.AdamW, "bf16-sr", torch.bfloat16),  # rounded in place
        (ng.Muon, "fp32", torch.float32),
    ],
)
def test_a_layout_changes_no_digit(cls, recipe, dtype, layout, gradient):
    of, x = GRADIENTS[gradient], values(dtype)
    for clip in (None, 0.5):
        found = trained(cls, recipe, torch.nn.Parameter(LAYOUTS[layout](x)), of, clip=clip)
        twin = trained(cls, recipe, torch.nn.Parameter(x.clone()), lambda x: of(x).contiguous(), clip=clip)
        assert_same_state(found, twin)


@pytest.mark.parametrize("recipe", ["msamp-o3", "bf16-sr", "eco"])
def test_a_narrow_weight_of_another_layout_trains_as_its_twin(recipe):
    def trained_model(layout):
        torch.manual_seed(0)
        layer = torch.nn.Linear(*SHAPE)
        layer.weight = torch.nn.Parameter(layout(layer.weight.detach()))
        model = ng.convert(layer, recipe)
        optimizer = ng.AdamW(model.parameters(), recipe, lr=1e-2)
        for n in range(2):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(n))
            model(x).square().mean().backward()
            grad = model.weight.grad
            model.weight.grad = LAYOUTS["transposed"](grad.clone()) if n else grad
            optimizer.step()
            optimizer.zero_grad()
        return model.weight

    weight, twin = trained_model(LAYOUTS["transposed"]), trained_model(torch.clone)
    assert torch.equal(stored_tensor(weight), stored_tensor(twin))
    assert torch.equal(weight.view(-1), twin.view(-1)), "as codes lie, whatever the plain parameter's strides"


#: A parameter and what a refusal says about it.
REFUSED = {
    "complex": (lambda: torch.zeros(4, dtype=torch.complex64), "is complex64"),
    "float64": (lambda: torch.zeros(4, dtype=torch.float64), "is float64"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "is sparse"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "is nested"),
    "expanded": (lambda: torch.zeros(4, 1).expand(4, 4), "shares memory among its elements"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("cls", [ng.AdamW, ng.Muon])
def test_a_parameter_that_no_state_is_for_is_refused_before_it_is_added(cls, kind):
    make, says = REFUSED[kind]
    p = torch.nn.Parameter(make())
    optimizer = cls([torch.nn.Parameter(torch.zeros(4))])
    with pytest.raises(UserError, match=f"{says}.*: use torch.optim.AdamW for it"):
        optimizer.add_param_group({"params": p})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("act", [ng.AdamW.step, lambda optimizer: optimizer.clip_grad_norm_(1.0)])
def test_a_sparse_gradient_is_refused_and_nothing_moves(act):
    embedding, p = torch.nn.Embedding(8, 4, sparse=True), torch.nn.Parameter(torch.ones(4))
    optimizer = ng.AdamW([p, embedding.weight])
    p.grad, before = torch.ones(4), embedding.weight.detach().clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        UserError, match=r"gradient of shape \(8, 4\) is sparse.*torch.nn.Embedding\(sparse=Fa"
    ):
        act(optimizer)
    assert torch.equal(p, torch.ones(4))
    assert torch.equal(embedding.weight, before)
