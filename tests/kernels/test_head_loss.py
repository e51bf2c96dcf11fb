"""Head and loss together are what they are apart, for any number of tokens in a chunk."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import narrowgauge.kernels.head_loss as module
from kernels.common import DTYPES, assert_same, of_traced_code
from narrowgauge.kernels.cross_entropy import IGNORED, objective_of
from narrowgauge.kernels.head_loss import head_loss, rows_of_chunk
from narrowgauge.nn import convert
from narrowgauge.recipes import recipe as named
from narrowgauge.trainer.models import Transformer, initialize, model_config

T, D, V = 37, 24, 101
F32, BF16, F16 = DTYPES


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of n tokens."""

    def of(rows):
        monkeypatch.setattr(module, "rows_of_chunk", lambda tokens, vocabulary: rows)

    of(16)
    return of


def drawn(dtype, device):
    generator = torch.Generator().manual_seed(0)
    h_TD = torch.randn(T, D, generator=generator).to(dtype)
    w_VD = torch.randn(V, D, generator=generator).to(dtype).float()  # as the head sees it, whatever the dtype
    y_T = torch.randint(V, (T,), generator=generator)
    return h_TD.to(device), w_VD.to(device), y_T.to(device)


def gradients(function, h_TD, w_VD, y_T, targets=None, upstream=1.0, z_loss=0.0):
    """(loss, dh, dw)."""
    h_TD, w_VD = h_TD.clone().requires_grad_(), w_VD.clone().requires_grad_()
    loss = function(h_TD, w_VD, y_T, targets, z_loss)
    (objective_of(loss) * upstream).backward()
    return loss.detach(), h_TD.grad, w_VD.grad


def together(*given, **options):
    return gradients(head_loss, *given, **options)


@pytest.mark.parametrize(
    ("rows", "dtype", "targets", "z_loss"),
    [(16, F32, None, 0.0), (1, BF16, T - 3, 0.0), (8, F16, T - 3, 0.05), (T, BF16, None, 0.05)],
)
def test_loss_and_gradients_are_those_of_float64(where, chunks, rows, dtype, targets, z_loss):
    """The loss of the logits as they are rounded, so that nothing else is in it."""
    chunks(rows)
    h_TD, w_VD, y_T = drawn(dtype, where)
    h_TD, w_VD = h_TD.mul(8).round() / 8, w_VD.mul(8).round() / 8
    y_T[5 : 5 + T - (targets or T)] = IGNORED
    loss, dh_TD, dw_VD = together(h_TD, w_VD, y_T, targets, 256.0, z_loss)
    h, w = h_TD.double().requires_grad_(), w_VD.double().requires_grad_()
    z_TV = h @ w.T
    z_TV = z_TV + (z_TV.to(dtype).double() - z_TV).detach()
    expected = functional.cross_entropy(z_TV, y_T, ignore_index=IGNORED)
    of_z = z_loss * z_TV.logsumexp(-1)[y_T != IGNORED].square().mean()
    terms = [expected + of_z, expected, of_z] if z_loss else [expected]
    assert loss.flatten().tolist() == pytest.approx([x.item() for x in terms], rel=1e-6)
    (dz_TV,) = torch.autograd.grad(terms[0] * 256, z_TV, retain_graph=True)
    (terms[0] * 256).backward()
    # Errors of dz, half an ulp each, add up at random over V or T terms; 4 sigma of that, and dh's rounding.
    half = torch.finfo(dtype).eps / 2 + 4e-7
    dh_bound_TD = 4 * half * (dz_TV.square() @ w.detach().square()).sqrt() + half * h.grad.abs()
    dw_bound_VD = 4 * half * (dz_TV.T.square() @ h.detach().square()).sqrt() + half * w.grad.abs()
    assert [t.dtype for t in (loss, dh_TD, dw_VD)] == [F32, dtype, F32]
    assert ((dh_TD.double() - h.grad).abs() <= dh_bound_TD).all()
    assert ((dw_VD.double() - w.grad).abs() <= dw_bound_VD).all()


@pytest.mark.tier("thorough")
def test_the_loss_scale_of_fp16_comes_before_the_rounding(where, chunks):
    """Gradients of logits below 2^-24, which fp16 has not, are there when they are scaled."""
    h_TD, w_VD, y_T = drawn(F16, where)
    h_TD = h_TD / 64  # logits near 0, p near 1/V
    y_T[1:] = IGNORED
    # p / 2^24 tokens is 0 in fp16, p itself is not
    scaled = together(h_TD, w_VD, y_T, targets=2**24, upstream=2.0**24)
    of_one = together(h_TD, w_VD, y_T, targets=1)
    assert_same(scaled[1:], of_one[1:])
    assert of_one[2].abs().max() > 0


def test_without_gradients_none_is_computed_and_a_second_pass_is_refused(where, chunks):
    h_TD, w_VD, y_T = drawn(F32, where)
    with torch.no_grad():
        alone = head_loss(h_TD.requires_grad_(), w_VD.requires_grad_(), y_T)
    assert not alone.requires_grad
    loss = head_loss(h_TD, w_VD, y_T)
    assert torch.equal(alone, loss)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "rows"),
    [(16384, 128256, 4096), (16384, 151936, 3328), (100, 128256, 128), (65536, 50257, 9472), (0, 7, 128)],
)
def test_chunks_fit_and_are_of_about_one_size(tokens, vocabulary, rows):
    assert rows_of_chunk(tokens, vocabulary) == rows
    assert rows * vocabulary <= module.CHUNK_ELEMENTS
    assert rows % 128 == 0


def small(recipe=None, **changes):
    config = model_config(
        "debug", dim=16, layers=1, heads=2, ffn_dim=32, vocab_size=512, max_sequence_length=128, **changes
    )
    model = Transformer(config, F32 if recipe is None else BF16)
    initialize(model, 0)
    return model if recipe is None else convert(model, recipe)


def gradients_of(model, x_BT, loss_of=None):
    model.zero_grad()
    loss = (loss_of or model.loss)(x_BT, x_BT.roll(-1, 1))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("recipe", "tied_head"), [(None, False), ("bf16", True), ("fp8", False)])
def test_a_models_loss_in_chunks_is_its_loss(chunks, recipe, tied_head):
    """The loss alone; simulate/test_memory.py shows that such a step holds no logits."""
    chunks(32)
    model, x_BT = small(recipe, tied_head=tied_head), torch.arange(2 * 128).view(2, 128)
    loss, gradients = gradients_of(model, x_BT)
    model.chunked_loss = True
    in_chunks, of_chunks = gradients_of(model, x_BT)
    assert in_chunks.item() == pytest.approx(loss.item(), rel=1e-6)
    bound = 1e-5 if recipe is None else 3e-2  # FP8 in the layers tips over where dh does by an ulp of bf16
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(of_chunks[name], gradient, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_head_that_is_more_than_a_product_is_called(is_kept):
    mxfp8 = named("mxfp8")
    model = small(mxfp8 if is_kept else replace(mxfp8, rules=()))
    model.chunked_loss = True
    called = []
    model.head.register_forward_hook(lambda *_: called.append(1))
    model.loss(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
    assert bool(called) is not is_kept
    assert model.chunks_loss is is_kept


@pytest.mark.tier("thorough")  # compiles for seconds
@of_traced_code
def test_a_compiled_model_has_it_in_one_graph():
    model, x_BT = small("bf16"), torch.arange(2 * 128).view(2, 128)
    model.chunked_loss = True
    loss, gradients = gradients_of(model, x_BT)
    compiled, of_compiled = gradients_of(
        model, x_BT, torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    )
    assert_same([compiled, *of_compiled.values()], [loss, *gradients.values()])
