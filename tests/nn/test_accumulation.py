"""Between the micro-batches of a step: gradients added in one pass, codes made once, the same numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge.nn.linear import accumulating
from narrowgauge.trainer.models.operators import Embedding
from nn.layers import transformer

SIZES = {"dim": 64, "layers": 2, "ffn_dim": 96, "vocab_size": 64, "max_sequence_length": 32}


def summed(model, is_one_step=True):
    """The gradients of three micro-batches."""
    model.zero_grad()
    with accumulating(model, keeps_codes=is_one_step):
        if not is_one_step:  # as a custom loop that sets no step
            for module in model.modules():
                module.__dict__.pop("accumulation", None)
        for i in range(3):
            model.loss(*torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(i))).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_sums_of_gradients_are_those_of_autograd_bit_for_bit(recipe, tied):
    model = transformer(recipe, **SIZES, tied_head=tied)
    ours, theirs = summed(model), summed(model, is_one_step=False)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Tables(TorchDispatchMode):
    """The numbers of rows of all gradients of embeddings."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.rows.append(args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(3, 50), (150,)])
def test_rows_of_an_embedding_are_added_as_its_whole_gradient_would_be(shape):
    """Most ids are frequent, so that sums of many rows are rounded."""
    generator = torch.Generator().manual_seed(0)
    ids = (400 * torch.rand(shape, generator=generator) ** 8).long()
    ours, theirs = (Embedding(400, 24) for _ in range(2))
    assert ids.unique().numel() < ids.numel() / 2
    before, dy = (torch.randn(*s, 24, generator=generator) for s in ((400,), shape))
    for layer in (ours, theirs):
        layer.weight.grad = before.clone()
    theirs(ids).backward(dy)
    with accumulating(ours, keeps_codes=False), Tables() as tables:
        ours(ids).backward(dy)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert tables.rows == [ids.numel()]


@pytest.mark.parametrize("lacks", ["a gradient", "a large table", "the dtype", "no hook", "training"])
def test_the_gradient_of_an_embedding_is_otherwise_left_to_autograd(lacks):
    layer = Embedding(8 if lacks == "a large table" else 64, 4)
    w, seen = layer.weight, []
    if lacks == "the dtype":
        w.grad_dtype = None
        w.grad = torch.zeros_like(w, dtype=torch.float64)
    elif lacks != "a gradient":
        w.grad = torch.zeros_like(w)
    if lacks == "no hook":
        w.register_hook(lambda g: seen.append(g.shape))
    w.requires_grad_(lacks != "training")
    with accumulating(layer, keeps_codes=False), Tables() as tables:
        y = layer(torch.arange(8))
        if lacks == "training":
            assert not y.requires_grad
            return
        y.sum().backward()
    assert tables.rows == [len(w)]
    assert w.grad.sum() == 32
    assert len(seen) == (lacks == "no hook")


def test_a_gradient_is_added_without_autograd_unless_a_hook_sees_it_or_it_is_frozen():
    model, seen, given = transformer("fp8", **SIZES), [], []
    frozen, watched, other = model.blocks[0].qkv.weight, model.blocks[0].down.weight, model.blocks[1].down
    frozen.requires_grad_(False)
    watched.register_hook(lambda g: seen.append(g.dtype))
    other.register_full_backward_hook(lambda *_: given.append(other.accumulation.parameter))
    assert summed(model)["blocks.0.qkv.weight"] is None
    assert seen == [torch.float32] * 3
    assert all(p is other.weight for p in given)
    assert len(given) == 3
    assert other.accumulation is None, "only as long as the weights are the same"
