"""Documents kept apart in one sequence: each comes out as it would alone; and targets that are ignored."""

import pytest
import torch

from narrowgauge.kernels.attention import document_mask
from narrowgauge.models import IGNORED, Transformer, cross_entropy, initialize, model_config

LENGTHS = [7, 1, 12, 4]
POSITION_BT = torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(2, -1)


def make(name="debug", **dimensions):
    small = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "vocab_size": 64, "max_sequence_length": 32}
    model = Transformer(model_config(name, **(small | dimensions)))
    initialize(model, 3)
    for parameter in model.parameters():  # larger weights, so that attention looks at something
        parameter.data *= 8 if parameter.dim() > 1 else 1
    return model


MODELS = [{"kv_heads": 2}, {"kv_heads": 4}, {"name": "gpt2-debug"}]


def ids(seed):
    return torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dimensions", MODELS, ids=str)
def test_each_document_is_as_it_would_be_alone(dimensions):
    model, x_BT = make(**dimensions), ids(0)
    together = model(x_BT, POSITION_BT).split(LENGTHS, dim=1)
    alone = [model(part) for part in x_BT.split(LENGTHS, dim=1)]
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(x_BT)[:, 8:], torch.cat(together, 1)[:, 8:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dimensions", MODELS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_no_gradient_crosses_a_border(dimensions, recompute):
    model, x_BT = make(**dimensions), ids(1)
    model.recompute = recompute
    model.embedding.weight.data[:1] = 0
    inputs = []
    model.embedding.register_forward_hook(
        lambda m, i, out: inputs.append(out.requires_grad_().retain_grad() or out)
    )
    model(x_BT, POSITION_BT)[:, 8:20].sum().backward()
    reached = inputs[0].grad.abs().sum(dim=(0, 2)) > 0
    assert reached.tolist() == [False] * 8 + [True] * 12 + [False] * 4


def test_one_document_is_causal_attention():
    model, x_BT = make(kv_heads=2), ids(2)
    positions_BT = torch.arange(24)[None].expand(2, -1)
    assert document_mask(positions_BT)[0, 0].equal(torch.ones(24, 24).tril() > 0)
    torch.testing.assert_close(model(x_BT, positions_BT), model(x_BT), rtol=1e-4, atol=1e-4)


def test_the_mask_is_made_of_blocks():
    blocks = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS)) > 0
    assert document_mask(POSITION_BT).equal(blocks.expand(2, 1, 24, 24))


def test_ignored_targets_add_nothing_and_the_mean_is_over_the_others():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 24, 50, generator=generator, requires_grad=True)
    y_BT = ids(3) % 50
    y_BT[0, 3:9] = IGNORED
    ours = cross_entropy(logits, y_BT, targets=42)
    (gradient,) = torch.autograd.grad(ours, logits)
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y_BT.flatten(), ignore_index=IGNORED)
    (expected,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, expected)
    assert not gradient[0, 3:9].any()


def test_without_ignored_targets_the_two_ways_have_the_same_bits():
    logits = torch.randn(2, 24, 50, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y_BT = ids(4) % 50
    losses = [cross_entropy(logits, y_BT), cross_entropy(logits, y_BT, targets=48)]
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in losses]
    assert losses[0].equal(losses[1])
    assert gradients[0].equal(gradients[1])


def test_nothing_but_ignored_targets_is_a_loss_of_zero():
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 4), IGNORED), targets=0)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(("bad", "targets"), [(IGNORED, None), (-1, 3), (8, 3), (-1, None)])
def test_an_id_outside_the_vocabulary_is_an_error_still(bad, targets):
    y_BT = torch.tensor([[1, 2, bad, 3]])
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(torch.randn(1, 4, 8), y_BT, targets)
