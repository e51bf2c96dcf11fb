"""Dropout: an element's bits follow from its place in the step, whoever computes it and whenever."""

import pytest
import torch

from kernels.common import normal, of_traced_code
from narrowgauge.kernels.dropout import Dropout
from narrowgauge.system.errors import UserError

CPU = torch.device("cpu")


def at(p=0.25, tensor=7, seed=0, step=1, first_sample=0):
    dropout = Dropout(p, tensor)
    dropout.set_position(seed, step, first_sample, CPU)
    return dropout


def drawn():
    return normal(4, 6, 50).requires_grad_()


def test_what_is_kept_is_larger_and_its_gradient_as_well():
    x = normal(40, 50, 50).requires_grad_()
    y = at()(x)
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=4 * (0.25 * 0.75 / x.numel()) ** 0.5)
    assert torch.equal(y[kept], (x * (1 / 0.75))[kept])
    y.sum().backward()
    assert torch.equal(x.grad, kept * torch.tensor(1 / 0.75))
    assert at()(x.bfloat16()).dtype == torch.bfloat16


def test_shares_and_micro_batches_have_the_bits_of_the_whole():
    x = drawn()
    whole = at(first_sample=2**31)(x)
    shares = [at(first_sample=2**31)(part, i, 3) for i, part in enumerate(x.chunk(3, dim=1))]
    assert torch.equal(torch.cat(shares, dim=1), whole)
    parts = [at(first_sample=2**31 + i)(part) for i, part in zip((0, 1), x.split([1, 3]), strict=True)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 2}, {"tensor": 8}, {"first_sample": 1}], ids=str)
def test_everything_else_has_other_bits(other):
    x = torch.ones(4, 6, 50).requires_grad_()
    same = ((at()(x) != 0) == (at(**other)(x) != 0)).float().mean().item()
    # independent masks agree with 0.75^2 + 0.25^2
    assert same == pytest.approx(0.625, abs=4 * (0.625 * 0.375 / x.numel()) ** 0.5)
    assert torch.equal(at()(x), at()(x))


def test_it_is_off_where_nothing_is_trained():
    x = drawn()
    with torch.no_grad():
        assert at()(x) is x
    assert at().eval()(x) is x
    with pytest.raises(UserError, match=r"does not set the step; call narrowgauge\.set_step"):
        Dropout(0.1, 0)(x)


@of_traced_code
def test_compiled_it_has_the_same_bits_and_is_compiled_once():
    dropout, x, frames = at(), drawn(), []
    compiled = torch.compile(
        dropout, backend=lambda graph, _: frames.append(1) or graph.forward, fullgraph=True, dynamic=False
    )
    for step in (1, 2, 3):
        dropout.set_position(0, step, step, CPU)
        assert torch.equal(compiled(x), dropout(x))
    assert len(frames) == 1
