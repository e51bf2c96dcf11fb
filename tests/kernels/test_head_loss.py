"""Head and loss together are what they are apart, for any number of tokens in a chunk."""

import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import narrowgauge.kernels.head_loss as module
from narrowgauge.kernels.cross_entropy import IGNORED, cross_entropy, objective_of
from narrowgauge.kernels.head_loss import head_loss, rows_of_chunk
from narrowgauge.models import Transformer, initialize, model_config
from narrowgauge.nn import convert
from narrowgauge.recipes import recipe as named

T, D, V = 37, 24, 101


@pytest.fixture(params=["plain", "kernel"])
def where(request, device, monkeypatch):
    """The device, once with kernels and once without."""
    if request.param == "plain":
        if device.type != "cpu":
            pytest.skip("on a GPU there are always kernels")
        monkeypatch.delenv("TRITON_INTERPRET")
    return device


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of n tokens."""

    def of(rows):
        monkeypatch.setattr(module, "rows_of_chunk", lambda tokens, vocabulary: rows)

    return of


def drawn(dtype, device):
    generator = torch.Generator().manual_seed(0)
    h_TD = torch.randn(T, D, generator=generator).to(dtype)
    w_VD = torch.randn(V, D, generator=generator).to(dtype).float()  # as the head sees it, whatever the dtype
    y_T = torch.randint(V, (T,), generator=generator)
    return h_TD.to(device), w_VD.to(device), y_T.to(device)


def together(h_TD, w_VD, y_T, targets=None, upstream=1.0, z_loss=0.0):
    h_TD, w_VD = h_TD.clone().requires_grad_(), w_VD.clone().requires_grad_()
    loss = head_loss(h_TD, w_VD, y_T, targets, z_loss)
    (objective_of(loss) * upstream).backward()
    return loss.detach(), h_TD.grad, w_VD.grad


def apart(h_TD, w_VD, y_T, targets=None, upstream=1.0, z_loss=0.0):
    h_TD, w_VD = h_TD.clone().requires_grad_(), w_VD.clone().requires_grad_()
    w = w_VD.to(h_TD.dtype)
    slow = h_TD.dtype == torch.float16 and h_TD.device.type == "cpu"
    logits_TV = (h_TD.float() @ w.float().T).to(h_TD.dtype) if slow else h_TD @ w.T
    loss = cross_entropy(logits_TV, y_T, targets, z_loss=z_loss)
    (objective_of(loss) * upstream).backward()
    return loss.detach(), h_TD.grad, w_VD.grad


# Half an ulp of each number that is rounded on the way: logits, their gradient, and (apart) dh and dw.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


CHUNKS = [
    pytest.param(rows, dtype, targets, id=f"{rows}-dtype{number}-{targets}")
    for rows in (1, 8, T, 128)
    for number, dtype in enumerate(BOUNDS)
    for targets in (None, T - 3)
]


@pytest.mark.tier("nightly", keep=8)
@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize(("rows", "dtype", "targets"), CHUNKS)
def test_as_head_and_loss_apart(where, chunks, rows, dtype, targets):
    check_as_apart(where, chunks, rows, dtype, targets)


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_with_a_z_loss_as_head_and_loss_apart(where, chunks, dtype):
    check_as_apart(where, chunks, 8, dtype, T - 3, z_loss=0.05)


def check_as_apart(where, chunks, rows, dtype, targets, z_loss=0.0):
    chunks(rows)
    h_TD, w_VD, y_T = drawn(dtype, where)
    if targets is not None:
        y_T[5:8] = IGNORED
    upstream = 1024.0 if dtype == torch.float16 else 1.0
    ours = together(h_TD, w_VD, y_T, targets, upstream, z_loss)
    theirs = apart(h_TD, w_VD, y_T, targets, upstream, z_loss)
    assert [t.dtype for t in ours] == [torch.float32, dtype, torch.float32]
    for a, b in zip(ours, theirs, strict=True):
        scale = BOUNDS[dtype] * b.float().abs().max()
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=float(scale))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_against_float64(where, chunks, dtype):
    """The loss of the logits as they are rounded, so that nothing else is in it."""
    chunks(16)
    h_TD, w_VD, y_T = drawn(dtype, where)
    h_TD, w_VD = h_TD.mul(8).round() / 8, w_VD.mul(8).round() / 8
    loss, dh_TD, dw_VD = together(h_TD, w_VD, y_T, upstream=256.0)
    h, w = h_TD.double().requires_grad_(), w_VD.double().requires_grad_()
    z_TV = h @ w.T
    z_TV = z_TV + (z_TV.to(dtype).double() - z_TV).detach()
    expected = torch.nn.functional.cross_entropy(z_TV, y_T)
    (expected * 256).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    # Errors of dz, half an ulp each, add up at random over V or T terms; 4 sigma of that, and dh's rounding.
    half = torch.finfo(dtype).eps / 2 + 4e-7
    dz_TV = torch.autograd.grad(torch.nn.functional.cross_entropy(z_TV, y_T) * 256, z_TV)[0]
    dh_bound_TD = 4 * half * (dz_TV.square() @ w.detach().square()).sqrt() + half * h.grad.abs()
    dw_bound_VD = 4 * half * (dz_TV.T.square() @ h.detach().square()).sqrt() + half * w.grad.abs()
    assert ((dh_TD.double() - h.grad).abs() <= dh_bound_TD).all()
    assert ((dw_VD.double() - w.grad).abs() <= dw_bound_VD).all()


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_size_of_a_chunk_changes_neither_loss_nor_dh(where, chunks, dtype):
    """With exact sums: a GEMM library may sum a row in another order if it has more rows."""
    generator = torch.Generator().manual_seed(1)
    h_TD = torch.randint(-2, 3, (T, D), generator=generator).to(where, dtype)
    # Two tokens of the vocabulary, far above the others: dz is 0, 1/2 and -1/2, over a power of two.
    w_VD = torch.zeros(V, D, device=where)
    w_VD[7:9] = torch.randint(-2, 3, (D,), generator=generator).float().to(where) * 8
    y_T = torch.full((T,), 8, device=where)
    found = []
    for rows in (1, 5, 16, T):
        chunks(rows)
        found.append(together(h_TD, w_VD, y_T))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert torch.equal(other[1], found[0][1])
        torch.testing.assert_close(other[2], found[0][2], rtol=1e-5, atol=1e-6)


@pytest.mark.tier("thorough", keep=2)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_power_of_two_from_above_scales_every_bit(where, chunks, dtype):
    chunks(16)
    h_TD, w_VD, y_T = drawn(dtype, where)
    one, eighth = together(h_TD, w_VD, y_T), together(h_TD, w_VD, y_T, upstream=0.125)
    if dtype == torch.float16:  # whose small gradients lose bits, as they do apart
        expected = apart(h_TD, w_VD, y_T, upstream=0.125)
        torch.testing.assert_close(eighth[1], expected[1], rtol=2e-3, atol=2e-7)
    else:
        assert torch.equal(one[1] * 0.125, eighth[1])
        assert torch.equal(one[2] * 0.125, eighth[2])


@pytest.mark.tier("thorough", keep=("plain",))
def test_the_loss_scale_of_fp16_comes_before_the_rounding(where, chunks):
    """Gradients of logits below 2^-24, which fp16 has not, are there when they are scaled."""
    chunks(16)
    h_TD, w_VD, y_T = drawn(torch.float16, where)
    h_TD = h_TD / 64  # logits near 0, p near 1/V
    y_T[1:] = IGNORED
    big = 2.0**24  # p / 2^24 tokens is 0 in fp16, p itself is not
    _, dh_TD, dw_VD = together(h_TD, w_VD, y_T, targets=2**24, upstream=big)
    _, of_one_TD, of_one_VD = together(h_TD, w_VD, y_T, targets=1)
    assert torch.equal(dh_TD, of_one_TD)
    assert torch.equal(dw_VD, of_one_VD)
    assert dw_VD.abs().max() > 0


@pytest.mark.tier("thorough")
def test_without_gradients_none_is_computed(where, chunks):
    chunks(16)
    h_TD, w_VD, y_T = drawn(torch.float32, where)
    with torch.no_grad():
        loss = head_loss(h_TD.requires_grad_(), w_VD.requires_grad_(), y_T)
    assert not loss.requires_grad
    assert torch.equal(loss, together(h_TD.detach(), w_VD.detach(), y_T)[0])


def test_a_second_backward_pass_is_refused(where):
    h_TD, w_VD, y_T = drawn(torch.float32, where)
    loss = head_loss(h_TD.requires_grad_(), w_VD, y_T)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_id_outside_the_vocabulary(where):
    h_TD, w_VD, y_T = drawn(torch.float32, where)
    y_T[3] = V
    if "TRITON_INTERPRET" in os.environ or where.type == "cuda":
        assert head_loss(h_TD, w_VD, y_T).isnan()
    else:
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            head_loss(h_TD, w_VD, y_T)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "rows"),
    [(16384, 128256, 4096), (16384, 151936, 3328), (100, 128256, 128), (65536, 50257, 9472), (0, 7, 128)],
)
def test_chunks_fit_and_are_of_about_one_size(tokens, vocabulary, rows):
    assert rows_of_chunk(tokens, vocabulary) == rows
    assert rows * vocabulary <= module.CHUNK_ELEMENTS
    assert rows % 128 == 0


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that operations make."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() // t.itemsize for t in tree_iter(out) if torch.is_tensor(t)]
        self.numbers = max([self.numbers, *made])
        return out


def small(recipe=None, **changes):
    config = model_config(
        "debug", dim=16, layers=1, heads=2, ffn_dim=32, vocab_size=512, max_sequence_length=128, **changes
    )
    model = Transformer(config, torch.float32 if recipe is None else torch.bfloat16)
    initialize(model, 0)
    return model if recipe is None else convert(model, recipe)


def gradients_of(model, x_BT):
    model.zero_grad()
    loss = model.loss(x_BT, x_BT.roll(-1, 1))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", [None, "bf16", "fp8"])
@pytest.mark.parametrize("tied_head", [False, True])
def test_a_models_step_never_holds_all_logits(chunks, recipe, tied_head):
    chunks(32)
    model, x_BT = small(recipe, tied_head=tied_head), torch.arange(2 * 128).view(2, 128)
    with Largest() as whole:
        loss, gradients = gradients_of(model, x_BT)
    model.chunked_loss = True
    with Largest() as chunked:
        in_chunks, of_chunks = gradients_of(model, x_BT)
    assert whole.numbers == 2 * 128 * 512
    assert chunked.numbers == 2 * 128 * 64  # the MLP's, or 32 x 512 logits
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own tracing
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_compiled_it_is_one_operator_with_the_same_bits(where, chunks):
    """What surrounds it in a model the compiler fuses in its own way, with other roundings than kernels."""
    chunks(16)
    h_TD, w_VD, y_T = drawn(torch.bfloat16, where)
    expected = together(h_TD, w_VD, y_T)
    h_TD.requires_grad_(), w_VD.requires_grad_()
    loss = torch.compile(head_loss, backend="aot_eager", fullgraph=True)(h_TD, w_VD, y_T)
    loss.backward()
    for a, b in zip((loss.detach(), h_TD.grad, w_VD.grad), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.tier("thorough")  # compiles for seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own tracing
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
def test_a_compiled_model_has_it_in_one_graph():
    model, x_BT = small("bf16"), torch.arange(2 * 128).view(2, 128)
    model.chunked_loss = True
    loss, gradients = gradients_of(model, x_BT)
    model.zero_grad()
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)(x_BT, x_BT.roll(-1, 1))
    compiled.backward()
    assert torch.equal(compiled.detach(), loss)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, gradients[name]), name
