"""Norms of the residual stream: bit for bit as torch where numbers are exact, and in C; else near float64.

A norm is a few fp32 operations around one or two sums of a row. In a tree over threads of 16 numbers each no
sum of the rows here errs by more than 32 * 2^-24 of the sum of its magnitudes, the operations around it by
less than that again: FEW = 2^-18 of the magnitudes that meet. Rounding to the output's dtype adds half of its
ulp, eps / 2 of the number.
"""

import pytest
import torch

from kernels.common import DTYPES, INF, NAN, assert_c_is_torch, assert_same, needs_c, normal
from narrowgauge.kernels.cast import attached_amax
from narrowgauge.kernels.norm import add_norm, reference

FEW, TINY = 2.0**-18, 2.0**-40
F32, BF16, F16 = DTYPES
of_each_kind = pytest.mark.parametrize("kind", ["rms", "layer"])


def drawn(shape, device, kind, *dtypes):
    """(x, delta, weight, bias) of rows; no delta where it has no dtype, and no bias of RMSNorm."""
    x, delta, weight_D = (
        None if d is None else normal(*rows, seed=i, dtype=d).to(device).requires_grad_()
        for i, (rows, d) in enumerate(zip((shape, shape, shape[-1:]), dtypes, strict=True))
    )
    bias_D = normal(shape[-1], seed=3).to(device).requires_grad_() if kind == "layer" else None
    return x, delta, weight_D, bias_D


@of_each_kind
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_exact_numbers_come_out_bit_for_bit(device, kind, out_dtype):
    """Rows of +-2 have mean 0 and mean square 4, so that every step is exact; LayerNorm of 5 +-2 as well."""
    sign_MD = torch.tensor([1.0, -1.0]).repeat(3, 13)
    s = (2 * sign_MD + (5 if kind == "layer" else 0)).to(device)
    delta = torch.arange(26.0).expand(3, 26).to(device, BF16)
    weight_D = (2.0 ** (torch.arange(26) % 5 - 2)).to(device, F16)
    bias_D = (torch.arange(26.0) - 7).to(device) if kind == "layer" else None
    stream, y = add_norm(s - delta, delta, weight_D, bias_D, TINY, kind, out_dtype)
    expected = reference(s, weight_D, bias_D, TINY, kind, out_dtype)
    assert_same([stream, y, attached_amax(y)], [s, expected, expected.float().abs().max()])


#: Shape, dtypes of the stream, the addend, the weight and the norm; which of stream and norm are used.
ROWS = [
    ((1, 7, 24), (F32, BF16, BF16), BF16, (0, 1)),
    ((1, 7, 24), (F32, F32, F32), BF16, (0, 1)),
    ((2, 3, 100), (F32, None, F32), F32, (0, 1)),
    ((2, 3, 100), (BF16, BF16, F32), F16, (1,)),
    ((2, 3, 1), (F32, BF16, F32), BF16, (0, 1)),
    ((2, 3, 24), (F32, None, F32), F32, (0,)),
]


@of_each_kind
@pytest.mark.parametrize(("shape", "dtypes", "out_dtype", "used"), ROWS)
def test_gradients_are_those_of_double_precision(device, kind, shape, dtypes, out_dtype, used, monkeypatch):
    """And numbers as near as rounding allows. Seven rows on three programs are three, three and one."""
    from narrowgauge.kernels.triton import norm as on_gpu

    monkeypatch.setattr(on_gpu, "PROGRAMS", 3)
    x, delta, weight_D, bias_D = drawn(shape, device, kind, *dtypes)
    stream, y = add_norm(x, delta, weight_D, bias_D, 1e-5, kind, out_dtype)
    assert torch.equal(stream, x if delta is None else x + delta)

    def half_ulp(t):
        return torch.finfo(t.dtype).eps / 2

    s, *wide = (
        None if t is None else t.detach().double().requires_grad_() for t in (stream, weight_D, bias_D)
    )
    deviation = s - (s.mean(-1, keepdim=True) if kind == "layer" else 0)
    scale = (deviation.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = deviation * scale * wide[0] + (wide[1] if kind == "layer" else 0)
    # What meets: the row's largest number over its deviation, times the weight; and the bias.
    meets = s.abs().amax(-1, keepdim=True) * scale * wide[0].abs() + exact.abs()
    assert ((y.double() - exact).abs() <= half_ulp(y) * exact.abs() + FEW * meets).all()

    above = [normal(*shape, seed=4 + i, dtype=(stream, y)[i].dtype).to(device) for i in used]
    leaves = [t for t in (x, delta, weight_D, bias_D) if t is not None]
    got = torch.autograd.grad([(stream, y)[i] for i in used], leaves, above)
    ds, *others = torch.autograd.grad(
        [(s * 1, exact)[i] for i in used], [s, *wide[: 1 + (kind == "layer")]], [g.double() for g in above],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    for leaf, g, e in zip(leaves, got, [ds] * (1 if delta is None else 2) + others, strict=True):
        assert g.dtype == leaf.dtype
        size = e.abs().amax(-1, keepdim=True) + e.abs().mean() if e.ndim > 1 else e.abs().max()
        assert ((g.double() - e).abs() <= half_ulp(g) * e.abs() + 4 * FEW * size).all()


@of_each_kind
@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, BF16), (F16, F16)])
def test_terms_that_are_kept_and_a_sum_that_is_rounded_before_change_no_bit(device, kind, dtypes):
    """A sum in 16 bits is as short as a term, and is kept; its two terms have one gradient, with its amax."""
    *leaves, bias_D = drawn((5, 24), device, kind, *dtypes, F32)
    dstream, dy = (normal(5, 24, seed=s, dtype=d).to(device) for s, d in ((4, dtypes[0]), (5, BF16)))
    found = []
    for keeps_terms in (False, True):
        stream, y = add_norm(*leaves, bias_D, 1e-5, kind, BF16, keeps_terms)
        kept = [t for t in stream.grad_fn.saved_tensors if t is not None and t.shape == dy.shape]
        assert len(kept) == (2 if keeps_terms and dtypes[0] == F32 else 1)
        found.append([stream, y, *torch.autograd.grad([stream, y], leaves, [dstream, dy])])
    assert_same(*found)
    total = (leaves[0].detach().float() + leaves[1].detach().float()).to(dtypes[0]).requires_grad_()
    other, other_y = add_norm(total, None, leaves[2], bias_D, 1e-5, kind, BF16)
    ds, dw = torch.autograd.grad([other, other_y], [total, leaves[2]], [dstream, dy])
    assert_same(found[0], [other, other_y, ds, ds.to(dtypes[1]), dw])


@of_each_kind
def test_bad_rows_stay_bad_and_leave_the_others_alone(device, kind):
    x = normal(6, 10).to(device)
    x[1, 3], x[2, 4], x[3] = NAN, INF, 0
    x[4], x[5] = x[4] * 2.0**-130, x[5] * 2.0**70  # subnormal; and squares beyond fp32
    weight_D = torch.ones(10, device=device)
    bias_D = torch.zeros(10, device=device) if kind == "layer" else None
    _, y = add_norm(x, None, weight_D, bias_D, 1e-5, kind, BF16)
    expected = reference(x, weight_D, bias_D, 1e-5, kind, BF16)
    rows = [1, 2, 3, 4] if kind == "layer" else [1, 2, 3, 4, 5]  # torch's LayerNorm sums in another way
    torch.testing.assert_close(y[rows], expected[rows], rtol=2**-7, atol=0, equal_nan=True)
    assert attached_amax(y).isnan()
    _, y = add_norm(x[:1].sign(), None, weight_D * 1e6, None, 1e-5, "rms", F16)
    assert y.isinf().all(), "beyond its dtype"
    assert attached_amax(y) == INF


def test_what_is_not_contiguous_and_what_a_compiler_sees(device):
    x = normal(6, 5).to(device).T.requires_grad_()
    delta = normal(5, 12, dtype=BF16).to(device)[:, ::2]
    weight_D = normal(12).to(device)[::2]
    stream, y = add_norm(x, delta, weight_D, None, 1e-5, "rms", BF16)
    of_copies = add_norm(*(t.contiguous() for t in (x, delta, weight_D)), None, 1e-5, "rms", BF16)
    assert_same([stream, y], [x + delta, of_copies[1]])
    y.sum().backward()
    assert x.grad.isfinite().all()
    compiled = torch.compile(add_norm, backend="eager", fullgraph=True)
    _, y = compiled(x, None, weight_D, None, 1e-5, "rms", BF16)
    assert_same([y, attached_amax(y)], [reference(x, weight_D, None, 1e-5, "rms", BF16), None])


def in_c(shape, has_delta, follows_stream, size=1.0):
    """The stream, its norm and all gradients; the name of the autograd function."""
    x, delta, weight, _ = drawn(shape, "cpu", "rms", F32, BF16 if has_delta else None, F32)
    x = x.detach() * size
    if x.isnan().all():
        x.view(torch.int32).fill_(2**31 - 1)  # a NaN that a carry of rounding would make a zero
    x.requires_grad_()
    s, y = add_norm(x, delta, weight, None, 1e-5, "rms", BF16)
    dy, ds = normal(*shape, seed=3, dtype=BF16), normal(*shape, seed=4)
    torch.autograd.backward((s, y) if follows_stream else (y,), (ds, dy) if follows_stream else (dy,))
    gradients = [t.grad for t in (x, weight, delta) if t is not None]
    return [s.detach(), y.detach(), *gradients], y.grad_fn.name()


@needs_c
@pytest.mark.parametrize("follows_stream", [True, False])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 32), (1, 7, 257), (4, 33)])
def test_norms_in_c_have_torchs_bits(shape, has_delta, follows_stream, monkeypatch):
    """Inputs have squares that are ordinary, underflow or overflow, and NaN."""
    for size in (1.0, 1e-20, 1e18, NAN):
        assert_c_is_torch(lambda size=size: in_c(shape, has_delta, follows_stream, size), monkeypatch)


@needs_c
def test_norms_in_c_pass_the_gradient_of_the_stream_on_and_leave_others_to_torch():
    x, delta, weight, _ = drawn((2, 4, 16), "cpu", "rms", F32, BF16, F32)
    s, _ = add_norm(x, delta, weight, None, 1e-5, "rms", BF16)
    s.backward(torch.full_like(s, 0.1))
    assert_same([x.grad, delta.grad, weight.grad], [torch.full_like(x, 0.1), x.grad.to(BF16), None])
    for kind, dtype in (("rms", F32), ("layer", BF16)):
        assert "InC" not in add_norm(x, None, weight, None, 1e-5, kind, dtype)[1].grad_fn.name()
