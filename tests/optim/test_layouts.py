"""Parameters of any layout and of 16 bits move as contiguous float32 ones do; others are refused."""

import pytest
import torch

import narrowgauge as ng
from narrowgauge.quantization import stored_tensor
from narrowgauge.system.errors import UserError

SHAPE = (64, 64)  # large enough for narrow moments

RECIPES = ("fp32", "bf16", "nvfp4", "bf16-sr", "msamp-o1", "msamp-o2", "msamp-o3", "eco", "coat")
LR, STEPS = 1e-5, 60

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


def wide_of(optimizer, p):
    """The master of a parameter, or else what it is."""
    state = optimizer.state[p]
    return state["master"].read() if "master" in state else p.detach().float()


def moved(optimizer, p):
    """How far a parameter is from ones, after steps of one sign."""
    for _ in range(STEPS):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return (1 - wide_of(optimizer, p)).mean().item()


@pytest.mark.tier("nightly", keep=("(96, 96)", "shape0-dtype0-bf16-sr"))
@pytest.mark.tier(
    "thorough",
    keep=("shape1-dtype0-fp32", "shape1-dtype1-nvfp4", "shape1-dtype0-msamp-o3", "shape0-dtype0-bf16-sr"),
)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096,), (96, 96)])
def test_small_updates_move_a_16_bit_parameter_as_they_do_a_float32_one(name, dtype, shape):
    """Each is a thousandth of the last bit: rounded to nearest, the parameter stands still."""
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = ng.AdamW([p], name, lr=LR, weight_decay=0.0)
    if "master" in optimizer.state[p]:
        twin = torch.nn.Parameter(torch.ones(shape))  # moments are as narrow as the parameter's
        expected = moved(ng.AdamW([twin], name, lr=LR, weight_decay=0.0), twin)
        assert moved(optimizer, p) == pytest.approx(expected, rel=1e-6)
        assert torch.equal(p.detach(), optimizer.state[p]["master"].read().to(dtype))
    else:  # rounded stochastically: each step of 2^-8 below one is taken with probability LR / 2^-8
        steps = p.numel() * STEPS * LR / 2**-8
        assert abs(moved(optimizer, p) - STEPS * LR) < 4 * STEPS * LR / steps**0.5
        assert name == "bf16-sr"
        assert dtype == torch.bfloat16


def test_a_16_bit_parameter_that_is_written_between_steps_goes_on_from_there():
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = ng.AdamW([p], lr=LR, weight_decay=0.0)
    moved(optimizer, p)
    with torch.no_grad():
        p[:4] = 3.0
    p.grad = torch.zeros_like(p)
    optimizer.step()
    master = optimizer.state[p]["master"].read()
    assert (3 - master[:4]).abs().max() < 2 * LR
    assert (1 - master[4:]).mean().item() == pytest.approx((STEPS + 1) * LR, rel=0.02)


def test_the_master_follows_a_model_that_becomes_16_bits_after_its_optimizer():
    model = torch.nn.LayerNorm(64)
    optimizer = ng.AdamW(model.parameters(), "msamp-o2", lr=LR, weight_decay=0.0)
    model.bfloat16()
    assert moved(optimizer, model.weight) == pytest.approx(STEPS * LR, rel=0.02)


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
