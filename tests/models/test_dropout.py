"""Dropout in the model: where it acts, and that it is the same when a block is computed again."""

import pytest
import torch

from models.built import built
from narrowgauge.kernels.attention import attend, attend_with_dropout, document_mask
from narrowgauge.nn import convert, set_step
from narrowgauge.system.errors import UserError
from narrowgauge.trainer.models import generate

IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
BOTH = {"dropout": 0.2, "attention_dropout": 0.1}


def small(**changes):
    return convert(built(initial_std=0, **changes), "fp32")


def step_of(model, step=1, first_sample=0):
    set_step(model, 0, step, first_sample)
    model.zero_grad()
    loss = model.loss(IDS, IDS.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def are_equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("changes", [{"dropout": 0.2}, {"attention_dropout": 0.1}, BOTH], ids=str)
def test_dropout_is_a_function_of_the_step_even_where_blocks_are_recomputed(changes):
    model = small(**changes)
    first = step_of(model)
    assert not are_equal(step_of(model, step=2), first)
    assert not are_equal(step_of(model, first_sample=2), first)
    model.recompute = 1
    assert are_equal(step_of(model), first)


def test_evaluation_and_generation_know_nothing_of_it():
    plain, model = small(), small(**BOTH)
    assert torch.equal(model.eval()(IDS), plain(IDS)), "without a step, too"
    model.train()
    assert generate(model, [1, 2, 3], 4) == generate(plain, [1, 2, 3], 4)
    with torch.no_grad():
        assert torch.equal(model.loss(IDS, IDS), plain.loss(IDS, IDS))
    with pytest.raises(UserError, match=r"call narrowgauge\.set_step before each forward pass"):
        model.loss(IDS, IDS)


@pytest.mark.parametrize(
    "position", [None, torch.arange(24).remainder(7).expand(2, 24)], ids=["", "documents"]
)
def test_the_probabilities_of_attention_are_what_is_dropped(position):
    """With one-hot vectors as values the result is the probabilities."""
    model = small(attention_dropout=0.25)
    set_step(model, 0, 1, 0)
    dropout = model.blocks[1].attention_dropout
    q, k, v = (torch.randn(2, heads, 24, 24, dtype=torch.float64) for heads in (4, 2, 2))
    mask = None if position is None else document_mask(position)
    y = attend_with_dropout(q, k, v, mask, dropout)
    k_all = k.repeat_interleave(2, dim=1)
    eye = torch.eye(24, dtype=torch.float64).expand(2, 4, 24, 24)
    p, dropped = attend(q, k_all, eye, mask), attend_with_dropout(q, k_all, eye, mask, dropout)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], p[kept] / 0.75)
    assert 0.6 < kept.sum() / (p > 1e-12).sum() < 0.9
    torch.testing.assert_close(y, dropped @ v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(attend_with_dropout(q, k, v, mask, dropout.eval()), attend(q, k, v, mask))
